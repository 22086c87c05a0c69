"""Second-order expansion of the loss along steps in weight space, against the true change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import UserError
from .operator import Hessian


@dataclass(frozen=True)
class Expansion:
    """L(θ + δ) − L(θ) and its terms, nats per token."""

    linear: float  # gᵀδ
    quadratic: float  # ½ δᵀHδ
    true: float  # L(θ + δ) − L(θ) on the same tokens
    norm2: float  # ‖δ‖²
    rayleigh: float  # δᵀHδ / ‖δ‖², the curvature along the step; NaN for δ = 0
    by_parameter: dict[
        str, tuple[float, float, float]
    ]  # name -> (linear, ½ δ_p·(Hδ)_p, ‖δ_p‖²); sums as above

    @property
    def predicted(self) -> float:
        """Linear and quadratic term together."""
        return self.linear + self.quadratic


def expand(h: Hessian, delta: Tensor | Mapping[str, Tensor]) -> Expansion:
    """The expansion along one step δ, flat [size] or by parameter name (all of ``h.names``)."""
    return expand_all(h, [delta])[0]


def expand_all(
    h: Hessian, deltas: Sequence[Tensor | Mapping[str, Tensor]], *, batch: int = 8
) -> list[Expansion]:
    """As ``expand``, for several steps at one θ: the gradient and θ's own loss are computed once.

    Args:
        batch: steps per pass.

    Raises:
        UserError: a step of another length or with other shapes, or not finite.
    """
    if not deltas:
        return []
    flat = [h.flat(d) if isinstance(d, Mapping) else d for d in deltas]
    for d in flat:
        if d.shape != (h.size,):
            raise UserError(
                f"expansion: a step has shape {list(d.shape)}, expected [{h.size}] (see Hessian.flat)"
            )
        if not torch.isfinite(d).all():
            raise UserError("expansion: a step is not finite; the weights at one of its ends are unusable")
    steps = torch.stack([d.to(h.device, h.dtype) for d in flat], 1)
    gradient = h.gradient().double()
    products = torch.cat([h @ part for part in steps.split(batch, 1)], 1)
    base = h.loss()
    out = []
    for step, product in zip(steps.T, products.T, strict=True):
        d, hd = step.double(), product.double()
        parts = {
            name: (float(gradient[s] @ d[s]), 0.5 * float(d[s] @ hd[s]), float(d[s] @ d[s]))
            for name, s in h.layout.items()
        }
        linear, quadratic, norm2 = (math.fsum(p[i] for p in parts.values()) for i in range(3))
        rayleigh = 2 * quadratic / norm2 if norm2 else math.nan
        out.append(Expansion(linear, quadratic, h.loss(step) - base, norm2, rayleigh, parts))
    return out
