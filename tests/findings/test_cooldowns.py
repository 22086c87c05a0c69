from __future__ import annotations

import numpy as np
import pytest
import synthetic
from scipy import stats

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.findings import cooldowns


@pytest.fixture
def table(rules_root):
    synthetic.write(rules_root, cooldowns=synthetic.cooldowns())
    return cooldowns.read()[0]


def test_variants_are_named_by_what_they_change_in_a_fixed_order(table) -> None:
    assert cooldowns.variants(table) == [
        "reference: linear, 20 %",
        "shape 1−√",
        "shape cosine",
        "length 5 %",
        "length 10 %",
        "length 40 %",
        "to 10 % of peak",
        "batch 32, not 16",
    ]


def test_differences_are_paired_by_seed(table) -> None:
    rows = table[table["bits"] == 3]
    found = cooldowns.differences(rows, "delta_ce")
    assert "reference: linear, 20 %" not in found

    def gap(seed: int, **labels) -> float:
        mask = rows["seed"] == seed
        for key, value in labels.items():
            mask &= rows[key] == value
        return rows.loc[mask, "delta_ce"].item()

    for name, labels in {
        "to 10 % of peak": {"member": "final_10"},
        "shape 1−√": {"member": "shapes", "cooldown": "1-sqrt"},
    }.items():
        delta = [gap(s, **labels) - gap(s, member="linear") for s in range(3)]
        low, high = stats.t.interval(0.95, 2, loc=np.mean(delta), scale=stats.sem(delta))
        assert found[name].value == pytest.approx(np.mean(delta))
        assert (found[name].low, found[name].high) == pytest.approx((low, high))


def test_pairing_takes_out_what_the_seeds_share(table) -> None:
    ours = cooldowns.summary(table).set_index("variant")
    row = ours.loc["length 5 %"]
    # a difference of 3e-3 nats in every seed, under a spread of 1e-2 between seeds
    assert row["difference of full-precision loss"] == pytest.approx(0.003)
    assert (
        row["difference of full-precision loss, high"] - row["difference of full-precision loss, low"] < 1e-9
    )
    assert row["full-precision loss, high"] - row["full-precision loss, low"] > 0.01
    assert ours.loc["reference: linear, 20 %"].filter(like="difference").isna().all()


def test_without_the_reference_nothing_can_be_compared(rules_root) -> None:
    measured, training = synthetic.cooldowns()
    synthetic.write(rules_root, cooldowns=(measured[measured["member"] != "linear"], training))
    with pytest.raises(UserError, match="no rows of member 'linear'"):
        cooldowns.read()


def test_no_claim_is_judged(table, rules_root) -> None:
    _, _, entries = cooldowns.report(True)
    assert entries == [] and not (rules_root / "reports" / "claims").exists()
