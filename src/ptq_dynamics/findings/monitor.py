"""The monitor (P3): what it sees along a run, and what choosing hyperparameters by quantized loss would gain.

Peak LR and cooldown are chosen twice, by full-precision loss and by quantized loss, on the mean over all seeds but one,
and both choices are read on the seed left out, as one who tunes on some runs and trains another would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from . import claims, cooldowns, peak_lr, statistics, style
from .statistics import ends, errors, longest

NAME = "monitor"
PRIMARY = 3  # bits of P3
BITS = (4, 3)
FULL = "full precision"
CHOICES = ("peak LR", "cooldown")


@dataclass(frozen=True)
class Tables:
    """The monitor's readings, measurements of the study that it read, the candidates by choice and bits, and their rows."""

    readings: pd.DataFrame
    measured: pd.DataFrame
    candidates: Mapping[tuple[str, int], pd.DataFrame]
    ends: pd.DataFrame


def read() -> Tables:
    """The tables in git.

    Raises:
        UserError: one is missing.
    """
    readings = statistics.table(NAME, "monitor").fillna({"diverging": "", "warned": ""})
    measured = statistics.read(readings["study"].iloc[0])[0]
    rates = longest(ends(peak_lr.read()[0]))
    rates = rates.assign(candidate=rates["peak_lr"].map("{:g}".format))
    shapes = ends(cooldowns.read()[0])
    reference = shapes[shapes["member"] == cooldowns.REFERENCE].iloc[0]
    same = (shapes[["sequences", "run_tokens"]] == reference[["sequences", "run_tokens"]]).all(axis=1)
    shapes = shapes[same].assign(candidate=lambda t: t["variant"])
    found = {
        (choice, bits): wide(errors(rows, bits), bits)
        for choice, rows in zip(CHOICES, (rates, shapes), strict=True)
        for bits in BITS
        if len(errors(rows, bits))
    }
    return Tables(readings, measured, found, pd.concat([rates, shapes]))


def wide(rows: pd.DataFrame, bits: int) -> pd.DataFrame:
    """Candidates of one choice: columns seed, candidate, full-precision loss, quantized loss (named ``<bits> bit``)."""
    return rows[["seed", "candidate", "ce_fp", "ce"]].rename(columns={"ce_fp": FULL, "ce": f"{bits} bit"})


# --- choices ---


def chosen(rows: pd.DataFrame, by: str) -> dict[int, str]:
    """For each seed the candidate with the lowest mean of ``by`` over the other seeds; none where there are no others.

    Of equals the first in the order of the table.
    """
    loss = rows.pivot(index="candidate", columns="seed", values=by).loc[rows["candidate"].unique()]
    if loss.shape[1] < 2:
        return {}
    return {int(s): str(loss.drop(columns=s).mean(axis=1, skipna=False).idxmin()) for s in loss.columns}


def outcome(rows: pd.DataFrame, by: str, read: str) -> dict[int, float]:
    """``read`` of the candidate that ``chosen`` gives, on the seed left out."""
    at = rows.set_index(["seed", "candidate"])[read]
    return {s: float(at[s, c]) for s, c in chosen(rows, by).items()}


def regret(rows: pd.DataFrame, by: str, read: str) -> dict[int, float]:
    """``outcome`` minus the best of that seed, known only afterwards; nats per token."""
    best = rows.groupby("seed")[read].min()
    return {s: v - float(best[s]) for s, v in outcome(rows, by, read).items()}


def gain(rows: pd.DataFrame, bits: int) -> dict[int, float]:
    """Per seed: quantized loss of the run chosen by full precision minus that of the run chosen by quantized loss."""
    low = f"{bits} bit"
    full, quantized = outcome(rows, FULL, low), outcome(rows, low, low)
    return {s: full[s] - quantized[s] for s in full}


def gains(t: Tables, bits: int) -> dict[int, float]:
    """P3, per seed: mean of ``gain`` over the choices."""
    parts = [gain(t.candidates[c, bits], bits) for c in CHOICES if (c, bits) in t.candidates]
    if len(parts) < len(CHOICES):
        return {}
    seeds = set.intersection(*(set(p) for p in parts))
    return {s: float(np.mean([p[s] for p in parts])) for s in sorted(seeds)}


