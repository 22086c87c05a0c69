"""Expansion (P1): how much of the quantization error do gradient and Hessian explain, and what makes it rise in the decay?"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..evaluation.intervals import Estimate
from . import claims, statistics, style
from .statistics import branches, ends, errors, growth, log, longest

NAME = "expansion"
ALONG, RATES = "token_budgets", "peak_lr"  # the studies whose cooldowns, and whose peak LRs, are read
PRIMARY = 4  # bits
METHODS = ("gptq", "rtn")

# What the measured rise in loss is a product of: see ``factors``.
FACTORS = ("relative size", "relative curvature", "rest")
PARTS = ("weights", "curvature")  # the relative curvature is their product


def read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Expansions along the trunk and its cooldowns, and by peak LR, with the ΔCE that was measured (``measured``; NaN
    where that quantizer was not).

    Raises:
        UserError: a table is missing.
    """
    found = []
    for study in (ALONG, RATES):
        table = statistics.table(f"expansion-{study}", "curvature")
        table = table[table["method"].isin(METHODS)]
        keys = ["run", "tokens", "method", "bits", "group_size"]
        measured = statistics.read(study)[0][[*keys, "delta_ce"]].rename(columns={"delta_ce": "measured"})
        table = table.merge(measured, on=keys, how="left")
        found.append(table.assign(predicted=table["linear"] + table["quadratic"]))
    return found[0], found[1]


# --- how much it explains ---


def bound() -> float:
    """What P1 allows to be left unexplained."""
    return claims.rules()["P1"].high


def unexplained(rows: pd.DataFrame, column: str = "predicted") -> dict[int, float]:
    """P1, per seed: Σ|predicted − true| / Σ|true| over the checkpoints."""
    out = {}
    for seed, g in rows.groupby("seed"):
        total = float(g["true"].abs().sum())
        out[int(seed)] = float((g[column] - g["true"]).abs().sum()) / total if total else float("nan")
    return out


def ratio(rows: pd.DataFrame, column: str = "predicted") -> dict[int, float]:
    """Per seed: Σ predicted / Σ true over the checkpoints; above 1 the expansion predicts too much."""
    sums = rows.groupby("seed")[[column, "true"]].sum()
    return {int(s): float(v) for s, v in (sums[column] / sums["true"].where(lambda x: x != 0)).items()}


# --- what makes the error rise ---


def factors(rows: pd.DataFrame) -> pd.DataFrame:
    """``rows`` with ln of the measured ΔCE ("total"), of its three factors, and of the two parts of the second.

    ΔCE = ‖δ‖²/‖W‖² · ‖W‖² ½δᵀHδ/‖δ‖² · rest: relative size of the step, curvature along it relative to the weights' scale,
    and what this leading term leaves (gradient, higher orders, the difference of texts and of precision). ΔCE is that of
    the measurements, on many tokens: on the few that the expansion is taken on, the gradient's noise moves it. The relative
    curvature is ‖W‖² ("weights") times ½δᵀHδ/‖δ‖² ("curvature"): a network with normalisation can grow its weights
    without changing what it computes, and the plain curvature then falls by as much. NaN for what has no logarithm.
    """
    weights, curvature = log(rows["weight_norm2"]), log(rows["quadratic"]) - log(rows["norm2"])
    logs = {
        "total": log(rows["measured"]),
        "relative size": log(rows["norm2"]) - weights,
        "relative curvature": weights + curvature,
        "rest": log(rows["measured"]) - log(rows["quadratic"]),
        "weights": weights,
        "curvature": curvature,
    }
    return rows.assign(**logs)


def decay_rises(rows: pd.DataFrame) -> pd.DataFrame:
    """Change of the logarithms of ``factors`` from the branch point to the end of each cooldown.

    Args:
        rows: of one quantizer.
    """
    columns = ["total", *FACTORS, *PARTS]
    last = branches(factors(rows), columns).query("end")
    change = pd.DataFrame({c: last[c] - last[f"{c}, start"] for c in columns})
    return pd.concat([last[["seed", "branch_tokens", "late"]], change], axis=1)


