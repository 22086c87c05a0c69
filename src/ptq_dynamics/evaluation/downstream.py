"""Accuracy on downstream tasks before and after quantization, by lm-eval on the model that every measurement loads.

Rows keep which items were answered right, so that base and quantized are compared on the same items.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import transformers
from pydantic import Field
from scipy import stats

from ..core import devices, fanout, paths, progress, provenance
from ..core.config import asdict, config_dataclass, digest
from ..core.errors import UserError
from ..core.files import read_json, sweep, write_json
from ..corpus.tokens import TokenSet
from ..quantization import backends
from ..quantization.quantizer import quantize, restore, snapshot
from ..quantization.spec import QuantSpec
from ..training.study import Study, expand
from ..trajectories import checkpoints
from ..trajectories.checkpoints import Checkpoint
from . import tasks
from .intervals import paired_bootstrap
from .measure import NUMERICS, CalibrationText, MeasureConfig, write_csv
from .tasks import ClozeConfig, PackagedTasks
from .variants import turning_points

NAME = "downstream"


@config_dataclass()
class DownstreamConfig:
    """Which checkpoints answer which questions: the branch points and ends of a study's cooldowns."""

    study: str
    branch_at: tuple[int, ...] = ()  # only the cooldowns from there; empty: all
    quantizers: Annotated[tuple[QuantSpec, ...], Field(min_length=1)]
    tasks: Literal["local", "hub", "all"] = "local"
    cloze: ClozeConfig | None = None
    packaged: PackagedTasks | None = None
    hub: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict
    )  # lm-eval's tasks: examples shown
    batch_size: Annotated[int, Field(ge=1)] = 64


@config_dataclass()
class Wanted:
    """One task for ``evaluate_checkpoint``."""

    name: str
    id: str  # hash of a local task's items; a hub task's name and lm-eval's version
    n_shot: int
    left_out: int = 0


def prepare(config: DownstreamConfig, corpus: Path, context: int) -> list[Wanted]:
    """The tasks to be asked; local ones are written to ``data/measurements/downstream/tasks``.

    Raises:
        UserError: there is none, two have one name, or the text or the package does not give them.
    """
    wanted = []
    if config.tasks != "hub":
        tokenizer = _tokenizer(corpus)
        local = []
        if config.cloze:
            local.append(tasks.cloze(TokenSet.open(corpus, config.cloze.set), tokenizer, config.cloze))
        if config.packaged:
            local += tasks.packaged(config.packaged, paths.downloads(), tokenizer, context)
        tasks.write(local, paths.measurements(NAME) / "tasks", paths.downloads() / "datasets")
        wanted += [Wanted(name=t.name, id=t.id, n_shot=0, left_out=t.left_out) for t in local]
    if config.tasks != "local":
        version = importlib.metadata.version("lm_eval")
        wanted += [Wanted(name=n, id=f"{n} of lm-eval {version}", n_shot=k) for n, k in config.hub.items()]
    names = [w.name for w in wanted]
    if not names:
        raise UserError(
            f"params.yaml: downstream: tasks '{config.tasks}' names none; add a cloze task, packaged or hub ones"
        )
    if twice := [n for n in names if names.count(n) > 1]:
        raise UserError(
            f"params.yaml: downstream: two tasks are called '{twice[0]}'; rename the packaged one"
        )
    return wanted