def regrets(t: Tables) -> pd.DataFrame:
    """Per choice, bits, objective and precision that is deployed: the regret, mean over seeds with 95 % t intervals in
    nats per token, and what was chosen how often."""
    found = []
    for (choice, bits), rows in t.candidates.items():
        for by in (FULL, f"{bits} bit"):
            picks = pd.Series(chosen(rows, by), dtype=object).value_counts()
            told = ", ".join(f"{c} ({n}×)" for c, n in picks.items())
            for deployed in (FULL, f"{bits} bit"):
                lost = claims.mean(regret(rows, by, deployed).values())
                row = {
                    "choice": choice,
                    "bits": bits,
                    "chosen by": by,
                    "chosen": told,
                    "deployed in": deployed,
                }
                found.append(row | statistics.columns("regret", lost))
    return pd.DataFrame(found)


# --- what the monitor sees ---


def labels(readings: pd.DataFrame) -> list[str]:
    """The quantizers that it reads: their columns."""
    return [c for c in readings.columns if c.split("-")[0] in ("rtn", "gptq")]


def agreement(t: Tables, bits: int = PRIMARY) -> dict[str, dict[int, float]]:
    """By label, per seed: Spearman's rank correlation of the readings with GPTQ's error as measured in full, over all
    checkpoints that have both."""
    full = errors(t.measured, bits)[["run", "tokens", "relative_error"]]
    both = t.readings.merge(full, on=["run", "tokens"])
    return {
        label: {int(s): float(stats.spearmanr(g[label], g["relative_error"]).statistic) for s, g in both.groupby("seed") if len(g) > 2}
        for label in labels(t.readings)
    }  # fmt: skip


def warned(t: Tables) -> dict[str, dict[int, tuple[int, int]]]:
    """Per seed: in how many of all cooldowns it warned, and at how many of all readings along the trunk, by half."""
    told = t.readings.assign(warned=t.readings["warned"] != "")
    trunk = told["branch_tokens"] == 0
    late = 2 * told["tokens"] >= told["run_tokens"]
    parts = {
        "cooldowns": told[~trunk].groupby(["seed", "run"])["warned"].any(),
        "readings of the trunk's first half": told[trunk & ~late].set_index("seed")["warned"],
        "readings of its last half": told[trunk & late].set_index("seed")["warned"],
    }
    return {
        what: {int(s): (int(g.sum()), len(g)) for s, g in rows.groupby("seed")}
        for what, rows in parts.items()
    }


# --- verdict ---


def judge(t: Tables, verdicts: bool) -> list[dict[str, Any]]:
    """Ledger entry for P3; each choice, other bits, costs in full precision and what the monitor sees as details."""
    values = gains(t, PRIMARY)
    details: dict[str, Any] = {}
    for bits in BITS:
        if bits != PRIMARY:
            details[f"both choices, {bits} bit"] = claims.plain(claims.mean(gains(t, bits).values()))
    for (choice, bits), rows in t.candidates.items():
        low = f"{bits} bit"
        details[f"{choice}, {low}"] = claims.plain(claims.mean(gain(rows, bits).values()))
        for by in (FULL, low):
            picks = list(chosen(rows, by).values())
            details[f"{choice}, chosen by {by}{'' if by == low else f' (beside {low})'}"] = picks
        a, b = outcome(rows, low, FULL), outcome(rows, FULL, FULL)
        cost = claims.mean(a[s] - b[s] for s in a)
        details[f"{choice}, full-precision loss that choosing by {low} costs"] = claims.plain(cost)
    for label, by_seed in agreement(t).items():
        name = f"rank correlation of the monitor's {label} with GPTQ {PRIMARY} bit in full"
        details[name] = claims.plain(claims.mean(by_seed.values()))
    for what, by_seed in warned(t).items():
        counts = {str(s): f"{k} of {n}" for s, (k, n) in by_seed.items()}
        details[f"warnings: {what}, per seed"] = counts
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    if not values:
        details["not judged"] = "a choice needs candidates and at least two seeds"
    size = statistics.scale(t.ends, f"GPTQ {PRIMARY} bit")
    return [claims.entry("P3", claims.mean(values.values()), len(values), size, details, verdicts=verdicts)]