def shares(rows: pd.DataFrame) -> dict[str, dict[int, float]]:
    """Per factor and seed: its part of the rise of ln ΔCE over the cooldowns that begin in the last half of the trunk.

    The parts of the three factors sum to 1 (those of the relative curvature's two parts to its own); one is negative
    where that factor falls while the error rises.
    """
    late = decay_rises(rows).query("late")
    sums = late.groupby("seed")[["total", *FACTORS, *PARTS]].agg(lambda x: x.sum(skipna=False))
    total = sums["total"].where(sums["total"] != 0)
    return {f: {int(s): float(v) for s, v in (sums[f] / total).items()} for f in (*FACTORS, *PARTS)}


def rate_slopes(rows: pd.DataFrame) -> dict[str, dict[int, float]]:
    """Per factor (and for ΔCE, "total") and seed: growth per tenfold peak LR at the end of the longest runs.

    The growths of the three factors multiply to that of ΔCE.
    """
    table = factors(longest(ends(rows)))
    return {
        f: {int(s): growth(np.log10(g["peak_lr"]), np.exp(g[f])) for s, g in table.groupby("seed")}
        for f in ("total", *FACTORS, *PARTS)
    }


# --- verdict ---


def judge(table: pd.DataFrame, by_rate: pd.DataFrame, verdicts: bool) -> list[dict[str, Any]]:
    """Ledger entry for P1; other quantizers, the leading term alone and the split of the rise as details."""
    rows = errors(table, PRIMARY)
    values = unexplained(rows)
    details: dict[str, Any] = statistics.per_quantizer(
        table, ("gptq", PRIMARY), lambda r: claims.mean(unexplained(r).values())
    )
    details["½δᵀHδ alone"] = claims.plain(claims.mean(unexplained(rows, "quadratic").values()))
    details["predicted over true, sums"] = claims.plain(claims.mean(ratio(rows).values()))
    for method in METHODS:
        told = [b for m, b in statistics.quantizers(table) if m == method]
        held = [
            b for b in told if claims.mean(unexplained(errors(table, b, method)).values()).value <= bound()
        ]
        details[f"bit widths at which at most {bound():g} is left, {method.upper()}"] = sorted(held)
    for method, bits in [q for q in _measured(table) if q[1] in (3, 4)]:
        for factor, by_seed in shares(errors(table, bits, method)).items():
            name = f"share of the rise over the late cooldowns, {bits}-bit {method.upper()}: {factor}"
            details[name] = claims.plain(claims.mean(by_seed.values()))
    for factor, by_seed in rate_slopes(errors(by_rate, PRIMARY)).items():
        details[f"growth per tenfold peak LR, {PRIMARY}-bit GPTQ: {factor}"] = claims.plain(
            claims.geometric(by_seed.values())
        )
    details["checkpoints per seed"] = int(rows.groupby("seed").size().min())
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    size = statistics.scale(table, f"GPTQ {PRIMARY} bit")
    return [claims.entry("P1", claims.mean(values.values()), len(values), size, details, verdicts=verdicts)]


def _measured(table: pd.DataFrame) -> list[tuple[str, int]]:
    """The quantizers of the measurements."""
    return statistics.quantizers(table[table["measured"].notna()])


