"""Verdicts: rules fixed in claims.yaml before the runs, applied to a value and its interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from ..core import paths
from ..core.config import config_dataclass, load, one_of, read_yaml
from ..core.errors import UserError
from ..core.files import read_json, write_json
from ..evaluation.intervals import Estimate, over_seeds

Verdict = Literal["supported", "contradicted", "inconclusive"]


@config_dataclass()
class Claim:
    """A claim of the paper and the rule by which our runs judge it.

    The rule is a range: the claim is supported if the whole 95 % interval lies within [low, high], contradicted if it
    lies wholly outside, and inconclusive otherwise.
    """

    statement: str
    statistic: str
    low: float | None = None
    high: float | None = None
    provided: str | None = None  # a further condition; if it fails, the claim is contradicted
    paper: str  # the paper's own figure, with its mark ([C] read, [e] by eye, [i] inferred)
    finding: str  # the notebook, stage and figure that judge it

    @model_validator(mode="after")
    def _bounded(self) -> Claim:
        if self.low is None and self.high is None:
            raise ValueError("a rule needs low, high or both")
        return self

    @property
    def rule(self) -> str:
        """The rule in words."""
        bounds = (("at least", self.low), ("at most", self.high))
        span = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        text = f"supported if the whole 95 % interval is {span}; contradicted if all of it is not; else inconclusive"
        return text + (f"; and contradicted unless {self.provided}" if self.provided else "")


def rules() -> dict[str, Claim]:
    """claims.yaml, checked."""
    path = paths.root() / "claims.yaml"
    return load(dict[str, Claim], read_yaml(path), path.name)


def number(x: float) -> float | None:
    """Six digits, and None for what is not finite (JSON has no NaN)."""
    return float(f"{x:.6g}") if math.isfinite(x) else None


def plain(e: Estimate) -> dict[str, float | None]:
    """An estimate for the ``details`` of an entry."""
    return {"value": number(e.value), "low": number(e.low), "high": number(e.high)}


def mean(values: Iterable[float]) -> Estimate:
    """Mean over independent runs with its t interval; NaN if there is none or one of them is NaN."""
    values = np.asarray(list(values), dtype=float)
    return over_seeds(values) if len(values) else Estimate(math.nan, math.nan, math.nan)


def geometric(values: Iterable[float]) -> Estimate:
    """Geometric mean of a ratio over independent runs, with the t interval of its logarithm; NaN as in ``mean``."""
    values = np.asarray(list(values), dtype=float)
    e = mean(np.log(np.where(values > 0, values, np.nan)))
    return Estimate(math.exp(e.value), math.exp(e.low), math.exp(e.high))


def judge(claim: Claim, estimate: Estimate, provided: bool | None = True) -> Verdict:
    """Apply the rule. An interval that is not finite (a single seed) decides nothing.

    Args:
        provided: whether the rule's further condition holds; None if that cannot be told.
    """
    low = -math.inf if claim.low is None else claim.low
    high = math.inf if claim.high is None else claim.high
    if provided is None or not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return "inconclusive"
    if not provided:
        return "contradicted"
    if low <= estimate.low and estimate.high <= high:
        return "supported"
    if estimate.high < low or estimate.low > high:
        return "contradicted"
    return "inconclusive"


def entry(
    id: str, estimate: Estimate, seeds: int, scale: str, details: Mapping[str, Any], *, provided: bool | None = True,
    verdicts: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """A ledger entry (design contract 8); ``verdicts=False`` (a profile too small to judge, or a statistic that its
    rule does not judge) is inconclusive."""
    known = rules()
    claim = known[one_of(id, known, "claim")]

    return {
        "id": id,
        "statement": claim.statement,
        "statistic": claim.statistic,
        "rule": claim.rule,
        "value": number(estimate.value),
        "interval": [number(estimate.low), number(estimate.high)],
        "seeds": seeds,
        "verdict": judge(claim, estimate, provided) if verdicts else "inconclusive",
        "paper": claim.paper,
        "scale": scale,
        "figure": f"reports/figures/{claim.finding}.png",
        "notebook": f"notebooks/finding_{claim.finding}.ipynb",
        "stage": f"finding_{claim.finding}",
        "command": f"dvc repro -sf finding_{claim.finding}",
        "details": dict(details),
    }


def write(finding: str, entries: Sequence[Mapping[str, Any]]) -> Path:
    """The judged claims of one finding."""
    path = paths.claims() / f"{finding}.json"
    write_json(path, list(entries))
    return path


def collect(findings: Sequence[str]) -> list[dict[str, Any]]:
    """All judged claims in order of number, written to reports/claims.json.

    Raises:
        UserError: a finding has not run, or two judge the same claim.
    """
    entries: dict[str, dict[str, Any]] = {}
    for finding in findings:
        for e in read_json(paths.claims() / f"{finding}.json", hint=f"run `dvc repro finding_{finding}`"):
            if e["id"] in entries:
                raise UserError(f"claims.yaml: {e['id']} is judged twice, the second time by '{finding}'")
            entries[e["id"]] = e
    ordered = [entries[i] for i in sorted(entries, key=lambda i: (i[0], int(i[1:])))]
    write_json(paths.root() / "reports" / "claims.json", ordered)
    return ordered
