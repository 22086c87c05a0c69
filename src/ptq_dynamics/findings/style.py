"""One look for all figures: paper-sized, colour-blind safe, saved as PNG and PDF that do not change from run to run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ..core import paths
from ..core.files import atomic_file, write_text
from ..evaluation.intervals import Estimate

TRUNK, RATE = "0.25", "0.62"  # greys: the stable trunk, the learning rate
WIDTH = 7.2  # inches, a text width


def use() -> None:
    """Set the style for all figures that follow."""
    sns.set_theme(
        context="paper",
        style="ticks",
        palette="colorblind",
        rc={
            "figure.dpi": 110,
            "savefig.dpi": 200,
            "font.size": 8.5,
            "axes.titlesize": 9,
            "axes.labelsize": 8.5,
            "legend.fontsize": 7.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "lines.linewidth": 1.4,
            "pdf.fonttype": 42,
            "figure.constrained_layout.use": True,
        },
    )


def band(ax: Axes, table: pd.DataFrame, y: str, **line: object) -> None:
    """Mean over seeds of ``y`` against tokens (millions), with the range over seeds as a band."""
    by = table.groupby("tokens")[y].agg(["mean", "min", "max"]).reset_index()
    x = by["tokens"] / 1e6
    (drawn,) = ax.plot(x, by["mean"], **line)
    ax.fill_between(x, by["min"], by["max"], color=drawn.get_color(), alpha=0.18, linewidth=0)


def trunk_and_cooldowns(ax: Axes, rows: pd.DataFrame, y: str) -> None:
    """``band`` of the trunk at constant LR and of each cooldown from its branch point on; ``cooldown_legend`` names them."""
    trunk, colours = rows[rows["member"] == "trunk"], _budgets(rows)
    band(ax, trunk, y, color=TRUNK, marker="o", markersize=2.5, zorder=3)
    for budget, colour in colours.items():
        branch = rows[(rows["member"] == "cooldown") & (rows["branch_tokens"] == budget)]
        path = pd.concat([trunk[trunk["tokens"] == budget], branch])
        band(ax, path, y, color=colour, marker="o", markersize=2.5, zorder=4)


def cooldown_legend(figure: Figure, rows: pd.DataFrame) -> None:
    """The legend of ``trunk_and_cooldowns`` and ``overlay_rate``, below the panels."""
    handles = [Line2D([], [], color=TRUNK, label="constant LR (trunk)")]
    handles += [
        Line2D([], [], color=c, label=f"cooldown from {b / 1e6:.1f}M") for b, c in _budgets(rows).items()
    ]
    handles.append(Line2D([], [], color=RATE, linestyle="--", linewidth=0.8, label="learning rate"))
    figure.legend(handles=handles, loc="outside lower center", ncol=4, frameon=False)


def _budgets(rows: pd.DataFrame) -> dict[int, tuple[float, ...]]:
    """Colours by the tokens at which a cooldown branches off."""
    budgets = sorted(rows.loc[rows["member"] == "cooldown", "branch_tokens"].unique())
    return dict(zip(budgets, gradient(len(budgets)), strict=True))


def gradient(n: int) -> list[tuple[float, ...]]:
    """Colours for ``n`` ascending values."""
    return [tuple(c) for c in plt.get_cmap("viridis")(np.linspace(0.0, 0.88, n))]


def letter(ax: Axes, i: int, title: str = "") -> None:
    """Panel letter number ``i`` and a title."""
    ax.set_title(f"({'abcdefghij'[i]})", loc="left", fontweight="bold")
    if title:
        ax.set_title(title)


def overlay_rate(
    ax: Axes, training: pd.DataFrame, label: bool, colours: Mapping[str, Any] | None = None, log: bool = False
) -> None:
    """Learning rate of each run (one seed of it) on a second axis, dashed, grey as in the paper or coloured by run.

    Args:
        label: whether the axis is labelled; else it is without numbers.
        colours: by name of run.
        log: for rates that span decades; a decay to zero then leaves the panel below.
    """
    twin = ax.twinx()
    one = training[training["seed"] == training["seed"].min()]
    for name, run in one.groupby("run"):
        colour = colours[name] if colours else RATE
        twin.plot(
            run["tokens"] / 1e6, run["lr"], color=colour, linewidth=0.7, linestyle="--", alpha=0.7, zorder=0
        )
    if log:
        twin.set_yscale("log")
        plain_log(twin.yaxis)
        # the lower half is left to the curves of the panel
        twin.set_ylim(one.groupby("run")["lr"].max().min() / 8, one["lr"].max() * 1.5)
    else:
        twin.set_ylim(0, None)
    twin.spines["right"].set_visible(True)
    twin.spines["right"].set_color(RATE)
    twin.tick_params(axis="y", which="both", colors=RATE)
    if label:
        twin.set_ylabel("learning rate", color="0.45")
    else:
        twin.tick_params(axis="y", which="both", labelright=False)
    ax.set_zorder(twin.get_zorder() + 1)
    ax.patch.set_visible(False)


def loss_plane(ax: Axes, rows: pd.DataFrame, by: str, colours: Mapping[float, Any]) -> None:
    """Full-precision loss against quantized loss: one point per run, coloured by ``by``, and the line x = y.

    The distance above the line is ΔCE.
    """
    low, high = rows["ce_fp"].min(), rows["ce_fp"].max()
    margin = 0.06 * (high - low) or 0.01
    span = [low - margin, high + margin]
    ax.plot(span, span, color=RATE, linewidth=0.8, zorder=1)
    ax.annotate(
        "x = y",
        (span[1], span[1]),
        color="0.45",
        fontsize=7,
        ha="right",
        va="center",
        xytext=(0, -17),
        textcoords="offset points",
    )
    for value, group in rows.groupby(by):
        ax.scatter(
            group["ce_fp"],
            group["ce"],
            color=[colours[value]],
            s=16,
            linewidths=0.4,
            edgecolors="white",
            zorder=3,
        )
    ax.set_xlim(*span)
    ax.set_xlabel("full-precision loss (nats/token)")


def plain_log(axis: Axis) -> None:
    """A logarithmic axis with ticks in plain numbers: at 1, 2 and 5, or evenly where what is drawn spans too little for
    these. Call it after drawing."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(
        MaxNLocator(5, steps=[1, 2, 5, 10]) if 0 < low and high < 4 * low else LogLocator(subs=(1, 2, 5))
    )
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def interval(ax: Axes, x: float, e: Estimate, **line: Any) -> None:
    """A mean with its interval as a vertical bar; without an interval (one seed) the mean alone."""
    bar = [[e.value - e.low], [e.high - e.value]] if np.isfinite(e.low) and np.isfinite(e.high) else None
    ax.errorbar(
        [x],
        [e.value],
        yerr=bar,
        **{"marker": "o", "markersize": 4, "linestyle": "none", "elinewidth": 1.0} | line,
    )


def save(figure: Figure, name: str, caption: str) -> Path:
    """Write ``reports/figures/<name>.png``, ``.pdf`` and, with the caption, ``.txt``; the PNG's path."""
    write_text(paths.figures() / f"{name}.txt", caption + "\n")
    for ending, meta in ((".pdf", {"CreationDate": None}), (".png", {"Software": None})):
        path = paths.figures() / f"{name}{ending}"
        with atomic_file(path) as tmp:
            figure.savefig(tmp, format=ending[1:], metadata=meta)
    plt.close(figure)
    return path
