"""The cross-check: does our GPTQ make the error that other tools' GPTQ makes at equal options?

Green, by a rule fixed before the first run: for every checkpoint and width our relative error lies within the paired
95 % interval of gptqmodel's, and it is not above that of round to nearest by more than the interval of their paired
difference.
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


def faults(table: pd.DataFrame) -> list[str]:
    """One line per checkpoint and width where the rule does not hold; empty: green.

    Raises:
        UserError: ours, gptqmodel's or round to nearest's row is missing.
    """
    found = []
    for (checkpoint, bits), rows in table.groupby(["checkpoint", "bits"], sort=False):
        by: dict[str, dict[str, Any]] = {r["method"]: r for r in rows.to_dict("records")}
        if absent := [m for m in (OURS, JUDGE, RTN) if m not in by]:
            raise UserError(f"crosscheck: {checkpoint}, {bits:.0f} bit: no row of {absent[0]}; run `make crosscheck`")
        where, ours, peer = f"{checkpoint}, {bits:.0f} bit", by[OURS]["relative_error"], by[JUDGE]
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
    """"green", or ``UserError`` in one line that names each fault."""
    if found := faults(table):
        raise UserError("cross-check red: " + "; ".join(found))
    return "green"


def figure(table: pd.DataFrame) -> Figure:
    """By checkpoint, one column per width. Top: relative error by tool. Bottom: its difference to ours."""
    style.use()
    palette = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    methods = list(dict.fromkeys(table["method"]))
    names, widths = list(dict.fromkeys(table["checkpoint"])), list(dict.fromkeys(table["bits"]))
    fig, axes = plt.subplots(2, len(widths), figsize=(style.WIDTH, 4.6), sharex=True, squeeze=False)
    for column, bits in enumerate(widths):
        for i, method in enumerate(methods):
            rows = table[(table["bits"] == bits) & (table["method"] == method)]
            for r in rows.to_dict("records"):
                x = names.index(r["checkpoint"]) + 0.13 * (i - (len(methods) - 1) / 2)
                for ax, what in zip(axes[:, column], ("relative_error", "difference"), strict=True):
                    if (what, method) in (("difference", OURS), ("difference", RTN)):
                        continue  # zero, and so far off that nothing else would be seen
                    value, low, high = (100 * r[k] for k in (what, f"{what}_low", f"{what}_high"))
                    first = what == "relative_error" and r["checkpoint"] == names[0] and column == 0
                    label = LABELS.get(method, method) if first else None
                    style.interval(ax, x, Estimate(value, low, high), color=palette[i % len(palette)], label=label)
        axes[0, column].set_ylim(bottom=0)
        axes[1, column].axhline(0.0, color=style.RATE, linewidth=0.8, zorder=0)
        axes[1, column].set_xticks(range(len(names)), names)
        style.letter(axes[0, column], column, f"{bits:.0f} bit")
        style.letter(axes[1, column], len(widths) + column)
    axes[0, 0].set_ylabel("relative error (%)")
    axes[1, 0].set_ylabel("difference to ours\n(points of per cent)")
    fig.legend(loc="outside lower center", ncol=len(methods), frameon=False)
    return fig


def caption(table: pd.DataFrame) -> str:
    """The figure's caption."""
    size = "/".join(f"{g:.0f}" for g in dict.fromkeys(table["group_size"]))
    verdict = "Red: " + "; ".join(found) + "." if (found := faults(table)) else "Green by its rule."
    return (
        f"GPTQ by tool at equal options (symmetric, groups of {size}, in order, damping 0.01, the same calibration tokens, "
        "float32) on three checkpoints of one seed: the end of the trunk at constant LR, the end of the last cooldown, and "
        "LAWA at the trunk's end. Top: relative error CE(Ŵ)/CE(W) − 1; bottom: its difference to that of ours. 95 % "
        f"intervals of a paired bootstrap over sequences. {verdict}"
    )  # fmt: skip


def report() -> tuple[Figure, pd.DataFrame, pd.DataFrame]:
    """Writes the figure; returns it with both tables. The rule is ``check``'s."""
    table, weights = read()
    fig = figure(table)
    style.save(fig, NAME, caption(table))
    return fig, table, weights
