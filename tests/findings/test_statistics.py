from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy import stats

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.findings import statistics


def layout(effect_a, effect_b, both, noise, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    a, b = len(effect_a), len(effect_b)
    cells = np.asarray(effect_a)[:, None] + np.asarray(effect_b)[None, :] + both * rng.normal(size=(a, b))
    return cells[:, :, None] + noise * rng.normal(size=(a, b, n))


def frame(y: np.ndarray) -> pd.DataFrame:
    a, b, n = y.shape
    at = np.indices(y.shape).reshape(3, -1)
    return pd.DataFrame({"peak_lr": 0.01 * (1 + at[0]), "run_tokens": 1000 * (1 + at[1]), "seed": at[2], "relative_error": np.exp(y.ravel())})  # fmt: skip


def residual_of_regression(y: np.ndarray, *factors: str) -> float:
    """Residual sum of squares of a least-squares fit on dummy variables."""
    i, j, _ = np.indices(y.shape).reshape(3, -1)
    dummies = {
        "A": np.eye(y.shape[0])[i],
        "B": np.eye(y.shape[1])[j],
        "AB": np.eye(y.shape[0] * y.shape[1])[i * y.shape[1] + j],
    }
    design = np.column_stack([np.ones(y.size), *(dummies[f] for f in factors)])
    fit = design @ np.linalg.lstsq(design, y.ravel(), rcond=None)[0]
    return float(((y.ravel() - fit) ** 2).sum())


def test_slope_is_least_squares_and_growth_its_exponential() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=7), rng.uniform(0.5, 2, size=7)
    assert statistics.slope(x, y) == pytest.approx(stats.linregress(x, y).slope, rel=1e-12)
    assert statistics.growth(x, 3 * 1.7**x) == pytest.approx(1.7, rel=1e-12)
    assert statistics.exponent(np.exp(x), 5 * np.exp(x) ** -0.3) == pytest.approx(-0.3, rel=1e-12)


@pytest.mark.parametrize(
    ("x", "y"),
    [([], []), ([1.0], [2.0]), ([1.0, 1.0], [2.0, 3.0]), ([1.0, 2.0], [2.0, 0.0]), ([1.0, 2.0], [2.0, -1.0]), ([1, 2], [1, math.nan])],
)  # fmt: skip
def test_growth_is_not_a_number_where_there_is_no_slope(x, y) -> None:
    assert math.isnan(statistics.growth(x, y))


def test_sums_of_squares_are_those_of_nested_regressions() -> None:
    y = layout([0.0, 0.5, 0.9, 1.0], [0.0, 0.2, 0.1], 0.1, 0.2, n=3)
    a, b, both, within = statistics.sums_of_squares(y)
    # type II: what a factor explains beyond the other main effect
    assert a == pytest.approx(residual_of_regression(y, "B") - residual_of_regression(y, "A", "B"), rel=1e-9)
    assert b == pytest.approx(residual_of_regression(y, "A") - residual_of_regression(y, "A", "B"), rel=1e-9)
    assert both == pytest.approx(
        residual_of_regression(y, "A", "B") - residual_of_regression(y, "AB"), rel=1e-9
    )
    assert within == pytest.approx(residual_of_regression(y, "AB"), rel=1e-9)
    assert a + b + both + within == pytest.approx(y.size * y.var(), rel=1e-12)


def test_one_factor_alone_agrees_with_the_one_way_test() -> None:
    y = layout([0.0, 0.5, 0.9], [0.0], 0.0, 0.3, n=5)
    a, b, both, within = statistics.sums_of_squares(y)
    assert b == pytest.approx(0) and both == pytest.approx(0, abs=1e-20)
    expected = stats.f_oneway(*y[:, 0, :]).statistic
    assert (a / 2) / (within / (3 * 4)) == pytest.approx(expected, rel=1e-12)


def test_shares_of_an_additive_table_are_the_closed_form() -> None:
    # three levels 0, 1, 2 (variance 2/3) and two levels 0, 1 (variance 1/4), no noise
    y = layout([0.0, 1.0, 2.0], [0.0, 1.0], 0.0, 0.0, n=3)
    found = statistics.variance_shares(frame(y), "peak_lr", "run_tokens")
    total = 2 / 3 + 1 / 4
    expected = [2 / 3 / total, 1 / 4 / total, 0, 0, 2 / 3 / total]
    assert found["share"].tolist() == pytest.approx(expected, abs=1e-12)
    assert found["low"].tolist() == pytest.approx(expected, abs=1e-12)  # all seeds agree
    assert found["high"].tolist() == pytest.approx(expected, abs=1e-12)
    assert found["degrees of freedom"].tolist()[:4] == [2, 1, 2, 12]