# --- figure ---

_COLOURS = sns.color_palette("colorblind")
BY_FULL, BY_LOW = _COLOURS[0], _COLOURS[3]


def figure(t: Tables) -> Figure:
    """Upper row: the monitor along trunk and cooldowns. Middle: the candidates, and what each objective chooses.
    Lower: regrets."""
    style.use()
    fig, axes = plt.subplots(3, 2, figsize=(style.WIDTH, 8.2))
    _error(axes[0, 0], t)
    _loss(axes[0, 1], t)
    for ax, choice in zip(axes[1], CHOICES, strict=True):
        if (choice, PRIMARY) in t.candidates:
            _candidates(ax, t.candidates[choice, PRIMARY])
        ax.set_title(choice, fontsize=8.5)
    for ax, choice in zip(axes[2], CHOICES, strict=True):
        _regrets(ax, regrets(t).query("choice == @choice"))
        ax.set_title(choice, fontsize=8.5)
    for i, ax in enumerate(axes.flat):
        style.letter(ax, i)
    return fig


def _error(ax: Axes, t: Tables) -> None:
    own = [c for c in labels(t.readings) if f"-{PRIMARY}bit" in c]
    one = t.readings[t.readings["seed"] == t.readings["seed"].min()]
    for label, colour in zip(own, (_COLOURS[2], _COLOURS[1]), strict=False):
        for run, g in one.groupby("run"):
            first = g["branch_tokens"].iloc[0]
            line = pd.concat([one[(one["branch_tokens"] == 0) & (one["tokens"] == first)], g])
            name = label if run == one["run"].iloc[0] else None
            ax.plot(line["tokens"] / 1e6, 100 * line[label], color=colour, linewidth=1, label=name)
            told = g[g["warned"].str.split().map(lambda d, k=label: k in d)]
            ax.plot(told["tokens"] / 1e6, 100 * told[label], "v", color=colour, markersize=5)
    full = errors(t.measured, PRIMARY)
    full = full[full["run"].isin(one["run"])]
    ax.plot(full["tokens"] / 1e6, 100 * full["relative_error"], ".", color="0.3", markersize=4, label=f"GPTQ {PRIMARY} bit, in full")  # fmt: skip
    ax.set_ylim(0, None)
    ax.set_xlabel("training tokens (millions)")
    ax.set_ylabel(f"{PRIMARY}-bit error (%)")
    ax.legend(frameon=False, loc="best")


def _loss(ax: Axes, t: Tables) -> None:
    one = t.readings[t.readings["seed"] == t.readings["seed"].min()]
    trunk = one[one["branch_tokens"] == 0]
    for _, g in one.groupby("run"):
        first = g["branch_tokens"].iloc[0]
        line = pd.concat([trunk[trunk["tokens"] == first], g])
        ax.plot(line["tokens"] / 1e6, line["ce"], color=style.TRUNK, linewidth=1)
    told = one[one["warned"] != ""]
    ax.plot(told["tokens"] / 1e6, told["ce"], "v", color=BY_LOW, markersize=5, label="warns")
    shown = trunk.loc[trunk["tokens"] >= trunk["tokens"].max() / 10, "ce"]
    low, high = min(one["ce"].min(), shown.min()), shown.max()
    ax.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
    ax.set_xlabel("training tokens (millions)")
    ax.set_ylabel("full-precision loss\non the monitor's batch (nats/token)")
    if len(told):
        ax.legend(frameon=False, loc="best")


