"""One pretraining run, top to bottom: data by position, schedule by step, checkpoints on a token grid, resume."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
from pydantic import Field, model_validator

from ..core import devices, progress, provenance
from ..core.config import asdict, config_dataclass, digest
from ..core.errors import UserError
from ..core.files import read_json, sweep, write_json, write_text
from ..corpus.tokens import TokenSet
from ..models import neox
from ..models.neox import ModelConfig
from ..trajectories import checkpoints
from .schedule import Schedule, lr_at, phase_at
from .step import Learner, OptimizerConfig, Precision

# what decides a run's numbers beyond its configuration; the loop around it only decides when things are saved
NUMERICS = (
    "ptq_dynamics.models.neox",
    "ptq_dynamics.training.schedule",
    "ptq_dynamics.training.step",
    "ptq_dynamics.corpus.tokens",
)


METRICS, RECORD = "metrics.csv", "run.json"


@config_dataclass()
class RunConfig:
    """Everything that decides a run's weights. A branch is a run that starts from a checkpoint of its parent."""

    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: Schedule  # in updates, the parent's included
    sequences: Annotated[int, Field(ge=1)]  # per update; times the context = tokens per update
    seed: Annotated[int, Field(ge=0)]  # of the weights and of the order of the data
    precision: Precision = "bf16"
    parent: str | None = None  # the parent run's folder name
    parent_key: str | None = None  # the parent's hash: a changed parent makes a new branch
    branch_step: Annotated[int, Field(ge=1)] | None = None
    checkpoint_steps: tuple[int, ...]  # ascending; the last is the schedule's end
    keep_state: bool = False  # optimizer state beside every checkpoint, so that branches can start there

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        steps = self.checkpoint_steps
        if not steps or list(steps) != sorted(set(steps)) or steps[0] < 1 or steps[-1] != self.schedule.steps:
            raise ValueError("checkpoint_steps must ascend from at least 1 to the schedule's last step")
        if self.branch_step is not None and self.branch_step >= self.schedule.steps:
            raise ValueError(f"branch_step {self.branch_step} is not before the end {self.schedule.steps}")
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.model.context


@config_dataclass()
class Machine:
    """How a run is executed; nothing here changes what it computes beyond rounding."""

    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"
    micro_batch: Annotated[int, Field(ge=1)] | None = None  # sequences at once; None: all
    compile: bool = True  # torch.compile where a compiler is found
    log_every: Annotated[int, Field(ge=1)] = 20  # updates per row of metrics.csv
    resume_seconds: Annotated[float, Field(gt=0)] = 60.0  # between saves for a resume
    resume_steps: Annotated[int, Field(ge=1)] | None = None  # the same, in updates


def run_key(config: RunConfig, train_id: str) -> str:
    """Hash under which a finished run is reused: configuration, training tokens and the code that decides numbers."""
    return digest({"config": asdict(config), "train": train_id, "code": provenance.fingerprint(*NUMERICS)})


def finished(folder: Path, key: str, config: RunConfig) -> bool:
    """Whether ``folder`` holds this very run, whole."""
    record = folder / RECORD
    if not record.is_file():
        return False
    if read_json(record, hint="delete the folder and run pretrain again").get("key") != key:
        return False
    return all(checkpoints.is_whole(folder / checkpoint_name(s)) for s in config.checkpoint_steps)


def checkpoint_name(step: int) -> str:
    return f"step-{step:07d}"


