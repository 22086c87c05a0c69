"""The cross-check on toy runs: which checkpoints, the table, and what tells two tools' weights apart."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
import toy

from ptq_dynamics.core import paths
from ptq_dynamics.core.config import load
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.evaluation.averages import AveragingConfig
from ptq_dynamics.evaluation.crosscheck import CrosscheckConfig, compare_weights, measure_crosscheck, points
from ptq_dynamics.evaluation.measure import MeasureConfig
from ptq_dynamics.quantization import backends
from ptq_dynamics.quantization.backends import subprocesses
from ptq_dynamics.quantization.grid import round_to_nearest
from ptq_dynamics.quantization.quantizer import block_linears, quantize, restore, snapshot
from ptq_dynamics.quantization.spec import QuantSpec
from ptq_dynamics.training.study import Study

MEASURE = load(MeasureConfig, toy.MEASURE, "params.yaml: measure")
AVERAGING = load(
    AveragingConfig, {"study": "toy", "soups_study": "toy", "window": 2}, "params.yaml: averaging"
)
WIDE = {"bits": 4, "group_size": 8, "block_size": 8}
CONFIG = load(
    CrosscheckConfig,
    {
        "quantizers": [WIDE, {"bits": 3, "group_size": 8}],
        "tools": ["gptqmodel", "auto-gptq", "llmcompressor"],
        "switches": {"true sequential": {**WIDE, "true_sequential": True}},
    },
    "params.yaml: crosscheck",
)
SPEC = QuantSpec(bits=3, group_size=8)
IDS = torch.randint(0, 300, (16, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def study(own_root) -> Study:
    return toy.config(Study, toy.STUDY)


def test_three_checkpoints_of_one_seed(study):
    found = points(CONFIG, AVERAGING, study)
    assert {k: [(c.tokens, c.phase) for c in cs] for k, cs in found.items()} == {
        "constant LR": [(3840, "stable")],
        "decayed": [(5760, "decay")],
        "LAWA": [(3840, "average")],
    }
    assert "seed0" in found["decayed"][0].path.parent.name
    other = points(dataclasses.replace(CONFIG, seed=1), AVERAGING, study)
    assert "seed1" in other["decayed"][0].path.parent.name
    with pytest.raises(UserError, match="crosscheck.seed: study 'toy' has no seed 7"):
        points(dataclasses.replace(CONFIG, seed=7), AVERAGING, study)


@pytest.fixture
def standins(monkeypatch):
    """Two of three tools are there: one gives round to nearest, the other fails when columns are to be sequential."""
    calls = []

    def run(model, names, calibration, spec, repeat=1):
        calls.append((spec.method, repeat))
        if spec.true_sequential:
            raise UserError("no such option (whole log: somewhere)")
        weights = {n: round_to_nearest(model.get_submodule(n).weight, spec).dequantize() for n in names}
        return weights, {"seconds": [9.0, 0.25][:repeat], "versions": {spec.method: "1.0+cpu"}}

    absent = "llmcompressor needs its own environment"
    monkeypatch.setattr(backends, "missing", lambda m: absent if m == "llmcompressor" else None)
    monkeypatch.setattr(backends, "identity", lambda m: {})
    monkeypatch.setattr(subprocesses, "run", run)
    return calls


def test_the_tables(study, standins):
    table, weights = measure_crosscheck(CONFIG, AVERAGING, study, MEASURE, 1)
    assert list(dict.fromkeys(table["method"])) == ["gptq", "gptqmodel", "auto-gptq", "rtn"]
    assert len(table) == 3 * 2 * 4 and set(table["checkpoint"]) == {"constant LR", "decayed", "LAWA"}
    assert {(r.bits, r.block_size) for r in table.itertuples()} == {(4, 8), (3, 128)}
    of = {k: g.set_index("method") for k, g in table.groupby(["checkpoint", "bits"])}
    for rows in of.values():
        assert rows.loc["gptq", "difference"] == 0
        gap = (rows.loc["rtn", "ce"] - rows.loc["gptq", "ce"]) / rows.loc["rtn", "ce_fp"]
        for method in ("gptqmodel", "auto-gptq", "rtn"):  # the stand-ins round to nearest too
            assert rows.loc[method, "difference"] == pytest.approx(gap, rel=1e-6)
        assert rows.loc["rtn", "difference_low"] <= gap <= rows.loc["rtn", "difference_high"]
        assert (
            rows.loc["gptqmodel", "seconds"] == 0.25 and rows.loc["gptqmodel", "versions"] == "gptqmodel 1.0"
        )
        assert np.isnan(rows.loc["rtn", "seconds"]) and rows.loc["gptq", "seconds"] > 0
    by = weights.set_index(["switch", "method", "bits"])
    assert by.loc[("true sequential", "auto-gptq", 4), "refused"] == "no such option"
    assert by.loc[("equal options", "auto-gptq", 4), "static_grid"] == 1
    assert by.loc[("equal options", "gptq", 4), "distance"] == 0
    assert by.loc[("equal options", "gptq", 4), "damping"] == 0.01
    written = pd.read_csv(paths.tables() / "crosscheck.csv")
    assert np.allclose(written["relative_error"], table["relative_error"], rtol=1e-6)
    assert len(pd.read_csv(paths.tables() / "crosscheck-weights.csv")) == len(weights) == 3 * 3

    done = len(standins)
    again, _ = measure_crosscheck(CONFIG, AVERAGING, study, MEASURE, 1)
    assert standins[done:] == [("gptqmodel", 2), ("auto-gptq", 2)]  # only what was refused is asked again
    pd.testing.assert_frame_equal(again, table)


def test_without_the_judge_there_is_no_cross_check(study, monkeypatch):
    monkeypatch.setattr(backends, "missing", lambda m: f"{m} needs the extra" if m == "gptqmodel" else None)
    with pytest.raises(UserError, match="^crosscheck: gptqmodel needs the extra$"):
        measure_crosscheck(CONFIG, AVERAGING, study, MEASURE, 1)


def test_what_tells_weights_apart(model):
    before = snapshot(model)
    quantize(model, IDS, SPEC)
    ours = snapshot(model)
    restore(model, before)
    same = compare_weights(before, ours, ours, SPEC)
    assert same["distance"] == same["distance_first_block"] == 0
    assert same["scale_rounding"] < 1e-6 and same["static_grid"] < 0.3

    # all grids fitted to the weights as they were
    static = {n: round_to_nearest(w, SPEC).dequantize() for n, w in before.items()}
    told = compare_weights(before, ours, static, SPEC)
    assert told["static_grid"] == 1 and told["scale_rounding"] < 1e-6 and told["distance"] > 0.1

    # scales kept in float16, the codes the same
    halved = {}
    for n, w in before.items():
        q = round_to_nearest(w, SPEC)
        halved[n] = dataclasses.replace(q, scales=q.scales.half().double()).dequantize()
    assert 1e-5 < compare_weights(before, ours, halved, SPEC)["scale_rounding"] <= 2**-11 * 1.01

    # by hand
    zero = {n: torch.zeros_like(w) for n, w in before.items()}
    far = compare_weights(before, ours, zero, SPEC)["distance"]
    norm = sum(w.double().square().sum() for w in ours.values()) ** 0.5
    moved = sum((ours[n].double() - before[n].double()).square().sum() for n in ours) ** 0.5
    assert far == pytest.approx(float(norm / moved), rel=1e-9)


def test_a_row_per_layer_is_single_grouped(model):
    before = snapshot(model)
    row = QuantSpec(bits=4, group_size=-1)
    weights = {n: round_to_nearest(w, row).dequantize() for n, w in before.items()}
    other = {n: w * 1.01 for n, w in before.items()}
    told = compare_weights(before, other, weights, row)
    assert told["static_grid"] is None and json.dumps(told, allow_nan=False)
    assert set(weights) == set(block_linears(model))
