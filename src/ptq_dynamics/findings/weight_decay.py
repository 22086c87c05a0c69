"""Weight decay (C8): does more of it give a model that is easier to quantize, and does it matter as much as the LR?"""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..evaluation.intervals import Estimate
from . import claims, peak_lr, statistics, style
from .statistics import ends, errors, longest

NAME = "weight_decay"
PRIMARY = 4  # bits of C8
BITS = (4, 3)
FACTORS = {"weight_decay": "weight decay", "peak_lr": "peak LR"}


def read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measurements of this study and of the peak-LR study, from the tables in git."""
    table, _ = statistics.read(NAME)
    return statistics.of_member(table, "wsd", NAME), peak_lr.read()[0]


def fitted(last: pd.DataFrame) -> list[float]:
    """The weight decays of C8's fit: full-precision loss similar to the best, and not 0, which has no logarithm."""
    return [v for v in statistics.similar(last, "weight_decay") if v > 0]


def decay_growth(rows: pd.DataFrame) -> dict[int, float]:
    """C8, per seed: growth of the error at the end of the run per tenfold weight decay, at similar loss."""
    last = longest(ends(rows))
    return statistics.growth_per_tenfold(last[last["weight_decay"].isin(fitted(last))], "weight_decay")


def further_from_one(a: float, b: float) -> bool | None:
    """Whether the factor ``a`` is further from 1 than ``b``, in ratio; None if one is not known."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return None
    return abs(math.log(a)) > abs(math.log(b))


def same_budget(rates: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """The LR runs that are as long as this study's runs; the longest where there are none."""
    same = rates[rates["run_tokens"] == table["run_tokens"].max()]
    return same if len(same) else longest(rates)


def judge(table: pd.DataFrame, rates: pd.DataFrame, verdicts: bool) -> list[dict[str, Any]]:
    """Ledger entry for C8; the other bit widths and quantizers as details."""
    rows = errors(table, PRIMARY)
    last = longest(ends(rows))
    values = decay_growth(rows)
    estimate = claims.geometric(values.values())
    by_rate = claims.geometric(peak_lr.lr_growth(errors(rates, PRIMARY)).values())
    details: dict[str, Any] = statistics.per_quantizer(
        table, ("gptq", PRIMARY), lambda t: claims.geometric(decay_growth(t).values())
    )
    details["per tenfold LR (C4)"] = claims.plain(by_rate)
    near = ends(same_budget(errors(rates, PRIMARY), table))
    near = near[near["peak_lr"].isin(statistics.similar(near, "peak_lr"))]
    among = statistics.growth_per_tenfold(near, "peak_lr")
    details["per tenfold LR, at similar loss and budget"] = claims.plain(claims.geometric(among.values()))
    details["weight decays fitted"] = fitted(last)
    details["weight decays left out"] = sorted({float(v) for v in last["weight_decay"]} - set(fitted(last)))
    details["errors of 0 or less, which have no logarithm"] = statistics.not_positive(last)
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    return [
        claims.entry(
            "C8", estimate, len(values), statistics.scale(table, f"GPTQ {PRIMARY} bit"), details,
            provided=further_from_one(by_rate.value, estimate.value), verdicts=verdicts,
        )
    ]  # fmt: skip


def change(last: pd.DataFrame, factor: str) -> pd.DataFrame:
    """Error relative to that at the value of ``factor`` with the best mean full-precision loss, paired by seed.

    Columns value, ratio (of the value to the best one; NaN where the best is 0), similar (whether the full-precision
    loss lies within ``SIMILAR`` nats of the best), change, low, high (geometric mean over seeds, 95 % t interval).
    """
    best = last.groupby(factor)["ce_fp"].mean().idxmin()
    wide = last.pivot(index="seed", columns=factor, values="relative_error")
    kept, rows = statistics.similar(last, factor), []
    for value in wide:
        e = claims.geometric(wide[value] / wide[best]) if value != best else Estimate(1.0, math.nan, math.nan)
        ratio = value / best if best > 0 else math.nan
        rows.append(
            {
                "value": value,
                "ratio": ratio,
                "similar": value in kept,
                "change": e.value,
                "low": e.low,
                "high": e.high,
            }
        )
    return pd.DataFrame(rows)


