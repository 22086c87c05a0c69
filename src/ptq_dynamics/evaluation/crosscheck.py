"""Our GPTQ against other tools' at equal options: error, paired difference, seconds, and where their weights differ.

Three checkpoints of one seed stand for what the study measures: the end of the trunk at constant LR, the end of the
last cooldown, and LAWA at the trunk's end. Errors are measured as everywhere (``evaluation.measure``). At the end of the
cooldown each tool's weights are also held against ours, with one option switched at a time, to see why tools disagree.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from ..core import paths
from ..core.config import config_dataclass
from ..core.errors import UserError
from ..core.files import read_json, write_json
from ..corpus.tokens import TokenSet
from ..quantization import backends
from ..quantization.backends import subprocesses
from ..quantization.grid import fit_grid
from ..quantization.quantizer import block_linears, quantize, restore, snapshot
from ..quantization.spec import QuantSpec
from ..training.study import Study
from ..trajectories import checkpoints
from ..trajectories.checkpoints import Checkpoint
from .averages import AveragingConfig, along, build, folder, read_runs
from .intervals import paired_bootstrap
from .measure import MeasureConfig, measure, row_key, write_csv

NAME, WEIGHTS = "crosscheck", "crosscheck-weights"
OURS, JUDGE, RTN = "gptq", "gptqmodel", "rtn"
STABLE, DECAYED, AVERAGED = "constant LR", "decayed", "LAWA"
BASE = "equal options"


@config_dataclass()
class CrosscheckConfig:
    """Which options the tools are compared at. Study and members are those of ``averaging``."""

    seed: Annotated[int, Field(ge=0)] = 0
    quantizers: Annotated[tuple[QuantSpec, ...], Field(min_length=1)]  # ours; each tool gets the same options
    tools: Annotated[tuple[str, ...], Field(min_length=1)]  # methods that run GPTQ
    switches: dict[str, QuantSpec] = Field(default_factory=dict)  # ours with one option changed, by its name


def points(config: CrosscheckConfig, averaging: AveragingConfig, study: Study) -> dict[str, list[Checkpoint]]:
    """The three checkpoints by name.

    Raises:
        UserError: the study has no such seed, or a checkpoint is missing or torn.
    """

    def runs(member: str) -> list[Any]:
        found = read_runs(averaging.study, study, member)
        if not (mine := [t for t in found if t.run.config.seed == config.seed]):
            raise UserError(
                f"params.yaml: crosscheck.seed: study '{averaging.study}' has no seed {config.seed}"
            )
        return mine

    (trunk,) = runs(averaging.trunk)
    cooldown = max(runs(averaging.cooldown), key=lambda t: t.run.branch_step)
    return {
        STABLE: trunk.measured[-1:],
        DECAYED: cooldown.measured[-1:],
        AVERAGED: [build(along(averaging, trunk)[-1], folder())],
    }


def measure_crosscheck(
    config: CrosscheckConfig, averaging: AveragingConfig, study: Study, measuring: MeasureConfig, workers: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measure all that is there; writes ``reports/tables/crosscheck.csv`` and ``crosscheck-weights.csv``.

    The first has one row per checkpoint and quantizer: relative error and its difference to ours (both with paired 95 %
    intervals), the tool's seconds and versions. The second has one row per tool, width and switch: how far its weights
    are from ours (``compare_weights``).

    Raises:
        UserError: gptqmodel, which ours is judged against, is not installed.
    """
    if lacking := backends.missing(JUDGE):
        raise UserError(f"crosscheck: {lacking}")
    tools = [t for t in config.tools if not backends.missing(t)]
    found = points(config, averaging, study)
    weights = _probe_all(config, tools, found[DECAYED][0], measuring)
    specs = [
        dataclasses.replace(q, method=method) for q in config.quantizers for method in (OURS, *tools, RTN)
    ]
    measuring = dataclasses.replace(measuring, quantizers=tuple(specs), also=None)
    measure(NAME, found, measuring, paths.corpus(), paths.measurements(NAME), workers)
    table = tabulate(pd.read_parquet(paths.measurements(NAME) / "table.parquet"), weights)
    write_csv(table, paths.tables() / f"{NAME}.csv")
    write_csv(weights, paths.tables() / f"{WEIGHTS}.csv")
    return table, weights


def tabulate(measured: pd.DataFrame, weights: pd.DataFrame) -> pd.DataFrame:
    """The table of errors.

    Args:
        measured: as ``measure`` leaves it, with per-sequence losses.
        weights: seconds and versions by ``method``, ``bits`` and ``block_size``, of the rows with the switch ``BASE``.
    """
    rows = []
    for name, points in measured.groupby("run", sort=False):
        base = points.loc[points["method"] == "none", "losses"].iloc[0]
        quantized = points[points["method"] != "none"]
        for (bits, block), same in quantized.groupby(["bits", "block_size"], sort=False):
            ours = same.loc[same["method"] == OURS, "losses"].iloc[0]
            for row in same.to_dict("records"):
                keep = ("tokens", "method", "bits", "group_size", "block_size", "ce_fp", "ce",
                        "relative_error", "relative_error_low", "relative_error_high")  # fmt: skip
                e = paired_bootstrap(base, row["losses"] - ours, lambda d, b: d / b)
                found = weights[
                    weights["switch"].eq(BASE) & weights["bits"].eq(bits) & weights["block_size"].eq(block)
                ]
                found = found[found["method"] == row["method"]].to_dict("records")
                rows.append(
                    {"checkpoint": name}
                    | {k: row[k] for k in keep}
                    | {"difference": e.value, "difference_low": e.low, "difference_high": e.high}
                    | {k: found[0][k] if found else None for k in ("seconds", "versions")}
                )
    return pd.DataFrame(rows)


