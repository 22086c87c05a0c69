"""Cosine against WSD (C6, C7): does the error grow with the tokens, or with what the schedule does at the end?"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..core import paths
from ..core.config import read_yaml
from ..evaluation.intervals import Estimate
from . import claims, statistics, style
from .statistics import ends, errors, longest

NAME = "schedules"
STUDIES = ("schedules_small", "schedules")  # one per size of the model
SCHEDULES = {"cosine": "cosine", "wsd": "WSD"}  # members and how they are called
PRIMARY, LOW = 4, 3  # bits of C6 and of C7
BITS = (PRIMARY, LOW)


def read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measurements and training curves of both sizes, from the tables in git; ``study`` tells them apart."""
    measured, trained = [], []
    for study in STUDIES:
        table, training = statistics.read(study)
        measured += [statistics.of_member(table, m, study).assign(study=study) for m in SCHEDULES]
        trained.append(training.assign(study=study))
    return pd.concat(measured, ignore_index=True), pd.concat(trained, ignore_index=True)


def exponents(rows: pd.DataFrame, least: float = 0.0) -> pd.DataFrame:
    """Exponent of ΔCE in tokens per parameter (Kumar et al. 2024): per size and seed, a column per schedule.

    NaN where one of the gaps is not positive.

    Args:
        least: tokens per parameter; shorter runs are left out.
    """
    last = ends(rows)
    last = last[last["run_tokens"] / last["parameters"] >= least]
    fits = {
        key: statistics.exponent(g["run_tokens"] / g["parameters"], g["delta_ce"])
        for key, g in last.groupby(["parameters", "seed", "member"])
    }
    return (
        pd.Series(fits, dtype=float)
        .rename_axis(["parameters", "seed", "member"])
        .unstack()
        .reindex(columns=SCHEDULES)
    )


def exponent_difference(rows: pd.DataFrame, least: float = 0.0) -> dict[int, float]:
    """C6, per seed: exponent under cosine minus that under WSD, mean over the sizes; NaN if one is NaN."""
    found = exponents(rows, least)
    gap = (found["cosine"] - found["wsd"]).unstack("seed")
    return {int(s): float(gap[s].mean(skipna=False)) for s in gap}


