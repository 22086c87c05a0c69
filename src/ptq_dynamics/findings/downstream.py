"""Downstream tasks: is more accuracy lost to quantization after the decay of the LR than before it?

No claim is judged. A task is at chance, and says nothing, unless the 95 % interval of the accuracy before quantization lies
above guessing at every checkpoint; else the loss differs where the interval over seeds, paired, of its change over the decay
leaves 0 out.
"""

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
from . import claims, statistics, style

NAME = "downstream"
STABLE, DECAYED = "constant LR", "after the decay"
AT_CHANCE, MORE, LESS, SAME, OPEN = (
    "at chance: no verdict", "more is lost after the decay", "less is lost after the decay", "no change shown", "one seed",
)  # fmt: skip


def read() -> pd.DataFrame:
    """Accuracies with the place on the schedule in the column ``place``."""
    table = statistics.table(f"measurements-{NAME}", NAME)
    return table.assign(place=np.where(table["branch_tokens"] > 0, DECAYED, STABLE))


def at_chance(table: pd.DataFrame) -> set[str]:
    """Tasks that the unquantized model does not do above guessing at some checkpoint."""
    base = table[table["method"] == "none"]
    return set(base.loc[base["at_chance"], "task"])


def lost(table: pd.DataFrame, task: str, bits: int, place: str) -> dict[int, float]:
    """Per seed: degradation (Acc − Acc_q) / (1 − Acc), mean over the checkpoints there."""
    rows = table[(table["task"] == task) & (table["bits"] == bits) & (table["place"] == place)]
    return {int(s): float(v) for s, v in rows.groupby("seed")["degradation"].mean().items()}


