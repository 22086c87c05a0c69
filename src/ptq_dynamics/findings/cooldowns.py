"""Cooldowns, beyond the paper: do the decay's shape, length and end, or the batch, change what quantization costs?"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..evaluation.intervals import Estimate
from . import claims, statistics, style
from .statistics import ends, errors

NAME = "cooldowns"
REFERENCE = "linear"  # the member that all others are compared with
BITS = (4, 3)


def read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measurements, with the ``variant`` of each run in words, and training curves, from the tables in git."""
    table, training = statistics.read(NAME)
    reference = statistics.of_member(table, REFERENCE, NAME).iloc[0]
    names = {r["run"]: _name(r, reference) for _, r in table.drop_duplicates("run").iterrows()}
    return table.assign(variant=table["run"].map(names)), training


def _name(run: pd.Series, reference: pd.Series) -> str:
    """What sets a run apart from the reference, in words."""
    if run["member"] == REFERENCE:
        return f"reference: {reference['cooldown']}, {_length(reference)}"
    parts = []
    if run["cooldown"] != reference["cooldown"]:
        parts.append(f"shape {run['cooldown'].replace('1-sqrt', '1−√')}")
    if run["decay_tokens"] != reference["decay_tokens"] and _length(run) != _length(reference):
        parts.append(f"length {_length(run)}")
    if run["final_fraction"] != reference["final_fraction"]:
        parts.append(f"to {100 * run['final_fraction']:g} % of peak")
    if run["sequences"] != reference["sequences"]:
        parts.append(f"batch {run['sequences']}, not {reference['sequences']}")
    return ", ".join(parts) or str(run["member"])


def _length(run: pd.Series) -> str:
    return f"{100 * run['decay_tokens'] / run['run_tokens']:.0f} %"


def variants(table: pd.DataFrame) -> list[str]:
    """The variants in the order of the table: the reference, then shape, length, end and batch."""
    first = table.drop_duplicates("variant")
    rank = first.assign(
        other=first["member"] != REFERENCE,
        batch=first["variant"].str.startswith("batch"),
        end=first["variant"].str.startswith("to "),
        length=first["variant"].str.startswith("length"),
    )
    keys = ["other", "batch", "end", "length", "decay_tokens", "variant"]
    return list(rank.sort_values(keys)["variant"])


def differences(rows: pd.DataFrame, column: str) -> dict[str, Estimate]:
    """``column`` at the end of the runs minus that of the reference, by variant: mean over seeds, paired by seed."""
    last = ends(rows)
    wide = last.pivot(index="seed", columns="variant", values=column)
    (reference,) = last.loc[last["member"] == REFERENCE, "variant"].unique()
    return {v: claims.mean(wide[v] - wide[reference]) for v in variants(rows) if v != reference}


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By variant: losses and ΔCE (nats/token) and errors (per cent) at the end of the runs, and the paired differences
    from the reference, with 95 % t intervals over seeds."""
    found = statistics.levels(ends(table), "variant").set_index("variant").loc[variants(table)].reset_index()
    for name, rows in statistics.quantities(ends(table)).items():
        delta = differences(rows, "y")
        for suffix in ("", "low", "high"):
            column = f"difference of {name}" + (f", {suffix}" if suffix else "")
            found[column] = [
                getattr(delta[v], suffix or "value") if v in delta else np.nan for v in found["variant"]
            ]
    return found


def figure(table: pd.DataFrame) -> Figure:
    """Upper row: full-precision loss and errors by variant. Lower row: paired differences from the reference."""
    style.use()
    names = variants(table)
    base = ends(table[table["method"] == "none"])
    columns = [("full-precision loss\n(nats/token)", base.assign(y=base["ce"]))]
    lower = [("difference of loss\n(mnats/token)", differences(base.assign(y=1e3 * base["ce"]), "y"))]
    for bits in (b for b in BITS if len(errors(table, b))):
        rows = ends(errors(table, bits))
        columns.append((f"{bits}-bit error\n(%)", rows.assign(y=100 * rows["relative_error"])))
        gap = differences(rows.assign(y=1e3 * rows["delta_ce"]), "y")
        lower.append((f"difference of {bits}-bit ΔCE\n(mnats/token)", gap))
    fig, axes = plt.subplots(2, len(columns), figsize=(style.WIDTH, 5.4), sharey=True, squeeze=False)
    for ax, (label, rows) in zip(axes[0], columns, strict=True):
        mean = claims.mean(rows.loc[rows["member"] == REFERENCE, "y"]).value
        ax.axvline(mean, color=style.RATE, linewidth=0.8, zorder=0)
        for i, name in enumerate(names):
            y = rows.loc[rows["variant"] == name, "y"]
            ax.plot(y, np.full(len(y), i + 0.18), ".", color="0.6", markersize=3, zorder=2)
            _bar(ax, i, claims.mean(y))
        ax.set_xlabel(label)
    for ax, (label, delta) in zip(axes[1], lower, strict=True):
        ax.axvline(0, color=style.RATE, linewidth=0.8, zorder=0)
        for i, name in enumerate(names):
            if name in delta:
                _bar(ax, i, delta[name])
        ax.set_xlabel(label)
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    for i, ax in enumerate(axes.flat):
        style.letter(ax, i)
    return fig


def _bar(ax: Axes, y: int, e: Estimate) -> None:
    known = np.isfinite(e.low) and np.isfinite(e.high)
    xerr = [[e.value - e.low], [e.high - e.value]] if known else None
    ax.errorbar(
        [e.value],
        [y],
        xerr=xerr,
        color=style.TRUNK,
        marker="o",
        markersize=3.5,
        linestyle="none",
        elinewidth=1.0,
        zorder=3,
    )


def caption(table: pd.DataFrame) -> str:
    """The figure's caption."""
    n, run = table["seed"].nunique(), table[table["member"] == REFERENCE].iloc[0]
    return (
        f"Cooldowns. WSD runs of {run['run_tokens'] / 1e6:.1f}M tokens at a peak LR of {run['peak_lr']:g}; the reference "
        f"decays over the last {_length(run)} ({run['cooldown']}) to {100 * run['final_fraction']:g} % of the peak with "
        f"{run['sequences']} sequences per update, and each row changes what it names. (a–c) Full-precision loss and relative "
        "error CE(Ŵ)/CE(W) − 1 of GPTQ at the end of the run; small dots: seeds; grey line: the reference. (d–f) Differences "
        "from the reference, of the loss and of the gap ΔCE = CE(Ŵ) − CE(W), paired by seed. "
        + (f"Means over {n} seeds with 95 % t intervals." if n > 1 else "One seed, no intervals.")
    )


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, table and metrics. It judges no claim, whatever ``verdicts`` says."""
    table, _ = read()
    fig = figure(table)
    style.save(fig, NAME, caption(table))
    ours = summary(table)
    numbers = {}
    for r in ours.to_dict("records"):
        numbers |= {f"{r['variant']}: {k}": v for k, v in r.items() if k not in ("variant", "seeds")}
    statistics.write(NAME, {NAME: ours}, numbers, None)
    return fig, ours, []
