"""Other quantizers (C15, P4): do AWQ, NF4 and RTN draw the curves that GPTQ draws, and does a rotation remove the rise?"""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from . import claims, statistics, style
from .statistics import branches, ends, log, longest

NAME = "quantizers"
BITS = (4, 3)
PRIMARY = 4
TRUNK, COOLDOWN, RATES = "trunk", "cooldown", "wsd"  # members: the token budgets' and the peak LRs'
REFERENCE = "GPTQ"
JUDGED = ("AWQ", "NF4")  # C15
ROTATED = "GPTQ, rotated"
ORDER = (REFERENCE, "RTN", *JUDGED, ROTATED)  # in figures and tables; others follow


def read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measurements with a column ``quantizer``, and what is missing for want of which extra."""
    table = statistics.table(f"measurements-{NAME}", NAME)
    return named(table), statistics.table(f"{NAME}-missing", NAME)


def named(table: pd.DataFrame) -> pd.DataFrame:
    """The quantized rows with the name that figures and tables give their quantizer."""
    rows = table[table["method"] != "none"]
    rotated = rows["rotation"].eq("hadamard")
    return rows.assign(quantizer=rows["method"].str.upper() + rotated.map({True: ", rotated", False: ""}))


def rise(rows: pd.DataFrame) -> dict[int, float]:
    """Per seed: error at the end of a cooldown over that at its branch point, geometric mean over the cooldowns that
    begin in the last half of the trunk (C2's statistic)."""
    found = branches(rows, ["relative_error"])
    found = found[found["end"] & found["late"]]
    ratio = pd.Series(log(found["relative_error"]) - log(found["relative_error, start"]), found.index)
    return {int(s): math.exp(g.mean(skipna=False)) for s, g in ratio.groupby(found["seed"])}


def lr_growth(rows: pd.DataFrame) -> dict[int, float]:
    """Per seed: growth of the error at the end of the longest WSD runs per tenfold peak LR (C4's statistic)."""
    return statistics.growth_per_tenfold(longest(ends(rows[rows["member"] == RATES])), "peak_lr")


def agreement(rows: pd.DataFrame, reference: pd.DataFrame) -> dict[int, float]:
    """Per seed: Spearman's rank correlation of two quantizers' errors over all checkpoints of both."""
    on = ["study", "run", "tokens", "seed"]
    both = rows.merge(reference[[*on, "relative_error"]], on=on, suffixes=("", ", reference"))
    return {
        int(s): float(stats.spearmanr(g["relative_error"], g["relative_error, reference"]).statistic)
        for s, g in both.groupby("seed")
    }


def of(table: pd.DataFrame, quantizer: str, bits: int) -> pd.DataFrame:
    """The rows of one quantizer."""
    return table[(table["quantizer"] == quantizer) & (table["bits"] == bits)]


def there(table: pd.DataFrame) -> list[tuple[str, int]]:
    """Which quantizers were measured, GPTQ first, more bits first."""
    found = {(q, int(b)) for q, b in zip(table["quantizer"], table["bits"], strict=True)}
    rank = {q: i for i, q in enumerate(ORDER)}
    return sorted(found, key=lambda f: (rank.get(f[0], len(rank)), f[0], -f[1]))


def judge(table: pd.DataFrame, verdicts: bool) -> list[dict[str, Any]]:
    """Ledger entries for C15 and P4. C15 is not judged while one of its quantizers is missing."""
    scale = statistics.scale(table, f"GPTQ against {' and '.join(JUDGED)}, {PRIMARY} bit")
    reference = of(table, REFERENCE, PRIMARY)
    absent = [q for q in JUDGED if of(table, q, PRIMARY).empty]
    found = {q: agreement(of(table, q, PRIMARY), reference) for q in JUDGED if q not in absent}
    seeds = sorted(set.intersection(*(set(f) for f in found.values()))) if not absent else []
    least = {s: min(f[s] for f in found.values()) for s in seeds}
    details: dict[str, Any] = {
        f"rank correlation, {q} {b} bit": claims.plain(claims.mean(agreement(of(table, q, b), of(table, REFERENCE, b)).values()))
        for q, b in there(table)
        if q != REFERENCE and len(of(table, REFERENCE, b))
    }  # fmt: skip
    for what, statistic in (("rise over the decay", rise), ("growth per tenfold LR", lr_growth)):
        details |= {
            f"{what}, {q} {b} bit": claims.plain(claims.geometric(statistic(of(table, q, b)).values()))
            for q, b in there(table)
        }
    details["not measured"] = absent
    details["per seed"] = {str(k): claims.number(v) for k, v in least.items()}
    c15 = claims.entry(
        "C15", claims.mean(least.values()), len(least), scale, details,
        provided=None if absent else all(same_direction(of(table, q, PRIMARY), reference) for q in JUDGED),
        verdicts=verdicts,
    )  # fmt: skip

    with_rotation, without = rise(of(table, ROTATED, PRIMARY)), rise(reference)
    plain = claims.geometric(without.values())
    p4 = claims.entry(
        "P4", claims.geometric(with_rotation.values()), len(with_rotation), statistics.scale(table, f"GPTQ {PRIMARY} bit"),
        {
            "without rotation": claims.plain(plain),
            "with over without": claims.plain(claims.geometric(with_rotation[s] / without[s] for s in with_rotation)),
            "3 bit": claims.plain(claims.geometric(rise(of(table, ROTATED, 3)).values())),
            "3 bit, without rotation": claims.plain(claims.geometric(rise(of(table, REFERENCE, 3)).values())),
            "per seed": {str(k): claims.number(v) for k, v in with_rotation.items()},
        },
        provided=None if math.isnan(plain.value) else plain.value >= 1.25, verdicts=verdicts,
    )  # fmt: skip
    return [c15, p4]


def same_direction(rows: pd.DataFrame, reference: pd.DataFrame) -> bool | None:
    """Whether rise and LR growth lie on the same side of 1 as the reference's, in their means; None if unknown."""
    pairs = [
        (claims.geometric(f(rows).values()).value, claims.geometric(f(reference).values()).value)
        for f in (rise, lr_growth)
    ]
    if not all(math.isfinite(v) for pair in pairs for v in pair):
        return None
    return all((a > 1) == (b > 1) for a, b in pairs)


def figure(table: pd.DataFrame) -> Figure:
    """Top: 4-bit error by quantizer before and after each cooldown, and by peak LR. Bottom: rise and LR growth, and rank
    agreement with GPTQ, 4 and 3 bit."""
    style.use()
    palette = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    names = list(dict.fromkeys([*ORDER, *(q for q, _ in there(table))]))
    colours = {q: palette[i % len(palette)] for i, q in enumerate(names)}
    fig, axes = plt.subplots(2, 2, figsize=(style.WIDTH, 5.4))
    for q, b in there(table):
        if b == PRIMARY:
            _budgets(axes[0, 0], of(table, q, b), colours[q])
            _rates(axes[0, 1], of(table, q, b), colours[q])
    for ax in axes[0]:
        ax.set_yscale("log")
        style.plain_log(ax.yaxis)
    axes[0, 0].set_xlabel("tokens (millions)")
    axes[0, 0].set_ylabel("4-bit relative error (%)")
    axes[0, 1].set_xscale("log")
    style.plain_log(axes[0, 1].xaxis)
    axes[0, 1].set_xlabel("peak learning rate")
    _points(axes[1, 0], table, rise, colours)
    axes[1, 0].axhline(1.0, color=style.RATE, linewidth=0.8, zorder=0)
    axes[1, 0].set_ylabel("error after the decay\nover that before")
    _agreement(axes[1, 1], table, colours)
    for i, (ax, title) in enumerate(
        zip(
            axes.flat,
            ("token budgets", "peak LR", "rise over the decay", "rank agreement with GPTQ"),
            strict=True,
        )
    ):
        style.letter(ax, i, title)
    names = dict.fromkeys(q for q, _ in there(table))
    handles = [Line2D([], [], color=colours[q], marker="o", markersize=4, label=q) for q in names]
    handles += [Line2D([], [], color="0.3", marker="o", linestyle="none", markersize=4, fillstyle=f, label=t)
                for f, t in (("full", "after the decay (a); 4 bit (c, d)"), ("none", "before it (a); 3 bit (c, d)"))]  # fmt: skip
    fig.legend(handles=handles, loc="outside lower center", ncol=4, frameon=False)
    return fig


def _mean(rows: pd.DataFrame, by: str) -> pd.Series:
    """Geometric mean over seeds of the error in per cent."""
    return np.exp(pd.Series(log(100 * rows["relative_error"]), rows.index).groupby(rows[by]).mean())


def _budgets(ax: Axes, rows: pd.DataFrame, colour: Any) -> None:
    for member, fill, line in ((TRUNK, "none", "--"), (COOLDOWN, "full", "-")):
        m = _mean(rows[rows["member"] == member], "tokens")
        ax.plot(
            m.index / 1e6,
            m,
            color=colour,
            marker="o",
            markersize=3.5,
            fillstyle=fill,
            linestyle=line,
            linewidth=0.9,
        )


def _rates(ax: Axes, rows: pd.DataFrame, colour: Any) -> None:
    m = _mean(longest(ends(rows[rows["member"] == RATES])), "peak_lr")
    ax.plot(m.index, m, color=colour, marker="o", markersize=3.5, linewidth=0.9)


def _points(ax: Axes, table: pd.DataFrame, statistic: Any, colours: dict[str, Any]) -> None:
    names = list(dict.fromkeys(q for q, _ in there(table)))
    for q, b in there(table):
        x = names.index(q) + (0.12 if b == 3 else -0.12)
        e = claims.geometric(statistic(of(table, q, b)).values())
        style.interval(ax, x, e, color=colours[q], fillstyle="full" if b == PRIMARY else "none")
    ax.set_xticks(range(len(names)), [n.replace(", ", ",\n") for n in names])
    ax.set_yscale("log")
    style.plain_log(ax.yaxis)


def _agreement(ax: Axes, table: pd.DataFrame, colours: dict[str, Any]) -> None:
    pairs = [(q, b) for q, b in there(table) if q != REFERENCE and len(of(table, REFERENCE, b))]
    names = list(dict.fromkeys(q for q, _ in pairs))
    for q, b in pairs:
        x = names.index(q) + (0.12 if b == 3 else -0.12)
        e = claims.mean(agreement(of(table, q, b), of(table, REFERENCE, b)).values())
        style.interval(ax, x, e, color=colours[q], fillstyle="full" if b == PRIMARY else "none")
    ax.axhline(0.7, color=style.RATE, linewidth=0.8, linestyle="--", zorder=0)
    ax.set_xticks(range(len(names)), [n.replace(", ", ",\n") for n in names])
    ax.set_ylabel("rank correlation\nwith GPTQ's errors")


def caption(table: pd.DataFrame, missing: pd.DataFrame) -> str:
    """The figure's caption."""
    n = table["seed"].nunique()
    text = (
        "Other quantizers, group size 64 throughout (NF4: blocks of 64). (a) 4-bit relative error CE(Ŵ)/CE(W) − 1 at the "
        "branch points of the trunk at constant LR (hollow) and at the ends of the cooldowns (filled), (b) at the ends of "
        "the longest WSD runs by peak LR: geometric means over seeds. (c) Error at the end of a cooldown over that at its "
        "branch point, cooldowns that begin in the last half of the trunk. (d) Spearman's rank correlation with GPTQ's "
        "errors over all these checkpoints, at the same bits; dashed: C15's bound. GPTQ, rotated: after a Hadamard rotation "
        "of every layer's inputs. " + (f"Means over {n} seeds with 95 % t intervals." if n > 1 else "One seed, no intervals.")
    )  # fmt: skip
    if len(missing):
        text += (
            " Not measured: " + "; ".join(f"{m.quantizer} ({m.reason})" for m in missing.itertuples()) + "."
        )
    return text


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By quantizer: rise over the decay, growth per tenfold LR, rank correlation with GPTQ, with 95 % t intervals."""
    rows = []
    for q, b in there(table):
        row: dict[str, Any] = {"quantizer": q, "bits": b, "seeds": table["seed"].nunique()}
        row |= statistics.columns("rise over the decay", claims.geometric(rise(of(table, q, b)).values()))
        row |= statistics.columns(
            "growth per tenfold LR", claims.geometric(lr_growth(of(table, q, b)).values())
        )
        if q != REFERENCE and len(of(table, REFERENCE, b)):
            same = agreement(of(table, q, b), of(table, REFERENCE, b))
            row |= statistics.columns("rank correlation with GPTQ", claims.mean(same.values()))
        rows.append(row)
    return pd.DataFrame(rows)


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, table, metrics and the judged claims."""
    table, missing = read()
    fig = figure(table)
    style.save(fig, NAME, caption(table, missing))
    ours = summary(table)
    entries = judge(table, verdicts)
    numbers = {
        f"rise, {r['quantizer']} {r['bits']} bit": r["rise over the decay"] for r in ours.to_dict("records")
    }
    statistics.write(NAME, {NAME: ours}, numbers, entries)
    return fig, ours, entries
