"""What the findings share: rows picked out of a table, slopes, levels over seeds, shares of variance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ..core import paths
from ..core.errors import UserError
from ..core.files import write_json, write_text
from ..evaluation.intervals import LEVEL, Estimate
from . import claims

SIMILAR = 0.05  # nats: full-precision losses no further apart count as similar (claims.yaml, C5 and C8)


def table(name: str, stage: str) -> pd.DataFrame:
    """``reports/tables/<name>.csv``.

    Raises:
        UserError: it is missing; ``stage`` writes it.
    """
    path = paths.tables() / f"{name}.csv"
    if not path.is_file():
        raise UserError(f"{paths.relative(path)}: no such file; run `dvc repro {stage}`")
    return pd.read_csv(path)


def read(study: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measurements and training curves of a study, from the tables in git.

    Raises:
        UserError: a table is missing.
    """
    stage = f"measure@{study}"
    return table(f"measurements-{study}", stage), table(f"training-{study}", stage)


def errors(table: pd.DataFrame, bits: int, method: str = "gptq") -> pd.DataFrame:
    """The rows of one quantizer."""
    return table[(table["method"] == method) & (table["bits"] == bits)]


def quantizers(table: pd.DataFrame) -> list[tuple[str, int]]:
    """(method, bits) of the quantizers in a table, GPTQ first, most bits first."""
    found = table.loc[table["method"] != "none", ["method", "bits"]].drop_duplicates()
    pairs = [(str(m), int(b)) for m, b in found.itertuples(index=False)]
    return sorted(pairs, key=lambda p: (p[0] != "gptq", p[0], -p[1]))


def of_member(table: pd.DataFrame, member: str, study: str) -> pd.DataFrame:
    """The rows of one member.

    Raises:
        UserError: the study has no such member.
    """
    rows = table[table["member"] == member]
    if rows.empty:
        raise UserError(
            f"measurements-{study}.csv: no rows of member '{member}'; has: {', '.join(sorted(table['member'].unique()))}; "
            f"restore it under studies.{study}.members in params.yaml"
        )
    return rows


def ends(rows: pd.DataFrame) -> pd.DataFrame:
    """The last checkpoint of every run."""
    return rows[rows["tokens"] == rows["run_tokens"]]


