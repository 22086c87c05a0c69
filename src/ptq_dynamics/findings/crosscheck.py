"""The cross-check: does our GPTQ make the error that other tools' GPTQ makes at equal options?

Green, by a rule fixed before the first run: for every checkpoint and width our relative error lies within the paired
95 % interval of gptqmodel's, and it is not above that of round to nearest by more than the interval of their paired
difference.

Options are equal where blocks of columns end where groups start. With wider blocks, the usual 128, tools of AutoGPTQ's
line fit a group's grid before the columns of the same block have been made up for, which ours never does. That is
another algorithm: it is measured and shown, and the rule's outcome is told, but it ends nothing.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from ..core.errors import UserError
from ..evaluation.intervals import Estimate
from . import statistics, style

NAME, WEIGHTS = "crosscheck", "crosscheck-weights"
OURS, JUDGE, RTN = "gptq", "gptqmodel", "rtn"
LABELS = {OURS: "ours", RTN: "RTN (ours)"}


def read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Errors by checkpoint and quantizer, and weights by tool and switch."""
    return statistics.table(NAME, NAME), statistics.table(WEIGHTS, NAME)


def equal(table: pd.DataFrame) -> pd.Series:
    """Whether a row's blocks end where its groups start, so that tools of AutoGPTQ's line run our algorithm."""
    return table["group_size"].eq(-1) | (table["group_size"] % table["block_size"]).eq(0)


def faults(table: pd.DataFrame) -> list[str]:
    """One line per checkpoint and width where the rule does not hold; empty: green.

    Raises:
        UserError: ours, gptqmodel's or round to nearest's row is missing.
    """
    found = []
    for (checkpoint, bits, _), rows in table.groupby(["checkpoint", "bits", "block_size"], sort=False):
        where = f"{checkpoint}, {bits:.0f} bit"
        by: dict[str, dict[str, Any]] = {r["method"]: r for r in rows.to_dict("records")}
        if absent := [m for m in (OURS, JUDGE, RTN) if m not in by]:
            raise UserError(f"crosscheck: {where}: no row of {absent[0]}; run `make crosscheck`")
        ours, peer = by[OURS]["relative_error"], by[JUDGE]
        if not peer["relative_error_low"] <= ours <= peer["relative_error_high"]:
            found.append(
                f"{where}: our error {100 * ours:.3f} % is outside gptqmodel's interval "
                f"{100 * peer['relative_error_low']:.3f} to {100 * peer['relative_error_high']:.3f} %"
            )
        if by[RTN]["difference_high"] < 0:  # round to nearest minus ours
            found.append(
                f"{where}: our error {100 * ours:.3f} % is above round to nearest's "
                f"{100 * by[RTN]['relative_error']:.3f} % by more than the interval of their difference"
            )
    return found


def check(table: pd.DataFrame) -> str:
    """The verdict at equal options: "green", or ``UserError`` in one line that names each fault."""
    judged = table[equal(table)]
    if judged.empty:
        raise UserError(
            "crosscheck: no quantizer with blocks that end where groups start; give one a block_size that divides its "
            "group_size"
        )
    if found := faults(judged):
        raise UserError("cross-check red: " + "; ".join(found))
    return "green"


def figure(table: pd.DataFrame) -> Figure:
    """By checkpoint, one column per width. Top: relative error by tool at equal options. Bottom: its difference to ours,
    hollow where blocks are wider than groups."""
    style.use()
    palette = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    methods = list(dict.fromkeys(table["method"]))
    names, widths = list(dict.fromkeys(table["checkpoint"])), list(dict.fromkeys(table["bits"]))
    fig, axes = plt.subplots(2, len(widths), figsize=(style.WIDTH, 4.6), sharex=True, squeeze=False)
    labelled: set[str] = set()
    for r in table.assign(equal=equal(table)).to_dict("records"):
        column, i = widths.index(r["bits"]), methods.index(r["method"])
        x = names.index(r["checkpoint"]) + 0.14 * (i - (len(methods) - 1) / 2)
        look = {"color": palette[i % len(palette)], "fillstyle": "full" if r["equal"] else "none"}
        if r["equal"]:
            label = LABELS.get(r["method"], r["method"])
            style.interval(
                axes[0, column],
                x,
                _percent(r, "relative_error"),
                label=None if label in labelled else label,
                **look,
            )
            labelled.add(label)
        if r["method"] not in (OURS, RTN):  # zero, and so far off that nothing else would be seen
            style.interval(axes[1, column], x if r["equal"] else x + 0.05, _percent(r, "difference"), **look)
    for column, bits in enumerate(widths):
        axes[0, column].set_ylim(bottom=0)
        axes[1, column].axhline(0.0, color=style.RATE, linewidth=0.8, zorder=0)
        axes[1, column].set_xticks(range(len(names)), names)
        style.letter(axes[0, column], column, f"{bits:.0f} bit")
        style.letter(axes[1, column], len(widths) + column)
    axes[0, 0].set_ylabel("relative error (%)")
    axes[1, 0].set_ylabel("difference to ours\n(points of per cent)")
    fig.legend(loc="outside lower center", ncol=len(methods), frameon=False)
    return fig


def _percent(row: dict[str, Any], what: str) -> Estimate:
    return Estimate(*(100 * row[k] for k in (what, f"{what}_low", f"{what}_high")))


def caption(table: pd.DataFrame) -> str:
    """The figure's caption."""
    judged, rest = table[equal(table)], table[~equal(table)]
    text = (
        f"GPTQ by tool at equal options (symmetric, groups of {_sizes(judged['group_size'])}, blocks of "
        f"{_sizes(judged['block_size'])}, in order, damping 0.01, the same calibration tokens, float32) on three checkpoints "
        "of one seed: the end of the trunk at constant LR, the end of the last cooldown, and LAWA at the trunk's end. Top: "
        "relative error CE(Ŵ)/CE(W) − 1; bottom: its difference to that of ours. 95 % intervals of a paired bootstrap over "
        f"sequences. {_outcome(judged)}"
    )  # fmt: skip
    if len(rest):
        text += (
            f" Hollow: blocks of {_sizes(rest['block_size'])}, the tools' default, where gptqmodel and auto-gptq run another "
            f"algorithm; not judged. {_outcome(rest)}"
        )  # fmt: skip
    return text


def _outcome(table: pd.DataFrame) -> str:
    return "Red by its rule: " + "; ".join(found) + "." if (found := faults(table)) else "Green by its rule."


def _sizes(sizes: pd.Series) -> str:
    return "/".join(f"{s:.0f}" for s in dict.fromkeys(sizes))


def report() -> tuple[Figure, pd.DataFrame, pd.DataFrame]:
    """Writes the figure; returns it with both tables. The verdict is ``check``'s."""
    table, weights = read()
    fig = figure(table)
    style.save(fig, NAME, caption(table))
    return fig, table, weights
