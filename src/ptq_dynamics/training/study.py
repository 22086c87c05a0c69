"""A study: members that differ in one thing, spelled out from params.yaml into runs, and run side by side."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from ..core import fanout, paths, progress
from ..core.config import config_dataclass
from ..core.devices import Precision
from ..core.errors import UserError
from ..models.neox import ModelConfig
from ..trajectories import checkpoints
from ..trajectories.checkpoints import Checkpoint
from . import loop
from .loop import Machine, RunConfig
from .schedule import Cooldown, Schedule, Shape, decay_start, phase_at
from .step import OptimizerConfig

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
    checkpoint_tokens: Tokens | None = None  # grid of checkpoints; default: the study's
    branch_of: str | None = None  # a member of this study
    branch_at: tuple[Tokens, ...] = ()  # tokens seen at the branch points: checkpoints of the parent
    data_seeds: tuple[
        Annotated[int, Field(ge=0)], ...
    ] = ()  # of a branch: orders of its data; default: the parent's


@config_dataclass()
class Study:
    """One controlled comparison."""

    model: ModelConfig
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    sequences: Annotated[int, Field(ge=1)]  # per update
    warmup_tokens: Annotated[int, Field(ge=0)]
    checkpoint_tokens: Tokens  # grid of checkpoints
    dense_tokens: Tokens | None = None  # finer grid of stable checkpoints, kept for averages and not measured
    decay_checkpoints: Annotated[int, Field(ge=1)] = 4  # evenly over a decay, its end included
    optimizer: OptimizerConfig = OptimizerConfig()  # a member's weight_decay takes the place of this one's
    precision: Precision = "auto"
    members: dict[str, Member]


@dataclass(frozen=True)
class Run:
    """One run of a study: where it lies and what it is."""

    name: str  # folder name
    member: str
    config: RunConfig
    measured_steps: tuple[int, ...]  # the checkpoints that are measured
    branch_step: int = 0  # of a branch: updates that it shares with its parent

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
            "branch_tokens": self.branch_step * per_step,
            "run_tokens": s.steps * per_step,
            "width": self.config.model.width,
            "parent": self.config.parent or "",
            "data_seed": self.config.order_at(s.steps),
        }


def expand(study: Study) -> list[Run]:
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
        own = {f: getattr(member, f) for f in ("sequences", "checkpoint_tokens")}
        study_of = dataclasses.replace(study, **{k: v for k, v in own.items() if v is not None})
        if member.branch_of is None:
            runs += _scratch(study_of, name, member)
        else:
            runs += _branches(study_of, name, member, runs)
    names = [r.name for r in runs]
    if twice := [n for n in names if names.count(n) > 1]:
        raise UserError(
            f"members: two runs would be called '{twice[0]}'; rename a member or give values that differ more"
        )
    return runs


def _scratch(study: Study, name: str, m: Member) -> list[Run]:
    if m.tokens is None or m.peak_lr is None:
        raise UserError(f"member '{name}': a run that is no branch needs tokens and peak_lr")
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
        steps_at = _grid(study, study.checkpoint_tokens, 0, schedule)
        for seed in study.seeds:
            run = _run(
                study, _label(name, m, v) + f"-seed{seed}", name, steps_at, seed=seed, schedule=schedule,
                optimizer=_optimizer(study, v["weight_decay"]),
                state_steps=tuple(x for x in steps_at if phase_at(schedule, x) == "stable"),
            )  # fmt: skip
            runs.append(run)
    return runs


def _branches(study: Study, name: str, m: Member, runs: list[Run]) -> list[Run]:
    of = [r for r in runs if r.member == m.branch_of and r.config.parent is None]
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
    orders = _values(name, "data_seeds", m.data_seeds) or (None,)
    points = _values(name, "branch_at", m.branch_at)
    for parent, at, cooldown, order in itertools.product(of, points, cooldowns, orders):
        p = parent.config
        own = dataclasses.replace(study, sequences=p.sequences)
        begin = _steps(own, at)
        if begin not in parent.measured_steps:
            grid = ", ".join(str(s * p.tokens_per_step) for s in parent.measured_steps)
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
        stem = parent.name.removesuffix(f"-seed{p.seed}")
        label = (
            f"{stem}-{name}-{_short(at)}"
            + (f"-{cooldown}" if isinstance(m.cooldown, tuple) else "")
            + (f"-order{order}" if order is not None else "")
            + f"-seed{p.seed}"
        )
        run = _run(
            own, label, name, _grid(own, own.checkpoint_tokens, begin, schedule), branch_step=begin, seed=p.seed,
            schedule=schedule, optimizer=p.optimizer, parent=parent.name,
            reorder=None if order is None else (begin, order),
        )  # fmt: skip
        out.append(run)
    return out


def _run(
    study: Study, label: str, member: str, measured: tuple[int, ...], branch_step: int = 0, **rest: Any
) -> Run:
    """A run of ``study`` that keeps the checkpoints to be measured and, of its stable phase, the dense grid."""
    dense: tuple[int, ...] = ()
    if study.dense_tokens is not None:
        schedule = rest["schedule"]
        grid = _grid(study, study.dense_tokens, branch_step, schedule)
        dense = tuple(x for x in grid if phase_at(schedule, x) == "stable")
    config = RunConfig(
        model=study.model, sequences=study.sequences, precision=study.precision,
        checkpoint_steps=tuple(sorted({*measured, *dense})), **rest,
    )  # fmt: skip
    return Run(label, member, config, measured, branch_step)


def _optimizer(study: Study, weight_decay: float) -> OptimizerConfig:
    o = study.optimizer
    return OptimizerConfig(weight_decay=weight_decay, beta1=o.beta1, beta2=o.beta2, eps=o.eps, clip=o.clip)


def _steps(study: Study, tokens: int, least: int = 1) -> int:
    return max(least, round(tokens / (study.sequences * study.model.context)))


def _grid(study: Study, tokens: int, begin: int, s: Schedule) -> tuple[int, ...]:
    """Steps at which checkpoints are taken: an even grid in tokens, another in the decay, always the end."""
    every = _steps(study, tokens)
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


@dataclass(frozen=True)
class Step:
    """One run of a plan.

    Attributes:
        start: updates that need not be made, since another run has made them or will have by then.
        lenders: folders of those runs.
        after: names of those among them that the plan trains first.
    """

    run: Run
    start: int
    lenders: tuple[Path, ...]
    after: tuple[str, ...]


def plan(runs: Sequence[Run], base: Path, train_id: str) -> list[Step]:
    """In which order to train ``runs`` into ``base``, the longest first, and what each takes from others.

    Any run of any study may lend what it shares: everything beside ``base`` is looked through.
    """
    lendable = [p for folder in sorted(base.parent.glob("*/*")) for p in loop.points(folder)]
    names: dict[Path, str] = {}
    steps = []
    for run in sorted(runs, key=lambda r: (r.branch_step > 0, r.branch_step - r.config.schedule.steps)):
        folder = base / run.name
        there = loop.points(folder, resume=True) + [p for p in lendable if p.run != folder]
        keys = loop.prefix_keys(
            run.config, {*run.config.checkpoint_steps, *(p.step for p in there)}, train_id
        )
        begin = loop.spared(run.config, keys, there)
        lenders = tuple(sorted(begin.runs - {folder}))
        steps.append(Step(run, begin.start, lenders, tuple(names[f] for f in lenders if f in names)))
        if begin.start < run.config.schedule.steps:
            names[folder] = run.name
            lendable += loop.promised(run.config, folder, keys)
    return steps


def pretrain(study_name: str, study: Study, machine: Machine, workers: int) -> pd.DataFrame:
    """Train what is missing of a study, ``workers`` runs at a time; one row per run for the lab record.

    Finished runs are recognised by their hash and kept; an interrupted run goes on from its last save; a run that
    shares its beginning with another, of this study or any, takes that from it.
    """
    from ..corpus.tokens import TokenSet

    corpus, base = paths.corpus(), paths.runs(study_name)
    runs = expand(study)
    steps = plan(runs, base, TokenSet.open(corpus, "train").id)
    left = [(s.run.config.schedule.steps - s.start) * s.run.config.tokens_per_step for s in steps]
    with progress.watched():
        title = f"pretrain {study_name}: {len(runs)} runs, {left.count(0)} of them there"
        progress.announce(title, sum(left), "tok")
        fanout.run(
            [
                fanout.Task(
                    key=s.run.name,
                    function=loop.train,
                    args=(s.run.config, base / s.run.name, corpus, machine, s.lenders, s.start),
                    log=base / f"{s.run.name}.error.txt",
                    after=s.after,
                    memory_gib=1.5,
                )
                for s in steps
            ],
            workers,
        )
    return pd.DataFrame([_record(r, base / r.name) for r in runs])


def _record(run: Run, folder: Path) -> dict[str, object]:
    from ..core.files import read_json

    record = read_json(folder / loop.RECORD, hint="run pretrain again")
    log = pd.read_csv(folder / loop.METRICS)
    return run.labels() | {
        "final_loss": log["loss"].iloc[-1],
        "tokens_per_second": round(record["tokens"] / max(record["seconds"], 1e-9)),
        "parameters": record["parameters"],
        "compiled": record["compiled"],
        "precision": record["precision"],
    }


def training_curves(study_name: str, runs: list[Run], points: int) -> pd.DataFrame:
    """The metrics logs of ``runs``, of branches from the branch point on: about ``points`` rows each (loss averaged
    between them), with run and seed."""
    parts = []
    for r in runs:
        log = pd.read_csv(paths.runs(study_name) / r.name / loop.METRICS).drop(columns="seconds")
        log = log[log["step"] > r.branch_step]
        every = max(1, len(log) // points)
        part = (
            np.arange(len(log))[::-1] // every
        )  # counted from the end, so that the last row is the last step
        thin = log.groupby(part).agg(
            {"step": "last", "tokens": "last", "lr": "last", "loss": "mean", "grad_norm": "mean"}
        )
        parts.append(thin.iloc[::-1].assign(run=r.name, member=r.member, seed=r.config.seed))
    return pd.concat(parts, ignore_index=True)


def trajectory(study_name: str, run: Run, dense: bool = False) -> list[Checkpoint]:
    """The checkpoints of one finished run in order of tokens: those to be measured, or (``dense``) all that it kept.

    Raises:
        UserError: one is missing or torn.
    """
    folder = paths.runs(study_name) / run.name
    steps = run.config.checkpoint_steps if dense else run.measured_steps
    return [checkpoints.verify(folder / loop.checkpoint_name(s)) for s in steps]
