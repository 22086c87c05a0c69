"""Peak learning rate (C4, C5): does a larger one give a model that is easier to quantize, and at what cost?"""

from __future__ import annotations

import itertools
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..core import paths
from ..core.config import read_yaml
from . import claims, statistics, style
from .statistics import ends, errors, longest

NAME = "peak_lr"
PRIMARY, LOW = 4, 3  # bits of C4 and of C5
BITS = (PRIMARY, LOW)
NO_COST = 0.01  # nats of full precision that the larger LR may lose (C5)


def read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measurements and training curves of the WSD runs, from the tables in git."""
    table, training = statistics.read(NAME)
    return statistics.of_member(table, "wsd", NAME), training


def lr_growth(rows: pd.DataFrame) -> dict[int, float]:
    """C4, per seed: growth of the error at the end of the longest runs per tenfold peak LR."""
    return statistics.growth_per_tenfold(longest(ends(rows)), "peak_lr")


def closest_pair(rows: pd.DataFrame) -> tuple[float, float] | None:
    """C5: the two LRs (smaller, larger) whose mean full-precision losses at the end of the longest runs are closest;
    of equals those with the smaller LRs. None where there is only one LR."""
    loss = longest(ends(rows)).groupby("peak_lr")["ce_fp"].mean()
    pairs = list(itertools.combinations(sorted(loss.index), 2))
    return min(pairs, key=lambda p: abs(loss[p[0]] - loss[p[1]])) if pairs else None


def difference(rows: pd.DataFrame, pair: tuple[float, float], column: str) -> dict[int, float]:
    """``column`` at the larger LR minus that at the smaller, at the end of the longest runs, per seed."""
    wide = longest(ends(rows)).pivot(index="seed", columns="peak_lr", values=column)
    return {int(s): float(v) for s, v in (wide[pair[1]] - wide[pair[0]]).items()}


def variance(table: pd.DataFrame) -> pd.DataFrame:
    """Two-way analysis of variance of ln relative error by peak LR and tokens, per bit width."""
    parts = [
        statistics.variance_shares(ends(errors(table, b)), "peak_lr", "run_tokens").assign(bits=b)
        for b in BITS
        if len(errors(table, b))
    ]
    names = {
        "peak_lr": "peak LR",
        "run_tokens": "tokens",
        "peak_lr against run_tokens": "peak LR against tokens",
    }
    found = pd.concat(parts, ignore_index=True).replace({"source": names})
    return found[["bits", *(c for c in found if c != "bits")]]


def two_way(table: pd.DataFrame) -> pd.DataFrame:
    """Error at the end of the run (per cent, mean over seeds) by peak LR and tokens (millions)."""
    parts = []
    for bits in BITS:
        rows = ends(errors(table, bits)).assign(
            pct=lambda t: 100 * t["relative_error"], M=lambda t: t["run_tokens"] / 1e6
        )
        wide = rows.pivot_table(index="peak_lr", columns="M", values="pct")
        wide.columns = [f"{c:.2f}M tokens" for c in wide.columns]
        parts.append(wide.reset_index().assign(bits=bits))
    found = pd.concat(parts, ignore_index=True)
    return found[["bits", *(c for c in found if c != "bits")]].rename(columns={"peak_lr": "peak LR"})


def judge(table: pd.DataFrame, verdicts: bool) -> list[dict[str, Any]]:
    """Ledger entries for C4 and C5; the other bit widths and quantizers as details."""
    return [_c4(table, verdicts), _c5(table, verdicts)]


def _c4(table: pd.DataFrame, verdicts: bool) -> dict[str, Any]:
    rows = errors(table, PRIMARY)
    last = longest(ends(rows))
    values = lr_growth(rows)
    details: dict[str, Any] = statistics.per_quantizer(
        table, ("gptq", PRIMARY), lambda t: claims.geometric(lr_growth(t).values())
    )
    kept = statistics.similar(last, "peak_lr")
    among = statistics.growth_per_tenfold(last[last["peak_lr"].isin(kept)], "peak_lr")
    details[f"LRs within {statistics.SIMILAR:g} nats of the best loss"] = claims.plain(
        claims.geometric(among.values())
    )
    details["those LRs"] = kept
    falls = [
        (g.sort_values("peak_lr")["relative_error"].diff().dropna() < 0).all()
        for _, g in last.groupby("seed")
    ]
    details["seeds in which the error falls with every step up in LR"] = sum(map(int, falls))
    details["errors of 0 or less, which have no logarithm"] = statistics.not_positive(last)
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    size = statistics.scale(table, f"GPTQ {PRIMARY} bit")
    return claims.entry(
        "C4", claims.geometric(values.values()), len(values), size, details, verdicts=verdicts
    )


def _c5(table: pd.DataFrame, verdicts: bool) -> dict[str, Any]:
    rows, pair = errors(table, LOW), closest_pair(errors(table, LOW))
    size = statistics.scale(table, f"GPTQ {LOW} bit")
    if pair is None:
        return claims.entry(
            "C5", claims.mean([]), 0, size, {"not judged": "there is only one LR"}, verdicts=False
        )
    values = difference(rows, pair, "ce")
    apart = claims.mean(difference(rows, pair, "ce_fp").values())
    details: dict[str, Any] = statistics.per_quantizer(
        table, ("gptq", LOW), lambda t: claims.mean(difference(t, pair, "ce").values())
    )
    details["full precision"] = claims.plain(apart)
    details["LRs compared"] = list(pair)
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    judged = abs(apart.value) <= statistics.SIMILAR
    if not judged:
        details["not judged"] = (
            f"the closest full-precision losses differ by more than {statistics.SIMILAR:g} nats"
        )
    return claims.entry(
        "C5", claims.mean(values.values()), len(values), size, details,
        provided=apart.value <= NO_COST, verdicts=verdicts and judged,
    )  # fmt: skip


def figure(table: pd.DataFrame, training: pd.DataFrame) -> Figure:
    """Columns: 4 and 3 bit. Rows: relative error and ΔCE along the longest runs with the LR; the plane of
    full-precision and quantized loss; the error at the end by LR and tokens."""
    style.use()
    rates = sorted(table["peak_lr"].unique())
    colours = dict(zip(rates, style.gradient(len(rates)), strict=True))
    longest_runs = longest(table)
    by_run = {
        r: colours[lr] for r, lr in longest_runs[["run", "peak_lr"]].drop_duplicates().itertuples(index=False)
    }
    curves = training[training["run"].isin(by_run)]
    share = variance(table)
    fig, axes = plt.subplots(4, 2, figsize=(style.WIDTH, 9.4))
    for col, bits in enumerate(BITS):
        rows = errors(table, bits).assign(pct=lambda t: 100 * t["relative_error"])
        along, last = longest(rows), longest(ends(rows))
        for row, (y, label) in enumerate((("pct", "error (%)"), ("delta_ce", "ΔCE (nats/token)"))):
            ax = axes[row, col]
            for lr in rates:
                style.band(
                    ax,
                    along[along["peak_lr"] == lr],
                    y,
                    color=colours[lr],
                    marker="o",
                    markersize=2.5,
                    zorder=4,
                )
            ax.set_ylabel(f"{bits}-bit {label}")
            ax.set_xlabel("training tokens (millions)")
            ax.set_ylim(min(0, 1.05 * along[y].min()), None)
            style.overlay_rate(ax, curves, label=col == 1, colours=by_run, log=True)
        style.loss_plane(axes[2, col], last, "peak_lr", colours)
        axes[2, col].set_ylabel(f"{bits}-bit loss (nats/token)")
        _by_rate(axes[3, col], ends(rows), bits)
        _tell_shares(axes[3, col], share[share["bits"] == bits])
    for i, ax in enumerate(axes.flat):
        style.letter(ax, i, f"GPTQ {BITS[i]} bit" if i < 2 else "")
    handles = [
        Line2D([], [], color=colours[r], marker="o", markersize=3, label=f"peak LR {r:g}") for r in rates
    ]
    handles.append(Line2D([], [], color=style.RATE, linestyle="--", linewidth=0.8, label="learning rate"))
    fig.legend(handles=handles, loc="outside upper center", ncol=5, frameon=False)
    return fig


def _by_rate(ax: Axes, rows: pd.DataFrame, bits: int) -> None:
    """Error at the end of the runs against the peak LR, one line per budget of tokens."""
    budgets = sorted(rows["run_tokens"].unique())
    for budget, grey in zip(budgets, np.linspace(0.72, 0.0, len(budgets)), strict=True):
        group = rows[rows["run_tokens"] == budget].groupby("peak_lr")["pct"].agg(["mean", "min", "max"])
        ax.plot(
            group.index,
            group["mean"],
            color=str(grey),
            marker="o",
            markersize=2.5,
            label=f"{budget / 1e6:.1f}M" + (" tokens" if budget == budgets[-1] else ""),
        )
        ax.fill_between(group.index, group["min"], group["max"], color=str(grey), alpha=0.15, linewidth=0)
    ax.set_xscale("log")
    rates = sorted(rows["peak_lr"].unique())
    ax.set_xticks(rates, [f"{r:g}" for r in rates])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("peak learning rate")
    ax.set_ylabel(f"{bits}-bit error at the end (%)")
    ax.set_ylim(top=1.2 * rows["pct"].max())  # room for the legend
    ax.legend(frameon=False, loc="upper center", ncol=3, columnspacing=1.0, handlelength=1.2)


def _tell_shares(ax: Axes, share: pd.DataFrame) -> None:
    """The shares of variance above a panel."""
    short = [
        ("peak LR", "LR"),
        ("tokens", "tokens"),
        ("interaction", "both"),
        ("residual (seeds)", "seeds"),
    ]
    by = share.set_index("source")["share"]
    if by.loc[[s for s, _ in short]].notna().all():
        ax.set_title(", ".join(f"{n} {100 * by[s]:.0f} %" for s, n in short), loc="right", fontsize=6.5)


def caption(table: pd.DataFrame) -> str:
    """The figure's caption."""
    n = table["seed"].nunique()
    rates = ", ".join(f"{r:g}" for r in sorted(table["peak_lr"].unique()))
    budgets = ", ".join(f"{t / 1e6:.1f}M" for t in sorted(table["run_tokens"].unique()))
    share = variance(table).set_index(["bits", "source"])
    told = [
        f"{b} bit {_interval(share.loc[(b, 'peak LR against tokens')])}"
        for b in BITS
        if b in share.index.get_level_values(0)
    ]
    return (
        f"Peak learning rate. WSD runs at peak LRs of {rates}, the last part decaying to zero, of {budgets} tokens. Lines: "
        f"mean; bands: {f'the range over {n} seeds' if n > 1 else 'not shown (one seed)'}; dashed, right axis: learning "
        "rate. (a, b) Relative error CE(Ŵ)/CE(W) − 1 in per cent and (c, d) gap ΔCE = CE(Ŵ) − CE(W) along the longest "
        "runs: the paper names the former, but the end values of its panel match the gap, so both are shown. (e, f) "
        "Quantized against full-precision loss at the end of the longest runs, one point per seed: the height above the "
        "line is ΔCE. (g, h) Error at the end by peak LR and tokens; above, how much of the variance of its logarithm "
        "each explains (two-way analysis of variance, seeds as replicates). The peak LR's share of what it and the "
        f"tokens explain as main effects: {', '.join(told)} (jackknife over seeds); it depends on the ranges of the grid."
    )


