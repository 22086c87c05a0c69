"""Uniform integer grids, and round to nearest on them.

A grid belongs to one output row and one group of input columns. Codes are q in 0 … 2^b − 1 and stand for
(q − zero) · scale. The convention is GPTQ's (``quant.py`` of IST-DASLab/gptq), which AutoGPTQ and gptqmodel
keep, without their optional search for a smaller range:

- symmetric: scale = 2 max|w| / (2^b − 1), zero = 2^(b−1), so the signed codes are −2^(b−1) … 2^(b−1) − 1
  and +max|w|, which falls half a step beyond the largest code, is clipped to it;
- asymmetric: the range [min(w, 0), max(w, 0)] always holds 0, scale = range / (2^b − 1),
  zero = round(−min / scale);
- a group of zeros gets the range [−1, 1]: every code equals zero and nothing divides by 0.

Rounding is to nearest, ties to even. Two differences, both of the symmetric grid. GPTQ leaves the lower end of
the range at 0 when a group has no negative weight, which clips the upper half of that group; here the range is
always ±max|w| (only very small groups can tell). And −max|w| lies halfway between two codes by construction, so
that rounding of the scale would decide where it goes; here the scale is a few units in the last place smaller
than the formula, and it always goes to code 0 (the even one), in any precision and on any device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import scipy.linalg
import torch
from torch import Tensor

from .spec import QuantSpec


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight matrix [rows, columns] as integers, columns in their original order.

    codes: uint8 [rows, columns] · scales, zeros: float64 [rows, groups] · g_idx: int64 [columns], the group of
    each column · rotation: float64 [columns, columns] that the columns had been multiplied by before, or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    rotation: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The weight matrix that the codes stand for, [rows, columns], float64."""
        weight = (self.codes - self.zeros[:, self.g_idx]) * self.scales[:, self.g_idx]
        return weight if self.rotation is None else weight @ self.rotation.T


def rotation_of(spec: QuantSpec, columns: int, device: torch.device) -> Tensor | None:
    """The orthogonal matrix R [columns, columns], float64, that ``spec`` asks for, or None.

    With x' = Rᵀx and W' = WR a layer's output Wx = W'x' is what it was, while outlying columns are spread over all
    (QuIP#, Tseng et al. 2024, arXiv:2402.04396; QuaRot, Ashkboos et al. 2024, arXiv:2404.00456). R is a Hadamard
    matrix over √n with random signs, the same for every layer of a width. A width that is no power of 2 is cut into
    blocks of the largest that divides it.
    """
    return None if spec.rotation == "none" else _hadamard(columns).to(device)


@functools.cache
def _hadamard(columns: int) -> Tensor:
    size = columns & -columns  # the largest power of 2 that divides it
    signs = torch.randint(0, 2, (columns,), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    block = torch.from_numpy(scipy.linalg.hadamard(size)).double() / size**0.5
    return signs[:, None] * torch.block_diag(*[block] * (columns // size))


def fit_grid(weight: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each row of one group, [rows, columns] → two tensors [rows]."""
    maxq = 2**bits - 1
    low = weight.amin(dim=1).clamp(max=0)
    high = weight.amax(dim=1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = (high - low) / maxq
    empty = scale == 0  # all zeros, or so small that the scale underflows
    scale = scale.masked_fill(empty, 2 / maxq)
    if symmetric:
        scale = scale * (1 - 4 * torch.finfo(scale.dtype).eps)  # see the module's docstring: ties at −max|w|
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        zero = torch.round(low.masked_fill(empty, -1).neg() / scale)
    return scale, zero


def round_to_nearest(weight: Tensor, spec: QuantSpec) -> QuantizedWeight:
    """Each weight to the nearest point of its group's grid.

    Args:
        weight: floats [rows, columns]; the arithmetic is done in float64.
    """
    weight = weight.detach().double()
    columns = weight.shape[1]
    if (rotation := rotation_of(spec, columns, weight.device)) is not None:
        weight = weight @ rotation
    width = columns if spec.group_size == -1 else spec.group_size
    codes, scales, zeros = [], [], []
    for group in weight.split(width, dim=1):
        scale, zero = fit_grid(group, spec.bits, spec.symmetric)
        q = torch.round(group / scale[:, None]) + zero[:, None]
        codes.append(q.clamp_(0, 2**spec.bits - 1).to(torch.uint8))
        scales.append(scale)
        zeros.append(zero)
    return QuantizedWeight(
        codes=torch.cat(codes, dim=1),
        scales=torch.stack(scales, dim=1),
        zeros=torch.stack(zeros, dim=1),
        g_idx=torch.arange(columns, device=weight.device) // width,
        rotation=rotation,
    )
