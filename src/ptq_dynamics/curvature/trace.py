"""Trace of a symmetric operator from random vectors, with its standard error, whole and by parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from scipy import stats
from torch import Tensor

from ..core.errors import UserError
from .operator import SupportsMatmul, layout_of, like

LEVEL = 0.95
MIN_PROBES = 10  # below it, the spread of a few probes says little about the error of their mean


@dataclass(frozen=True)
class Trace:
    """An estimate with its 95 % interval (Student's t over probes)."""

    value: float
    standard_error: float
    low: float
    high: float
    probes: int  # random vectors in it (Hutch++: products with the operator)
    stopped: bool  # the stop rule ended it before all probes were used
    samples: Tensor = field(repr=False)  # float64 [probes of the random part, parameters]: z_p · (H z)_p
    exact: Tensor = field(
        repr=False
    )  # float64 [parameters]: what is known without error (Hutch++), else zeros
    names: tuple[str, ...] = field(repr=False)

    @property
    def by_parameter(self) -> dict[str, tuple[float, float]]:
        """(value, standard error) of each parameter's own part; the values sum to ``value``."""
        return {name: self.over([name]) for name in self.names}

    def over(self, names: Iterable[str]) -> tuple[float, float]:
        """(value, standard error) of the trace over some parameters together (a block's, the quantized ones).

        Raises:
            UserError: an unknown name.
        """
        places = {name: i for i, name in enumerate(self.names)}
        names = list(names)
        if unknown := [n for n in names if n not in places]:
            raise UserError(
                f"trace: no parameter '{unknown[0]}' in it; it covers {', '.join(self.names[:3])}, …"
            )
        of = [places[n] for n in names]
        value, error = _mean(self.samples[:, of].sum(1))
        return value + float(self.exact[of].sum()), error


def trace(
    h: SupportsMatmul,
    *,
    probes: int,
    seed: int,
    atol: float | None = None,
    min_probes: int = MIN_PROBES,
    method: Literal["hutchinson", "hutch++"] = "hutchinson",
    batch: int = 8,
) -> Trace:
    """tr H from products with Rademacher vectors.

    Hutchinson (1989): the mean of zᵀHz, whose variance is twice the sum of the squared off-diagonal entries.
    Hutch++ (Meyer et al. 2021): exact on the range of H S for a random S, Hutchinson on the rest; pays where a few
    eigenvalues dominate. Probes depend on ``seed`` and their place alone, not on ``batch``.

    Args:
        h: anything with ``size`` and ``@``; with a ``layout``, parts are told by parameter.
        probes: products at most; all of them without ``atol``. Hutch++ spends a third on each of its steps.
        atol: stop as soon as half the width of the 95 % interval is at most this, in units of the trace
            (absolute, so a trace near zero ends too). Only Hutchinson.
        min_probes: never stop before so many.
        batch: vectors per pass.

    Raises:
        UserError: fewer than two probes (six for Hutch++), or a stop rule that may end before ten.
    """
    least = {"hutchinson": 2, "hutch++": 6}.get(method)
    if least is None:
        raise UserError(f"trace: method '{method}' is unknown; use hutchinson or hutch++")
    if probes < least:
        raise UserError(
            f"trace: probes must be at least {least} for {method} (a standard error needs two), got {probes}"
        )
    if batch < 1:
        raise UserError(f"trace: batch must be at least 1, got {batch}")
    if atol is not None:
        if method == "hutch++":
            raise UserError("trace: hutch++ spends all its probes; leave out atol")
        if atol <= 0:
            raise UserError(f"trace: atol must be above 0, got {atol}")
        if min_probes < MIN_PROBES:
            raise UserError(
                f"trace: the stop rule needs at least {MIN_PROBES} probes, got min_probes {min_probes}"
            )
    layout = layout_of(h)
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        # one by one, so that the numbers do not depend on how many are drawn at once
        signs = [torch.randint(2, (h.size,), generator=generator) for _ in range(n)]
        return (2 * torch.stack(signs, 1) - 1).to(**like(h))

    def parts(left: Tensor, right: Tensor) -> Tensor:
        products = left.double() * right.double()
        return torch.stack([products[s].sum(0) for s in layout.values()], 1).cpu()

    exact = torch.zeros(len(layout), dtype=torch.float64)
    samples: list[Tensor] = []
    used, stopped, basis = 0, False, None
    if method == "hutch++":
        basis = torch.linalg.qr(_products(h, draw(probes // 3), batch).double()).Q.to(**like(h))
        exact = parts(basis, _products(h, basis, batch)).sum(0)
        used = 2 * (probes // 3)
    while used < probes:
        z = draw(min(batch, probes - used))
        if basis is not None:
            z = z - basis @ (basis.T @ z)
        samples += parts(z, h @ z).split(1)
        used += z.shape[1]
        if atol is None:
            continue
        # the first number of probes that satisfies the rule, so that ``batch`` changes nothing
        candidates = range(max(min_probes, used - z.shape[1] + 1), used + 1)
        enough = next((n for n in candidates if _half_width(torch.cat(samples[:n]).sum(1)) <= atol), None)
        if enough is not None:
            samples, used, stopped = samples[:enough], enough, enough < probes
            break
    table = torch.cat(samples)
    totals = table.sum(1)
    value, error = _mean(totals)
    value += float(exact.sum())
    half = _half_width(totals)
    return Trace(value, error, value - half, value + half, used, stopped, table, exact, tuple(layout))


def _products(h: SupportsMatmul, v: Tensor, batch: int) -> Tensor:
    return torch.cat([h @ part for part in v.split(batch, dim=1)], 1)


def _mean(samples: Tensor) -> tuple[float, float]:
    return float(samples.mean()), float(samples.std() / len(samples) ** 0.5)


def _half_width(samples: Tensor) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, len(samples) - 1)) * _mean(samples)[1]
