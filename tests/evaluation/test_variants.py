"""Other quantizers and options on the turning points of real toy runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
import toy

from ptq_dynamics.core import paths
from ptq_dynamics.core.config import load
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.evaluation import variants
from ptq_dynamics.evaluation.measure import MeasureConfig, measure_study
from ptq_dynamics.evaluation.variants import OptionsConfig, QuantizersConfig
from ptq_dynamics.quantization import backends
from ptq_dynamics.quantization.spec import QuantSpec
from ptq_dynamics.training.study import Study, expand

MEASURE = load(MeasureConfig, toy.MEASURE, "params.yaml: measure")


@pytest.fixture
def toy_study(own_root) -> Study:
    return toy.config(Study, toy.STUDY)


def test_where_the_curves_turn(toy_study):
    found = variants.turning_points("toy", expand(toy_study))
    at = {run: [c.tokens for c in cs] for run, cs in found.items()}
    assert at.pop("trunk-seed0") == at.pop("trunk-seed1") == [1920, 3840]  # the branch points
    assert len(at) == 4 and all(len(tokens) == 1 for tokens in at.values())  # the ends of the cooldowns
    assert sorted(t for (t,) in at.values()) == [3840, 3840, 5760, 5760]
    one = variants.turning_points("toy", expand(toy_study), [3840])
    assert {r: [c.tokens for c in cs] for r, cs in one.items() if "cooldown" not in r} == {
        "trunk-seed0": [3840],
        "trunk-seed1": [3840],
    }
    assert len(one) == 4
    with pytest.raises(UserError) as e:
        variants.turning_points("toy", expand(toy_study), [640])
    assert str(e.value) == "study 'toy': no cooldown begins at 640 tokens; its branch points: 1920, 3840"


def test_other_quantizers_beside_the_kept_ones(toy_study, monkeypatch):
    measured = measure_study("toy", toy_study, MEASURE, 1)
    config = load(
        QuantizersConfig,
        {
            "studies": ["toy"],
            "quantizers": [{"bits": 3, "group_size": 16, "rotation": "hadamard"}, {"method": "awq", "group_size": 16}],
        },
        "params.yaml: quantizers",
    )  # fmt: skip
    monkeypatch.setattr(backends, "missing", lambda m: "install it" if m == "awq" else None)
    table = variants.measure_quantizers(config, {"toy": toy_study}, MEASURE, 1)
    assert set(table["study"]) == {"toy"}
    assert len(table) == (4 + 4) * (
        1 + 2 + 1
    )  # branch points and ends; base, those of `measure`, the rotated one
    on = ["run", "tokens", "bits", "method"]
    both = table[table["rotation"] == "none"].merge(measured, on=on)
    assert len(both) == 8 * 2 and np.array_equal(both["ce_x"], both["ce_y"])
    assert (both["seconds_x"] == both["seconds_y"]).all()  # taken, not measured again
    rotated = table[table["rotation"] == "hadamard"].merge(
        measured[measured["method"] == "gptq"], on=["run", "tokens"]
    )
    assert (rotated["ce_x"] != rotated["ce_y"]).all()
    (missing,) = pd.read_csv(paths.tables() / "quantizers-missing.csv").to_dict("records")
    assert missing == {"method": "awq", "bits": 4, "quantizer": "awq-4bit-g16", "reason": "install it"}


def test_one_option_changed_at_a_time(toy_study):
    base = QuantSpec(bits=3, group_size=16)
    config = load(
        OptionsConfig,
        {
            "study": "toy",
            "branch_at": [3840],
            "base": {"bits": 3, "group_size": 16},
            "quantizers": {"act order": {"bits": 3, "group_size": 16, "act_order": True}},
            "calibrations": {"seed 1": {"sequences": 8, "length": 16, "seed": 1}, "same": {"sequences": 8, "length": 16}},
        },
        "params.yaml: options",
    )  # fmt: skip
    table = variants.measure_options(config, toy_study, MEASURE, 1)
    rows = table[table["method"] != "none"]
    assert rows.groupby("variant").size().to_dict() == dict.fromkeys(
        ["base", "act order", "seed 1", "same"], 4
    )
    ce = rows.pivot_table(index=["run", "tokens"], columns="variant", values="ce")
    assert np.array_equal(ce["same"], ce["base"])
    assert not np.array_equal(ce["seed 1"], ce["base"]) and not np.array_equal(ce["act order"], ce["base"])
    assert rows.set_index("variant")["act_order"].groupby(level=0).first().to_dict()["act order"]
    twice = dataclasses.replace(config, quantizers={"seed 1": base})
    with pytest.raises(UserError, match="two variants are called 'seed 1'"):
        variants.measure_options(twice, toy_study, MEASURE, 1)
