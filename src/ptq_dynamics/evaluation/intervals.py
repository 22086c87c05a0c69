"""95 % intervals: paired bootstrap over sequences, Student's t over seeds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def paired_bootstrap(
    base: np.ndarray,
    quantized: np.ndarray,
    statistic: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Percentile bootstrap (Efron 1979) of a statistic of two means, sequences drawn in pairs.

    Args:
        base, quantized: losses of the same sequences ``[n]``.
        statistic: of (mean quantized, mean base), vectorised, such as ``lambda q, b: q / b - 1``.
    """
    if base.shape != quantized.shape or base.ndim != 1:
        raise ValueError(f"losses must pair up: {base.shape} against {quantized.shape}")
    n = len(base)
    counts = _draws(n, resamples, seed)
    draws = statistic(counts @ quantized / n, counts @ base / n)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = statistic(np.asarray(quantized.mean()), np.asarray(base.mean()))
    return Estimate(float(value), float(low), float(high))


@functools.lru_cache(maxsize=4)
def _draws(n: int, resamples: int, seed: int) -> np.ndarray:
    """How often each of ``n`` sequences is drawn, float64 ``[resamples, n]``: it decides both means."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1.0 / n), size=resamples).astype(np.float64)


def over_seeds(values: np.ndarray) -> Estimate:
    """Mean over independent runs with its t interval; a single run has no interval (NaN bounds)."""
    values = np.asarray(values, dtype=np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, float("nan"), float("nan"))
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return Estimate(mean, mean - float(half), mean + float(half))
