"""Our checkpoints where the curves turn, under other quantizers and under other options of GPTQ and its calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

import pandas as pd
from pydantic import Field

from ..core import paths
from ..core.config import config_dataclass
from ..core.errors import UserError
from ..core.files import write_text
from ..quantization import backends
from ..quantization.spec import QuantSpec
from ..training.study import Run, Study, expand, trajectory
from ..trajectories.checkpoints import Checkpoint
from .measure import CalibrationText, MeasureConfig, measure_variants, write_csv

QUANTIZERS, OPTIONS, MISSING = "quantizers", "options", "quantizers-missing"


@config_dataclass()
class QuantizersConfig:
    """Other quantizers beside those of ``measure``, at the turning points of some studies."""

    studies: Annotated[tuple[str, ...], Field(min_length=1)]
    quantizers: Annotated[tuple[QuantSpec, ...], Field(min_length=1)]


@config_dataclass()
class OptionsConfig:
    """One option of GPTQ or of its calibration changed at a time."""

    study: str  # with branches
    branch_at: tuple[int, ...] = ()  # only the cooldowns from there; empty: all
    base: QuantSpec
    quantizers: dict[str, QuantSpec] = Field(default_factory=dict)  # by name of what is changed
    calibrations: dict[str, CalibrationText] = Field(default_factory=dict)


def turning_points(
    name: str, runs: Sequence[Run], branch_at: Sequence[int] = ()
) -> dict[str, list[Checkpoint]]:
    """Where the curves of a study turn: the end of every run that is no trunk, and the branch points of the trunks.

    Args:
        branch_at: tokens of the branch points to keep; empty: all.

    Raises:
        UserError: no cooldown begins at one of ``branch_at``; a checkpoint is missing or torn.
    """
    branches = [r for r in runs if r.branch_step]
    begins = {(r.config.parent, r.branch_step): r.labels()["branch_tokens"] for r in branches}
    if stray := sorted(set(branch_at) - set(begins.values())):
        known = ", ".join(str(t) for t in sorted(set(begins.values()))) or "none"
        raise UserError(
            f"study '{name}': no cooldown begins at {stray[0]} tokens; its branch points: {known}"
        )
    kept = {k for k, tokens in begins.items() if not branch_at or tokens in branch_at}
    trunks = {parent for parent, _ in begins}
    found: dict[str, list[Checkpoint]] = {}
    for r in runs:
        if r.branch_step and (r.config.parent, r.branch_step) not in kept:
            continue
        points = trajectory(name, r)
        chosen = [c for c in points if (r.name, c.step) in kept] if r.name in trunks else points[-1:]
        if chosen:
            found[r.name] = chosen
    return found


def measure_quantizers(
    config: QuantizersConfig, studies: Mapping[str, Study], measuring: MeasureConfig, workers: int
) -> pd.DataFrame:
    """Measure the turning points of ``config.studies``; writes ``reports/tables/measurements-quantizers.csv``.

    One row per checkpoint and quantizer, those of ``measuring`` included (taken from the studies' own measurements), with
    the study in the column ``study``. What a missing extra keeps from being measured is in
    ``reports/tables/quantizers-missing.csv``, one row per quantizer with what to install.
    """
    lacking = {q: line for q in config.quantizers if (line := backends.missing(q.method))}
    there = tuple(q for q in config.quantizers if q not in lacking)
    own = dataclasses.replace(measuring, quantizers=measuring.quantizers + there, also=None)
    table = _measure(QUANTIZERS, {s: (studies[s], ()) for s in config.studies}, {"": own}, workers)
    rows = [
        {"method": q.method, "bits": q.bits, "quantizer": q.label, "reason": r} for q, r in lacking.items()
    ]
    missing = pd.DataFrame(rows, columns=["method", "bits", "quantizer", "reason"])
    write_text(paths.tables() / f"{MISSING}.csv", missing.to_csv(index=False))
    return table


def measure_options(
    config: OptionsConfig, study: Study, measuring: MeasureConfig, workers: int
) -> pd.DataFrame:
    """Measure the turning points of ``config.study`` with one thing changed at a time; writes
    ``reports/tables/measurements-options.csv``, what was changed in the column ``variant`` ("base": nothing)."""
    plain = dataclasses.replace(measuring, quantizers=(config.base,), also=None)
    configs = {"base": plain}
    configs |= {k: dataclasses.replace(plain, quantizers=(q,)) for k, q in config.quantizers.items()}
    configs |= {k: dataclasses.replace(plain, calibration=c) for k, c in config.calibrations.items()}
    if twice := {"base", *config.quantizers} & set(config.calibrations) | {"base"} & set(config.quantizers):
        raise UserError(f"params.yaml: options: two variants are called '{min(twice)}'; rename one")
    return _measure(OPTIONS, {config.study: (study, config.branch_at)}, configs, workers)


def _measure(
    name: str, studies: Mapping[str, tuple[Study, Sequence[int]]], configs: Mapping[str, MeasureConfig], workers: int
) -> pd.DataFrame:  # fmt: skip
    found, labels = {}, []
    for study_name, (study, branch_at) in studies.items():
        runs = expand(study)
        points = turning_points(study_name, runs, branch_at)
        found |= {f"{study_name}/{run}": cs for run, cs in points.items()}
        labels += [
            {"study": study_name, "key": f"{study_name}/{r.name}"} | r.labels()
            for r in runs
            if r.name in points
        ]
    folder = paths.measurements(name)
    lenders = [f for f in sorted(folder.parent.glob("*")) if f != folder]
    table = measure_variants(name, found, configs, paths.corpus(), folder, workers, lenders)
    table = table.drop(columns=["versions", "key"]).rename(columns={"run": "key"})
    table = pd.DataFrame(labels).merge(table, on="key").drop(columns="key")
    write_csv(table, paths.tables() / f"measurements-{name}.csv")
    return table