def _candidates(ax: Axes, rows: pd.DataFrame) -> None:
    """Mean losses of each candidate, and what each objective would choose on all seeds."""
    low = f"{PRIMARY} bit"
    mean = rows.groupby("candidate", sort=False)[[FULL, low]].mean()
    ax.plot(rows[FULL], rows[low], ".", color="0.75", markersize=3, zorder=1)
    ax.plot(mean[FULL], mean[low], "o", color=style.TRUNK, markersize=4, zorder=3)
    ax.margins(x=0.1, y=0.15)
    # names in a column beside the panel, in the order of the points, since the points lie close together
    for i, (name, (x, y)) in enumerate(mean.sort_values(low).iterrows()):
        place = (1.06, (i + 0.5) / len(mean))
        ax.annotate(
            str(name).removeprefix("reference: "), (x, y), xytext=place, textcoords="axes fraction", fontsize=6.5,
            color="0.3", va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "0.8", "linewidth": 0.5, "shrinkB": 3},
        )  # fmt: skip
    for by, colour, size in ((FULL, BY_FULL, 11), (low, BY_LOW, 15)):
        best = mean.loc[mean[by].idxmin()]
        ax.plot(best[FULL], best[low], "o", markersize=size, markerfacecolor="none", markeredgecolor=colour, label=f"best in {by}")  # fmt: skip
    ax.set_xlabel("full-precision loss (nats/token)")
    ax.set_ylabel(f"{PRIMARY}-bit loss (nats/token)")
    ax.legend(frameon=False, loc="best")


def _regrets(ax: Axes, rows: pd.DataFrame) -> None:
    places = [FULL, *(f"{b} bit" for b in BITS)]
    for i, deployed in enumerate(places):
        # regret in full precision is that of the choice by the lowest bit width
        bits = PRIMARY if deployed == FULL else int(deployed.split()[0])
        own = rows[(rows["deployed in"] == deployed) & (rows["bits"] == bits)]
        for r in own.to_dict("records"):
            full = r["chosen by"] == FULL
            e = claims.Estimate(*(1e3 * r[c] for c in ("regret", "regret, low", "regret, high")))
            style.interval(ax, i + (-0.12 if full else 0.12), e, color=BY_FULL if full else BY_LOW)
    ax.axhline(0, color=style.RATE, linewidth=0.8, zorder=0)
    ax.set_xticks(range(len(places)), places)
    ax.set_xlim(-0.5, len(places) - 0.5)
    ax.set_xlabel("deployed in")
    ax.set_ylabel("regret (mnats/token)")
    ax.margins(y=0.25)
    handles = [
        Line2D([], [], color=c, marker="o", linestyle="none", markersize=4, label=f"chosen by {what} loss")
        for c, what in ((BY_FULL, "full-precision"), (BY_LOW, "quantized"))
    ]
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.3 * (high - low))  # room for the legend
    ax.legend(handles=handles, frameon=False, loc="upper center")


def caption(t: Tables) -> str:
    """The figure's caption."""
    one = t.readings
    n = t.ends["seed"].nunique()
    return (
        f"The monitor. (a) Relative error at {PRIMARY} bit as the monitor reads it on a small fixed batch along the constant-LR "
        f"trunk and its cooldowns (lines, seed {one['seed'].min()}), and GPTQ's as measured in full (dots). Triangles: it warns. "
        "(b) Full-precision loss on the same batch. (c, d) What there is to choose from: the peak LRs of the longest WSD runs and "
        f"the cooldowns at equal tokens and batch, full-precision against {PRIMARY}-bit loss (means over {n} seeds; small dots: "
        "seeds); rings: the best by either. (e, f) Regret of choosing by either loss on the other seeds, on the seed left out: "
        "loss above that of the seed's best candidate, in thousandths of a nat per token"
        + ("; means with 95 % t intervals over seeds." if n > 1 else "; one seed, no choice can be tested.")
        + " In full precision: of the choice by 3-bit loss."
    )


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, tables, metrics and the judged claim."""
    t = read()
    fig = figure(t)
    style.save(fig, NAME, caption(t))
    ours, entries = regrets(t), judge(t, verdicts)
    numbers = {
        f"regret, {r['choice']}, by {r['chosen by']}, in {r['deployed in']} (beside {r['bits']} bit)": r[
            "regret"
        ]
        for r in ours.to_dict("records")
    }
    statistics.write(NAME, {f"{NAME}-regret": ours}, numbers, entries)
    return fig, ours, entries
