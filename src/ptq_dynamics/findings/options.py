"""Options of GPTQ and of its calibration, one changed at a time: which move the curves, which only their level?"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..evaluation.intervals import Estimate
from . import claims, statistics, style
from .quantizers import rise
from .statistics import log

NAME = "options"
BASE = "base"


def read() -> pd.DataFrame:
    """Quantized rows with what was changed in the column ``variant``."""
    table = statistics.table(f"measurements-{NAME}", NAME)
    return table[table["method"] != "none"]


def level(rows: pd.DataFrame, base: pd.DataFrame) -> dict[int, float]:
    """Per seed: error over that with nothing changed, geometric mean over the same checkpoints."""
    on = ["run", "tokens", "seed"]
    both = rows.merge(base[[*on, "relative_error"]], on=on, suffixes=("", ", base"))
    ratio = pd.Series(log(both["relative_error"]) - log(both["relative_error, base"]), both.index)
    return {int(s): float(np.exp(v)) for s, v in ratio.groupby(both["seed"]).mean().items()}


def change_of_rise(rows: pd.DataFrame, base: pd.DataFrame) -> dict[int, float]:
    """Per seed: rise of the error over the decay, over that with nothing changed."""
    ours, theirs = rise(rows), rise(base)
    return {s: ours[s] / theirs[s] for s in ours}


def moves(e: Estimate) -> bool | None:
    """Whether the interval of a ratio leaves 1 out; None without an interval."""
    return None if not np.isfinite([e.low, e.high]).all() else not e.low <= 1 <= e.high


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By what was changed: level and rise over the decay relative to nothing changed, paired by seed, with 95 % t intervals,
    and whether each interval leaves 1 out."""
    base, rows = table[table["variant"] == BASE], []
    for variant in dict.fromkeys(table["variant"]):
        found = table[table["variant"] == variant]
        row: dict[str, Any] = {"variant": variant, "seeds": found["seed"].nunique()}
        row["error (%)"] = 100 * claims.geometric(found["relative_error"]).value
        row |= statistics.columns("rise over the decay", claims.geometric(rise(found).values()))
        if variant != BASE:
            up, more = (
                claims.geometric(level(found, base).values()),
                claims.geometric(change_of_rise(found, base).values()),
            )
            row |= statistics.columns("level over base", up) | {"moves the level": moves(up)}
            row |= statistics.columns("rise over base", more) | {"moves the rise": moves(more)}
        rows.append(row)
    return pd.DataFrame(rows)


def figure(table: pd.DataFrame) -> Figure:
    """By what was changed: (a) the error's level, (b) its rise over the decay, each over that with nothing changed."""
    style.use()
    found = summary(table)
    changed = found[found["variant"] != BASE].iloc[::-1].reset_index(drop=True)
    fig, axes = plt.subplots(1, 2, figsize=(style.WIDTH, 0.9 + 0.24 * len(changed)), sharey=True)
    for ax, column in zip(axes, ("level over base", "rise over base"), strict=True):
        _dots(ax, changed, column)
    axes[0].set_yticks(range(len(changed)), changed["variant"])
    axes[0].set_xlabel("error over that of the base")
    axes[1].set_xlabel("rise over the decay over that of the base")
    for i, (ax, title) in enumerate(zip(axes, ("level", "rise over the decay"), strict=True)):
        style.letter(ax, i, title)
    return fig


def _dots(ax: Axes, changed: pd.DataFrame, column: str) -> None:
    ax.axvline(1.0, color=style.RATE, linewidth=0.8, zorder=0)
    for y, r in changed.iterrows():
        e = Estimate(r[column], r[f"{column}, low"], r[f"{column}, high"])
        bar = [[e.value - e.low], [e.high - e.value]] if np.isfinite([e.low, e.high]).all() else None
        fill = "full" if moves(e) else "none"
        ax.errorbar(
            [e.value],
            [y],
            xerr=bar,
            color=style.TRUNK,
            marker="o",
            markersize=4,
            elinewidth=1.0,
            fillstyle=fill,
        )
    ax.set_xscale("log")
    style.plain_log(ax.xaxis)


def caption(table: pd.DataFrame) -> str:
    """The figure's caption."""
    base, n = table[table["variant"] == BASE].iloc[0], table["seed"].nunique()
    budgets = ", ".join(
        f"{t / 1e6:.1f}M" for t in sorted(table.loc[table["member"] == "cooldown", "branch_tokens"].unique())
    )
    return (
        f"Options of GPTQ at {base['bits']:.0f} bit and of its calibration, changed one at a time from the base (symmetric, "
        f"groups of {base['group_size']:.0f}, in order, damping {base['damping']:g}, {base['calibration_sequences']:.0f} "
        f"sequences of the set '{base['calibration_set']}'), at the branch points and ends of the cooldowns from {budgets} "
        "tokens. (a) Relative error over that of the base, (b) error at the end of a cooldown over that at its branch point, "
        "over the same ratio of the base. Filled: the interval leaves 1 out. "
        + (f"Geometric means over {n} seeds, paired, with 95 % t intervals." if n > 1 else "One seed, no intervals.")
    )  # fmt: skip


def report() -> tuple[Figure, pd.DataFrame]:
    """Everything this finding writes: figure, table and metrics. It judges no claim."""
    table = read()
    fig = figure(table)
    style.save(fig, NAME, caption(table))
    ours = summary(table)
    records = ours[ours["variant"] != BASE].to_dict("records")
    numbers = {
        f"{what}, {r['variant']}": r[f"{what} over base"] for r in records for what in ("level", "rise")
    }
    statistics.write(NAME, {NAME: ours}, numbers, None)
    return fig, ours
