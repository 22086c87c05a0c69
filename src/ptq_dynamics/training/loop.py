"""One pretraining run, top to bottom: data by position, schedule by step, checkpoints on a token grid, resume.

No update is made twice. What decides the weights after a number of updates is hashed with every checkpoint, so a run goes
on from the furthest checkpoint that agrees with it: its own after a kill, its trunk's where it is a cooldown, a shorter
run's where it is a longer one, those of another study where they coincide.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
from pydantic import Field, model_validator

from ..core import devices, progress, provenance
from ..core.config import asdict, config_dataclass, digest
from ..core.devices import Precision
from ..core.errors import UserError
from ..core.files import read_json, sweep, write_json, write_text
from ..corpus.tokens import TokenSet
from ..models import neox
from ..models.neox import ModelConfig
from ..trajectories import checkpoints
from .schedule import Schedule, lr_at, phase_at
from .step import Learner, OptimizerConfig

# what decides a run's numbers beyond its configuration; the loop around it only decides when things are saved
NUMERICS = (
    "ptq_dynamics.models.neox",
    "ptq_dynamics.training.schedule",
    "ptq_dynamics.training.step",
    "ptq_dynamics.corpus.tokens",
)


# called after every update with the model, the updates done and the loss (0-d, on the device); what it returns joins the
# next row of metrics.csv. It must leave weights and random numbers as they are.
Watch = Callable[[torch.nn.Module, int, torch.Tensor], Mapping[str, float]]

METRICS, RECORD, PENDING, RESUME = "metrics.csv", "run.json", "pending.json", "resume"


@config_dataclass()
class RunConfig:
    """Everything that decides a run's weights, and which of them are kept."""

    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: Schedule
    sequences: Annotated[int, Field(ge=1)]  # per update; times the context = tokens per update
    seed: Annotated[int, Field(ge=0)]  # of the weights and of the order of the data
    precision: Precision = (
        "auto"  # of the matrix products; auto counts as one and the same wherever it is trained
    )
    reorder: tuple[int, int] | None = (
        None  # (step, seed): from there on the data come in the order of that seed
    )
    parent: str | None = None  # the run that it is a branch of, for the record alone
    checkpoint_steps: tuple[int, ...]  # ascending; the last is the schedule's end
    state_steps: tuple[int, ...] = ()  # those that carry optimizer state, so that others can go on from there

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        steps = self.checkpoint_steps
        if not steps or list(steps) != sorted(set(steps)) or steps[0] < 1 or steps[-1] != self.schedule.steps:
            raise ValueError("checkpoint_steps must ascend from at least 1 to the schedule's last step")
        if not set(self.state_steps) <= set(steps):
            raise ValueError("state_steps must be among checkpoint_steps")
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.model.context

    def order_at(self, step: int) -> int:
        """Seed of the order of the data at update number ``step`` (0-based)."""
        return self.reorder[1] if self.reorder and step >= self.reorder[0] else self.seed


@config_dataclass()
class Machine:
    """How a run is executed; nothing here changes what it computes beyond rounding."""

    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"
    micro_batch: Annotated[int, Field(ge=1)] | None = None  # sequences at once; None: all
    compile: bool = True  # torch.compile where a compiler is found
    log_every: Annotated[int, Field(ge=1)] = 20  # updates per row of metrics.csv
    resume_seconds: Annotated[float, Field(gt=0)] = 60.0  # between saves for a resume
    resume_steps: Annotated[int, Field(ge=1)] | None = None  # the same, in updates


