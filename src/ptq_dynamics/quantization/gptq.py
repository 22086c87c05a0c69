"""GPTQ (Frantar et al. 2022, arXiv:2210.17323, Algorithm 1) on one weight matrix.

Columns are rounded one after the other. After each, the columns still to come move to make up for the error
that it causes in the layer's output: with H = 2/n Σ x xᵀ over the n inputs x of the layer, and U the upper
triangular factor of H⁻¹ = Uᵀ U,

    δ_i = w_i − q_i,        w_j ← w_j − δ_i U_ij / U_ii        for j > i.

Rows do not depend on each other, so layers that share their inputs may be stacked.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..core.errors import UserError
from .grid import QuantizedWeight, fit_grid, rotation_of
from .spec import QuantSpec

MAX_DAMPING = 10.0  # beyond it the Hessian is not singular but wrong, and GPTQ would be RTN anyway


class Hessian:
    """Running H = 2/n Σ x xᵀ of one layer's inputs, [width, width].

    The sum is kept unscaled, so that the order and the size of batches matter only by rounding. Only strips on
    and above the diagonal are computed (up to 1.6 times as fast at width 512 and more).
    """

    def __init__(self, width: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.sum = torch.zeros(width, width, dtype=dtype, device=device)
        self.n = 0
        step = max(128, width // 16)
        self._strips = [slice(j, j + step) for j in range(0, width, step)]

    def add(self, x: Tensor) -> None:
        """Count inputs [tokens, width] of any floating dtype."""
        x = x.detach().to(self.sum.dtype)
        with full_precision():
            for strip in self._strips:
                self.sum[strip, strip.start :].addmm_(x[:, strip].T, x[:, strip.start :])
        self.n += len(x)

    def value(self) -> Tensor:
        """H, symmetric; zeros before any input."""
        upper = self.sum.triu() * (2 / max(self.n, 1))
        return upper + upper.triu(1).T


def gptq(
    weight: Tensor, hessian: Tensor, spec: QuantSpec, *, name: str = "layer"
) -> tuple[QuantizedWeight, float]:
    """Quantize one matrix.

    As in the reference code (IST-DASLab/gptq): a column that the inputs never touch (H_ii = 0) gets H_ii = 1
    and weight 0; damping is a fraction of the mean diagonal after that; a group's grid is fitted when its
    first column is reached, to weights that already make up for all earlier columns. (The reference leaves
    out what the current block of columns still owes if a group starts inside one; here blocks also end where
    groups start, so nothing is left out.) With act order columns are taken by descending H_ii and, as in the
    reference, groups are of columns that are neighbours in *that* order; ``g_idx`` tells.

    H is factored in its own dtype, while columns are rounded in float64: noise of 1e-7 in a weight is 1e-5 of a
    step at 8 bit, enough to flip a code here and there and with it the rest of its row; in U it is harmless.

    Args:
        weight: [rows, columns], any floating dtype; not modified.
        hessian: [columns, columns], undamped, float32 or float64; not modified.
        name: the layer's, for messages.

    Returns:
        The quantized weight, and the damping used.

    Raises:
        UserError: the Hessian is not finite, or not positive definite whatever the damping.
    """
    rows, columns = weight.shape
    maxq = 2**spec.bits - 1
    width = columns if spec.group_size == -1 else spec.group_size
    W = weight.detach().to(torch.float64, copy=True).T.contiguous()  # [columns, rows]
    H = hessian.clone()
    if not torch.isfinite(H).all():
        raise UserError(f"{name}: calibration gives inputs that are not finite; check the checkpoint for NaN")
    if (rotation := rotation_of(spec, columns, W.device)) is not None:
        W, H = rotation.T @ W, (rotation.T @ H.double() @ rotation).to(H.dtype)

    diagonal = H.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    W[dead] = 0
    order = torch.arange(columns, device=W.device)
    if spec.act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
        W, H = W[order], H[order][:, order]

    with full_precision():
        U, damping = inverse_factor(H, spec.damping, name)
        U = (U / U.diagonal()[:, None]).to(W.dtype)  # U_ij / U_ii
        codes = torch.empty_like(W)  # signed: q − zero
        scales, zeros = [], []
        for i1, i2 in _blocks(columns, spec.block_size, width):
            if i1 % width == 0:
                scale, zero = fit_grid(W[i1 : i1 + width].T, spec.bits, spec.symmetric)
                scales.append(scale)
                zeros.append(zero)
                low, high = -zero, maxq - zero
            block, q = W[i1:i2], codes[i1:i2]  # views: the loop works in place
            for i, (w, qi) in enumerate(zip(block.unbind(0), q.unbind(0), strict=True)):
                torch.div(w, scale, out=qi).round_().clamp_(low, high)
                delta = torch.addcmul(w, qi, scale, value=-1)
                block[i + 1 :].addr_(U[i1 + i, i1 + i + 1 : i2], delta, alpha=-1)
            if i2 < columns:
                W[i2:].addmm_(U[i1:i2, i2:].T, block.addcmul(q, scale[None], value=-1), alpha=-1)

    scales, zeros = torch.stack(scales, dim=1), torch.stack(zeros, dim=1)
    g_idx = torch.empty_like(order)
    g_idx[order] = torch.arange(columns, device=W.device) // width
    original = torch.empty(rows, columns, dtype=torch.uint8, device=W.device)
    original[:, order] = codes.T.add(zeros.repeat_interleave(width, dim=1)[:, :columns]).to(torch.uint8)
    return QuantizedWeight(
        codes=original, scales=scales, zeros=zeros, g_idx=g_idx, rotation=rotation
    ), damping


def inverse_factor(H: Tensor, damping: float, name: str) -> tuple[Tensor, float]:
    """U, upper triangular, with Uᵀ U = (H + damping · mean(diag H) · I)⁻¹, and the damping used.

    Where that is not positive definite (in floating point), damping grows tenfold with a warning, up to
    ``MAX_DAMPING``. The reference inverts H and factors the inverse; the Cholesky factor of H with rows and
    columns reversed gives the same U by one triangular solve, faster and with less rounding.

    Raises:
        UserError: nothing up to the bound helps.
    """
    mean = H.diagonal().mean()
    eye = torch.eye(len(H), dtype=H.dtype, device=H.device)
    while True:
        L, info = torch.linalg.cholesky_ex(torch.add(H, eye * mean, alpha=damping).flip(0, 1))
        if info.item() == 0:
            # a row-major ``out`` takes LAPACK's faster path (half the time on CPU)
            U = torch.linalg.solve_triangular(L, eye, upper=False, out=torch.empty_like(eye)).flip(0, 1)
            if torch.isfinite(U).all():
                return U, damping
        if damping * 10 > MAX_DAMPING:
            raise UserError(
                f"{name}: the Hessian is not positive definite even with damping {damping:g}; "
                "use more or other calibration text, or precision float64"
            )
        warnings.warn(
            f"{name}: the Hessian is not positive definite with damping {damping:g}; trying {damping * 10:g}",
            stacklevel=3,
        )
        damping *= 10


def reconstruction_error(weight: Tensor, quantized: Tensor, hessian: Tensor) -> Tensor:
    """tr(ΔW H ΔWᵀ) / tr(W H Wᵀ): the squared error of the layer's output over the output's square.

    Args:
        weight, quantized: [rows, columns]. hessian: [columns, columns], undamped, in the dtype to compute in.

    Returns:
        0-dimensional tensor; 0 where the layer's output is 0 before and after.
    """
    w = weight.to(hessian.dtype)
    delta = quantized.to(hessian.dtype) - w
    with full_precision():
        error, size = (delta @ hessian * delta).sum(), (w @ hessian * w).sum()
    return torch.where(error == 0, error, error / size)


def _blocks(columns: int, block_size: int, group: int) -> Iterator[tuple[int, int]]:
    """Ranges of columns that start at every multiple of the block size and of the group size."""
    starts = sorted({*range(0, columns, block_size), *range(0, columns, group)})
    yield from zip(starts, [*starts[1:], columns], strict=True)


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 or bf16 in float32 matrix products, and no autocast, whatever the caller has set for training."""
    backends = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
    before = [b.fp32_precision for b in backends]
    for b in backends:
        b.fp32_precision = "ieee"
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for b, value in zip(backends, before, strict=True):
            b.fp32_precision = value
