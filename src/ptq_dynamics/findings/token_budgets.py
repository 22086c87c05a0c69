"""Token budgets (C1, C2, C3): is it the number of tokens, or the decay of the learning rate, that raises the error?"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..core import paths
from ..core.config import read_yaml
from . import claims, statistics, style
from .statistics import errors, growth, log

NAME = "token_budgets"
PRIMARY = 4  # bits; the paper's numbers for C1 to C3 are 4-bit
BITS = (4, 3, 2)


def read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measurements and training curves of the study, from the tables in git."""
    return statistics.read(NAME)


def plateau_growth(rows: pd.DataFrame) -> dict[int, float]:
    """C1, per seed: growth of the error per doubling of tokens over the last half of the constant-LR trunk."""
    trunk = rows[rows["member"] == "trunk"]
    late = trunk[trunk["tokens"] >= trunk["run_tokens"] / 2]
    return {s: growth(np.log2(g["tokens"]), g["relative_error"]) for s, g in late.groupby("seed")}


def cooldown_ratio(rows: pd.DataFrame) -> dict[int, float]:
    """C2, per seed: error at the end of a cooldown over that at its branch point, geometric mean over the cooldowns
    that begin in the last half of the trunk."""
    return _per_seed(rows, "relative_error", lambda end, start: log(end) - log(start), np.exp)


def loss_change(rows: pd.DataFrame) -> dict[int, float]:
    """C2's condition, per seed: change of full-precision loss over the same cooldowns (nats; the largest)."""
    return _per_seed(rows, "ce_fp", lambda end, start: end - start, lambda x: x, np.max)


def _per_seed(
    rows: pd.DataFrame, column: str, compare: Any, back: Any, fold: Any = np.mean
) -> dict[int, float]:
    trunk = rows[rows["member"] == "trunk"].set_index(["seed", "tokens"])[column]
    ends = cooldown_ends(rows)
    late = ends[ends["branch_tokens"] >= rows.loc[rows["member"] == "trunk", "run_tokens"].max() / 2]
    out = {}
    for seed, group in late.groupby("seed"):
        changes = [compare(r[column], trunk[(seed, r["branch_tokens"])]) for _, r in group.iterrows()]
        out[seed] = float(back(fold(changes)))
    return out


def cooldown_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """The last checkpoint of every cooldown branch."""
    branches = rows[rows["member"] == "cooldown"]
    return branches[branches["tokens"] == branches["run_tokens"]]


def budget_growth(rows: pd.DataFrame, least: float = 0.0) -> dict[int, float]:
    """C3, per seed: growth of the error at the end of the cooldowns per tenfold budget (total tokens)."""
    ends = cooldown_ends(rows)
    ends = ends[ends["tokens"] >= least]
    return {s: growth(np.log10(g["tokens"]), g["relative_error"]) for s, g in ends.groupby("seed")}


def judge(table: pd.DataFrame, verdicts: bool) -> list[dict[str, Any]]:
    """Ledger entries for C1, C2 and C3; the other bit widths and RTN as details."""
    seeds, parameters = table["seed"].nunique(), int(table["parameters"].iloc[0])
    scale = statistics.scale(table, f"GPTQ {PRIMARY} bit")
    out = []
    for id, statistic in (("C1", plateau_growth), ("C2", cooldown_ratio), ("C3", budget_growth)):
        estimate = claims.geometric(list(statistic(errors(table, PRIMARY)).values()))
        details: dict[str, Any] = {
            f"{method} {bits} bit": claims.plain(
                claims.geometric(list(statistic(errors(table, bits, method)).values()))
            )
            for method in ("gptq", "rtn")
            for bits in BITS
            if (bits != PRIMARY or method == "rtn") and len(errors(table, bits, method))
        }
        details["per seed"] = {str(k): claims.number(v) for k, v in statistic(errors(table, PRIMARY)).items()}
        provided = True
        if id == "C2":
            change = loss_change(errors(table, PRIMARY))
            details["largest change of loss, nats, per seed"] = {
                str(k): claims.number(v) for k, v in change.items()
            }
            provided = all(v < 0 for v in change.values())
        if id == "C3":
            least = 60 * parameters
            late = errors(table, PRIMARY)
            if cooldown_ends(late).query("tokens >= @least")["tokens"].nunique() > 1:
                values = budget_growth(late, least).values()
                details["budgets of at least 60 tokens per parameter"] = claims.plain(
                    claims.geometric(list(values))
                )
        out.append(claims.entry(id, estimate, seeds, scale, details, provided=provided, verdicts=verdicts))
    return out