def train(
    config: RunConfig, folder: Path, corpus: Path, machine: Machine, parent_folder: Path | None = None
) -> str:
    """Train one run into ``folder``, resuming what a killed process left; returns its key.

    Writes checkpoints ``step-XXXXXXX/``, ``metrics.csv`` (one row per ``log_every`` updates) and, at the end,
    ``run.json``. Running it again on a finished run does nothing; on an interrupted one it goes on from the last save
    with the same result as an undisturbed run.

    Raises:
        UserError: the loss is not finite (step, rate and the last good checkpoint are named), the parent's
            checkpoint is missing or torn, the disk is full.
    """
    train_set = TokenSet.open(corpus, "train")
    key = run_key(config, train_set.id)
    total = config.schedule.steps * config.tokens_per_step
    begin = config.branch_step or 0
    resume = folder / "resume"
    sweep(folder)
    if finished(folder, key, config):
        shutil.rmtree(resume, ignore_errors=True)  # of a process killed right after it had finished
        progress.report(str(folder), total - begin * config.tokens_per_step, resumed=True)
        return key

    device = devices.pick(machine.device)
    model = neox.build(config.model, train_set.vocab_size, config.seed).to(device)
    compiled = machine.compile and neox.can_compile()
    learner = Learner(model, config.optimizer, config.precision, compiled)
    rows: list[dict[str, float]] = []
    step = begin
    if _resumable(folder, key, config):
        checkpoints.load_weights(model, resume)
        learner.load_state(checkpoints.load_state(resume))
        step = checkpoints.read(resume).step or 0
        rows = pd.read_csv(resume / METRICS).to_dict("records")
        progress.report(str(folder), (step - begin) * config.tokens_per_step, resumed=True)
        progress.say(f"{folder.name}: goes on from step {step} of {config.schedule.steps}")
    else:
        shutil.rmtree(folder, ignore_errors=True)  # what another configuration left under this name
    if step == begin and config.branch_step is not None:
        start = Path(parent_folder or "") / checkpoint_name(config.branch_step)
        if not start.is_dir():
            raise UserError(
                f"{start}: no such checkpoint to branch from; the parent saves {_grid(start.parent)}"
            )
        checkpoints.load_weights(model, start)
        learner.load_state(checkpoints.load_state(start))

    def save(where: Path, at: int, state: bool, **texts: str) -> None:
        checkpoints.save(
            where, model, corpus / "tokenizer", tokens=at * config.tokens_per_step, step=at,
            lr=lr_at(config.schedule, at - 1), phase=phase_at(config.schedule, at), parent=config.parent,
            state=learner.state() if state else None, texts=texts,
        )  # fmt: skip

    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    last_save = clock = time.monotonic()
    seconds_before = rows[-1]["seconds"] if rows else 0.0
    due = set(config.checkpoint_steps)
    while step < config.schedule.steps:
        lr = lr_at(config.schedule, step)
        tokens = train_set.batch(config.seed, step, config.sequences, config.model.context)
        batch = torch.from_numpy(tokens).to(device, non_blocking=True)
        loss, norm = learner.update(batch, lr, machine.micro_batch or config.sequences)
        losses.append(loss)
        norms.append(norm)
        step += 1

        log = step % machine.log_every == 0 or step in due
        if log:
            seconds = seconds_before + time.monotonic() - clock
            rows.append(_row(losses, norms, step, lr, config, seconds, folder))
            losses, norms = [], []
            progress.report(str(folder), (step - begin) * config.tokens_per_step)
        if step in due:
            save(folder / checkpoint_name(step), step, config.keep_state)
        waited = time.monotonic() - last_save >= machine.resume_seconds
        if log and step < config.schedule.steps and (waited or _every(machine.resume_steps, step)):
            save(resume, step, True, **{METRICS: _csv(rows), RECORD: json.dumps({"key": key})})
            last_save = time.monotonic()

    write_text(folder / METRICS, _csv(rows))
    seconds = rows[-1]["seconds"] if rows else 0.0
    write_json(
        folder / RECORD,
        {
            "key": key,
            "config": asdict(config),
            "corpus": train_set.id,
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens": total,
            "seconds": round(seconds, 1),
            "compiled": compiled,
            "machine": asdict(machine),
            "hardware": provenance.hardware(),
            "versions": provenance.versions(),
        },
    )
    shutil.rmtree(resume, ignore_errors=True)
    progress.report(str(folder), total - begin * config.tokens_per_step, final=True)
    return key


def _row(
    losses: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], step: int, lr: float, config: RunConfig,
    seconds: float, folder: Path,
) -> dict[str, float]:  # fmt: skip
    """Mean loss and gradient norm since the last row; stops the run at the first that is not finite."""
    values, grads = torch.stack(list(losses)).float().cpu(), torch.stack(list(norms)).float().cpu()
    bad = (~(torch.isfinite(values) & torch.isfinite(grads))).nonzero()
    if len(bad):
        at = step - len(values) + int(bad[0]) + 1
        saved = [s for s in config.checkpoint_steps if s < at and (folder / checkpoint_name(s)).is_dir()]
        good = folder / checkpoint_name(saved[-1]) if saved else "none"
        raise UserError(
            f"{folder}: loss is {values[bad[0]].item():.4g} and its gradient's norm {grads[bad[0]].item():.4g} at step "
            f"{at} with learning rate {lr_at(config.schedule, at - 1):.3g}; last good checkpoint: {good}. Lower peak_lr or lengthen the warmup"
        )
    return {
        "step": step,
        "tokens": step * config.tokens_per_step,
        "lr": lr,
        "loss": values.mean().item(),
        "grad_norm": grads.mean().item(),
        "seconds": seconds,
    }


def _every(steps: int | None, step: int) -> bool:
    return steps is not None and step % steps == 0


def _resumable(folder: Path, key: str, config: RunConfig) -> bool:
    """Whether ``folder`` holds a whole save of this very run, and every checkpoint up to it."""
    resume = folder / "resume"
    if not (resume / RECORD).is_file():
        return False
    record = read_json(resume / RECORD, hint="delete the folder")
    if record.get("key") != key or not checkpoints.is_whole(resume):
        return False
    step = checkpoints.read(resume).step or 0
    return all(
        checkpoints.is_whole(folder / checkpoint_name(s)) for s in config.checkpoint_steps if s <= step
    )


def _grid(folder: Path) -> str:
    names = sorted(p.name for p in folder.glob("step-*")) if folder.is_dir() else []
    return ", ".join(names) or "nothing yet"


def _csv(rows: list[dict[str, float]]) -> str:
    return pd.DataFrame(rows).to_csv(index=False)