def prefix_keys(config: RunConfig, steps: Iterable[int], train_id: str) -> dict[int, str]:
    """For each of ``steps`` up to the end the hash of all that decides the weights after so many updates.

    Model, optimizer, batch, seed, precision, training tokens, code, and the learning rate and order of the data of
    every update before: runs that agree up to a step share its hash, whatever they do later.
    """
    shared = {f: getattr(config, f) for f in ("sequences", "seed", "precision")}
    shared |= {"model": asdict(config.model), "optimizer": asdict(config.optimizer)}
    shared |= {"train": train_id, "code": provenance.fingerprint(*NUMERICS)}
    running, found = hashlib.sha256(digest(shared).encode()), {}
    wanted = {s for s in steps if s <= config.schedule.steps}
    for step in range(max(wanted, default=-1) + 1):
        if step in wanted:
            found[step] = running.hexdigest()[:20]
        running.update(struct.pack("<dq", lr_at(config.schedule, step), config.order_at(step)))
    return found


def run_key(config: RunConfig, train_id: str) -> str:
    """Hash under which a finished run is known: that of its last update."""
    return prefix_keys(config, [config.schedule.steps], train_id)[config.schedule.steps]


@dataclass(frozen=True)
class Point:
    """Weights that are there, or will be once their run has been trained: after ``step`` updates.

    Attributes:
        key: as ``prefix_keys`` has it, of the run that they belong to.
        restart: whether training can go on from them (optimizer state and log are there).
        run: folder of the run.
        path: the checkpoint; None for the end of a finished run, which has a log but no optimizer state.
    """

    step: int
    key: str
    restart: bool
    run: Path
    path: Path | None


def points(folder: Path, resume: bool = False) -> list[Point]:
    """The whole checkpoints of the run in ``folder``, with ``resume`` also the save that a killed process left."""
    found = []
    if (folder / RECORD).is_file() and (folder / METRICS).is_file():
        record = read_json(folder / RECORD, hint="delete the folder and run pretrain again")
        found.append(Point(record.get("steps", 0), record.get("key", ""), False, folder, None))
    for path in sorted(folder.glob("step-*")) + ([folder / RESUME] if resume else []):
        if checkpoints.is_whole(path):
            meta = checkpoints.read_meta(path)
            restart = meta.get("state_sha256") is not None
            found.append(Point(meta["step"], meta.get("key", ""), restart, folder, path))
    return found


def promised(config: RunConfig, folder: Path, keys: Mapping[int, str]) -> list[Point]:
    """The checkpoints that training ``config`` into ``folder`` will leave."""
    return [
        Point(s, keys[s], s in config.state_steps, folder, folder / checkpoint_name(s))
        for s in config.checkpoint_steps
    ]


@dataclass(frozen=True)
class Spared:
    """What of a run need not be trained.

    Attributes:
        start: updates that are behind it.
        kept: its checkpoints up to there.
        origin: what to go on from; None: from scratch.
    """

    start: int
    kept: dict[int, Point]
    origin: Point | None

    @property
    def runs(self) -> set[Path]:
        """Folders of all runs that it takes something from."""
        return {p.run for p in [*self.kept.values(), *([self.origin] if self.origin else [])]}


def spared(config: RunConfig, keys: Mapping[int, str], there: Iterable[Point]) -> Spared:
    """How far ``there`` spares the training of ``config``.

    Args:
        keys: ``prefix_keys`` at the steps of ``there``.
        there: of two points that serve as well the first is taken.
    """
    end = config.schedule.steps
    weights: dict[int, Point] = {}
    origins: dict[int, Point] = {}
    for p in there:
        if keys.get(p.step) == p.key:
            if p.restart or (p.path is None and p.step == end):
                origins.setdefault(p.step, p)
            if p.path is not None and p.path.name != RESUME:
                weights.setdefault(p.step, p)
    lacking = [c for c in config.checkpoint_steps if c not in weights]
    start = max((s for s in origins if s < (lacking[0] if lacking else end + 1)), default=0)
    return Spared(start, {c: weights[c] for c in config.checkpoint_steps if c <= start}, origins.get(start))


def checkpoint_name(step: int) -> str:
    return f"step-{step:07d}"