def figure(table: pd.DataFrame, training: pd.DataFrame) -> Figure:
    """Validation loss and GPTQ error at 4, 3 and 2 bit against tokens, learning rate overlaid (as the paper's fig.)."""
    style.use()
    base = table[table["method"] == "none"]
    panels = [("validation loss (nats/token)", base, "ce")]
    panels += [
        (f"{b}-bit error, GPTQ (%)", errors(table, b).assign(pct=lambda t: 100 * t["relative_error"]), "pct")
        for b in BITS
        if len(errors(table, b))
    ]
    fig, axes = plt.subplots(2, 2, figsize=(style.WIDTH, 4.8), sharex=True)
    for i, (ax, (title, rows, y)) in enumerate(zip(axes.flat, panels, strict=False)):
        style.trunk_and_cooldowns(ax, rows, y)
        ax.set_ylabel(title)
        style.letter(ax, i)
        if y == "pct":
            ax.set_ylim(0, None)
        style.overlay_rate(ax, training, label=i % 2 == 1)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[1]:
        ax.set_xlabel("training tokens (millions)")
    style.cooldown_legend(fig, table)
    return fig


def caption(table: pd.DataFrame) -> str:
    """The figure's caption."""
    n = table["seed"].nunique()
    bands = f"the range over {n} seeds" if n > 1 else "not shown (one seed)"
    text = sorted(table["evaluation_set"].unique())
    return (
        "Token budgets. One trunk at constant learning rate per seed, and fixed-length linear cooldowns to zero from "
        f"{table.loc[table['member'] == 'cooldown', 'branch_tokens'].nunique()} budgets. Lines: mean; bands: {bands}. "
        "Error: CE(Ŵ)/CE(W) − 1 in per cent on "
        f"{int(table['evaluation_tokens'].max()):,} held-out tokens ({', '.join(text)}); dashed: learning rate. (a) full precision, "
        "(b–d) GPTQ, symmetric."
    )


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Ours beside the paper's: error at the branch point and at the end of each cooldown, per bit width.

    Ours are means over seeds with 95 % t intervals, in per cent; the paper's are read by eye off its figure.
    """
    paper = read_yaml(paths.reference() / "paper.yaml")["token_budgets"]
    rows = []
    for method in ("gptq", "rtn"):
        for bits in BITS:
            measured = errors(table, bits, method)
            trunk, ends = measured[measured["member"] == "trunk"], cooldown_ends(measured)
            for rank, budget in enumerate(sorted(ends["branch_tokens"].unique())):
                start = 100 * trunk.loc[trunk["tokens"] == budget, "relative_error"]
                end = ends[ends["branch_tokens"] == budget]
                a, b = claims.mean(start), claims.mean(100 * end["relative_error"])
                listed = paper["after_cooldown_4bit"] if method == "gptq" and bits == 4 else []
                rows.append(
                    {
                        "method": method,
                        "bits": bits,
                        "cooldown from (M tokens)": budget / 1e6,
                        "loss after": end["ce_fp"].mean(),
                        "error before (%)": a.value,
                        "before, low": a.low,
                        "before, high": a.high,
                        "error after (%)": b.value,
                        "after, low": b.low,
                        "after, high": b.high,
                        "paper, same rank of budget (%) [e]": 100 * listed[rank]
                        if rank < len(listed)
                        else None,
                    }
                )
    return pd.DataFrame(rows)


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, summary table, metrics and judged claims."""
    table, training = read()
    fig = figure(table, training)
    style.save(fig, NAME, caption(table))
    ours = summary(table)
    entries = judge(table, verdicts)
    statistics.write(NAME, {NAME: ours}, {}, entries)
    return fig, ours, entries