def figure(table: pd.DataFrame, rates: pd.DataFrame) -> Figure:
    """Columns: 4 and 3 bit. Rows: the plane of full-precision and quantized loss by weight decay; the error's change
    with weight decay beside that with the LR."""
    style.use()
    decays = sorted(table["weight_decay"].unique())
    colours = dict(zip(decays, style.gradient(len(decays)), strict=True))
    fig, axes = plt.subplots(2, 2, figsize=(style.WIDTH, 5.2))
    for col, bits in enumerate(BITS):
        last = longest(ends(errors(table, bits)))
        style.loss_plane(axes[0, col], last, "weight_decay", colours)
        axes[0, col].set_ylabel(f"{bits}-bit loss (nats/token)")
        for factor, rows in (
            ("weight_decay", last),
            ("peak_lr", ends(same_budget(errors(rates, bits), table))),
        ):
            _change(axes[1, col], change(rows, factor), factor)
        ax = axes[1, col]
        ax.axhline(1.0, color=style.RATE, linewidth=0.8, zorder=0)
        ax.set_xscale("log")
        style.plain_log(ax.xaxis)
        ax.set_xlabel("value over that with the best loss")
        ax.set_ylabel(f"{bits}-bit error over\nthat with the best loss")
    for i, ax in enumerate(axes.flat):
        style.letter(ax, i, f"GPTQ {BITS[i]} bit" if i < 2 else "")
    handles = [
        Line2D(
            [], [], color=colours[d], marker="o", linestyle="none", markersize=4, label=f"weight decay {d:g}"
        )
        for d in decays
    ]
    axes[0, 0].legend(handles=handles, frameon=False, loc="best")
    handles = [
        Line2D([], [], color=_colour(f), marker=_marker(f), markersize=4, label=f"{name} (c, d)")
        for f, name in FACTORS.items()
    ]
    handles.append(
        Line2D(
            [],
            [],
            color="0.3",
            marker="o",
            fillstyle="none",
            linestyle="none",
            markersize=4,
            label="hollow: loss not similar",
        )
    )
    fig.legend(handles=handles, loc="outside lower center", ncol=3, frameon=False)
    return fig


def _colour(factor: str) -> str:
    return plt.rcParams["axes.prop_cycle"].by_key()["color"][list(FACTORS).index(factor)]


def _marker(factor: str) -> str:
    return {"weight_decay": "o", "peak_lr": "s"}[factor]


def _change(ax: Axes, changes: pd.DataFrame, factor: str) -> None:
    drawn = changes[np.isfinite(changes["ratio"]) & (changes["ratio"] > 0) & np.isfinite(changes["change"])]
    ax.plot(drawn["ratio"], drawn["change"], color=_colour(factor), linewidth=0.8, alpha=0.6)
    for r in drawn.itertuples():
        style.interval(
            ax, r.ratio, Estimate(r.change, r.low, r.high), color=_colour(factor), marker=_marker(factor),
            fillstyle="full" if r.similar else "none",
        )  # fmt: skip


def caption(table: pd.DataFrame, rates: pd.DataFrame) -> str:
    """The figure's caption."""
    near = same_budget(rates, table)
    n, tokens = table["seed"].nunique(), table["run_tokens"].max() / 1e6
    zero = " (0 is not drawn: it has no logarithm)" if (table["weight_decay"] == 0).any() else ""
    return (
        f"Weight decay. WSD runs of {tokens:.1f}M tokens at a peak LR of {table['peak_lr'].iloc[0]:g}. (a, b) Quantized "
        "against full-precision loss at the end of the run, one point per seed: the height above the line is ΔCE. (c, d) "
        "Relative error CE(Ŵ)/CE(W) − 1 over that at the value with the best mean full-precision loss, by weight decay"
        f"{zero}, and beside it by peak LR (runs of {near['run_tokens'].max() / 1e6:.1f}M tokens at a weight decay of "
        f"{near['weight_decay'].iloc[0]:g}). Matching rule: only values whose mean full-precision loss lies within "
        f"{statistics.SIMILAR:g} nats of the best of their own sweep are compared (filled); the others are hollow. "
        + (
            f"Geometric means over {n} seeds, paired, with 95 % t intervals."
            if n > 1
            else "One seed, no intervals."
        )
    )


def summary(table: pd.DataFrame, rates: pd.DataFrame) -> pd.DataFrame:
    """By weight decay, and below by peak LR at the same budget: losses and ΔCE (nats/token), errors (per cent), with
    95 % t intervals over seeds; ``similar loss`` marks the values that are compared. The paper's numbers were not read.
    """
    parts = []
    for factor, name, rows in (
        ("weight_decay", "weight decay", longest(ends(table))),
        ("peak_lr", "peak LR", ends(same_budget(rates, table))),
    ):
        levels = statistics.levels(rows, factor).rename(columns={factor: "value"})
        kept = statistics.similar(errors(rows, PRIMARY), factor)
        parts.append(levels.assign(factor=name, **{"similar loss": levels["value"].isin(kept)}))
    found = pd.concat(parts, ignore_index=True)
    first = ["factor", "value", "similar loss"]
    return found[[*first, *(c for c in found if c not in first)]]


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, table, metrics and the judged claim."""
    table, rates = read()
    fig = figure(table, rates)
    style.save(fig, NAME, caption(table, rates))
    ours = summary(table, rates)
    entries = judge(table, rates, verdicts)
    numbers = {
        k: v["value"] for k, v in entries[0]["details"].items() if isinstance(v, dict) and "value" in v
    }
    statistics.write(NAME, {NAME: ours}, numbers, entries)
    return fig, ours, entries
