"""Extreme eigenvalues and spectral density of a symmetric operator, by Lanczos with full re-orthogonalisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..core.errors import UserError
from .operator import SupportsMatmul, like

CHECK_EVERY = 4  # Lanczos steps between two looks at the residuals, at least
PER_PASS = 8  # vectors to a product


@dataclass(frozen=True)
class Eigenvalue:
    """A signed eigenvalue of H, nats per (weight unit)²."""

    value: float
    residual: float  # ‖H y − value y‖ for the unit vector y
    converged: bool  # residual <= tolerance · largest |eigenvalue| seen
    steps: int  # products spent
    vector: Tensor = field(repr=False)  # y, [size]


@dataclass(frozen=True)
class Density:
    """Spectral density: the share of eigenvalues per unit of the axis, smoothed by a Gaussian."""

    grid: Tensor  # float64 [g]
    density: Tensor  # float64 [g]; integrates to one over the real line
    nodes: Tensor  # float64 [probes, steps], the quadrature's eigenvalues
    weights: Tensor  # float64 [probes, steps]; each row sums to one


def top_eigenvalues(
    h: SupportsMatmul,
    k: int,
    *,
    tolerance: float = 1e-3,
    max_steps: int = 80,
    seed: int = 0,
    end: Literal["largest", "smallest"] = "largest",
) -> list[Eigenvalue]:
    """The k eigenvalues at one end of the spectrum, by signed value, the outermost first.

    Lanczos (1950) from one random vector. A repeated eigenvalue is found once, until the vectors reached from the
    first are exhausted and a new one is drawn. It stops when all k have converged.

    Args:
        tolerance: of the residual, relative to the largest absolute eigenvalue seen.
        max_steps: products at most; what has not converged by then says so.
        end: ``largest``, descending, or ``smallest``, ascending.

    Raises:
        UserError: k below 1, more than there are steps or dimensions, or an unknown end.
    """
    if end not in ("largest", "smallest"):
        raise UserError(f"eigenvalues: end '{end}' is unknown; use largest or smallest")
    steps = min(max_steps, h.size)
    if not 1 <= k <= steps:
        raise UserError(
            f"eigenvalues: k must be from 1 to {steps} (max_steps, or the operator's size), got {k}"
        )
    if not tolerance > 0:
        raise UserError(f"eigenvalues: tolerance must be above 0, got {tolerance}")
    recursion = _Lanczos(h, steps, seed)
    while True:
        recursion.step()
        m = recursion.steps
        if m < steps and (m < k or m % max(CHECK_EVERY, m // 8)):
            continue
        values, ritz = torch.linalg.eigh(recursion.tridiagonal())
        order = torch.arange(m - 1, m - 1 - k, -1) if end == "largest" else torch.arange(k)
        scale = float(values.abs().max())
        bound = recursion.next_norm * ritz[-1, order].abs()  # of the residual, in exact arithmetic
        if m == steps or bool((bound <= tolerance * scale).all()):
            break
    vectors = recursion.combine(ritz[:, order])
    products = torch.cat([h @ part for part in vectors.split(PER_PASS, 1)], 1).double()
    out = []
    for value, y, hy in zip(values[order].tolist(), vectors.T, products.T, strict=True):
        residual = float((hy - value * y.double()).norm())  # measured, rounding included
        out.append(Eigenvalue(value, residual, residual <= tolerance * scale, m, y))
    return out


def spectral_density(
    h: SupportsMatmul,
    *,
    probes: int,
    steps: int,
    grid: int | Tensor = 400,
    width: float | None = None,
    seed: int = 0,
) -> Density:
    """Density of the eigenvalues by stochastic Lanczos quadrature (Lin, Saad & Yang 2016; Ghorbani et al. 2019).

    Args:
        probes: random vectors, each with a Lanczos recursion of ``steps`` products.
        grid: points of the axis, or their number: evenly over the eigenvalues seen and three widths beyond.
        width: standard deviation of the Gaussians that smooth it; default 1 % of the range of eigenvalues seen.

    Raises:
        UserError: no probe, no step, a width that is not positive.
    """
    if probes < 1 or steps < 1:
        raise UserError(f"spectral density: probes and steps must be at least 1, got {probes} and {steps}")
    if width is not None and not width > 0:
        raise UserError(f"spectral density: width must be above 0, got {width}")
    nodes, weights = [], []
    steps = min(steps, h.size)
    for i in range(probes):
        recursion = _Lanczos(h, steps, seed=seed * 1_000_003 + i)
        for _ in range(steps):
            recursion.step()
        values, ritz = torch.linalg.eigh(recursion.tridiagonal())
        nodes.append(values)
        weights.append(ritz[0] ** 2)
    node, weight = torch.stack(nodes), torch.stack(weights)
    low, high = float(node.min()), float(node.max())
    if width is None:
        width = 0.01 * (high - low) or 1e-3 * max(abs(high), 1e-12)
    if not isinstance(grid, Tensor):
        grid = torch.linspace(low - 3 * width, high + 3 * width, grid, dtype=torch.float64)
    grid = grid.double().cpu()
    bumps = torch.exp(-0.5 * ((grid[:, None, None] - node) / width) ** 2) / (width * (2 * torch.pi) ** 0.5)
    return Density(grid, (bumps * weight).sum(-1).mean(-1), node, weight)


class _Lanczos:
    """An orthonormal basis Q of a Krylov space, with QᵀHQ tridiagonal, grown by one vector a step up to ``capacity``."""

    def __init__(self, h: SupportsMatmul, capacity: int, seed: int) -> None:
        self.h = h
        self.generator = torch.Generator().manual_seed(seed)
        self.basis = torch.empty(capacity, h.size, **like(h))  # rows
        self.steps = 0
        self.diagonal: list[float] = []
        self.beside: list[float] = []
        self.next_norm = 0.0
        self.scale = 0.0
        self.following = self._fresh()

    def step(self) -> None:
        """One product and one more basis vector."""
        if self.steps:
            self.beside.append(self.next_norm)
        q = self.basis[self.steps] = self.following
        self.steps += 1
        w = self.h @ q
        self.scale = max(self.scale, float(w.double().norm()))
        self.diagonal.append(float(q.double() @ w.double()))
        w = self._orthogonal(w)
        self.next_norm = float(w.double().norm())
        if self.next_norm > 100 * torch.finfo(w.dtype).eps * self.scale:
            self.following = w / self.next_norm
        else:  # an invariant subspace: the recursion goes on elsewhere
            self.next_norm = 0.0
            if self.steps < self.h.size:
                self.following = self._fresh()

    def _fresh(self) -> Tensor:
        v = torch.randn(self.h.size, generator=self.generator, dtype=torch.float64).to(**like(self.h))
        v = self._orthogonal(v)
        return v / v.norm()

    def _orthogonal(self, w: Tensor) -> Tensor:
        q = self.basis[: self.steps]
        for _ in range(2):  # twice is enough (Kahan, in Parlett 1980)
            w = w - q.T @ (q @ w)
        return w

    def tridiagonal(self) -> Tensor:
        """QᵀHQ, float64 [steps, steps]."""
        off = torch.tensor(self.beside, dtype=torch.float64)
        t = torch.diag(torch.tensor(self.diagonal, dtype=torch.float64))
        return t + torch.diag(off, 1) + torch.diag(off, -1) if len(off) else t

    def combine(self, coefficients: Tensor) -> Tensor:
        """The unit vectors Q c, [size, k], of the columns c of [steps, k]."""
        y = self.basis[: self.steps].T @ coefficients.to(**like(self.h))
        return y / y.norm(dim=0)
