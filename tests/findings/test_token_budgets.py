from __future__ import annotations

import math

import pytest
import synthetic

from ptq_dynamics.findings import claims, statistics, token_budgets


def rows(**options):
    return statistics.errors(synthetic.token_budgets(spread=0.0, **options)[0], 4)


def test_statistics_recover_known_effects() -> None:
    table = rows(plateau=1.07, spike=2.5, per_tenfold=1.3)
    assert token_budgets.plateau_growth(table) == pytest.approx({0: 1.07, 1: 1.07, 2: 1.07})
    assert token_budgets.budget_growth(table) == pytest.approx({0: 1.3, 1: 1.3, 2: 1.3})
    flat = rows(plateau=1.0, spike=2.5, per_tenfold=1.0)
    assert token_budgets.cooldown_ratio(flat) == pytest.approx({0: 2.5, 1: 2.5, 2: 2.5})


def test_the_ratio_of_cooldowns_is_a_geometric_mean_over_the_late_ones() -> None:
    table = rows(plateau=1.2, spike=2.0, per_tenfold=1.0)
    # branches from 14.336M and 24.576M; the trunk's error at the former is lower by 1.2 per doubling
    late = [2.0 / 1.2 ** math.log2(b / 24_576_000) for b in (14_336_000, 24_576_000)]
    assert token_budgets.cooldown_ratio(table)[0] == pytest.approx(math.sqrt(late[0] * late[1]))


def test_verdicts(rules_root) -> None:
    table, _ = synthetic.token_budgets()
    assert [e["verdict"] for e in token_budgets.judge(table, True)] == ["supported"] * 3
    table, _ = synthetic.token_budgets(plateau=1.5, spike=1.0, per_tenfold=2.0)
    assert [e["verdict"] for e in token_budgets.judge(table, True)] == ["contradicted"] * 3
    assert {e["verdict"] for e in token_budgets.judge(table, False)} == {"inconclusive"}


def test_a_spike_without_a_fall_of_the_loss_contradicts_c2(rules_root) -> None:
    table, _ = synthetic.token_budgets(loss_change=0.01)
    c2 = token_budgets.judge(table, True)[1]
    assert c2["interval"][0] > 1.25 and c2["verdict"] == "contradicted"


def test_an_error_without_a_logarithm_decides_nothing(rules_root) -> None:
    table, _ = synthetic.token_budgets()
    synthetic.spoil(table, (table["bits"] == 4) & (table["tokens"] == 24_576_000) & (table["seed"] == 0))
    c1, c2, c3 = token_budgets.judge(table, True)
    for entry in (c1, c2):  # C3 rests on other checkpoints
        assert (entry["value"], entry["verdict"]) == (None, "inconclusive")
    assert c3["value"] == pytest.approx(1.1, abs=0.05)
    assert math.isnan(
        claims.geometric(token_budgets.plateau_growth(statistics.errors(table, 4)).values()).value
    )