def train(
    config: RunConfig,
    folder: Path,
    corpus: Path,
    machine: Machine,
    lenders: Sequence[Path] = (),
    planned: int = 0,
    watch: Watch | None = None,
) -> str:
    """Train one run into ``folder``, from the furthest checkpoint that is there; returns its key.

    Writes checkpoints ``step-XXXXXXX/``, ``metrics.csv`` (one row per ``log_every`` updates) and, at the end,
    ``run.json``. Running it again on a finished run does nothing; on an interrupted one it goes on from the last save.
    Wherever it starts from, the result is that of an undisturbed run.

    Args:
        lenders: folders of other runs, from whose checkpoints it may go on.
        planned: step from which the progress display counts.
        watch: sees every update that this call makes, such as ``evaluation.monitor.QuantizationMonitor``. After a resume
            it begins anew; what it returned before is in metrics.csv.

    Raises:
        UserError: the loss is not finite (step, rate and the last good checkpoint are named), the disk is full.
    """
    train_set = TokenSet.open(corpus, "train")
    end, per_step = config.schedule.steps, config.tokens_per_step
    sweep(folder)
    there = points(folder, resume=True) + [p for f in lenders for p in points(f)]
    keys = prefix_keys(
        config, {end, *config.checkpoint_steps, *(p.step for p in there)}, train_id=train_set.id
    )
    begin = spared(config, keys, there)
    if begin.start == end and begin.origin.path is None and begin.runs == {folder}:
        _tidy(folder, begin.kept, None)
        progress.report(str(folder), (end - planned) * per_step, resumed=True)
        return keys[end]

    for at, point in begin.kept.items():
        if point.run != folder:
            checkpoints.copy(point.path, folder / checkpoint_name(at))
    step, device = begin.start, devices.pick(machine.device)
    precision = devices.precision(config.precision, device)
    rows, losses, norms = _log_before(begin.origin, device)
    (folder / RECORD).unlink(missing_ok=True)
    _tidy(folder, begin.kept, begin.origin)
    model = neox.build(config.model, train_set.vocab_size, config.seed)
    compiled = machine.compile and neox.can_compile()
    if step < end:
        learner = Learner(model.to(device), config.optimizer, precision, compiled)
        if begin.origin is not None:
            checkpoints.load_weights(model, begin.origin.path)
            learner.load_state(checkpoints.load_state(begin.origin.path))
            if begin.origin.path == folder / RESUME:
                progress.say(f"{folder.name}: goes on from step {step} of {end}")
    progress.report(str(folder), (step - planned) * per_step, resumed=True)

    def save(where: Path, at: int, state: bool) -> None:
        texts = {METRICS: _csv(rows), PENDING: json.dumps([_floats(losses), _floats(norms)])} if state else {}
        checkpoints.save(
            where, model, corpus / "tokenizer", tokens=at * per_step, step=at, lr=lr_at(config.schedule, at - 1),
            phase=phase_at(config.schedule, at), parent=config.parent,
            key=prefix_keys(config, [at], train_set.id)[at], state=learner.state() if state else None, texts=texts,
        )  # fmt: skip

    last_save = clock = time.monotonic()
    seconds_before = rows[-1]["seconds"] if rows else 0.0
    due, seen = set(config.checkpoint_steps), {}
    while step < end:
        lr = lr_at(config.schedule, step)
        tokens = train_set.batch(config.order_at(step), step, config.sequences, config.model.context)
        batch = torch.from_numpy(tokens).to(device, non_blocking=True)
        loss, norm = learner.update(batch, lr, machine.micro_batch or config.sequences)
        losses.append(loss)
        norms.append(norm)
        step += 1
        if watch is not None:
            seen |= watch(model, step, loss)

        log = step % machine.log_every == 0
        if log or step in due:
            _stop_unless_finite(losses, norms, step, config, folder)
        if log:
            seconds = seconds_before + time.monotonic() - clock
            rows.append(_row(losses, norms, step, config, seconds) | seen)
            losses, norms, seen = [], [], {}
            progress.report(str(folder), (step - planned) * per_step)
        if step in due:
            save(folder / checkpoint_name(step), step, step in config.state_steps)
        waited = time.monotonic() - last_save >= machine.resume_seconds
        if log and step < end and (waited or _every(machine.resume_steps, step)):
            save(folder / RESUME, step, True)
            last_save = time.monotonic()

    if losses:
        rows.append(_row(losses, norms, step, config, seconds_before + time.monotonic() - clock) | seen)
    write_text(folder / METRICS, _csv(rows))
    write_json(
        folder / RECORD,
        {
            "key": keys[end],
            "steps": end,
            "config": asdict(config),
            "corpus": train_set.id,
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens": end * per_step,
            "seconds": round(rows[-1]["seconds"], 1),
            "compiled": compiled,
            "precision": precision,
            "machine": asdict(machine),
            "hardware": provenance.hardware(),
            "versions": provenance.versions(),
        },
    )
    shutil.rmtree(folder / RESUME, ignore_errors=True)
    progress.report(str(folder), (end - planned) * per_step, final=True)
    return keys[end]


