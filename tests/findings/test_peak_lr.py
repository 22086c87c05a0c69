from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy import stats

from ptq_dynamics.findings import peak_lr, statistics

RATES = (0.002, 0.01, 0.03, 0.06)


def ends(table: pd.DataFrame, bits: int) -> pd.DataFrame:
    last = table[(table["tokens"] == 7_680_000) & (table["run_tokens"] == 7_680_000)]
    return last[(last["method"] == "gptq") & (last["bits"] == bits)]


def test_c4_recovers_a_known_growth() -> None:
    table, _ = synthetic.peak_lr(per_tenfold=0.6, spread=0.0)
    assert peak_lr.lr_growth(statistics.errors(table, 4)) == pytest.approx({0: 0.6, 1: 0.6, 2: 0.6})


@pytest.mark.parametrize(
    ("growth", "spread", "verdict"),
    [(0.6, 0.02, "supported"), (1.5, 0.02, "contradicted"), (1.0, 0.1, "inconclusive")],
)
def test_c4_verdict_and_interval(rules_root, growth, spread, verdict) -> None:
    table, _ = synthetic.peak_lr(per_tenfold=growth, spread=spread)
    entry = peak_lr.judge(table, True)[0]
    logs = [
        stats.linregress(np.log10(g["peak_lr"]), np.log(g["relative_error"])).slope
        for _, g in ends(table, 4).groupby("seed")
    ]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(logs), scale=stats.sem(logs))
    assert entry["value"] == pytest.approx(math.exp(np.mean(logs)), rel=1e-5)
    assert entry["interval"] == pytest.approx([math.exp(low), math.exp(high)], rel=1e-5)
    assert (entry["seeds"], entry["verdict"]) == (3, verdict)


def test_c4_tells_which_rates_have_similar_losses(rules_root) -> None:
    losses = {0.002: 3.1, 0.01: 3.0, 0.03: 3.04, 0.06: 3.2}
    table, _ = synthetic.peak_lr(per_tenfold=0.7, spread=0.0, loss=lambda at: losses[at["peak_lr"]])
    details = peak_lr.judge(table, True)[0]["details"]
    assert details["those LRs"] == [0.01, 0.03]
    assert details["LRs within 0.05 nats of the best loss"]["value"] == pytest.approx(0.7, rel=1e-5)
    assert details["seeds in which the error falls with every step up in LR"] == 3


def by_rate(losses: dict[float, float]) -> pd.DataFrame:
    return synthetic.peak_lr(spread=0.01, loss=lambda at: losses[at["peak_lr"]] + 0.01 * at["seed"])[0]


def test_c5_compares_the_two_rates_with_the_closest_losses_paired_by_seed(rules_root) -> None:
    table = by_rate({0.002: 3.1, 0.01: 3.01, 0.03: 3.0, 0.06: 3.2})
    entry = peak_lr.judge(table, True)[1]
    wide = {key: g["ce"].item() for key, g in ends(table, 3).groupby(["peak_lr", "seed"])}
    differences = [wide[(0.03, s)] - wide[(0.01, s)] for s in range(3)]
    assert entry["details"]["LRs compared"] == [0.01, 0.03]
    assert entry["value"] == pytest.approx(np.mean(differences), rel=1e-5)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(differences), scale=stats.sem(differences))
    assert entry["interval"] == pytest.approx([low, high], rel=1e-5)
    assert entry["verdict"] == "supported"


def test_c5_is_contradicted_where_the_larger_rate_costs_full_precision(rules_root) -> None:
    # the 3-bit loss is better all the same
    table = by_rate({0.002: 3.3, 0.01: 3.0, 0.03: 3.011, 0.06: 3.5})
    entry = peak_lr.judge(table, True)[1]
    assert entry["interval"][1] < 0 and entry["verdict"] == "contradicted"


def test_c5_is_not_judged_where_no_losses_are_similar(rules_root) -> None:
    table = by_rate({0.002: 3.3, 0.01: 3.0, 0.03: 3.06, 0.06: 3.5})
    entry = peak_lr.judge(table, True)[1]
    assert entry["verdict"] == "inconclusive" and "more than 0.05 nats" in entry["details"]["not judged"]
    assert entry["value"] is not None


@pytest.mark.parametrize("losses", [*itertools.permutations([3.0, 3.03, 3.031, 3.2])])
def test_the_closest_pair_whatever_the_order(losses) -> None:
    table = synthetic.peak_lr(
        seeds=[0], tokens=[2_560_000], loss=lambda at: losses[RATES.index(at["peak_lr"])]
    )[0]
    expected = tuple(sorted(RATES[losses.index(v)] for v in (3.03, 3.031)))
    assert peak_lr.closest_pair(statistics.errors(table, 3)) == expected


def test_one_rate_alone_is_not_judged(rules_root) -> None:
    table, _ = synthetic.peak_lr(rates=[0.01])
    c4, c5 = peak_lr.judge(table, True)
    assert (c4["value"], c4["verdict"], c5["value"], c5["verdict"]) == (
        None,
        "inconclusive",
        None,
        "inconclusive",
    )


def test_the_two_way_table_and_the_shares_tell_rate_from_tokens() -> None:
    table, _ = synthetic.peak_lr(per_tenfold=0.5, per_doubling=1.0, spread=0.001)
    share = peak_lr.variance(table).set_index(["bits", "source"])
    assert (
        share.loc[(4, "peak LR"), "share"] > 0.99 and share.loc[(3, "peak LR against tokens"), "low"] > 0.99
    )
    table, _ = synthetic.peak_lr(per_tenfold=1.0, per_doubling=1.5, spread=0.001)
    share = peak_lr.variance(table).set_index(["bits", "source"])
    assert (
        share.loc[(4, "tokens"), "share"] > 0.99 and share.loc[(4, "peak LR against tokens"), "high"] < 0.01
    )
    cells = peak_lr.two_way(table).set_index(["bits", "peak LR"])
    rows = table.query("bits == 3 and peak_lr == 0.03 and tokens == run_tokens and run_tokens == 5_120_000")
    assert cells.loc[(3, 0.03), "5.12M tokens"] == pytest.approx(100 * rows["relative_error"].mean())


def test_the_paper_stands_beside_only_where_ranks_can_be_matched(rules_root) -> None:
    beside = "paper, 4-bit ΔCE [e]"
    assert peak_lr.summary(synthetic.peak_lr()[0])[beside].tolist() == [0.063, 0.05, 0.0355, 0.03]
    assert peak_lr.summary(synthetic.peak_lr(rates=[0.01, 0.03])[0])[beside].isna().all()