def measure_downstream(
    config: DownstreamConfig, study: Study, measuring: MeasureConfig, workers: int
) -> pd.DataFrame:
    """Ask every checkpoint; writes ``reports/tables/measurements-downstream.csv``, one row per checkpoint, quantizer and task.

    Raises:
        UserError: a quantizer's extra is not installed, a task is unknown or a checkpoint missing.
    """
    for q in config.quantizers:
        if lacking := backends.missing(q.method):
            raise UserError(f"params.yaml: downstream.quantizers: {lacking}")
    corpus, rows = paths.corpus(), paths.measurements(NAME) / "rows"
    wanted = prepare(config, corpus, study.model.context)
    runs = expand(study)
    found = turning_points(config.study, runs, config.branch_at)
    points = [(run, c) for run, cs in found.items() for c in cs]
    distinct = {c.weights_id: (run, c) for run, c in reversed(points)}
    sweep(rows)
    with progress.watched():
        progress.announce(f"{NAME}: {len(distinct)} checkpoints", len(distinct), "ckpt")
        keys = fanout.run(
            [
                fanout.Task(
                    key=f"{run}/{c.name}",
                    function=evaluate_checkpoint,
                    args=(c, config.quantizers, wanted, measuring, config.batch_size, corpus, rows, f"{run}/{c.name}"),
                    log=paths.measurements(NAME) / f"{run}-{c.name}.error.txt",
                    memory_gib=2.0,
                )
                for run, c in distinct.values()
            ],
            workers,
        )  # fmt: skip
    labels = {r.name: r.labels() for r in runs}
    records = []
    for run, c in points:
        at, first = distinct[c.weights_id]
        for (spec, task), key in keys[f"{at}/{first.name}"].items():
            base = _read(rows, keys[f"{at}/{first.name}"][None, task])
            place = {"run": run, "checkpoint": c.name, "tokens": c.tokens, "lr": c.lr, "phase": c.phase}
            named = (
                {k: getattr(spec, k) for k in ("method", "bits", "group_size", "rotation")}
                if spec
                else {"method": "none"}
            )
            records.append(labels[run] | place | named | score(_read(rows, key), base, spec is not None))
    table = pd.DataFrame(records)
    write_csv(table, paths.tables() / f"measurements-{NAME}.csv")
    return table


def score(row: Mapping[str, Any], base: Mapping[str, Any], quantized: bool) -> dict[str, Any]:
    """Accuracy with a Wilson interval, and what quantization takes of it on the same items.

    ``degradation`` is (Acc − Acc_q) / (1 − Acc) as in the paper, with a paired bootstrap over items; NaN for the base, and
    where the base is right everywhere. ``at_chance``: the base's 95 % interval does not lie above guessing.
    """
    right, full = np.asarray(row["correct"], float), np.asarray(base["correct"], float)
    low, high = _wilson(right)
    told = {
        "task": row["task"],
        "n_shot": row["n_shot"],
        "bos": row["bos"],
        "items": len(right),
        "left_out": row["left_out"],
        "chance": row["chance"],
        "acc": right.mean(),
        "acc_low": low,
        "acc_high": high,
        "acc_fp": full.mean(),
        "at_chance": _wilson(full)[0] <= row["chance"],
    }
    names = ("degradation", "degradation_low", "degradation_high")
    if not quantized or full.all():
        return told | dict.fromkeys(names, math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):  # a draw of items that the base has all right
        e = paired_bootstrap(full, right, lambda q, b: (b - q) / (1 - b))
    return told | dict(zip(names, (e.value, e.low, e.high), strict=True))


def _wilson(right: np.ndarray) -> tuple[float, float]:
    found = stats.binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def evaluate_checkpoint(
    checkpoint: Checkpoint, quantizers: Sequence[QuantSpec], wanted: Sequence[Wanted], measuring: MeasureConfig,
    batch_size: int, corpus: Path, rows: Path, name: str,
) -> dict[tuple[QuantSpec | None, str], str]:  # fmt: skip
    """Ask one checkpoint with and without each quantizer, computing what ``rows`` lacks; keys by quantizer and task.

    Base and quantized share one load, one dtype (float32) and the same items in the same batches.
    """
    c = measuring.calibration
    calibration = TokenSet.open(corpus, c.set)
    keys = {
        (spec, w.name): _key(checkpoint, spec, w, c, calibration.id)
        for spec in (None, *quantizers)
        for w in wanted
    }
    missing = [k for k in keys if not (rows / f"{keys[k]}.json").is_file()]
    if missing:
        device = devices.pick(measuring.device)
        model = checkpoints.load_model(checkpoint).to(device)
        ids = torch.from_numpy(calibration.calibration(c.sequences, c.length, c.seed)).to(device)
        before = snapshot(model)
        with _quiet():
            lm = _harness(model, _tokenizer(corpus), batch_size, device)
        for spec in dict.fromkeys(spec for spec, _ in missing):
            if spec is not None:
                quantize(model, ids if spec.calibrated else None, spec)
            todo = [w for w in wanted if (spec, w.name) in missing]
            for w, answers in _ask(lm, todo):
                place = {"task": w.name, "n_shot": w.n_shot, "left_out": w.left_out, "bos": _bos(lm)}
                write_json(rows / f"{keys[spec, w.name]}.json", place | answers)
            restore(model, before)
    progress.report(name, 1, resumed=not missing, final=True)
    return keys