def _tidy(folder: Path, kept: Iterable[int], origin: Point | None) -> None:
    """Remove the checkpoints that are none of this run's."""
    names = {checkpoint_name(s) for s in kept}
    for path in [*folder.glob("step-*"), folder / RESUME]:
        if path.name not in names and not (origin and path == origin.path):
            shutil.rmtree(path, ignore_errors=True)


def _log_before(
    origin: Point | None, device: torch.device
) -> tuple[list[dict[str, float]], list[torch.Tensor], list[torch.Tensor]]:
    """Rows of the log up to a point, and the losses and norms of the updates since the last row."""
    if origin is None:
        return [], [], []
    folder = origin.path or origin.run
    text = (folder / METRICS).read_text(encoding="utf-8").strip()
    rows = pd.read_csv(io.StringIO(text)).to_dict("records") if text else []
    pending = folder / PENDING  # a finished run has none
    losses, norms = json.loads(pending.read_text(encoding="utf-8")) if pending.is_file() else ([], [])
    return rows, *([torch.tensor(x, device=device) for x in values] for values in (losses, norms))


def _floats(values: Sequence[torch.Tensor]) -> list[float]:
    return torch.stack(list(values)).float().cpu().tolist() if values else []


def _stop_unless_finite(
    losses: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], step: int, config: RunConfig, folder: Path
) -> None:
    """Stop the run at the first loss or gradient norm since the last row that is not finite."""
    values, grads = torch.tensor(_floats(losses)), torch.tensor(_floats(norms))
    bad = (~(torch.isfinite(values) & torch.isfinite(grads))).nonzero()
    if len(bad):
        at = step - len(values) + int(bad[0]) + 1
        saved = [s for s in config.checkpoint_steps if s < at and (folder / checkpoint_name(s)).is_dir()]
        good = folder / checkpoint_name(saved[-1]) if saved else "none"
        raise UserError(
            f"{folder}: loss is {values[bad[0]].item():.4g} and its gradient's norm {grads[bad[0]].item():.4g} at step "
            f"{at} with learning rate {lr_at(config.schedule, at - 1):.3g}; last good checkpoint: {good}. Lower peak_lr or lengthen the warmup"
        )


def _row(
    losses: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor],
    step: int,
    config: RunConfig,
    seconds: float,
) -> dict[str, float]:
    """Mean loss and gradient norm since the last row."""
    return {
        "step": step,
        "tokens": step * config.tokens_per_step,
        "lr": lr_at(config.schedule, step - 1),
        "loss": torch.tensor(_floats(losses)).mean().item(),
        "grad_norm": torch.tensor(_floats(norms)).mean().item(),
        "seconds": seconds,
    }


def _every(steps: int | None, step: int) -> bool:
    return steps is not None and step % steps == 0


def _csv(rows: list[dict[str, float]]) -> str:
    return pd.DataFrame(rows).to_csv(index=False)
