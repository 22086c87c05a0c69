"""A study: members that differ in one thing, spelled out from params.yaml into runs, and run side by side."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import Field

from ..core import fanout, paths, progress
from ..core.config import config_dataclass
from ..core.errors import UserError
from ..models.neox import ModelConfig
from ..trajectories import checkpoints
from ..trajectories.checkpoints import Checkpoint
from . import loop
from .loop import Machine, RunConfig
from .schedule import Cooldown, Schedule, Shape, decay_start, phase_at
from .step import OptimizerConfig, Precision

Tokens = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]


@config_dataclass()
class Member:
    """Runs that share all but what is given as a list: every combination is a run, for every seed.

    With ``branch_of`` and ``branch_at`` the runs are cooldown branches of another member's runs.
    """

    shape: Shape = "wsd"
    tokens: Tokens | tuple[Tokens, ...] | None = None  # length; of a branch: of the cooldown alone
    peak_lr: Rate | tuple[Rate, ...] | None = None  # of a branch: the parent's
    weight_decay: Decay | tuple[Decay, ...] | None = None  # default: the study's; of a branch: the parent's
    cooldown: Cooldown | tuple[Cooldown, ...] = "linear"
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2  # of wsd: the last part of the run
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0  # of the peak
    sequences: Annotated[int, Field(ge=1)] | None = None  # per update; default: the study's
    branch_of: str | None = None  # a member of this study
    branch_at: tuple[Tokens, ...] = ()  # tokens seen at the branch points: checkpoints of the parent


@config_dataclass()
class Study:
    """One controlled comparison."""

    model: ModelConfig
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    sequences: Annotated[int, Field(ge=1)]  # per update
    warmup_tokens: Annotated[int, Field(ge=0)]
    checkpoint_tokens: Tokens  # grid of checkpoints
    decay_checkpoints: Annotated[int, Field(ge=1)] = 4  # evenly over a decay, its end included
    optimizer: OptimizerConfig = OptimizerConfig()  # a member's weight_decay takes the place of this one's
    precision: Precision = "bf16"
    members: dict[str, Member]


@dataclass(frozen=True)
class Run:
    """One run of a study: where it lies and what it is."""

    name: str  # folder name
    member: str
    config: RunConfig
    parent: str | None  # name of the run it branches from

    def labels(self) -> dict[str, object]:
        """What the tables say of it, so that no reader of a table needs the configuration."""
        s, per_step = self.config.schedule, self.config.tokens_per_step
        return {
            "run": self.name,
            "member": self.member,
            "seed": self.config.seed,
            "shape": s.shape,
            "peak_lr": s.peak_lr,
            "weight_decay": self.config.optimizer.weight_decay,
            "cooldown": s.cooldown if s.shape == "wsd" else "",
            "decay_tokens": (s.steps - decay_start(s)) * per_step,
            "final_fraction": s.final_fraction,
            "sequences": self.config.sequences,
            "branch_tokens": (self.config.branch_step or 0) * per_step,
            "run_tokens": s.steps * per_step,
            "width": self.config.model.width,
            "parent": self.parent or "",
        }


def expand(study: Study, train_id: str) -> list[Run]:
    """All runs of a study, parents before their branches.

    Raises:
        UserError: an unknown parent, a branch point off the parent's checkpoint grid or not at its peak, duplicate
            seeds or values, values too close to tell apart, a run no longer than its warmup.
    """
    _distinct("seeds", study.seeds)
    runs: list[Run] = []
    order = sorted(study.members, key=lambda m: study.members[m].branch_of is not None)
    for name in order:
        member = study.members[name]
        if member.branch_of is None:
            own = (
                study if member.sequences is None else dataclasses.replace(study, sequences=member.sequences)
            )
            runs += _scratch(own, name, member)
        else:
            runs += _branches(study, name, member, runs, train_id)
    names = [r.name for r in runs]
    if twice := [n for n in names if names.count(n) > 1]:
        raise UserError(
            f"members: two runs would be called '{twice[0]}'; rename a member or give values that differ more"
        )
    return runs


def _scratch(study: Study, name: str, m: Member) -> list[Run]:
    if m.tokens is None or m.peak_lr is None:
        raise UserError(f"member '{name}': a run that is no branch needs tokens and peak_lr")
    parents = {o.branch_of for o in study.members.values()}
    axes = {
        "tokens": _values(name, "tokens", m.tokens),
        "peak_lr": _values(name, "peak_lr", m.peak_lr),
        "weight_decay": _values(
            name, "weight_decay", study.optimizer.weight_decay if m.weight_decay is None else m.weight_decay
        ),
        "cooldown": _values(name, "cooldown", m.cooldown),
    }
    runs = []
    for values in itertools.product(*axes.values()):
        v = dict(zip(axes, values, strict=True))
        steps, warmup = _steps(study, v["tokens"]), _steps(study, study.warmup_tokens, least=0)
        if warmup >= steps:
            raise UserError(
                f"member '{name}': tokens {v['tokens']} is no longer than warmup_tokens {study.warmup_tokens}; raise "
                "the one or lower the other"
            )
        schedule = Schedule(
            shape=m.shape, peak_lr=v["peak_lr"], steps=steps, warmup_steps=warmup,
            decay_steps=max(1, round(steps * m.decay_fraction)) if m.shape == "wsd" else 0,
            cooldown=v["cooldown"], final_fraction=m.final_fraction,
        )  # fmt: skip
        config = dict(
            optimizer=_optimizer(study, v["weight_decay"]), schedule=schedule, keep_state=name in parents
        )
        for seed in study.seeds:
            label = _label(name, m, v) + f"-seed{seed}"
            steps_at = _grid(study, 0, schedule)
            runs.append(Run(label, name, _config(study, seed, checkpoint_steps=steps_at, **config), None))
    return runs


def _branches(study: Study, name: str, m: Member, runs: list[Run], train_id: str) -> list[Run]:
    of = [r for r in runs if r.member == m.branch_of and r.parent is None]
    if not of:
        known = ", ".join(k for k, o in study.members.items() if o.branch_of is None)
        raise UserError(
            f"member '{name}': branch_of names '{m.branch_of}'; members that can be branched from: {known}"
        )
    if m.tokens is None or isinstance(m.tokens, tuple) or not m.branch_at:
        raise UserError(f"member '{name}': a branch needs one value of tokens and a list branch_at")
    if m.peak_lr is not None or m.weight_decay is not None or m.sequences is not None or m.shape != "wsd":
        raise UserError(
            f"member '{name}': a branch takes peak_lr, weight_decay, sequences and shape from its parent; drop them"
        )
    out = []
    cooldowns = _values(name, "cooldown", m.cooldown)
    for parent, at, cooldown in itertools.product(of, _values(name, "branch_at", m.branch_at), cooldowns):
        p = parent.config
        own = dataclasses.replace(study, sequences=p.sequences)
        begin = _steps(own, at)
        if begin not in p.checkpoint_steps:
            grid = ", ".join(str(s * p.tokens_per_step) for s in p.checkpoint_steps)
            raise UserError(
                f"member '{name}': branch_at {at} is no checkpoint of '{parent.name}'; its tokens: {grid}"
            )
        if (phase := phase_at(p.schedule, begin)) != "stable":
            raise UserError(
                f"member '{name}': branch_at {at} lies in the {phase} of '{parent.name}'; branch at its peak"
            )
        decay = _steps(own, m.tokens)
        schedule = Schedule(
            shape="wsd", peak_lr=p.schedule.peak_lr, steps=begin + decay, warmup_steps=p.schedule.warmup_steps,
            decay_steps=decay, cooldown=cooldown, final_fraction=m.final_fraction,
        )  # fmt: skip
        config = _config(
            own, p.seed, optimizer=p.optimizer, schedule=schedule, parent=parent.name,
            parent_key=loop.run_key(p, train_id), branch_step=begin,
            checkpoint_steps=_grid(own, begin, schedule),
        )  # fmt: skip
        stem = parent.name.removesuffix(f"-seed{p.seed}")
        label = (
            f"{stem}-{name}-{_short(at)}"
            + (f"-{cooldown}" if isinstance(m.cooldown, tuple) else "")
            + f"-seed{p.seed}"
        )
        out.append(Run(label, name, config, parent.name))
    return out


def _config(study: Study, seed: int, **rest: object) -> RunConfig:
    return RunConfig(
        model=study.model, sequences=study.sequences, seed=seed, precision=study.precision, **rest
    )  # fmt: skip


def _optimizer(study: Study, weight_decay: float) -> OptimizerConfig:
    o = study.optimizer
    return OptimizerConfig(weight_decay=weight_decay, beta1=o.beta1, beta2=o.beta2, eps=o.eps, clip=o.clip)


def _steps(study: Study, tokens: int, least: int = 1) -> int:
    return max(least, round(tokens / (study.sequences * study.model.context)))


def _grid(study: Study, begin: int, s: Schedule) -> tuple[int, ...]:
    """Steps at which checkpoints are taken: an even grid in tokens, denser in the decay, always the end."""
    every = _steps(study, study.checkpoint_tokens)
    decay = decay_start(s)
    steady = [x for x in range(every, min(decay, s.steps) + 1, every) if x > begin]
    if decay < s.steps and s.shape == "wsd":
        length = s.steps - decay
        steady += [
            decay + round(length * (i + 1) / study.decay_checkpoints) for i in range(study.decay_checkpoints)
        ]
        if decay > begin:
            steady.append(decay)
    elif s.shape in ("cosine", "linear"):
        steady += list(range(every, s.steps, every))
    return tuple(sorted({x for x in steady if begin < x <= s.steps} | {s.steps}))


def _values(member: str, field: str, value: object) -> tuple:
    values = value if isinstance(value, tuple) else (value,)
    _distinct(f"member '{member}': {field}", values)
    return values


def _distinct(what: str, values: tuple) -> None:
    twice = sorted({v for v in values if values.count(v) > 1})
    if twice:
        raise UserError(f"{what}: {', '.join(map(str, twice))} is listed twice")


def _label(name: str, m: Member, v: Mapping[str, object]) -> str:
    """Name of a run: what is given as a list (also of one value) is named, so that a longer list renames nothing."""
    short = {"tokens": "", "peak_lr": "lr", "weight_decay": "wd", "cooldown": ""}
    parts = [short[k] + _short(v[k]) for k in v if isinstance(getattr(m, k), tuple)]
    return "-".join([name, *parts])


def _short(value: object) -> str:
    if isinstance(value, int) and value >= 1000:
        return f"{value / 1e6:g}M" if value < 1e9 else f"{value / 1e9:g}B"
    return f"{value:g}" if isinstance(value, float) else str(value)


def pretrain(study_name: str, study: Study, machine: Machine, workers: int) -> pd.DataFrame:
    """Train what is missing of a study, ``workers`` runs at a time; one row per run for the lab record.

    Finished runs are recognised by their hash and kept; an interrupted run goes on from its last save.
    """
    from ..corpus.tokens import TokenSet

    corpus = paths.corpus()
    train_id = TokenSet.open(corpus, "train").id
    runs = expand(study, train_id)
    base = paths.runs(study_name)
    total = sum(
        (r.config.schedule.steps - (r.config.branch_step or 0)) * r.config.tokens_per_step for r in runs
    )
    with progress.watched():
        progress.announce(f"pretrain {study_name}: {len(runs)} runs", total, "tok")
        fanout.run(
            [
                fanout.Task(
                    key=r.name,
                    function=loop.train,
                    args=(r.config, base / r.name, corpus, machine, base / r.parent if r.parent else None),
                    log=base / f"{r.name}.error.txt",
                    after=(r.parent,) if r.parent else (),
                    memory_gib=1.5,
                )
                for r in runs
            ],
            workers,
        )
    return pd.DataFrame([_record(r, base / r.name) for r in runs])


def _record(run: Run, folder: Path) -> dict[str, object]:
    from ..core.files import read_json

    record = read_json(folder / loop.RECORD, hint="run pretrain again")
    log = pd.read_csv(folder / loop.METRICS)
    updates = run.config.schedule.steps - (run.config.branch_step or 0)
    return run.labels() | {
        "final_loss": log["loss"].iloc[-1],
        "tokens_per_second": round(updates * run.config.tokens_per_step / max(record["seconds"], 1e-9)),
        "parameters": record["parameters"],
        "compiled": record["compiled"],
    }


def training_curves(study_name: str, runs: list[Run], points: int) -> pd.DataFrame:
    """The metrics logs of ``runs``: about ``points`` rows each (loss averaged between them), with run and seed."""
    parts = []
    for r in runs:
        log = pd.read_csv(paths.runs(study_name) / r.name / loop.METRICS).drop(columns="seconds")
        every = max(1, len(log) // points)
        part = (
            np.arange(len(log))[::-1] // every
        )  # counted from the end, so that the last row is the last step
        thin = log.groupby(part).agg(
            {"step": "last", "tokens": "last", "lr": "last", "loss": "mean", "grad_norm": "mean"}
        )
        parts.append(thin.iloc[::-1].assign(run=r.name, member=r.member, seed=r.config.seed))
    return pd.concat(parts, ignore_index=True)


def trajectory(study_name: str, run: Run) -> list[Checkpoint]:
    """The checkpoints of one finished run in order of tokens.

    Raises:
        UserError: one is missing or torn.
    """
    folder = paths.runs(study_name) / run.name
    return [checkpoints.verify(folder / loop.checkpoint_name(s)) for s in run.config.checkpoint_steps]
