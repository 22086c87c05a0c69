"""Curvature along the trajectories of the studies: which checkpoints, side by side, and the tables for git."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from ..core import fanout, paths, progress
from ..core.config import config_dataclass, one_of
from ..core.errors import UserError
from ..core.files import sweep
from ..evaluation.measure import EvaluationText, MeasureConfig, write_csv
from ..quantization.spec import QuantSpec
from ..training.study import Run, Study, expand, trajectory
from ..trajectories.checkpoints import Checkpoint
from .point import Ask, Basin, Numerics, Plane, Step, Top, examine, read

NAME = "curvature"
PREVIOUS = "previous"  # as a method in the table of expansions: the way back to the checkpoint before


@config_dataclass()
class Sampling:
    """What is computed along the runs of one study: trace and weight scales always, and what is asked for here."""

    points: Literal["all", "ends"] = "ends"  # of the measured checkpoints
    top_eigenvalue: bool = False
    quantizers: tuple[
        QuantSpec, ...
    ] = ()  # expansions along their steps, and along the way to the checkpoint before


@config_dataclass()
class Slices:
    """Planes through the end of each longest run (first seed), the checkpoint before it and each quantized version."""

    study: str
    resolution: Annotated[int, Field(ge=3)] = 15  # points along each side
    margin: Annotated[float, Field(ge=0)] = 0.4  # around the three points, in parts of their extent


@config_dataclass()
class CurvatureConfig:
    """Where along the studies curvature is computed, and how exactly."""

    text: EvaluationText  # the tokens that loss, gradient and Hessian are taken on
    probes: Annotated[int, Field(ge=10)] = 10
    tolerance: Annotated[float, Field(gt=0)] = 0.01  # of the top eigenvalue, relative
    max_steps: Annotated[int, Field(ge=1)] = 40  # of Lanczos
    studies: Annotated[dict[str, Sampling], Field(min_length=1)]
    slices: Slices | None = None

    def numerics(self, measuring: MeasureConfig) -> Numerics:
        """How each checkpoint is treated: quantized as it is measured."""
        return Numerics(
            text=self.text,
            calibration=measuring.calibration,
            group_size=measuring.quantizers[0].group_size,
            probes=self.probes,
            tolerance=self.tolerance,
            max_steps=self.max_steps,
            device=measuring.device,
        )


@dataclass(frozen=True)
class Point:
    """One checkpoint of a run, the measured one before it (of a branch: where it begins) and what is asked of it."""

    study: str
    run: Run
    checkpoint: Checkpoint
    previous: Checkpoint | None
    asks: tuple[Ask, ...]


# --- where: pure ---


def choose(config: CurvatureConfig, studies: Mapping[str, Mapping[Run, Sequence[Checkpoint]]]) -> list[Point]:
    """All points of ``config``.

    Args:
        studies: by name, the runs and their measured checkpoints in order.

    Raises:
        UserError: slices of a study without quantizers.
    """
    found = []
    for name, sampling in config.studies.items():
        runs = studies[name]
        by_name = {r.name: r for r in runs}
        for run, cs in runs.items():
            begin = runs[by_name[run.config.parent]] if run.config.parent else ()
            before = [next((c for c in begin if c.step == run.branch_step), None), *cs]
            for previous, c in list(zip(before, cs, strict=False))[-1 if sampling.points == "ends" else 0 :]:
                asks: list[Ask] = [Basin()] + [Top()] * sampling.top_eigenvalue + list(sampling.quantizers)
                if previous is not None and sampling.quantizers:
                    asks.append(Step(previous))
                    asks += _planes(config, name, run, c, previous, runs)
                found.append(Point(name, run, c, previous, tuple(asks)))
    return found


def _planes(
    config: CurvatureConfig, study: str, run: Run, c: Checkpoint, previous: Checkpoint,
    runs: Mapping[Run, Sequence[Checkpoint]],
) -> list[Plane]:  # fmt: skip
    s = config.slices
    longest = max(r.config.schedule.steps * r.config.tokens_per_step for r in runs)
    first = min(r.config.seed for r in runs)
    wanted = run.config.schedule.steps * run.config.tokens_per_step == longest and run.config.seed == first
    if s is None or s.study != study or not wanted or c != runs[run][-1]:
        return []
    return [Plane(previous, spec, s.resolution, s.margin) for spec in config.studies[study].quantizers]


# --- computed ---


def compute(
    config: CurvatureConfig, studies: Mapping[str, Study], measuring: MeasureConfig, workers: int
) -> dict[str, pd.DataFrame]:
    """Compute what is missing along all studies; writes the tables for git and returns them by file name.

    ``curvature-<study>``: a row per checkpoint with loss, gradient norm, trace (all parameters; quantized matrices) with
    standard errors, top eigenvalue with residual, scale of the quantized matrices. ``expansion-<study>``: a row per
    checkpoint and step (of a quantizer, or to the ``previous`` checkpoint) with gᵀδ (``linear``), ½δᵀHδ
    (``quadratic``), the rise in loss on the same tokens (``true``), ‖δ‖² (``norm2``) and δᵀHδ/‖δ‖² (``rayleigh``).
    ``slices``: the planes, a row per grid point and per named point. Losses in nats per token.

    Raises:
        UserError: a checkpoint is missing or torn, the text is too short, members failed.
    """
    if config.slices is not None:
        s = one_of(config.slices.study, config.studies, "study of curvature.slices")
        if not config.studies[s].quantizers:
            raise UserError(
                f"params.yaml: curvature.slices: curvature.studies.{s} names no quantizers; add some"
            )
    runs = {n: {r: trajectory(n, r) for r in expand(studies[n])} for n in config.studies}
    points = choose(config, runs)
    numerics = config.numerics(measuring)
    files = _examine_all(points, numerics, workers)
    rows = paths.measurements(NAME) / "rows"
    tables: dict[str, list[dict[str, Any]]] = {}
    for p in points:
        answers = {a: _answer(rows / files[p.checkpoint.weights_id][a]) for a in p.asks}
        place = {k: getattr(p.checkpoint, k) for k in ("step", "tokens", "lr", "phase", "weights_id")}
        labels = p.run.labels() | place | {"text_tokens": config.text.tokens}
        flat = {k: v for a in answers if isinstance(a, Basin | Top) for k, v in answers[a].items()}
        of_group = {"group_size": numerics.group_size}  # of weight_scale
        tables.setdefault(f"curvature-{p.study}", []).append(labels | of_group | flat)
        of_weights = {"weight_norm2": flat["weight_norm"] ** 2, "parameters": flat["parameters"]}
        for ask, answer in answers.items():
            if isinstance(ask, QuantSpec):
                spec = {"method": ask.method, "bits": ask.bits, "group_size": ask.group_size}
                row = labels | spec | answer | of_weights
                tables.setdefault(f"expansion-{p.study}", []).append(row)
            elif isinstance(ask, Step):
                row = labels | {"method": PREVIOUS, "bits": None, "group_size": None} | answer | of_weights
                row["step_tokens"] = p.checkpoint.tokens - ask.previous.tokens
                tables.setdefault(f"expansion-{p.study}", []).append(row)
            elif isinstance(ask, Plane):
                short = {k: labels[k] for k in ("run", "seed", "peak_lr", "tokens")}
                short |= {"method": ask.spec.method, "bits": ask.spec.bits}
                tables.setdefault("slices", []).extend(short | r for r in _grid(answer))
    done = {name: pd.DataFrame(found) for name, found in tables.items()}
    for name, table in done.items():
        write_csv(table, paths.tables() / f"{name}.csv")
    return done


def _examine_all(points: Sequence[Point], config: Numerics, workers: int) -> dict[str, dict[Ask, str]]:
    """Files of the answers by weights; runs that share weights share them."""
    asked: dict[str, tuple[Point, dict[Ask, None]]] = {}
    for p in points:
        asked.setdefault(p.checkpoint.weights_id, (p, {}))[1].update(dict.fromkeys(p.asks))
    folder = paths.measurements(NAME)
    rows = folder / "rows"
    sweep(rows)
    with progress.watched():
        progress.announce(f"curvature: {len(asked)} checkpoints", len(asked), "ckpt")
        tasks = {
            weights: fanout.Task(
                key=f"{p.study}/{p.run.name}/{p.checkpoint.name}",
                function=examine,
                args=(p.checkpoint, tuple(asks), config, paths.corpus(), rows),
                log=folder / f"{p.run.name}-{p.checkpoint.name}.error.txt",
                memory_gib=3.0,  # an operator keeps up to two of records
            )
            for weights, (p, asks) in asked.items()
        }
        done = fanout.run(list(tasks.values()), workers)
    return {weights: done[t.key] for weights, t in tasks.items()}


def _answer(path: Path) -> dict[str, Any]:
    if (found := read(path)) is None:
        raise UserError(f"{path}: vanished while curvature was computed; run the same command again")
    return found


def _grid(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    grid = [
        {"kind": "grid", "x": x, "y": y, "loss": loss}
        for y, line in zip(answer["y"], answer["loss"], strict=True)
        for x, loss in zip(answer["x"], line, strict=True)
    ]
    names = ("checkpoint", PREVIOUS, "quantized")
    return grid + [
        {"kind": n, "x": x, "y": y, "loss": loss}
        for n, (x, y), loss in zip(names, answer["points"], answer["losses"], strict=True)
    ]