def larger(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the larger model."""
    return table[table["parameters"] == table["parameters"].max()]


def half(rows: pd.DataFrame) -> pd.DataFrame:
    """Per run the checkpoint nearest to half of it; of two as near the later, which makes a late upturn smaller."""
    order = rows.assign(off=(rows["tokens"] - rows["run_tokens"] / 2).abs(), back=-rows["tokens"])
    return order.sort_values(["off", "back"]).groupby("run", as_index=False).head(1)


def upturn(rows: pd.DataFrame, member: str = "cosine") -> dict[int, float]:
    """C7, per seed: error at the end of the longest run of the larger model over that at half of the run.

    NaN if one of them is not positive.
    """
    runs = larger(rows)
    runs = longest(runs[runs["member"] == member])
    end, mid = ends(runs).set_index("seed")["relative_error"], half(runs).set_index("seed")["relative_error"]
    ratio = (end / mid).where((end > 0) & (mid > 0))
    return {int(s): float(v) for s, v in ratio.items()}


def judge(table: pd.DataFrame, verdicts: bool) -> list[dict[str, Any]]:
    """Ledger entries for C6 and C7; the other bit widths and quantizers as details."""
    return [_c6(table, verdicts), _c7(table, verdicts)]


def _c6(table: pd.DataFrame, verdicts: bool) -> dict[str, Any]:
    rows = errors(table, PRIMARY)
    values = exponent_difference(rows)
    details: dict[str, Any] = statistics.per_quantizer(
        table, ("gptq", PRIMARY), lambda t: claims.mean(exponent_difference(t).values())
    )
    for (size, schedule), e in _estimates(exponents(rows)).items():
        details[f"{schedule}, {size:,} parameters"] = claims.plain(e)
    if ends(rows).query("run_tokens >= 20 * parameters").groupby("study")["run_tokens"].nunique().min() > 1:
        late = exponent_difference(rows, least=20.0)
        details["budgets of at least 20 tokens per parameter"] = claims.plain(claims.mean(late.values()))
    known = [v for v in values.values() if np.isfinite(v)]
    details["gaps of 0 or less, which have no logarithm"] = statistics.not_positive(ends(rows), "delta_ce")
    details["seeds without an exponent"] = len(values) - len(known)
    if len(known) < len(values):
        details["the other seeds alone, not judged"] = claims.plain(claims.mean(known))
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    sizes = " and ".join(f"{p:,}" for p in sorted(table["parameters"].unique()))
    tokens = sorted(table["run_tokens"].unique())
    scale = f"GPTNeoX with {sizes} parameters, {tokens[0] / 1e6:.1f}M to {tokens[-1] / 1e6:.1f}M tokens, GPTQ {PRIMARY} bit"
    return claims.entry("C6", claims.mean(values.values()), len(values), scale, details, verdicts=verdicts)


def _c7(table: pd.DataFrame, verdicts: bool) -> dict[str, Any]:
    rows = errors(table, LOW)
    values = upturn(rows)
    details: dict[str, Any] = statistics.per_quantizer(
        table, ("gptq", LOW), lambda t: claims.geometric(upturn(t).values())
    )
    details[f"WSD instead, gptq {LOW} bit"] = claims.plain(claims.geometric(upturn(rows, "wsd").values()))
    runs = larger(rows)
    middle = half(longest(runs[runs["member"] == "cosine"]))
    details["tokens at the checkpoint nearest to half"] = sorted(int(t) for t in middle["tokens"].unique())
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    scale = statistics.scale(larger(table), f"GPTQ {LOW} bit")
    return claims.entry(
        "C7", claims.geometric(values.values()), len(values), scale, details, verdicts=verdicts
    )


def _estimates(found: pd.DataFrame) -> dict[tuple[int, str], Estimate]:
    """Mean exponent over seeds by (parameters, schedule), and of the paired difference."""
    out = {}
    for size, group in found.groupby("parameters"):
        for member, name in SCHEDULES.items():
            out[(int(size), name)] = claims.mean(group[member])
        out[(int(size), "cosine − WSD")] = claims.mean(group["cosine"] - group["wsd"])
    return out


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Exponents of ΔCE in tokens per parameter by size, bit width and schedule, with 95 % t intervals over seeds.

    ``reading`` says what the interval separates: growth from 0, or WSD from cosine (paired by seed).
    """
    paper = read_yaml(paths.reference() / "paper.yaml")[NAME]
    sizes = sorted(table["parameters"].unique())
    told = dict(zip(sizes, (paper["smaller"], paper["larger"]), strict=True)) if len(sizes) == 2 else {}
    rows = []
    for bits in (b for b in BITS if len(errors(table, b))):
        last = ends(errors(table, bits))
        bad = last["delta_ce"] <= 0
        for (size, name), e in _estimates(exponents(last)).items():
            here = last["parameters"] == size
            if name in SCHEDULES.values():
                here &= last["member"].map(SCHEDULES) == name
            rows.append(
                {
                    "parameters": size,
                    "bits": bits,
                    "exponent": name,
                    "value": e.value,
                    "low": e.low,
                    "high": e.high,
                    "reading": reading(e, difference=name not in SCHEDULES.values()),
                    "seeds": last["seed"].nunique(),
                    "gaps ≤ 0": int((bad & here).sum()),
                    "paper, growth under WSD [C]": told.get(size) if name == "WSD" else None,
                }
            )
    return pd.DataFrame(rows)


def reading(e: Estimate, difference: bool) -> str:
    """What an interval of an exponent, or of the exponent under cosine minus that under WSD, tells from 0."""
    if not (np.isfinite(e.low) and np.isfinite(e.high)):
        return "no interval"
    above, below = ("smaller under WSD", "larger under WSD") if difference else ("grows", "falls")
    return (
        above
        if e.low > 0
        else below
        if e.high < 0
        else "not distinguishable" + (" from 0" if not difference else "")
    )


def figure(table: pd.DataFrame, training: pd.DataFrame) -> Figure:
    """Columns: 4 and 3 bit. Rows: ΔCE at the end against tokens per parameter with power laws; the error along the
    longest runs of the larger model with the learning rate."""
    style.use()
    palette = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    colours = dict(zip(SCHEDULES, palette, strict=False))
    sizes = sorted(table["parameters"].unique())
    fig, axes = plt.subplots(2, 2, figsize=(style.WIDTH, 5.2))
    runs = longest(larger(table))
    curves = training[
        (training["study"] == runs["study"].iloc[0]) & training["run"].isin(runs["run"].unique())
    ]
    by_run = {r: colours[m] for r, m in runs[["run", "member"]].drop_duplicates().itertuples(index=False)}
    for col, bits in enumerate(BITS):
        rows = errors(table, bits)
        _laws(axes[0, col], ends(rows), colours, sizes)
        axes[0, col].set_ylabel(f"{bits}-bit ΔCE (nats/token)")
        ax, along = axes[1, col], longest(larger(rows)).assign(pct=lambda t: 100 * t["relative_error"])
        for member, colour in colours.items():
            style.band(
                ax,
                along[along["member"] == member],
                "pct",
                color=colour,
                marker="o",
                markersize=2.5,
                zorder=4,
            )
        ax.set_ylim(min(0, 1.05 * along["pct"].min()), None)
        ax.set_xlabel("training tokens (millions)")
        ax.set_ylabel(f"{bits}-bit error (%)")
        style.overlay_rate(ax, curves, label=col == 1, colours=by_run)
    for i, ax in enumerate(axes.flat):
        style.letter(ax, i, f"GPTQ {BITS[i]} bit" if i < 2 else "")
    handles = [Line2D([], [], color=c, label=SCHEDULES[m]) for m, c in colours.items()]
    handles += [
        Line2D(
            [],
            [],
            color="0.3",
            linestyle="none",
            marker="o",
            markersize=4,
            fillstyle=_fill(p, sizes),
            label=f"{p:,} parameters",
        )
        for p in sizes
    ]
    handles.append(
        Line2D([], [], color=style.RATE, linestyle="--", linewidth=0.8, label="learning rate (c, d)")
    )
    fig.legend(handles=handles, loc="outside lower center", ncol=5, frameon=False)
    return fig


def _fill(size: int, sizes: list[int]) -> str:
    return "full" if size == max(sizes) else "none"


def _laws(ax: Axes, last: pd.DataFrame, colours: dict[str, Any], sizes: list[int]) -> None:
    """ΔCE against tokens per parameter: seeds as small points, means as markers, fitted laws as lines."""
    found = exponents(last)
    for (size, member), group in last.groupby(["parameters", "member"]):
        group = group.assign(ratio=group["run_tokens"] / group["parameters"])
        ax.plot(
            group["ratio"],
            group["delta_ce"].where(group["delta_ce"] > 0),
            ".",
            color=colours[member],
            markersize=2.5,
            alpha=0.5,
        )
        means = (
            group[group["delta_ce"] > 0]
            .groupby("ratio")["delta_ce"]
            .apply(lambda v: np.exp(np.log(v).mean()))
        )
        ax.plot(
            means.index,
            means,
            linestyle="none",
            marker="o",
            markersize=4.5,
            fillstyle=_fill(size, sizes),
            color=colours[member],
        )
        gamma = found.loc[size, member].mean(skipna=False)
        if np.isfinite(gamma):
            x, centre = np.log(means.index.to_numpy()), np.log(means.to_numpy()).mean()
            span = np.array([x.min(), x.max()])
            ax.plot(np.exp(span), np.exp(centre + gamma * (span - x.mean())), color=colours[member], linewidth=1.0,
                    linestyle="-" if size == max(sizes) else (0, (4, 1.5)))  # fmt: skip
    ax.set_xscale("log")
    style.plain_log(ax.xaxis)
    if (last["delta_ce"] > 0).any():
        ax.set_yscale("log")
        style.plain_log(ax.yaxis)
    ax.set_xlabel("tokens per parameter")


def caption(table: pd.DataFrame) -> str:
    """The figure's caption."""
    n = table["seed"].nunique()
    bad = {b: statistics.not_positive(ends(errors(table, b)), "delta_ce") for b in BITS}
    lost = ", ".join(f"{k} at {b} bit" for b, k in bad.items() if k)
    laws = []
    for (size, name), e in _estimates(exponents(errors(table, PRIMARY))).items():
        if name in SCHEDULES.values():
            span = f" [{e.low:.2f}, {e.high:.2f}]" if np.isfinite(e.low) else ""
            value = f"{e.value:.2f}{span}" if np.isfinite(e.value) else "none (a gap has no logarithm)"
            laws.append(f"{size:,} parameters, {name}: {value}")
    return (
        "Cosine against WSD at equal budgets of tokens. (a, b) Gap ΔCE = CE(Ŵ) − CE(W) at the end of every run against "
        f"tokens per parameter, both axes logarithmic; dots: {n} seed{'s' if n > 1 else ''}; circles: geometric mean; lines: "
        "power law with the mean exponent over seeds (solid: larger model; broken: smaller). Exponents at "
        f"{PRIMARY} bit with 95 % intervals over seeds: {'; '.join(laws)}. "
        + (f"Gaps of 0 or less, not drawn: {lost}. " if lost else "")
        + "(c, d) Relative error CE(Ŵ)/CE(W) − 1 in per cent along the longest run of the larger model; lines: mean; bands: "
        f"{'the range over seeds' if n > 1 else 'not shown (one seed)'}; dashed, right axis: learning rate."
    )


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, table of exponents, metrics and judged claims."""
    table, training = read()
    fig = figure(table, training)
    style.save(fig, NAME, caption(table))
    ours = summary(table)
    entries = judge(table, verdicts)
    numbers: dict[str, float | None] = {}
    for r in ours.to_dict("records"):
        key = f"exponent, {r['bits']} bit, {r['parameters']} parameters, {r['exponent']}"
        numbers |= {key: r["value"], f"{key}, low": r["low"], f"{key}, high": r["high"]}
    statistics.write(NAME, {NAME: ours}, numbers, entries)
    return fig, ours, entries