# --- tables ---


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By quantizer: what expansion and leading term leave unexplained, and predicted over true (sums over checkpoints).

    Means over seeds with 95 % t intervals.
    """
    rows = []
    for method, bits in statistics.quantizers(table):
        of = errors(table, bits, method)
        row: dict[str, Any] = {"method": method, "bits": bits, "seeds": of["seed"].nunique()}
        row |= statistics.columns("true ΔCE", claims.mean(of.groupby("seed")["true"].mean()))
        row |= statistics.columns("unexplained", claims.mean(unexplained(of).values()))
        row |= statistics.columns("unexplained by ½δᵀHδ", claims.mean(unexplained(of, "quadratic").values()))
        row |= statistics.columns("predicted / true", claims.mean(ratio(of).values()))
        rows.append(row)
    return pd.DataFrame(rows)


def split(table: pd.DataFrame, by_rate: pd.DataFrame) -> pd.DataFrame:
    """By measured quantizer and factor: its share of the rise through the late cooldowns, its growth there (geometric mean) and
    its growth per tenfold peak LR; 95 % t intervals over seeds."""
    rows = []
    for method, bits in _measured(table):
        of = errors(table, bits, method)
        late, parts = decay_rises(of).query("late"), shares(of)
        slopes = rate_slopes(errors(by_rate, bits, method)) if len(errors(by_rate, bits, method)) else {}
        for factor in ("total", *FACTORS, *PARTS):
            seeds = np.exp(late.groupby("seed")[factor].agg(lambda x: x.mean(skipna=False)))
            row: dict[str, Any] = {"method": method, "bits": bits, "factor": factor, "seeds": len(seeds)}
            row |= statistics.columns("growth over the decay", claims.geometric(seeds))
            share = claims.mean(parts[factor].values()) if factor in parts else Estimate(1.0, np.nan, np.nan)
            row |= statistics.columns("share", share)
            row |= statistics.columns(
                "growth per tenfold peak LR", claims.geometric(slopes.get(factor, {}).values())
            )
            rows.append(row)
    return pd.DataFrame(rows)


# --- figure ---


def figure(table: pd.DataFrame) -> Figure:
    """Predicted against true rise; what is left by bits; size of the step and curvature along it, against tokens; the
    split of the rise."""
    style.use()
    fig, axes = plt.subplots(3, 2, figsize=(style.WIDTH, 7.6))
    bits = sorted(table["bits"].unique())
    colours = dict(zip(bits, style.gradient(len(bits)), strict=True))
    _plane(axes[0, 0], table, colours)
    _left(axes[0, 1], table)
    _split(axes[1, 0], table)
    _ratios(axes[1, 1], table, colours)
    rows = factors(errors(table, PRIMARY)).assign(
        size=lambda t: 100 * np.sqrt(t["norm2"] / t["weight_norm2"]), sharpness=lambda t: t["rayleigh"]
    )
    for ax, (label, y) in zip(
        axes[2],
        ((f"‖δ‖/‖W‖, GPTQ {PRIMARY} bit (%)", "size"), ("curvature along δ", "sharpness")),
        strict=True,
    ):
        _along(ax, rows, y)
        ax.set_ylabel(label)
    for i, ax in enumerate(axes.flat):
        style.letter(ax, i)
    handles = [
        Line2D([], [], color=c, marker="o", linestyle="none", markersize=4, label=f"{b:g} bit")
        for b, c in colours.items()
    ]
    handles += [
        Line2D([], [], color="0.35", marker=m, linestyle="none", markersize=4, label=n)
        for m, n in (("o", "GPTQ"), ("^", "RTN"))
    ]
    fig.legend(handles=handles, loc="outside upper center", ncol=len(handles), frameon=False)
    return fig


MARKS = {"gptq": "o", "rtn": "^"}


def _plane(ax: Axes, table: pd.DataFrame, colours: dict[float, Any]) -> None:
    both = table[(table["true"] > 0) & (table["predicted"] > 0)]
    if len(both):
        span = [both[["true", "predicted"]].min(axis=None), both[["true", "predicted"]].max(axis=None)]
        ax.plot(span, span, color=style.RATE, linewidth=0.8, zorder=1)
        ax.set_xscale("log")
        ax.set_yscale("log")
    for (method, bits), g in both.groupby(["method", "bits"]):
        ax.scatter(
            g["true"],
            g["predicted"],
            s=9,
            marker=MARKS[method],
            color=[colours[bits]],
            linewidths=0.2,
            edgecolors="white",
            zorder=3,
        )
    ax.set_xlabel("true rise in loss (nats/token)")
    ax.set_ylabel("gᵀδ + ½δᵀHδ (nats/token)")


def _left(ax: Axes, table: pd.DataFrame) -> None:
    for method, colour in zip(METHODS, sns.color_palette("colorblind"), strict=False):
        for column, line, label in (("predicted", "-", "gᵀδ + ½δᵀHδ"), ("quadratic", ":", "½δᵀHδ alone")):
            told = [
                (b, 100 * claims.mean(unexplained(errors(table, b, m), column).values()).value)
                for m, b in statistics.quantizers(table)
                if m == method
            ]
            if told:
                x, y = zip(*told, strict=True)
                ax.plot(
                    x,
                    y,
                    line,
                    color=colour,
                    marker=MARKS[method],
                    markersize=3.5,
                    label=f"{method.upper()}, {label}",
                )
    ax.axhline(100 * bound(), color=style.RATE, linewidth=0.8)
    ax.set_yscale("log")
    style.plain_log(ax.yaxis)
    ax.set_xticks(sorted(table["bits"].unique()))
    ax.set_xlabel("bits")
    ax.set_ylabel("left unexplained (%)")
    ax.legend(frameon=False, loc="best")


def _split(ax: Axes, table: pd.DataFrame) -> None:
    shown = [(m, b) for m, b in _measured(table) if b in (3, 4)]
    colours = sns.color_palette("colorblind")
    for k, factor in enumerate(FACTORS):
        for i, (method, bits) in enumerate(shown):
            e = claims.mean(shares(errors(table, bits, method))[factor].values())
            x = i + 0.26 * (k - 1)
            ax.bar(x, 100 * e.value, 0.24, color=colours[k], label=factor if i == 0 else None)
            style.interval(
                ax, x, Estimate(100 * e.value, 100 * e.low, 100 * e.high), color="0.2", markersize=0
            )
    ax.axhline(0, color="0.3", linewidth=0.7)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.35 * (high - low))  # room for the legend
    ax.set_xticks(range(len(shown)), [f"{m.upper()}\n{b} bit" for m, b in shown])
    ax.set_ylabel("share of the rise\nof ln ΔCE in the decay (%)")
    ax.legend(frameon=False, loc="upper left", ncol=3, columnspacing=1.0, handlelength=1.2)


def _ratios(ax: Axes, table: pd.DataFrame, colours: dict[float, Any]) -> None:
    for (method, bits), g in table[table["true"] > 0].groupby(["method", "bits"]):
        ax.scatter(
            np.sqrt(g["norm2"] / g["weight_norm2"]) * 100,
            g["predicted"] / g["true"],
            s=8,
            marker=MARKS[method],
            color=[colours[bits]],
            linewidths=0.2,
            edgecolors="white",
        )
    ax.axhline(1.0, color=style.RATE, linewidth=0.8, zorder=0)
    ax.set_xscale("log")
    style.plain_log(ax.xaxis)
    ax.set_xlabel("‖δ‖/‖W‖ (%)")
    ax.set_ylabel("predicted over true")


def _along(ax: Axes, rows: pd.DataFrame, y: str) -> None:
    trunk, branches = (rows[rows["member"] == m] for m in ("trunk", "cooldown"))
    style.band(ax, trunk, y, color=style.TRUNK, marker="o", markersize=2.5, zorder=3)
    for budget, branch in branches.groupby("branch_tokens"):
        path = pd.concat([trunk[trunk["tokens"] == budget], branch])
        style.band(
            ax,
            path,
            y,
            color=sns.color_palette("colorblind")[3],
            linewidth=0.9,
            marker="v",
            markersize=3,
            zorder=4,
        )
    ax.set_ylim(min(0, 1.05 * rows[y].min()), None)
    ax.set_xlabel("training tokens (millions)")


def caption(table: pd.DataFrame) -> str:
    """The figure's caption."""
    n = table["seed"].nunique()
    hidden = int(((table["true"] <= 0) | (table["predicted"] <= 0)).sum())
    return (
        "How much the local geometry explains: at every measured checkpoint of trunk and cooldowns, the second-order "
        "expansion gᵀδ + ½δᵀHδ of the loss along the quantization step δ against the true rise ΔCE on the same tokens. (a) One "
        f"point per checkpoint, seed and quantizer ({hidden} values of 0 or less are not shown). (b) Sum of the absolute "
        f"differences over the sum of the true rises, mean over {n} seed{'s' if n > 1 else ''}; line: P1's bound. (c) Parts of the rise of the measured "
        "ln ΔCE from branch point to end of the cooldowns that begin in the last half of the trunk: relative size of the "
        "step ‖δ‖²/‖W‖², curvature along it relative to the weights' scale ‖W‖² ½δᵀHδ/‖δ‖², and what this leading term "
        "leaves (the measured ΔCE is on more text, its products in the precision of the measurements); bars: 95 % intervals over seeds. (d) Predicted over true against the relative size of the step. (e, f) That size, and the curvature along "
        "the step (Rayleigh quotient, nats per squared weight unit), along the trunk at constant LR (grey) and its cooldowns "
        f"(red); bands: {f'the range over {n} seeds' if n > 1 else 'not shown (one seed)'}."
    )


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, tables, metrics and judged claims."""
    table, by_rate = read()
    fig, ours, entries = figure(table), summary(table), judge(table, by_rate, verdicts)
    style.save(fig, NAME, caption(table))
    numbers = {
        f"{r['method']} {r['bits']:g} bit, unexplained": r["unexplained"] for r in ours.to_dict("records")
    }
    statistics.write(NAME, {NAME: ours, f"{NAME}-split": split(table, by_rate)}, numbers, entries)
    return fig, ours, entries
