"""Averages of our own checkpoints, built and measured: LAWA along a run, its window and interval, EMA, soups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from ..core import paths, progress, provenance
from ..core.config import config_dataclass, digest, one_of
from ..core.errors import UserError
from ..core.files import read_json, sweep
from ..training.study import Run, Study, expand, trajectory
from ..trajectories import averaging, checkpoints
from ..trajectories.checkpoints import Checkpoint
from .measure import MeasureConfig, measure, write_csv

NAME = "averages"
Count = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


@config_dataclass()
class AveragingConfig:
    """What is averaged. Windows count checkpoints; intervals count saved (dense) checkpoints between two of them."""

    study: str  # with a run at constant LR and cooldowns that branch from it
    trunk: str = "trunk"  # member at constant LR: LAWA along it
    cooldown: str = "cooldown"  # member of branches: LAWA over the decay of the one that begins last
    window: Count = 8  # of LAWA along the trunk
    interval: Count = 1
    windows: tuple[Count, ...] = (4, 8, 16)  # at the end of the trunk, each with each interval
    intervals: tuple[Count, ...] = (1, 2, 4)
    ema_decays: tuple[Decay, ...] = (0.8,)  # per saved checkpoint, at the end of the trunk
    decay_window: Count = 2  # of LAWA over the checkpoints of a decay
    soups_study: str  # with branches that differ in the order of their data alone
    soups_cooldown: str = "cooldown"  # their member

    @property
    def studies(self) -> tuple[str, ...]:
        """The studies whose checkpoints are averaged."""
        return tuple(dict.fromkeys((self.study, self.soups_study)))


@dataclass(frozen=True)
class Trajectory:
    """A finished run, its measured checkpoints, and all that were saved, in order of tokens."""

    run: Run
    measured: Sequence[Checkpoint]
    saved: Sequence[Checkpoint]


@dataclass(frozen=True)
class Average:
    """One average to be: which checkpoints, with which weights, and what the table says of it."""

    kind: str  # lawa, ema, soup, soup_of_lawas
    members: tuple[Checkpoint, ...]  # in training order; the average lies where the last one lies
    weights: tuple[float, ...] | None  # None: uniform
    labels: Mapping[str, Any]  # the same for all averages of one `run`

    @property
    def run(self) -> str:
        """Name of the series it belongs to, and of that series' folder."""
        return self.labels["run"]

    @property
    def key(self) -> str:
        """Hash of all that decides its weights."""
        return digest(
            {
                "members": [m.weights_id for m in self.members],
                "weights": list(self.weights or ()),
                "code": provenance.fingerprint("ptq_dynamics.trajectories.averaging"),
            },
            length=16,
        )


# --- what to average: pure ---


def choose(
    config: AveragingConfig,
    trunks: Sequence[Trajectory],
    cooldowns: Sequence[Trajectory],
    ingredients: Sequence[Trajectory],
) -> list[Average]:
    """All averages of ``config``: along each trunk, at its end, over the last decay of each seed, soups of branches.

    Raises:
        UserError: a trunk is shorter than the window, a decay than its window, or a soup has a single ingredient.
    """
    found = [a for t in trunks for a in (*along(config, t), *ablation(config, t))]
    last: dict[int, Trajectory] = {}
    for t in sorted(cooldowns, key=_begin):
        last[t.run.config.seed] = t
    found += [over_decay(config, t) for t in last.values()]
    return found + [s for group in same_but_for_order(ingredients) for s in soups(config, group)]


def along(config: AveragingConfig, t: Trajectory) -> list[Average]:
    """LAWA at each measured checkpoint of a run's stable phase that has a whole window behind it, the end included."""
    stable = _stable(t)
    points = [c for c in stable if any(c.step == m.step for m in t.measured)]
    windows = [[s for s in stable if s.tokens <= p.tokens] for p in points]
    need = (config.window - 1) * config.interval + 1
    reached = [w for w in windows if len(w) >= need] or windows[-1:]  # too few even at the end: _lawa tells
    return [_lawa(config, t, w, config.window, config.interval, "trajectory") for w in reached]


