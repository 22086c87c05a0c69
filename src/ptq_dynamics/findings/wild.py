"""In the wild (C14): trajectories that others published, and any one of your own, in one look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..core import paths
from ..core.errors import UserError
from ..core.files import atomic_file
from ..trajectories.families import Family, caveats, load_families
from . import claims, statistics, style
from .statistics import errors

NAME = "wild"
PRIMARY = 3  # bits of C14
PHASES = {
    "warmup": "#e69f00",
    "stable": style.TRUNK,
    "decay": "#0072b2",
    "average": "#d55e00",
    "unknown": "#009e73",
    "other": "#cc79a7",
}  # colour-blind safe (Okabe and Ito)


def read() -> dict[str, pd.DataFrame]:
    """The tables of all measured families by key, in the order of families.yaml.

    Raises:
        UserError: there is none.
    """
    folder = paths.tables() / "wild"
    found = {p.stem: pd.read_csv(p) for p in folder.glob("*.csv")}
    if not found:
        raise UserError(f"{paths.relative(folder)}: no family is measured; run `dvc repro wild@mini`")
    known = list(load_families())
    return {k: found[k] for k in sorted(found, key=lambda k: known.index(k) if k in known else len(known))}


def is_open(family: Family) -> bool:
    """Whether it was published by others; those that lie in a local hub are ours."""
    return family.hub is None


def decay_ratio(table: pd.DataFrame, bits: int, method: str = "gptq") -> float:
    """C14: error at the end of the decay over that at its start; NaN where a trajectory shows no decay.

    The start is the last checkpoint before the learning rate falls, or the first of the decay if none was measured
    before it; the end is the last of the decay. Warmup and averages do not count.
    """
    rows = errors(table, bits, method)
    if "kind" in rows:
        rows = rows[rows["kind"] == "checkpoint"]
    rows = rows.sort_values("tokens")
    decay = rows[rows["phase"] == "decay"]
    before = rows[(rows["phase"] == "stable") & (rows["tokens"] < decay["tokens"].min())]
    path = pd.concat([before.tail(1), decay])["relative_error"].to_numpy()
    return float(path[-1] / path[0]) if len(path) > 1 and path[0] > 0 else float("nan")


def judge(tables: Mapping[str, pd.DataFrame], verdicts: bool) -> list[dict[str, Any]]:
    """The ledger's entry for C14; families that are ours as details only."""
    families = load_families()
    ratios = {k: decay_ratio(t, PRIMARY) for k, t in tables.items() if k in families}
    judged = {k: r for k, r in ratios.items() if is_open(families[k]) and np.isfinite(r)}
    details: dict[str, Any] = {
        f"{families[k].display}, {bits} bit": claims.number(decay_ratio(t, bits))
        for k, t in tables.items()
        if k in families
        for _, bits in statistics.quantizers(t)
    }
    details["open families measured"] = sorted(judged)
    absent = [f.display for k, f in families.items() if is_open(f) and k not in judged]
    details["open families not measured"] = absent
    if not judged:
        details["not judged"] = "no open family ran: this needs a Hub to download from"
    scale = ", ".join(families[k].display for k in judged) or "no open family was measured"
    return [
        claims.entry(
            "C14", claims.geometric(judged.values()), len(judged), f"{scale}; GPTQ {PRIMARY} bit", details,
            provided=all(r > 1 for r in judged.values()), verdicts=verdicts and len(judged) > 0,
        )
    ]  # fmt: skip


