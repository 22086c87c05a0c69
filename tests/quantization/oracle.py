"""GPTQ and its grid once more, for tests: float64 numpy, one column at a time, nothing clever.

Written from the papers (OBQ: Frantar and Alistarh 2022; GPTQ: Frantar et al. 2022), with the explicit inverse
Hessian of the columns that are left, re-derived by elimination after each column. No Cholesky, no blocks.
"""

from __future__ import annotations

import numpy as np


def grid(w: np.ndarray, bits: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero of each row of ``w``."""
    top = 2**bits - 1
    scales, zeros = np.empty(len(w)), np.empty(len(w))
    for r, row in enumerate(w):
        if not row.any():
            low, high = -1.0, 1.0
        elif symmetric:
            low, high = -abs(row).max(), abs(row).max()
        else:
            low, high = min(row.min(), 0.0), max(row.max(), 0.0)
        scales[r] = (high - low) / top
        zeros[r] = 2 ** (bits - 1) if symmetric else np.rint(-low / scales[r])
    return scales, zeros


def nearest(x: np.ndarray) -> np.ndarray:
    """Nearest integers, ties to even, where noise in the last digits does not unmake a tie.

    The symmetric grid has ties by construction: −max|w| lies at −(2^b − 1)/2 steps.
    """
    return np.rint(np.round(x, 9))


def rtn(w: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and dequantized weights by round to nearest."""
    w = w.astype(np.float64)
    group = w.shape[1] if group == -1 else group
    codes, weights = np.empty_like(w), np.empty_like(w)
    for a in range(0, w.shape[1], group):
        cols = slice(a, a + group)
        scale, zero = grid(w[:, cols], bits, symmetric)
        codes[:, cols] = np.clip(nearest(w[:, cols] / scale[:, None]) + zero[:, None], 0, 2**bits - 1)
        weights[:, cols] = scale[:, None] * (codes[:, cols] - zero[:, None])
    return codes, weights


def gptq(
    w: np.ndarray, h: np.ndarray, bits: int, group: int, symmetric: bool, act_order: bool, damping: float
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and dequantized weights, columns in their original order."""
    w, h = w.astype(np.float64).copy(), h.astype(np.float64).copy()
    n = w.shape[1]
    group = n if group == -1 else group
    for j in range(n):
        if h[j, j] == 0:
            h[j, j], w[:, j] = 1, 0
    h += damping * np.trace(h) / n * np.eye(n)
    order = np.argsort(-np.diag(h), kind="stable") if act_order else np.arange(n)
    w, h = w[:, order], h[np.ix_(order, order)]
    inverse = np.linalg.inv(h)
    codes, weights = np.empty_like(w), np.empty_like(w)
    for j in range(n):
        if j % group == 0:
            scale, zero = grid(w[:, j : j + group], bits, symmetric)
        codes[:, j] = np.clip(nearest(w[:, j] / scale) + zero, 0, 2**bits - 1)
        weights[:, j] = scale * (codes[:, j] - zero)
        w -= np.outer((w[:, j] - weights[:, j]) / inverse[j, j], inverse[j])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, :] = inverse[:, j] = 0  # column j is out, whatever rounding left there
    back = np.argsort(order)
    return codes[:, back], weights[:, back]


def output_error(w: np.ndarray, q: np.ndarray, x: np.ndarray) -> float:
    """Squared error of the outputs for inputs ``x`` [tokens, columns], over the outputs' square."""
    w, q, x = (a.astype(np.float64) for a in (w, q, x))
    return float((((q - w) @ x.T) ** 2).sum() / ((w @ x.T) ** 2).sum())
