"""One look for all figures: paper-sized, colour-blind safe, saved as PNG and PDF that do not change from run to run."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..core import paths
from ..core.files import atomic_file

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


def overlay_rate(ax: Axes, training: pd.DataFrame, label: bool) -> None:
    """Learning rate of each run (one seed of it) on a second axis, dashed and grey as in the paper."""
    twin = ax.twinx()
    one = training[training["seed"] == training["seed"].min()]
    for _, run in one.groupby("run"):
        twin.plot(run["tokens"] / 1e6, run["lr"], color=RATE, linewidth=0.7, linestyle="--", zorder=0)
    twin.set_ylim(0, None)
    twin.spines["right"].set_visible(True)
    twin.spines["right"].set_color(RATE)
    twin.tick_params(axis="y", colors=RATE)
    if label:
        twin.set_ylabel("learning rate", color="0.45")
    else:
        twin.set_yticklabels([])
    ax.set_zorder(twin.get_zorder() + 1)
    ax.patch.set_visible(False)


def save(figure: Figure, name: str) -> Path:
    """Write ``reports/figures/<name>.png`` and ``.pdf``; the PNG's path."""
    for ending, meta in ((".pdf", {"CreationDate": None}), (".png", {"Software": None})):
        path = paths.figures() / f"{name}{ending}"
        with atomic_file(path) as tmp:
            figure.savefig(tmp, format=ending[1:], metadata=meta)
    plt.close(figure)
    return path
