from __future__ import annotations

import math

import numpy as np
import pytest
import synthetic
from scipy import stats

from ptq_dynamics.findings import weight_decay

SIMILAR = {0.01: 3.0, 0.1: 2.98, 0.3: 2.99, 1.0: 3.2}  # 1.0 is left out


def entry(decay: float, rate: float, spread: float = 0.01, losses=SIMILAR, **options) -> dict:
    table = synthetic.weight_decay(per_tenfold=decay, spread=spread, losses=losses, **options)[0]
    return weight_decay.judge(table, synthetic.peak_lr(per_tenfold=rate, spread=0.005)[0], True)[0]


def test_c8_fits_the_values_with_similar_loss_alone(rules_root) -> None:
    table = synthetic.weight_decay(spread=0.02)[0]
    found = weight_decay.judge(table, synthetic.peak_lr()[0], True)[0]
    logs = []
    for _, g in table[(table["bits"] == 4) & (table["weight_decay"] < 1)].groupby("seed"):
        logs.append(stats.linregress(np.log10(g["weight_decay"]), np.log(g["relative_error"])).slope)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(logs), scale=stats.sem(logs))
    assert found["value"] == pytest.approx(math.exp(np.mean(logs)), rel=1e-5)
    assert found["interval"] == pytest.approx([math.exp(low), math.exp(high)], rel=1e-5)
    assert found["details"]["weight decays fitted"] == [0.01, 0.1, 0.3]
    assert found["details"]["weight decays left out"] == [1.0]


@pytest.mark.parametrize(
    ("decay", "rate", "verdict"),
    [
        (0.85, 0.6, "supported"),
        (0.85, 1.5, "supported"),  # 1.5 is further from 1 than 1/0.85
        (0.6, 0.85, "contradicted"),  # matters more than the LR
        (1.2, 0.6, "contradicted"),  # grows
        (1.0, 0.6, "inconclusive"),
    ],
)
def test_c8_verdicts(rules_root, decay, rate, verdict) -> None:
    assert entry(decay, rate)["verdict"] == verdict


@pytest.mark.parametrize(
    ("a", "b", "further"),
    [(0.5, 1.9, True), (0.5, 2.1, False), (1.0, 1.0, False), (math.nan, 0.9, None), (0.5, math.nan, None)],
)
def test_distance_from_one_is_a_ratio(a, b, further) -> None:
    assert weight_decay.further_from_one(a, b) is further


def test_a_weight_decay_of_zero_is_left_out_and_told(rules_root) -> None:
    found = entry(0.9, 0.6, decays=[0.0, 0.1, 0.3], losses={0.0: 2.97, 0.1: 2.98, 0.3: 2.99})
    assert found["details"]["weight decays left out"] == [0.0]
    assert found["value"] == pytest.approx(0.9, abs=0.03)
    table = synthetic.weight_decay(decays=[0.0, 0.1])[0]
    assert "0 is not drawn" in weight_decay.caption(table, synthetic.peak_lr()[0])


def test_one_similar_value_alone_decides_nothing(rules_root) -> None:
    found = entry(0.9, 0.6, losses={0.01: 3.3, 0.1: 2.9, 0.3: 3.0, 1.0: 3.1})
    assert (found["value"], found["verdict"]) == (None, "inconclusive")


def test_one_seed_decides_nothing(rules_root) -> None:
    found = entry(0.6, 0.9, seeds=[0])
    assert found["verdict"] == "inconclusive" and found["interval"] == [None, None]


def test_changes_are_paired_and_relative_to_the_best_loss() -> None:
    table = synthetic.weight_decay(spread=0.05)[0]
    rows = table[table["bits"] == 4]
    found = weight_decay.change(rows, "weight_decay").set_index("value")
    assert found["ratio"].to_dict() == pytest.approx({0.01: 0.1, 0.1: 1.0, 0.3: 3.0, 1.0: 10.0})
    assert found["similar"].to_dict() == {0.01: True, 0.1: True, 0.3: True, 1.0: False}
    wide = {(r["weight_decay"], r["seed"]): r["relative_error"] for _, r in rows.iterrows()}
    logs = [math.log(wide[(0.3, s)] / wide[(0.1, s)]) for s in range(3)]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(logs), scale=stats.sem(logs))
    assert found.loc[0.3, "change"] == pytest.approx(math.exp(np.mean(logs)))
    assert (found.loc[0.3, "low"], found.loc[0.3, "high"]) == pytest.approx((math.exp(low), math.exp(high)))
    assert found.loc[0.1, "change"] == 1.0


def test_the_rates_beside_have_the_same_budget_where_there_is_one() -> None:
    table, rates = synthetic.weight_decay()[0], synthetic.peak_lr()[0]
    assert set(weight_decay.same_budget(rates, table)["run_tokens"]) == {5_120_000}
    others = rates[rates["run_tokens"] != 5_120_000]
    assert set(weight_decay.same_budget(others, table)["run_tokens"]) == {7_680_000}
