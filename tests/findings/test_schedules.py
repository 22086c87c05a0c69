from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy import stats

from ptq_dynamics.evaluation.intervals import Estimate
from ptq_dynamics.findings import schedules, statistics


def both(**options) -> pd.DataFrame:
    parts = [
        synthetic.schedules(parameters=p, **options)[0].assign(study=s)
        for p, s in ((91_000, "schedules_small"), (231_000, "schedules"))
    ]
    return pd.concat(parts, ignore_index=True)


def last(table: pd.DataFrame, bits: int) -> pd.DataFrame:
    return table[(table["bits"] == bits) & (table["tokens"] == table["run_tokens"])]


def test_exponents_recover_a_known_power_law_whatever_the_size() -> None:
    found = schedules.exponents(statistics.errors(both(spread=0.0), 4))
    assert found.loc[91_000].to_numpy() == pytest.approx(np.tile([0.6, 0.2], (3, 1)))
    assert found.loc[231_000].to_numpy() == pytest.approx(np.tile([0.6, 0.2], (3, 1)))


def test_c6_is_the_paired_difference_over_sizes_and_seeds(rules_root) -> None:
    table = both(spread=0.05)
    entry = schedules.judge(table, True)[0]
    per_seed = []
    for seed in range(3):
        gaps = []
        for size in (91_000, 231_000):
            fit = {}
            for member in ("cosine", "wsd"):
                rows = last(table, 4).query(
                    f"seed == {seed} and parameters == {size} and member == '{member}'"
                )
                fit[member] = stats.linregress(np.log(rows["tokens"] / size), np.log(rows["delta_ce"])).slope
            gaps.append(fit["cosine"] - fit["wsd"])
        per_seed.append(np.mean(gaps))
    low, high = stats.t.interval(0.95, 2, loc=np.mean(per_seed), scale=stats.sem(per_seed))
    assert entry["value"] == pytest.approx(np.mean(per_seed), rel=1e-5)
    assert entry["interval"] == pytest.approx([low, high], rel=1e-5)
    assert (entry["seeds"], entry["verdict"]) == (3, "supported")


@pytest.mark.parametrize(
    ("cosine", "wsd", "spread", "verdict"),
    [(0.1, 0.5, 0.03, "contradicted"), (0.3, 0.3, 0.1, "inconclusive")],
)
def test_c6_can_fail(rules_root, cosine, wsd, spread, verdict) -> None:
    table = both(exponents={"cosine": cosine, "wsd": wsd}, spread=spread)
    assert schedules.judge(table, True)[0]["verdict"] == verdict


def test_a_gap_without_a_logarithm_is_counted_and_leaves_c6_undecided(rules_root) -> None:
    table = both()
    at = (
        (table["bits"] == 4)
        & (table["run_tokens"] == 1_280_000)
        & (table["seed"] == 1)
        & (table["member"] == "wsd")
    )
    synthetic.spoil(table, at & (table["parameters"] == 91_000))
    entry = schedules.judge(table, True)[0]
    assert (entry["value"], entry["verdict"]) == (None, "inconclusive")
    assert entry["details"]["gaps of 0 or less, which have no logarithm"] == 1
    assert entry["details"]["seeds without an exponent"] == 1
    assert entry["details"]["per seed"]["1"] is None
    others = [entry["details"]["per seed"][k] for k in ("0", "2")]
    assert entry["details"]["the other seeds alone, not judged"]["value"] == pytest.approx(
        np.mean(others), rel=1e-4
    )
    ours = schedules.summary(table).set_index(["parameters", "bits", "exponent"])
    assert ours["gaps ≤ 0"].to_dict() == {
        key: int(key in [(91_000, 4, "WSD"), (91_000, 4, "cosine − WSD")]) for key in ours.index
    }
    assert ours.loc[(91_000, 4, "WSD"), "reading"] == "no interval"
    assert ours.loc[(91_000, 4, "cosine"), "reading"] == "grows"
    assert "Gaps of 0 or less, not drawn: 1 at 4 bit" in schedules.caption(table)


@pytest.mark.parametrize(
    ("low", "high", "difference", "text"),
    [
        (0.1, 0.2, False, "grows"),
        (-0.2, -0.1, False, "falls"),
        (-0.1, 0.1, False, "not distinguishable from 0"),
        (0.1, 0.2, True, "smaller under WSD"),
        (-0.2, -0.1, True, "larger under WSD"),
        (0.0, 0.2, True, "not distinguishable"),
        (math.nan, math.nan, True, "no interval"),
    ],
)
def test_readings_follow_the_interval(low, high, difference, text) -> None:
    assert schedules.reading(Estimate((low + high) / 2, low, high), difference) == text


def test_c7_divides_the_end_by_the_checkpoint_nearest_to_half(rules_root) -> None:
    table = both(spread=0.05)  # with a checkpoint at half
    entry = schedules.judge(table, True)[1]
    rows = table.query(
        "bits == 3 and parameters == 231_000 and member == 'cosine' and run_tokens == 10_240_000"
    )
    logs = [
        math.log(g.loc[g["tokens"] == 10_240_000, "relative_error"].item() / g.loc[g["tokens"] == 5_120_000, "relative_error"].item())
        for _, g in rows.groupby("seed")
    ]  # fmt: skip
    low, high = stats.t.interval(0.95, 2, loc=np.mean(logs), scale=stats.sem(logs))
    assert entry["value"] == pytest.approx(math.exp(np.mean(logs)), rel=1e-5)
    assert entry["interval"] == pytest.approx([math.exp(low), math.exp(high)], rel=1e-5)
    assert entry["verdict"] == "supported"


def test_of_two_checkpoints_as_near_to_half_the_later_counts(rules_root) -> None:
    table = both(half=False)  # 4,096,000 and 6,144,000 are as far from 5,120,000
    details = schedules.judge(table, True)[1]["details"]
    assert details["tokens at the checkpoint nearest to half"] == [6_144_000]


@pytest.mark.parametrize(
    ("upturn", "spread", "verdict"), [(0.0, 0.01, "contradicted"), (0.2, 0.05, "inconclusive")]
)
def test_c7_can_fail(rules_root, upturn, spread, verdict) -> None:
    table = both(upturn=upturn, spread=spread)
    assert schedules.judge(table, True)[1]["verdict"] == verdict


def test_an_error_below_zero_at_half_leaves_c7_undecided(rules_root) -> None:
    table = both()
    synthetic.spoil(table, (table["bits"] == 3) & (table["tokens"] == 5_120_000) & (table["seed"] == 0))
    entry = schedules.judge(table, True)[1]
    assert (entry["value"], entry["verdict"], entry["details"]["per seed"]["0"]) == (
        None,
        "inconclusive",
        None,
    )