def branches(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The rows of the cooldowns that branch from a trunk, with what each of ``columns`` was at the branch point.

    Further columns: ``<column>, start``; done (share of the decay), end (is it), late (begins in the last half of the
    trunk).
    """
    trunk = rows[rows["member"] == "trunk"]
    start = trunk.set_index(["seed", "tokens"])[list(columns)].add_suffix(", start")
    found = rows[rows["member"] == "cooldown"].join(start, on=["seed", "branch_tokens"])
    return found.assign(
        done=(found["tokens"] - found["branch_tokens"]) / (found["run_tokens"] - found["branch_tokens"]),
        end=found["tokens"] == found["run_tokens"],
        late=2 * found["branch_tokens"] >= trunk["run_tokens"].max(),
    )


def longest(rows: pd.DataFrame) -> pd.DataFrame:
    """The runs with the most tokens."""
    return rows[rows["run_tokens"] == rows["run_tokens"].max()]


def slope(x: Iterable[float], y: Iterable[float]) -> float:
    """Least-squares slope of ``y`` on ``x``; NaN for fewer than two different ``x`` or a value that is not finite."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(np.unique(x)) < 2 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return float("nan")
    dx = x - x.mean()
    return float(dx @ (y - y.mean()) / (dx @ dx))


def exponent(x: Iterable[float], y: Iterable[float]) -> float:
    """Power law: slope of ln ``y`` on ln ``x``; NaN if one of ``y`` is not positive, since it has no logarithm."""
    return slope(log(x), log(y))


def growth(x: Iterable[float], y: Iterable[float]) -> float:
    """Factor by which ``y`` grows when ``x`` grows by one: exp of the slope of ln ``y``; NaN as in ``exponent``."""
    return float(np.exp(slope(x, log(y))))


def growth_per_tenfold(rows: pd.DataFrame, factor: str) -> dict[int, float]:
    """Per seed: growth of the relative error per tenfold ``factor`` (a column)."""
    return {int(s): growth(np.log10(g[factor]), g["relative_error"]) for s, g in rows.groupby("seed")}


def log(values: Iterable[float] | float) -> np.ndarray:
    """Natural logarithm; NaN for what has none."""
    values = np.asarray(values, dtype=float)
    return np.log(np.where(values > 0, values, np.nan))


def similar(rows: pd.DataFrame, factor: str) -> list[float]:
    """Values of ``factor`` whose mean full-precision loss lies within ``SIMILAR`` nats of the best, ascending."""
    loss = rows.groupby(factor)["ce_fp"].mean()
    return [float(v) for v in loss.index[loss - loss.min() <= SIMILAR]]


def quantities(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What is reported of checkpoints, each as rows with its number in the column ``y``.

    Full-precision loss; and per GPTQ bit width the loss (nats/token), ΔCE (nats/token) and relative error (per cent).
    """
    found = {"full-precision loss": rows[rows["method"] == "none"].assign(y=lambda t: t["ce"])}
    for method, bits in quantizers(rows):
        if method == "gptq":
            q = errors(rows, bits)
            found[f"{bits}-bit loss"] = q.assign(y=q["ce"])
            found[f"{bits}-bit ΔCE"] = q.assign(y=q["delta_ce"])
            found[f"{bits}-bit error (%)"] = q.assign(y=100 * q["relative_error"])
    return found


def levels(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """``quantities`` by value of ``by``: means over seeds with 95 % t intervals in the columns ", low" and ", high"."""
    out: dict[object, dict[str, float]] = {}
    for name, q in quantities(rows).items():
        for value, group in q.groupby(by):
            row = out.setdefault(value, {by: value, "seeds": group["seed"].nunique()})
            row |= columns(name, claims.mean(group["y"]))
    return pd.DataFrame([out[v] for v in sorted(out)])


def columns(name: str, e: Estimate) -> dict[str, float]:
    """An estimate as three columns of a table."""
    return {name: e.value, f"{name}, low": e.low, f"{name}, high": e.high}


def scale(table: pd.DataFrame, quantizer: str) -> str:
    """The size of the runs and the quantizer of a verdict, in words."""
    parameters, tokens = int(table["parameters"].max()), int(table["run_tokens"].max())
    return (
        f"GPTNeoX with {parameters:,} parameters, {tokens / 1e6:.1f}M tokens "
        f"({tokens / parameters:.0f} per parameter), {quantizer}"
    )


def sums_of_squares(y: np.ndarray) -> np.ndarray:
    """Two-way analysis of variance of a complete, balanced layout.

    Args:
        y: ``[levels of A, levels of B, replicates]``.

    Returns:
        Sums of squares of A, B, their interaction and the residual. They add up to the total, and in a balanced layout
        types I, II and III agree.
    """
    a, b, n = y.shape
    mean, cells = y.mean(), y.mean(axis=2)
    rows, cols = cells.mean(axis=1) - mean, cells.mean(axis=0) - mean
    rest = cells - mean - rows[:, None] - cols[None, :]
    within = y - cells[:, :, None]
    return np.array([b * n * rows @ rows, a * n * cols @ cols, n * (rest**2).sum(), (within**2).sum()])


def variance_shares(rows: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    """How much of the variance of ln relative error two factors explain (η² = sum of squares / total).

    The last row sets the first factor against the second alone: its share of what the two main effects explain.
    Intervals: jackknife over seeds (Tukey 1958), t with seeds − 1 degrees of freedom, cut to [0, 1].

    Args:
        rows: one per (value of ``first``, value of ``second``, seed); seeds are the replicates.

    Returns:
        Columns source, sum of squares, degrees of freedom, share, low, high. NaN if an error is not positive.

    Raises:
        UserError: a combination is missing.
    """
    layout = rows.pivot_table(index=first, columns=[second, "seed"], values="relative_error", dropna=False)
    values, n = layout.columns.get_level_values(0).unique(), rows["seed"].nunique()
    if len(layout.columns) != len(values) * n or layout.isna().any(axis=None):
        raise UserError(
            f"two-way table: not every {first} was run with every {second} and seed; run the missing ones"
        )
    y = log(layout.to_numpy()).reshape(len(layout), len(values), n)
    squares = sums_of_squares(y)
    a, b = len(layout), len(values)
    share = jackknife(y, _shares)
    if n < 2:  # a single seed cannot tell the interaction from noise
        share[2:4] = [Estimate(float("nan"), float("nan"), float("nan"))] * 2
    return pd.DataFrame(
        {
            "source": [first, second, "interaction", "residual (seeds)", f"{first} against {second}"],
            "sum of squares": [*squares, np.nan],
            "degrees of freedom": [a - 1, b - 1, (a - 1) * (b - 1), a * b * (n - 1), np.nan],
            "share": [e.value for e in share],
            "low": [e.low for e in share],
            "high": [e.high for e in share],
        }
    )


def _shares(y: np.ndarray) -> np.ndarray:
    squares = sums_of_squares(y)
    main, total = squares[:2].sum(), squares.sum()
    return np.array(
        [*(squares / total if total > 0 else squares * np.nan), squares[0] / main if main > 0 else np.nan]
    )


def jackknife(y: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> list[Estimate]:
    """Shares of ``y`` with jackknife intervals over its last axis, cut to [0, 1]; a single replicate has none."""
    whole, n = statistic(y), y.shape[-1]
    if n < 2:
        return [Estimate(float(v), float("nan"), float("nan")) for v in whole]
    half = jackknife_half_width(np.array([statistic(np.delete(y, i, axis=-1)) for i in range(n)]))
    return [
        Estimate(float(v), float(np.clip(v - h, 0, 1)), float(np.clip(v + h, 0, 1)))
        for v, h in zip(whole, half, strict=True)
    ]


def jackknife_half_width(parts: np.ndarray) -> np.ndarray:
    """Half the 95 % interval (t) of a statistic from its values with each replicate left out in turn, ``[n, ...]``."""
    n = len(parts)
    error = np.sqrt((n - 1) / n * ((parts - parts.mean(axis=0)) ** 2).sum(axis=0))
    return stats.t.ppf((1 + LEVEL) / 2, n - 1) * error


def not_positive(rows: pd.DataFrame, column: str = "relative_error") -> int:
    """How many errors have no logarithm."""
    return int((rows[column] <= 0).sum())


def write(
    name: str,
    tables: Mapping[str, pd.DataFrame],
    numbers: Mapping[str, float | None],
    entries: Sequence[Mapping[str, Any]] | None,
) -> None:
    """What a finding leaves beside its figure: ``reports/tables/<table>.csv`` each, ``reports/metrics/<name>.json``, and
    its judged claims (None: it judges none)."""
    for table, rows in tables.items():
        write_text(paths.tables() / f"{table}.csv", rows.to_csv(index=False, float_format="%.5g"))
    if entries is not None:
        claims.write(name, entries)
    values = {e["id"]: e["value"] for e in entries or ()}
    write_json(paths.metrics() / f"{name}.json", flat(values | dict(numbers)))


def flat(values: dict[str, float | None]) -> dict[str, float]:
    """Numbers for a metrics file; what is not finite is left out."""
    kept = {k: None if v is None else claims.number(float(v)) for k, v in values.items()}
    return {k: v for k, v in kept.items() if v is not None}


def per_quantizer(
    table: pd.DataFrame, primary: tuple[str, int], estimate: Callable[[pd.DataFrame], Estimate]
) -> dict[str, dict[str, float | None]]:
    """A statistic under every quantizer but the one that the rule names, for the details of an entry."""
    others: Sequence[tuple[str, int]] = [q for q in quantizers(table) if q != primary]
    return {f"{m} {b} bit": claims.plain(estimate(errors(table, b, m))) for m, b in others}
