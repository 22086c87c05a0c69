"""A corpus, a study and a measurement so small that a whole pipeline takes seconds; shared by the tests."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import pkgutil
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import dask
import distributed
import pandas as pd
import torch

from ptq_dynamics.core import paths
from ptq_dynamics.core.config import load
from ptq_dynamics.corpus.build import CorpusConfig, build
from ptq_dynamics.evaluation.measure import MeasureConfig, measure
from ptq_dynamics.models.neox import ModelConfig
from ptq_dynamics.training.loop import Machine
from ptq_dynamics.training.study import Study, expand, pretrain, trajectory

NOUNS = "river stone house tree winter bread glass wind morning summer water salt light road boat".split()
VERBS = "keeps holds turns carries finds follows leaves breaks".split()
PLACES = "under the bridge|over the hill|near the water|beside the old house|after a long winter".split("|")
CORPUS = {
    "seed": 1,
    "vocab_size": 300,
    "splits": {"validation": 0.2, "calibration": 0.2},
    "bpe_sample_mb": 1,
    "min_paragraph_chars": 20,
    "sources": [
        {"kind": "files", "name": name, "role": role, "license": "own", "files": [f"text/{name}/*.txt"]}
        for name, role in (("own", "train"), ("other", "calibration"))
    ],
}
MODEL = {"width": 16, "layers": 1, "heads": 2, "context": 16}
STUDY = {  # 64 tokens an update: trunks of 60 updates, cooldowns of 30
    "model": MODEL,
    "seeds": [0, 1],
    "sequences": 4,
    "warmup_tokens": 320,
    "checkpoint_tokens": 1920,
    "decay_checkpoints": 1,
    "members": {
        "trunk": {"shape": "constant", "tokens": 3840, "peak_lr": 0.01},
        "cooldown": {"branch_of": "trunk", "branch_at": [1920, 3840], "tokens": 1920},
    },
}
MEASURE = {
    "evaluation": {"tokens": 512, "length": 16},
    "calibration": {"sequences": 8, "length": 16},
    "quantizers": [
        {"method": "gptq", "bits": 3, "group_size": 16},
        {"method": "rtn", "bits": 4, "group_size": 16},
    ],
    "device": "cpu",
    "compile": False,
}
IMPORTS = ["distributed", "ptq_dynamics.evaluation.measure"]
MACHINE = Machine(device="cpu", compile=False, log_every=5, resume_steps=5)


def config(cls, data, **changes):
    """``data`` with ``changes`` put over it, as ``cls``."""
    return load(cls, {**data, **changes}, "params.yaml")


def model_config(**changes) -> ModelConfig:
    return config(ModelConfig, MODEL, **changes)


def write_text(root: Path) -> None:
    rng = random.Random(0)
    for name, files in (("own", 60), ("other", 10)):
        (root / "text" / name).mkdir(parents=True)
        for i in range(files):
            told = [
                f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)} {rng.choice(PLACES)}, "
                f"and the {rng.choice(NOUNS)} {rng.choice(VERBS)} a {rng.choice(NOUNS)}."
                for _ in range(10)
            ]
            (root / "text" / name / f"{i:02d}.txt").write_text("\n\n".join(told), encoding="utf-8")


def write_root(root: Path) -> Path:
    """Text files and the corpus built from them by the real corpus code."""
    write_text(root)
    with working_in(root):
        build(load(CorpusConfig, CORPUS, "params.yaml: corpus"))
    return root


@contextlib.contextmanager
def working_in(root: Path) -> Iterator[None]:
    before = os.environ.get("PTQ_DYNAMICS_ROOT")
    os.environ["PTQ_DYNAMICS_ROOT"] = str(root)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PTQ_DYNAMICS_ROOT"]
        else:
            os.environ["PTQ_DYNAMICS_ROOT"] = before


def run_study(root: Path, workers: int) -> pd.DataFrame:
    """Pretrain the toy study and measure all of it, under ``root``."""
    torch.set_num_threads(1)
    with working_in(root):
        study = config(Study, STUDY)
        pretrain("toy", study, MACHINE, workers)
        runs = expand(study)
        found = {r.name: trajectory("toy", r) for r in runs}
        return measure(
            "toy", found, config(MeasureConfig, MEASURE), paths.corpus(), paths.measurements("toy"), workers
        )


def results(root: Path) -> dict[str, object]:
    """All that must not depend on interruptions: weights and states by hash, logs and table but for the clock."""
    out: dict[str, object] = {}
    base = root / "data" / "runs" / "toy"
    for file in sorted(base.rglob("*")):
        name = file.relative_to(base).as_posix()
        if file.suffix == ".safetensors":
            out[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        elif file.name == "metrics.csv":
            lines = file.read_text().splitlines()
            out[name] = [line.rpartition(",")[0] for line in lines]  # seconds come last
            assert lines[0].endswith(",seconds")
        elif file.is_file() and file.name != "run.json":
            out[name] = "present"
    rows = root / "data" / "measurements" / "toy"
    if rows.exists():
        out["rows"] = sorted(p.name for p in (rows / "rows").iterdir())
        table = pd.read_parquet(rows / "table.parquet").drop(columns="seconds")
        out["table"] = (
            table.assign(losses=table["losses"].map(list))
            .astype(object)
            .where(table.notna(), None)
            .to_dict("records")
        )
    return out


def wait_for(root: Path, pattern: str, alive: Callable[[], bool], seconds: float = 60.0) -> Path:
    """The first file under ``root/data`` that matches, as soon as it is there."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for found in (root / "data").glob(pattern):
            return found
        assert alive(), f"the process ended before {pattern} appeared"
        time.sleep(0.002)
    raise AssertionError(f"{pattern} did not appear within {seconds} s")


def process(target: Callable[..., None], *args: object) -> multiprocessing.Process:
    """``target(*args)`` in a process of its own, forked from a server that has the imports behind it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    started = context.Process(target=target, args=args)
    started.start()
    return started


def run_until(root: Path, target: str | None = None, call: int = 0) -> int:
    """The study with one worker in a process of its own, killed by SIGKILL as it calls ``target`` for the
    ``call``-th time; its exit code."""
    running = process(_run_until, root, target, call)
    running.join(90)
    return running.exitcode


def _run_until(root: Path, target: str | None, call: int) -> None:
    if target is None:
        run_study(root, 1)
        return
    owner, _, name = target.rpartition(".")
    real = getattr(pkgutil.resolve_name(owner), name)
    calls = itertools.count(1)

    def deadly(*args, **kwargs):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    with mock.patch(target, deadly):
        run_study(root, 1)


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Dask workers that are forked from a server which has the imports behind it."""
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        distributed.utils.get_mp_context()  # sets a list of imports of its own, once
        multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTS)
        yield


def pretrain_with_two_workers(root: Path) -> None:
    """To be a process's target."""
    torch.set_num_threads(1)
    with working_in(root), forked_workers():
        pretrain("toy", config(Study, STUDY), MACHINE, 2)
