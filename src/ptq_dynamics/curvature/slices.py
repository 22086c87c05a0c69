"""The loss on the plane through three points of weight space."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.errors import UserError
from .operator import Hessian

DEGENERATE = 1e-4  # a triangle's height over its longest side: below it the third direction is rounding


@dataclass(frozen=True)
class Slice:
    """The loss over a square window of a plane; both axes in units of ‖weights‖, so that circles are circles."""

    x: Tensor  # float64 [resolution]
    y: Tensor  # float64 [resolution]
    loss: Tensor  # float64 [resolution, resolution], nats per token; loss[i, j] lies at (x[j], y[i])
    points: Tensor  # float64 [3, 2], coordinates of a, b, c
    losses: tuple[float, float, float]  # at a, b, c
    basis: Tensor = field(repr=False)  # [2, size], orthonormal


def plane(
    h: Hessian, a: Tensor, b: Tensor, c: Tensor, *, resolution: int = 21, margin: float = 0.25
) -> Slice:
    """The loss around a, b and c: origin a, x axis towards b, y axis orthogonal to it, towards c.

    Args:
        h: the loss; parameters outside ``h.names`` stay as they are in it.
        a: weights as a flat vector [size], such as ``h.theta`` or ``h.flat(model)``; so are b and c.
        resolution: points on each side of the window.
        margin: what the window shows beyond the three points on each side, as a share of their extent.

    Raises:
        UserError: points of other shapes or not finite, two of them equal or all three on a line, a
            resolution below 2 or a negative margin.
    """
    if resolution < 2:
        raise UserError(f"slice: resolution must be at least 2, got {resolution}")
    if margin < 0:
        raise UserError(f"slice: margin must not be negative, got {margin}")
    for name, p in (("first", a), ("second", b), ("third", c)):
        if p.shape != (h.size,):
            raise UserError(
                f"slice: the {name} point has shape {list(p.shape)}, expected [{h.size}]; "
                "all three must be checkpoints of one architecture"
            )
        if not torch.isfinite(p).all():
            raise UserError(f"slice: the {name} point is not finite; its weights are unusable")
    start = a.to(h.device).double()
    to_b, to_c = b.to(h.device).double() - start, c.to(h.device).double() - start
    for pair, step in (
        ("first and second", to_b),
        ("first and third", to_c),
        ("second and third", to_c - to_b),
    ):
        if float(step.norm()) == 0:
            raise UserError(f"slice: the {pair} points are the same weights, so they span no plane")
    e1 = to_b / to_b.norm()
    across = to_c - (to_c @ e1) * e1
    longest = max(float(v.norm()) for v in (to_b, to_c, to_c - to_b))
    if float(across.norm()) <= DEGENERATE * longest:
        raise UserError("slice: the three points lie on a line, so they span no plane")
    e2 = across / across.norm()
    points = torch.tensor(
        [[0.0, 0.0], [float(to_b @ e1), 0.0], [float(to_c @ e1), float(to_c @ e2)]], dtype=torch.float64
    )
    low, high = points.min(0).values, points.max(0).values
    middle, half = (low + high) / 2, float((high - low).max()) * (0.5 + margin)
    steps = torch.linspace(-half, half, resolution, dtype=torch.float64)
    x, y = middle[0] + steps, middle[1] + steps
    origin = start - h.theta.double()

    def loss(at: Tensor) -> float:
        return h.loss(origin + at[0].item() * e1 + at[1].item() * e2)

    window = torch.tensor([[loss(torch.stack((i, j))) for i in x] for j in y], dtype=torch.float64)
    at_points = tuple(h.loss(p.to(h.device).double() - h.theta.double()) for p in (a, b, c))
    return Slice(x, y, window, points, at_points, torch.stack((e1, e2)).to(h.dtype))