def widths(table: pd.DataFrame) -> list[int]:
    """Bits, most first."""
    return sorted((int(b) for b in table["bits"].dropna().unique()), reverse=True)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By task and bits: accuracy, degradation before and after the decay and its change, with t intervals over seeds."""
    guessed, rows = at_chance(table), []
    for task, found in table.groupby("task", sort=False):
        base = found[found["method"] == "none"]
        for bits in widths(found):
            before, after = (lost(table, task, bits, p) for p in (STABLE, DECAYED))
            change = claims.mean(after[s] - before[s] for s in sorted(before.keys() & after.keys()))
            row: dict[str, Any] = {"task": task, "bits": bits, "seeds": base["seed"].nunique(), "n_shot": base["n_shot"].iloc[0]}  # fmt: skip
            row |= {"items": base["items"].iloc[0], "chance": base["chance"].iloc[0]}
            for place in (STABLE, DECAYED):
                row[f"accuracy, {place}"] = base.loc[base["place"] == place, "acc"].mean()
            row |= statistics.columns(f"degradation, {STABLE}", claims.mean(before.values()))
            row |= statistics.columns(f"degradation, {DECAYED}", claims.mean(after.values()))
            row |= statistics.columns("change", change)
            rows.append(row | {"says": AT_CHANCE if task in guessed else _says(change)})
    return pd.DataFrame(rows)


def _says(change: Estimate) -> str:
    if math.isnan(change.low):
        return OPEN
    return MORE if change.low > 0 else LESS if change.high < 0 else SAME


def figure(table: pd.DataFrame) -> Figure:
    """By task: (a) accuracy before quantization, (b, …) degradation at each width before and after the decay."""
    style.use()
    found, guessed = summary(table), at_chance(table)
    names, bits = list(dict.fromkeys(found["task"])), widths(table)
    height = 1.2 + 0.34 * len(names)
    fig, axes = plt.subplots(1, 1 + len(bits), figsize=(style.WIDTH, height), sharey=True)
    colours = dict(zip((STABLE, DECAYED), plt.rcParams["axes.prop_cycle"].by_key()["color"][:2], strict=True))
    for y, task in enumerate(names):
        rows = found[found["task"] == task]
        axes[0].plot([rows["chance"].iloc[0]] * 2, [y - 0.3, y + 0.3], color="0.3", linewidth=1.0)
        for shift, (place, colour) in zip((-0.13, 0.13), colours.items(), strict=True):
            look = {"color": style.RATE if task in guessed else colour}
            look["fillstyle"] = "none" if place == STABLE else "full"
            seeds = table[
                (table["task"] == task) & (table["place"] == place) & (table["method"] == "none")
            ].groupby("seed")["acc"]
            _bar(axes[0], y + shift, claims.mean(seeds.mean()), look)
            for ax, b in zip(axes[1:], bits, strict=True):
                _bar(ax, y + shift, claims.mean(lost(table, task, b, place).values()), look)
    axes[0].set_yticks(range(len(names)), [n.replace("_", " ") for n in names])
    axes[0].invert_yaxis()
    axes[0].set_xlabel("accuracy")
    for ax in axes[1:]:
        ax.axvline(0.0, color=style.RATE, linewidth=0.8, zorder=0)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("(Acc − Acc_q) / (1 − Acc)")
    for i, (ax, title) in enumerate(zip(axes, ("full precision", *(f"{b} bit" for b in bits)), strict=True)):
        style.letter(ax, i, title)
    handles = [
        Line2D([], [], color=c, marker="o", linestyle="none", markersize=4,
               fillstyle="none" if p == STABLE else "full", label=p)
        for p, c in colours.items()
    ]  # fmt: skip
    handles.append(
        Line2D([], [], color=style.RATE, marker="o", linestyle="none", markersize=4, label="at chance")
    )
    handles.append(Line2D([], [], color="0.3", marker="|", linestyle="none", markersize=8, label="guessing"))
    fig.legend(handles=handles, loc="outside lower center", ncol=4, frameon=False)
    return fig


def _bar(ax: Axes, y: float, e: Estimate, look: dict[str, Any]) -> None:
    bar = [[e.value - e.low], [e.high - e.value]] if math.isfinite(e.low) else None
    ax.errorbar([e.value], [y], xerr=bar, marker="o", markersize=4, elinewidth=1.0, **look)


def caption(table: pd.DataFrame) -> str:
    """The figure's caption."""
    base, n = table[table["method"] == "none"], table["seed"].nunique()
    asked = base.drop_duplicates("task")
    guessed = sorted(at_chance(table))
    items = ", ".join(f"{r.items} items of {r.task}" + (f" ({r.n_shot}-shot)" if r.n_shot else "") for r in asked.itertuples())  # fmt: skip
    return (
        f"Downstream tasks through lm-eval: {items}. (a) Accuracy before quantization; (b, c) share of the accuracy still to "
        "be had that quantization takes away, (Acc − Acc_q)/(1 − Acc), under "
        + ", ".join(f"{m.upper()} at {b} bit" for m, b in statistics.quantizers(table))
        + ", at the branch point at constant LR (hollow) and at the end of the cooldown that begins there (filled). "
        + (f"Means over {n} seeds with 95 % t intervals. " if n > 1 else "One seed, no intervals. ")
        + f"Beginning-of-sequence token: {', '.join(sorted(base['bos'].unique()))}. "
        + (f"Grey: at chance before quantization at some checkpoint, so nothing can be said ({', '.join(guessed)})." if guessed else "No task is at chance.")
    )  # fmt: skip


def report() -> tuple[Figure, pd.DataFrame]:
    """Everything this finding writes: figure, table and metrics. It judges no claim."""
    table = read()
    fig = figure(table)
    style.save(fig, NAME, caption(table))
    ours = summary(table)
    numbers = {
        f"change of the degradation, {r['task']} {r['bits']} bit": r["change"]
        for r in ours.to_dict("records")
        if r["says"] != AT_CHANCE
    }
    statistics.write(NAME, {NAME: ours}, numbers, None)
    return fig, ours