# --- weights against weights ---


def _probe_all(
    config: CrosscheckConfig, tools: list[str], checkpoint: Checkpoint, measuring: MeasureConfig
) -> pd.DataFrame:
    """One row per tool (ours too), width and switch; rows are kept in ``data/measurements/crosscheck/weights``."""
    calibration = TokenSet.open(paths.corpus(), measuring.calibration.set)
    c = measuring.calibration
    ids = torch.from_numpy(calibration.calibration(c.sequences, c.length, c.seed))
    text = {"evaluation": "", "calibration": calibration.id}
    wanted = [(BASE, q) for q in config.quantizers] + list(config.switches.items())
    model, rows = None, []
    for switch, ours in wanted:
        for method in (OURS, *tools):
            spec = dataclasses.replace(ours, method=method)
            path = paths.measurements(NAME) / "weights" / f"{row_key(checkpoint, spec, measuring, text)}.json"
            if path.is_file():
                found = read_json(path, hint="delete it and run the same command again")
            else:
                model = model or checkpoints.load_model(checkpoint)
                found = _probe(model, ids, spec, ours)
                if found["refused"] is None:  # else it may have been an accident: asked again next time
                    write_json(path, found)
            place = {"method": method, "bits": spec.bits, "block_size": spec.block_size, "switch": switch}
            rows.append(place | found)
    return pd.DataFrame(rows)


def _probe(model: torch.nn.Module, ids: Tensor, spec: QuantSpec, ours: QuantSpec) -> dict[str, Any]:
    """Seconds of the tool's second call in one process (ours: in this one), versions, and its weights against ours."""
    before = snapshot(model)
    with _one_thread():
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            done = quantize(model, ids, ours)
            seconds.append(time.perf_counter() - start)
            mine = snapshot(model)
            restore(model, before)
    told = {
        "seconds": seconds[-1],
        "versions": f"torch {torch.__version__.split('+')[0]}",
        "refused": None,
        "damping": max(layer.damping or 0.0 for layer in done.layers),
    }
    theirs: Mapping[str, Tensor] = mine
    if spec.method != OURS:
        try:
            theirs, done_by_tool = subprocesses.run(model, list(block_linears(model)), ids, spec, repeat=2)
        except UserError as e:
            return dict.fromkeys(told) | {"refused": str(e).partition(" (whole log")[0]}
        told |= {
            "seconds": done_by_tool["seconds"][-1],
            "versions": ", ".join(f"{k} {v.split('+')[0]}" for k, v in done_by_tool["versions"].items()),
            "damping": None,
        }
    return told | compare_weights(before, mine, theirs, spec)


def compare_weights(
    before: Mapping[str, Tensor], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], spec: QuantSpec
) -> dict[str, float]:
    """How a tool's weights differ from ours; linear layers by name, ``[rows, columns]``.

    Returns:
        ``distance``: ‖theirs − ours‖ / ‖ours − before‖ over all layers, and ``distance_first_block`` over the first
        block alone, whose inputs are the same for every tool (unless ``true_sequential``).
        ``scale_rounding``: how far the first group of each row is off the float32 grid that ``grid.fit_grid`` fits,
        relative, at most; it tells scales kept in float16 (2⁻¹¹ = 5e-4).
        ``static_grid``: share of later groups that lie on the grid fitted to ``before``, as with a tool that fits all
        grids at the start; NaN where no layer has a second group.
    """
    first = _first_block(list(before))
    off, static = 0.0, []
    for name, w in before.items():
        width = w.shape[1] if spec.group_size == -1 else spec.group_size
        for start in range(0, w.shape[1], width):
            group = slice(start, start + width)
            scale, _ = fit_grid(w[:, group].double(), spec.bits, spec.symmetric)
            steps = theirs[name][:, group].double() / scale[:, None]
            away = (steps - steps.round()).abs()
            if start:
                static += (away.amax(1) < 0.01).tolist()
            elif not spec.act_order and name == first[0]:
                off = (away / steps.round().abs().clamp(min=1)).max().item()
    return {
        "distance": _distance(before, ours, theirs, list(before)),
        "distance_first_block": _distance(before, ours, theirs, first),
        "scale_rounding": off,
        "static_grid": sum(static) / len(static) if static else None,
    }


def _first_block(names: list[str]) -> list[str]:
    """Names up to where the number of the block changes."""
    number = next(i for i, part in enumerate(names[0].split(".")) if part.isdigit())
    head = names[0].split(".")[: number + 1]
    return [n for n in names if n.split(".")[: number + 1] == head]


def _distance(
    before: Mapping[str, Tensor], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], names: list[str]
) -> float:
    apart = sum((theirs[n].double() - ours[n].double()).square().sum().item() for n in names)
    moved = sum((ours[n].double() - before[n].double()).square().sum().item() for n in names)
    return (apart / moved) ** 0.5


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
