from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from ptq_dynamics.evaluation.intervals import over_seeds, paired_bootstrap


def relative(q, b):
    return q / b - 1.0


def gap(q, b):
    return q - b


def pairs(n, seed, shift=0.05, spread=0.02):
    """Losses of sequences that differ much, and quantized ones that differ from them by a little."""
    rng = np.random.default_rng(seed)
    base = rng.gamma(30, 0.1, n)
    return base, base + shift + spread * rng.standard_normal(n)


@pytest.mark.parametrize("statistic", [relative, gap])
def test_against_scipys_paired_bootstrap(statistic):
    base, quantized = pairs(200, seed=0)
    ours = paired_bootstrap(base, quantized, statistic, resamples=10_000)
    theirs = stats.bootstrap(
        (quantized, base), lambda q, b, axis: statistic(q.mean(axis), b.mean(axis)), paired=True, vectorized=True,
        n_resamples=10_000, method="percentile", confidence_level=0.95, rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    width = theirs.high - theirs.low
    assert ours.value == pytest.approx(statistic(quantized.mean(), base.mean()), rel=1e-12)
    assert abs(ours.low - theirs.low) < 0.04 * width and abs(ours.high - theirs.high) < 0.04 * width


def test_the_interval_covers_the_truth_as_often_as_it_says():
    truth = 0.05  # of the gap
    hits = 0
    for seed in range(400):
        e = paired_bootstrap(*pairs(100, seed), gap, resamples=400)
        hits += e.low <= truth <= e.high
    assert stats.binom.ppf(0.001, 400, 0.94) <= hits <= stats.binom.ppf(0.999, 400, 0.96)


def test_pairing_is_what_makes_it_narrow():
    base, quantized = pairs(300, seed=3)
    paired = paired_bootstrap(base, quantized, gap)
    apart = paired_bootstrap(np.sort(base), np.sort(quantized)[::-1].copy(), gap)
    assert (paired.high - paired.low) < 0.1 * (apart.high - apart.low)
    half = 1.96 * np.std(quantized - base) / math.sqrt(300)
    assert paired.high - paired.low == pytest.approx(2 * half, rel=0.15)


def test_equal_losses_have_no_error_and_the_same_seed_the_same_interval():
    base, quantized = pairs(50, seed=4)
    same = paired_bootstrap(base, base, relative)
    assert (same.value, same.low, same.high) == pytest.approx((0, 0, 0), abs=1e-12)
    assert paired_bootstrap(base, quantized, gap, seed=7) == paired_bootstrap(base, quantized, gap, seed=7)
    assert paired_bootstrap(base, quantized, gap, seed=7) != paired_bootstrap(base, quantized, gap, seed=8)


@pytest.mark.parametrize("shapes", [((3,), (4,)), ((2, 2), (2, 2))])
def test_losses_that_do_not_pair_up(shapes):
    with pytest.raises(ValueError, match="losses must pair up"):
        paired_bootstrap(np.ones(shapes[0]), np.ones(shapes[1]), gap)


def test_seeds_against_scipys_t_interval():
    values = [0.011, 0.013, 0.0105]
    e = over_seeds(values)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert (e.value, e.low, e.high) == pytest.approx((np.mean(values), low, high), rel=1e-12)


def test_a_single_seed_has_no_interval():
    e = over_seeds([0.5])
    assert e.value == 0.5 and math.isnan(e.low) and math.isnan(e.high)