def _key(checkpoint: Checkpoint, spec: QuantSpec | None, task: Wanted, c: CalibrationText, text: str) -> str:
    calibrated = spec is not None and spec.calibrated
    return digest(
        (backends.identity(spec.method) if spec else {})
        | {
            "weights": checkpoint.weights_id,
            "spec": asdict(spec) if spec else None,
            "calibration": asdict(c) | {"id": text} if calibrated else None,
            "task": [task.id, task.n_shot],
            "code": provenance.fingerprint(*NUMERICS, "ptq_dynamics.evaluation.downstream"),
            "versions": {k: importlib.metadata.version(k) for k in ("torch", "transformers", "lm_eval")},
        },
        length=16,
    )


def _harness(
    model: torch.nn.Module,
    tokenizer: transformers.PreTrainedTokenizerBase,
    batch_size: int,
    device: torch.device,
) -> Any:
    from lm_eval.models.huggingface import HFLM  # seconds, and only here

    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(device))


def _ask(lm: Any, wanted: Sequence[Wanted]) -> Iterator[tuple[Wanted, dict[str, Any]]]:
    """Which items the model has right, by task; a group of tasks counts as one."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with _quiet():
        leaves = {w: _leaves(w, paths.measurements(NAME) / "tasks") for w in wanted}
        found = lm_eval.simple_evaluate(
            model=lm, tasks=[t for ts in leaves.values() for t in ts.values()], bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False),  # not its own index, since the tasks are there
        )  # fmt: skip
    for w, names in leaves.items():
        samples = [s for n in names for s in found["samples"][n]]
        yield (
            w,
            {
                "correct": [int(s["acc"]) for s in samples],
                "chance": sum(1 / len(s["arguments"]) for s in samples) / len(samples),
            },
        )


@functools.cache
def _shipped() -> Any:
    """lm-eval's index of its own tasks, which takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


@functools.cache
def _leaves(task: Wanted, local: Path) -> dict[str, Any]:
    """lm-eval's task objects, loaded once per process."""
    from lm_eval.tasks import TaskManager

    name = task.name
    here = (local / f"{name}.yaml").is_file()
    manager = TaskManager(include_path=str(local), include_defaults=False) if here else _shipped()
    if name not in manager.all_tasks:
        raise UserError(f"params.yaml: downstream.hub: lm-eval has no task '{name}'")
    try:
        loaded = manager.load([name])["tasks"]
    except (OSError, ValueError) as e:
        first = (str(e).strip() or repr(e)).splitlines()[0]
        raise UserError(
            f"downstream task '{name}': cannot be loaded ({type(e).__name__}: {first}); check the connection"
        ) from None
    for leaf in loaded.values():
        leaf.set_config(key="num_fewshot", value=task.n_shot)
    return loaded


def _bos(lm: Any) -> str:
    """Whether a beginning-of-sequence token goes before every text, as the tokenizer and lm-eval have it."""
    first = lm.tok_encode("a")[:1]
    return "added" if first and first[0] == lm.tokenizer.bos_token_id else "not added"


def _tokenizer(corpus: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(corpus / "tokenizer", local_files_only=True)


def _read(rows: Path, key: str) -> dict[str, Any]:
    return read_json(rows / f"{key}.json", hint="delete it and run the same command again")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval's bars and notices would run into our own progress display."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