def test_intervals_are_the_jackknife_over_seeds() -> None:
    y = layout([0.0, 0.3], [0.0, 0.2, 0.3], 0.05, 0.1, n=4, seed=2)
    found = statistics.variance_shares(frame(y), "peak_lr", "run_tokens").set_index("source")

    def share(z: np.ndarray) -> float:
        explained = residual_of_regression(z, "B") - residual_of_regression(z, "A", "B")
        return explained / (z.size * z.var())

    parts = [share(np.delete(y, i, axis=2)) for i in range(4)]
    half = stats.t.ppf(0.975, 3) * math.sqrt(3 / 4 * sum((p - np.mean(parts)) ** 2 for p in parts))
    row = found.loc["peak_lr"]
    assert row["share"] == pytest.approx(share(y), rel=1e-9)
    assert row["low"] == pytest.approx(max(0, share(y) - half), rel=1e-9)
    assert row["high"] == pytest.approx(min(1, share(y) + half), rel=1e-9)


def test_one_seed_has_shares_of_the_main_effects_and_no_interval() -> None:
    found = statistics.variance_shares(frame(layout([0, 1], [0, 2], 0.1, 0, n=1)), "peak_lr", "run_tokens")
    assert found["share"].notna().tolist() == [True, True, False, False, True]
    assert found[["low", "high"]].isna().all(axis=None)


def test_an_error_without_a_logarithm_leaves_no_share() -> None:
    rows = frame(layout([0, 1], [0, 2], 0.1, 0.1, n=3))
    rows.loc[4, "relative_error"] = -1e-4
    assert statistics.variance_shares(rows, "peak_lr", "run_tokens")["share"].isna().all()


def test_an_incomplete_table_is_told() -> None:
    rows = frame(layout([0, 1], [0, 2], 0.1, 0.1, n=3))
    with pytest.raises(UserError, match="not every peak_lr was run with every run_tokens and seed"):
        statistics.variance_shares(rows.drop(index=3), "peak_lr", "run_tokens")


def test_similar_keeps_what_is_within_the_tolerance_of_the_best() -> None:
    rows = pd.DataFrame({"weight_decay": [0.1, 0.1, 0.2, 0.2, 0.3], "ce_fp": [2.9, 3.1, 3.0, 3.098, 3.051]})
    assert statistics.similar(rows, "weight_decay") == [0.1, 0.2]  # means 3.0, 3.049, 3.051


def test_levels_are_means_over_seeds_with_t_intervals() -> None:
    runs = [synthetic.run(f"lr{lr}", s, 4096, peak_lr=lr) for lr in (0.01, 0.03) for s in range(3)]
    table = synthetic.measured(
        runs, lambda r: 3 + r["peak_lr"] + 0.1 * r["seed"], lambda r, b: 0.01 * (r["seed"] + 1) / b
    )
    found = statistics.levels(statistics.ends(table), "peak_lr").set_index("peak_lr").loc[0.03]
    half = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert found["seeds"] == 3
    assert found["full-precision loss"] == pytest.approx(3.13)
    assert found["full-precision loss, high"] == pytest.approx(3.13 + half)
    percent = stats.t.interval(0.95, 2, loc=0.5, scale=stats.sem([0.25, 0.5, 0.75]))
    assert found["4-bit error (%)"] == pytest.approx(0.5)
    assert (found["4-bit error (%), low"], found["4-bit error (%), high"]) == pytest.approx(percent)
    gaps = [(3.03 + 0.1 * s) * 0.01 * (s + 1) / 3 for s in range(3)]
    assert found["3-bit ΔCE"] == pytest.approx(np.mean(gaps))
    assert found["3-bit loss"] == pytest.approx(np.mean([3.03 + 0.1 * s + g for s, g in enumerate(gaps)]))


def test_a_missing_table_and_a_missing_member_are_told_with_the_fix(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    with pytest.raises(
        UserError, match=r"measurements-peak_lr\.csv: no such file; run `dvc repro measure@peak_lr`"
    ):
        statistics.read("peak_lr")
    with pytest.raises(UserError, match=r"no rows of member 'wsd'; has: other; .*studies\.peak_lr\.members"):
        statistics.of_member(pd.DataFrame({"member": ["other"]}), "wsd", "peak_lr")


def test_metrics_hold_no_nan() -> None:
    assert statistics.flat({"a": 1.23456789, "b": math.nan, "c": None, "d": math.inf}) == {"a": 1.23457}