def summary(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """By family and bit width: checkpoints, errors at start and end of the decay (per cent) and their ratio."""
    families = load_families()
    rows = []
    for key, table in tables.items():
        for method, bits in statistics.quantizers(table):
            q = errors(table, bits, method)
            q = q[q["kind"] == "checkpoint"].sort_values("tokens")
            stars = errors(table, bits, method).query("kind == 'average' or phase == 'average'")
            rows.append(
                {
                    "family": families[key].display if key in families else key,
                    "open": key in families and is_open(families[key]),
                    "method": method,
                    "bits": bits,
                    "checkpoints": len(q),
                    "first error (%)": 100 * q["relative_error"].iloc[0],
                    "last error (%)": 100 * q["relative_error"].iloc[-1],
                    "end of decay over its start": decay_ratio(table, bits, method),
                    "lowest quantized loss": q["ce"].min(),
                    "averages, lowest quantized loss": stars["ce"].min() if len(stars) else np.nan,
                }
            )
    return pd.DataFrame(rows)


def figure(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """One row per family: 4- and 3-bit error against tokens, learning rate overlaid; quantized against full precision."""
    style.use()
    families = load_families()
    fig, axes = plt.subplots(len(tables), 3, figsize=(style.WIDTH, 2.6 * len(tables) + 0.3), squeeze=False)
    for row, (key, table) in enumerate(tables.items()):
        bits = _two(table)
        for col, b in enumerate(bits):
            along(axes[row, col], table, b, axis="tokens", label=col == len(bits) - 1)
        for ax in axes[row, len(bits) : 2]:
            ax.set_visible(False)
        plane(axes[row, 2], table)
        axes[row, 0].set_title(families[key].display if key in families else key)
    for i, ax in enumerate(axes.flat):
        style.letter(ax, i)
    fig.legend(handles=legend(tables.values()), loc="outside lower center", ncol=6, frameon=False)
    return fig


def trajectory_figure(table: pd.DataFrame, axis: str = "tokens") -> Figure:
    """One trajectory: the error of each bit width with the learning rate, and quantized against full-precision loss.

    Args:
        axis: ``tokens``, or ``step`` where tokens are not known.
    """
    style.use()
    bits = [b for _, b in statistics.quantizers(table)]
    fig, axes = plt.subplots(1, len(bits) + 1, figsize=(max(style.WIDTH, 2.7 * (len(bits) + 1)), 3.1))
    for i, b in enumerate(bits):
        along(axes[i], table, b, axis=axis, label=i == len(bits) - 1)
    plane(axes[-1], table)
    for i, ax in enumerate(axes):
        style.letter(ax, i)
    fig.legend(handles=legend([table]), loc="outside lower center", ncol=6, frameon=False)
    return fig


def along(ax: Axes, table: pd.DataFrame, bits: int, axis: str, label: bool) -> None:
    """Relative error (per cent) against tokens or steps; points coloured by phase, averages as stars."""
    rows = table[table["bits"] == bits].assign(pct=lambda t: 100 * t["relative_error"])
    scale, unit = _unit(rows[axis])
    run = rows[rows["phase"] != "average"].sort_values([axis, "checkpoint"])
    ax.plot(run[axis] / scale, run["pct"], color="0.8", linewidth=0.9, zorder=2)
    for phase, group in run.groupby("phase"):
        ax.plot(group[axis] / scale, group["pct"], "o", color=_colour(phase), markersize=3.5, zorder=3)
    stars = rows[rows["phase"] == "average"]
    ax.plot(stars[axis] / scale, stars["pct"], "*", color=PHASES["average"], markersize=9, zorder=4)
    ax.set_ylabel(f"{bits}-bit error (%)")
    ax.set_xlabel(f"training tokens{unit}" if axis == "tokens" else f"step{unit}")
    ax.set_ylim(min(0, 1.05 * rows["pct"].min()), 1.08 * max(rows["pct"].max(), 0) or None)
    if run["lr"].notna().any():
        _rate(ax, run[axis] / scale, run["lr"], label)


def _rate(ax: Axes, x: pd.Series, rate: pd.Series, label: bool) -> None:
    twin = ax.twinx()
    twin.plot(x, rate, color=style.RATE, linewidth=0.9, linestyle="--", zorder=0)
    twin.set_ylim(0, None)
    twin.spines["right"].set_visible(True)
    twin.spines["right"].set_color(style.RATE)
    twin.tick_params(axis="y", colors=style.RATE)
    if label:
        twin.set_ylabel("learning rate", color="0.45")
    else:
        twin.tick_params(axis="y", labelright=False)
    ax.set_zorder(twin.get_zorder() + 1)
    ax.patch.set_visible(False)


def plane(ax: Axes, table: pd.DataFrame) -> None:
    """Quantized against full-precision loss, one point per checkpoint; the height above the line is ΔCE."""
    rows = table[table["method"] != "none"]
    low, high = rows["ce_fp"].min(), rows["ce_fp"].max()
    margin = 0.06 * (high - low) or 0.01
    span = [low - margin, high + margin]
    ax.plot(span, span, color=style.RATE, linewidth=0.8, zorder=1)
    widths = sorted(rows["bits"].unique())
    for (b, phase), group in rows.groupby(["bits", "phase"]):
        star, hollow = phase == "average", b == widths[0] and len(widths) > 1
        ax.plot(
            group["ce_fp"], group["ce"], "*" if star else "o", color=_colour(phase),
            markerfacecolor="none" if hollow else _colour(phase), linestyle="none",
            markersize=8 if star else 3.5, markeredgewidth=0.8, zorder=4 if star else 3,
        )  # fmt: skip
    if len(widths) > 1:
        ax.text(
            0.03,
            0.98,
            f"hollow: {widths[0]:g} bit",
            transform=ax.transAxes,
            fontsize=7,
            color="0.35",
            va="top",
        )
    ax.set_xlabel("full-precision loss\n(nats/token)")
    ax.set_ylabel("quantized loss (nats/token)")


def legend(tables: Any) -> list[Line2D]:
    """Handles for the phases that occur."""
    tables = list(tables)
    seen = {p for t in tables for p in t["phase"]}
    told = {"average": "average of checkpoints", "unknown": "checkpoint"}
    handles = [
        Line2D([], [], color=_colour(p), marker="*" if p == "average" else "o", linestyle="none",
               markersize=8 if p == "average" else 4, label=told.get(p, p))
        for p in PHASES if p in seen
    ]  # fmt: skip
    if any(t["lr"].notna().any() for t in tables):
        handles.append(Line2D([], [], color=style.RATE, linestyle="--", linewidth=0.9, label="learning rate"))
    return handles


def trajectory_caption(report: Mapping[str, Any], table: pd.DataFrame) -> str:
    """The caption of ``trajectory_figure``, from what ``measure_source`` reports."""
    q = table[table["method"] != "none"].iloc[0]
    widths = ", ".join(f"{b}" for _, b in statistics.quantizers(table))
    text = (
        f"{report['title']}. Error CE(Ŵ)/CE(W) − 1 of {str(q['method']).upper()} at {widths} bit, groups of "
        f"{int(q['group_size'])}, on {int(q['evaluation_tokens']):,} tokens of held-out text, and quantized against "
        "full-precision loss (on the line: no loss at all). One run, no intervals over seeds."
    )
    if report["axis"] == "step":
        text += " The source tells steps, not tokens."
    if table["lr"].isna().all():
        text += " The source tells no learning rate."
    return text + _uncertain(report["caveats"])


def caption(tables: Mapping[str, pd.DataFrame]) -> str:
    """The figure's caption: what ran, on what, what is uncertain, and what did not run."""
    families = load_families()
    ours = [families[k].display for k in tables if k in families and not is_open(families[k])]
    others = [families[k].display for k in tables if k in families and is_open(families[k])]
    absent = [f.display for k, f in families.items() if is_open(f) and k not in tables]
    used = sorted({int(t["evaluation_tokens"].max()) for t in tables.values()})
    tokens = f"{used[0]:,}" if len(used) == 1 else f"{used[0]:,} to {used[-1]:,}"
    text = (
        "In the wild. Relative error CE(Ŵ)/CE(W) − 1 of GPTQ along each trajectory, points coloured by the phase of its "
        "learning rate (dashed, right axis), and quantized against full-precision loss; stars: averages of checkpoints. "
        f"One run each, no intervals over seeds; {tokens} tokens of held-out text. "
    )
    if ours:
        text += f"Ours, read back through the Hub's own client from a local copy: {', '.join(ours)}. "
    if others:
        text += f"Open families: {', '.join(others)}. "
    else:
        text += (
            "No open family ran: they are downloaded from a Hub, and the machine that made this figure has none, so C14 "
            "is not judged here. "
        )
    text += f"Not measured: {', '.join(absent)}." if absent else ""
    doubts = [f"{families[k].display}: {c}" for k in tables if k in families for c in caveats(families[k])]
    return text.strip() + _uncertain(doubts)


def _uncertain(doubts: Sequence[str]) -> str:
    return f" Not certain: {'; '.join(doubts)}." if doubts else ""


def save_trajectory(fig: Figure, out: Path) -> None:
    """``figure.png`` and ``figure.pdf`` in ``out``."""
    for ending, meta in ((".pdf", {"CreationDate": None}), (".png", {"Software": None})):
        with atomic_file(Path(out) / f"figure{ending}") as tmp:
            fig.savefig(tmp, format=ending[1:], metadata=meta)
    plt.close(fig)


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, table, metrics and the entry for C14."""
    tables = read()
    fig = figure(tables)
    style.save(fig, NAME, caption(tables))
    ours = summary(tables)
    entries = judge(tables, verdicts)
    numbers = {
        f"{r['family']}, {r['method']} {r['bits']} bit, end of decay over its start": r[
            "end of decay over its start"
        ]
        for r in ours.to_dict("records")
    }
    statistics.write(NAME, {NAME: ours}, numbers, entries)
    return fig, ours, entries


def _two(table: pd.DataFrame) -> list[int]:
    """The bit widths of the figure: 4 and 3 where they were measured."""
    has = [b for m, b in statistics.quantizers(table) if m == "gptq"]
    return ([b for b in (4, 3) if b in has] or has)[:2]


def _colour(phase: str) -> str:
    return PHASES.get(phase, PHASES["other"])


def _unit(values: pd.Series) -> tuple[float, str]:
    top = values.max()
    for size, word in ((1e9, " (billions)"), (1e6, " (millions)"), (1e3, " (thousands)")):
        if top >= 2 * size:
            return size, word
    return 1.0, ""