def _interval(share: pd.Series) -> str:
    if not np.isfinite(share["low"]):
        return f"{share['share']:.2f} (no interval)"
    return f"{share['share']:.2f} [{share['low']:.2f}, {share['high']:.2f}]"


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Ours by peak LR at the end of the longest runs, with the paper's LR of the same rank beside it.

    Losses and ΔCE in nats per token, errors in per cent; means over seeds with 95 % t intervals. The paper's numbers
    are read by eye off its figure and shown where both grids have as many LRs.
    """
    paper = read_yaml(paths.reference() / "paper.yaml")[NAME]
    ours = statistics.levels(longest(ends(table)), "peak_lr").rename(columns={"peak_lr": "peak LR"})
    beside = {
        "paper, peak LR of the same rank": paper["peak_lr"],
        "paper, full-precision loss [e]": paper["full_precision_loss"],
        "paper, 4-bit ΔCE [e]": paper["gap_4bit"],
        "paper, 3-bit loss [e]": paper["loss_3bit"],
    }
    return ours.assign(**{k: v if len(v) == len(ours) else None for k, v in beside.items()})


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, tables, metrics and judged claims."""
    table, training = read()
    fig = figure(table, training)
    style.save(fig, NAME, caption(table))
    ours, share = summary(table), variance(table)
    entries = judge(table, verdicts)
    numbers: dict[str, float | None] = {}
    for r in share.to_dict("records"):
        key = f"share of variance, {r['bits']} bit, {r['source']}"
        numbers |= {key: r["share"], f"{key}, low": r["low"], f"{key}, high": r["high"]}
    tables = {NAME: ours, f"{NAME}-two-way": two_way(table), f"{NAME}-variance": share}
    statistics.write(NAME, tables, numbers, entries)
    return fig, ours, entries