def ablation(config: AveragingConfig, t: Trajectory) -> list[Average]:
    """Every window with every interval, and the EMAs, at the end of a run's stable phase.

    Left out: the pair that ``along`` has, and pairs that the run is too short for.
    """
    stable = _stable(t)
    pairs = [(w, i) for w in config.windows for i in config.intervals if (w - 1) * i < len(stable)]
    found = [
        _lawa(config, t, stable, w, i, "ablation")
        for w, i in dict.fromkeys(pairs)
        if (w, i) != (config.window, config.interval)
    ]
    for decay in config.ema_decays:
        labels = _labels(config.study, t, f"ema-{decay:g}-{t.run.name}", "ema", "ablation", len(stable))
        weights = tuple(averaging.ema_weights(len(stable), decay))
        labels |= {"ema_decay": decay, "interval": 1, "interval_tokens": _spacing(stable)}
        found.append(Average("ema", tuple(stable), weights, labels))
    return found


def over_decay(config: AveragingConfig, t: Trajectory) -> Average:
    """LAWA over the latest checkpoints of a run's decay."""
    return _lawa(config, t, _decay(t), config.decay_window, 1, "decay")


def same_but_for_order(ts: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Branches in groups that share all but the order of their data."""
    groups: dict[tuple, list[Trajectory]] = {}
    for t in ts:
        alike = {k: v for k, v in t.run.labels().items() if k not in ("run", "data_seed")}
        groups.setdefault(tuple(alike.items()), []).append(t)
    return list(groups.values())


def soups(config: AveragingConfig, group: Sequence[Trajectory]) -> list[Average]:
    """The uniform soup of a group's ends, and of its LAWAs over the decay.

    Raises:
        UserError: a single ingredient.
    """
    first, study = group[0], config.soups_study
    if len(group) < 2:
        raise UserError(
            f"averaging: a soup needs two or more branches that differ in the order of their data, '{first.run.name}' "
            f"of studies.{study} is alone; give studies.{study}.members.{first.run.member} more data_seeds"
        )
    like = first.run.labels()
    place = f"{like['cooldown']}-{_begin(first) / 1e6:g}M-{like['parent'] or first.run.name}"
    ends = tuple(t.measured[-1] for t in group)
    labels = _labels(study, first, f"soup-{place}", "soup", "soup", len(ends))
    labels |= {"source": like["parent"], "window": 1, "interval": 1}
    w = config.decay_window
    lawas = [[_decay(t)[i] for i in _lawa_indices(t, len(_decay(t)), w, 1)] for t in group]
    members = tuple(c for cs in lawas for c in cs)
    spread = {"window": w, "interval_tokens": _spacing(_decay(first)), "ingredients": len(members)}
    nested = {**labels, **spread, "run": f"soup-of-lawas-w{w}-{place}", "kind": "soup_of_lawas"}
    return [Average("soup", ends, None, labels), Average("soup_of_lawas", members, None, nested)]


def _lawa(
    config: AveragingConfig, t: Trajectory, saved: Sequence[Checkpoint], window: int, interval: int, purpose: str
) -> Average:  # fmt: skip
    members = tuple(saved[i] for i in _lawa_indices(t, len(saved), window, interval))
    run = f"lawa-w{window}-i{interval}-{t.run.name}"
    labels = _labels(config.study, t, run, "lawa", purpose, window)
    labels |= {"window": window, "interval": interval, "interval_tokens": _spacing(saved) * interval}
    return Average("lawa", members, None, labels)


def _lawa_indices(t: Trajectory, n: int, window: int, interval: int) -> list[int]:
    try:
        return averaging.lawa_indices(n, window, interval)
    except UserError as e:
        raise UserError(f"averaging: run '{t.run.name}': {e}") from None


def _labels(study: str, t: Trajectory, run: str, kind: str, purpose: str, ingredients: int) -> dict[str, Any]:
    return {
        "run": run,
        "kind": kind,
        "purpose": purpose,
        "study": study,
        "member": t.run.member,
        "source": t.run.name,
        "seed": t.run.config.seed,
        "branch_tokens": _begin(t),
        "run_tokens": t.measured[-1].tokens,
        "ingredients": ingredients,
        "window": None,
        "interval": None,
        "interval_tokens": None,
        "ema_decay": None,
    }


def _stable(t: Trajectory) -> list[Checkpoint]:
    return [c for c in t.saved if c.phase == "stable"]


def _decay(t: Trajectory) -> list[Checkpoint]:
    return [c for c in t.measured if c.phase == "decay"]


def _begin(t: Trajectory) -> int:
    return t.run.branch_step * t.run.config.tokens_per_step


def _spacing(cs: Sequence[Checkpoint]) -> int:
    """Tokens between the last two checkpoints."""
    return cs[-1].tokens - cs[-2].tokens if len(cs) > 1 else 0


# --- built and measured ---


def folder() -> Path:
    """One folder per series of averages, each holding checkpoints named after their last ingredient."""
    return paths.root() / "data" / NAME


def build(average: Average, base: Path) -> Checkpoint:
    """The averaged checkpoint under ``base``: kept if it is whole and made of the same weights, else written anew."""
    target = base / average.run / average.members[-1].name
    if not _is_kept(target, average.key):
        details = {k: v for k, v in average.labels.items() if v is not None and k not in ("run", "kind")}
        sweep(target.parent)
        averaging.average(
            [m.path for m in average.members],
            target,
            weights=average.weights,
            kind=average.kind,
            details={**details, "of": [m.path.parent.name for m in average.members], "key": average.key},
        )
    return checkpoints.read(target)


def _is_kept(target: Path, key: str) -> bool:
    try:
        recipe = read_json(target / averaging.RECIPE, hint="it is written anew")
    except UserError:
        return False
    return recipe.get("key") == key and checkpoints.is_whole(target)


def read_runs(study_name: str, study: Study, member: str) -> list[Trajectory]:
    """The finished runs of one member.

    Raises:
        UserError: no such member, or a checkpoint is missing or torn.
    """
    one_of(member, study.members, f"member of study '{study_name}'")
    return [
        Trajectory(r, trajectory(study_name, r), trajectory(study_name, r, dense=True))
        for r in expand(study)
        if r.member == member
    ]


def measure_averages(
    config: AveragingConfig, studies: Mapping[str, Study], measuring: MeasureConfig, workers: int
) -> pd.DataFrame:
    """Build and measure every average; writes
    ``reports/tables/measurements-averages.csv`` and returns it.

    One row per average and quantizer: which average (``kind``, ``purpose``: along a ``trajectory``, an ``ablation`` at
    the trunk's end, over a ``decay``, a ``soup``; window, interval, ingredients, source) and its measurement;
    ``tokens`` are those seen by the last ingredient.
    """
    trunks = read_runs(config.study, studies[config.study], config.trunk)
    cooldowns = read_runs(config.study, studies[config.study], config.cooldown)
    ingredients = read_runs(config.soups_study, studies[config.soups_study], config.soups_cooldown)
    averages = choose(config, trunks, cooldowns, ingredients)
    found: dict[str, list[Checkpoint]] = {}
    with progress.watched():
        progress.announce(f"average: {len(averages)} averages", len(averages), "avg")
        for a in averages:
            found.setdefault(a.run, []).append(build(a, folder()))
            progress.report(f"{a.run}/{found[a.run][-1].name}", 1, final=True)
        table = measure(NAME, found, measuring.of(NAME), paths.corpus(), paths.measurements(NAME), workers)
    labels = pd.DataFrame([{**a.labels} for a in averages]).drop_duplicates("run")
    table = labels.merge(table.drop(columns=["versions", "key"]), on="run")
    write_csv(table, paths.tables() / f"measurements-{NAME}.csv")
    return table
