"""Averaging (C9, C10, C11): does an average of checkpoints do for low bits what the decay of the LR does, and better?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..core import paths
from ..core.config import read_yaml
from . import claims, statistics, style
from .statistics import ends, errors, log

NAME = "averaging"
SOUP_BITS, LAWA_BITS = 4, 3  # of C10 and of C9
BITS = (4, 3, 2)
PAPER = {  # quantity: key in paper.yaml, factor
    "full-precision loss": ("full_precision_loss", 1.0),
    "3-bit loss": ("loss_3bit", 1.0),
    "3-bit error (%)": ("error_3bit", 100.0),
}


@dataclass(frozen=True)
class Tables:
    """Measurements: the averages, the study whose trunk is averaged, and the study of the soups' ingredients."""

    averages: pd.DataFrame
    runs: pd.DataFrame
    soups: pd.DataFrame

    @property
    def lawa(self) -> pd.DataFrame:
        """LAWA along the trunk."""
        return self.averages[self.averages["purpose"] == "trajectory"]

    @property
    def trunk(self) -> pd.DataFrame:
        """The trunk itself."""
        return self.runs[self.runs["run"].isin(self.lawa["source"])]

    @property
    def cooldowns(self) -> pd.DataFrame:
        """The branches of the trunk, with all their checkpoints."""
        return self.runs[self.runs["parent"].isin(self.lawa["source"]) & (self.runs["branch_tokens"] > 0)]

    def quantizer(self, bits: int, method: str = "gptq") -> Tables:
        """The rows of one quantizer."""
        return Tables(*(errors(t, bits, method) for t in (self.averages, self.runs, self.soups)))


def read() -> Tables:
    """The tables in git.

    Raises:
        UserError: one is missing.
    """
    averages = statistics.table("measurements-averages", "average")
    of = averages.groupby("purpose")["study"].first()
    return Tables(averages, statistics.read(of["trajectory"])[0], statistics.read(of["soup"])[0])


# --- statistics ---


def matched(t: Tables, column: str) -> pd.DataFrame:
    """``column`` of the LAWA, of the cooldown that ends there and of the trunk, where all have seen as many tokens.

    A cooldown of length c from budget B ends at B + c tokens and is set against the LAWA at B + c tokens of the trunk,
    not at B. Columns: seed, tokens, lawa, cooldown, stable, late (in the last half of the trunk).
    """
    parts = {"lawa": t.lawa, "cooldown": ends(t.cooldowns), "stable": t.trunk}
    series = [
        g.groupby(["seed", "tokens"])[column].mean().rename(name) for name, g in parts.items()
    ]  # fmt: skip
    found = pd.concat(series, axis=1, join="inner").reset_index()
    return found.assign(late=2 * found["tokens"] >= t.trunk["run_tokens"].max())


def behind(t: Tables, column: str) -> dict[int, float]:
    """C9, per seed: ``column`` of the LAWA minus that of the cooldown, mean over the late cooldowns."""
    late = matched(t, column).query("late")
    return {int(s): float((g["lawa"] - g["cooldown"]).mean()) for s, g in late.groupby("seed")}


def gap_closed(t: Tables, column: str) -> dict[int, float]:
    """Per seed: how much of the way from the stable trunk down to the cooldown the LAWA goes, over the late cooldowns;
    NaN where the cooldown does not end below the trunk."""
    late = matched(t, column).query("late").groupby("seed")[["lawa", "cooldown", "stable"]].mean()
    way = (late["stable"] - late["cooldown"]).where(lambda w: w > 0)
    return {int(s): float(v) for s, v in ((late["stable"] - late["lawa"]) / way).items()}


def ingredients(t: Tables) -> pd.DataFrame:
    """The ends of the branches that the soups are made of, with the soup's ``source`` and seed."""
    made = t.averages.loc[t.averages["purpose"] == "soup", ["source", "branch_tokens", "member"]]
    return ends(t.soups).merge(
        made.drop_duplicates().rename(columns={"source": "parent"}), on=["parent", "branch_tokens", "member"]
    )


def against_best(t: Tables, column: str, kind: str = "soup", fold: str = "min") -> pd.DataFrame:
    """``column`` of each soup (``value``) and of the best of its ingredients (``best``; ``fold`` "mean": their mean)."""
    at = ["seed", "branch_tokens"]
    soup = t.averages[t.averages["kind"] == kind].set_index(at)[column].rename("value")
    best = ingredients(t).groupby(at)[column].agg(fold).rename("best")
    return pd.concat([soup, best], axis=1, join="inner").reset_index()


def soup_ratio(t: Tables, kind: str = "soup", fold: str = "min") -> dict[int, float]:
    """C10, per seed: error of the soup over the smallest among its ingredients (geometric mean over its soups)."""
    pairs = against_best(t, "relative_error", kind, fold)
    ratio = pairs.assign(log=log(pairs["value"]) - log(pairs["best"])).groupby("seed")["log"]
    return {int(s): float(np.exp(v)) for s, v in ratio.agg(lambda x: x.mean(skipna=False)).items()}


def soup_gap(t: Tables, column: str, kind: str = "soup") -> dict[int, float]:
    """Per seed: ``column`` of the soup minus that of the best of its ingredients."""
    pairs = against_best(t, column, kind)
    return {
        int(s): float(v) for s, v in (pairs["value"] - pairs["best"]).groupby(pairs["seed"]).mean().items()
    }


def over_decay(t: Tables, column: str) -> dict[int, float]:
    """C11's likeness at our scale, per seed: ``column`` of the LAWA over a decay minus that of its final weights."""
    lawa = t.averages[t.averages["purpose"] == "decay"].set_index(["source", "seed"])[column]
    end = ends(t.runs).rename(columns={"run": "source"}).set_index(["source", "seed"])[column]
    return {int(s): float(v) for (_, s), v in (lawa - end.reindex(lawa.index)).items()}


# --- verdicts ---


def judge(t: Tables, verdicts: bool) -> list[dict[str, Any]]:
    """Ledger entries for C9, C10 and C11; other bit widths and quantizers as details."""
    return [_c9(t, verdicts), _c10(t, verdicts), _c11(t)]


def _c9(t: Tables, verdicts: bool) -> dict[str, Any]:
    primary = t.quantizer(LAWA_BITS)
    values, full = behind(primary, "ce"), behind(primary, "ce_fp")
    details: dict[str, Any] = _others(t, t.runs, LAWA_BITS, lambda q: claims.mean(behind(q, "ce").values()))
    details["full precision"] = claims.plain(claims.mean(full.values()))
    pairs = matched(primary, "ce")
    for tokens, g in pairs.groupby("tokens"):
        name = f"at {tokens / 1e6:g}M tokens" + ("" if g["late"].all() else " (early, not judged)")
        details[name] = claims.plain(claims.mean(g["lawa"] - g["cooldown"]))
    for name, column in (("full precision", "ce_fp"), (f"{LAWA_BITS} bit", "ce")):
        closed = gap_closed(primary, column).values()
        details[f"share of the way from stable to decay, {name}"] = claims.plain(claims.mean(closed))
    details["window and interval (checkpoints, tokens)"] = _window(primary.lawa)
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    if not values:
        details["not judged"] = "no cooldown ends, in the last half of the trunk, where the LAWA was measured"
    size = statistics.scale(t.trunk, f"GPTQ {LAWA_BITS} bit")
    return claims.entry(
        "C9", claims.mean(values.values()), len(values), size, details,
        provided=all(v > 0 for v in full.values()), verdicts=verdicts and bool(values),
    )  # fmt: skip


def _c10(t: Tables, verdicts: bool) -> dict[str, Any]:
    primary = t.quantizer(SOUP_BITS)
    values = soup_ratio(primary)
    details: dict[str, Any] = _others(
        t, t.soups, SOUP_BITS, lambda q: claims.geometric(soup_ratio(q).values())
    )
    nested = claims.geometric(soup_ratio(primary, "soup_of_lawas").values())
    details["soup of LAWAs over the decays"] = claims.plain(nested)
    details["against the mean of the ingredients"] = claims.plain(
        claims.geometric(soup_ratio(primary, fold="mean").values())
    )
    for name, column in (("full-precision loss", "ce_fp"), (f"{SOUP_BITS}-bit loss", "ce")):
        gap = claims.mean(soup_gap(primary, column).values())
        details[f"{name} minus the best ingredient's, nats"] = claims.plain(gap)
    of = ingredients(primary)
    details["ingredients per soup"] = (
        int(of.groupby(["seed", "branch_tokens"]).size().min()) if len(of) else 0
    )
    details["errors of 0 or less, which have no logarithm"] = statistics.not_positive(of)
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    size = statistics.scale(of if len(of) else t.soups, f"GPTQ {SOUP_BITS} bit")
    return claims.entry(
        "C10", claims.geometric(values.values()), len(values), size, details, verdicts=verdicts
    )


def _c11(t: Tables) -> dict[str, Any]:
    """No verdict: it speaks of open models. What our own runs show of the kind stands in the details."""
    decay = t.averages[t.averages["purpose"] == "decay"]
    window = int(decay["window"].iloc[0]) if len(decay) else 0
    likeness = f"our runs, LAWA over the last {window} checkpoints of a decay minus its final weights, nats"
    details: dict[str, Any] = {
        "not judged": "it speaks of open models' published checkpoints, of which this pipeline reads none",
    }
    for bits in [b for b in BITS if len(errors(decay, b))]:
        q = t.quantizer(bits)
        details[f"{likeness}: {bits} bit"] = claims.plain(claims.mean(over_decay(q, "ce").values()))
        details.setdefault(
            f"{likeness}: full precision", claims.plain(claims.mean(over_decay(q, "ce_fp").values()))
        )
    return claims.entry("C11", claims.mean([]), 0, "no open model", details, verdicts=False)


def _others(
    t: Tables, compared: pd.DataFrame, bits: int, estimate: Callable[[Tables], Any]
) -> dict[str, dict[str, float | None]]:
    """The statistic under every quantizer that the averages share with what they are compared with."""
    shared = set(statistics.quantizers(compared)) - {("gptq", bits)}
    pairs = [q for q in statistics.quantizers(t.averages) if q in shared]
    return {f"{m} {b} bit": claims.plain(estimate(t.quantizer(b, m))) for m, b in pairs}


def _window(lawa: pd.DataFrame) -> list[int]:
    return [int(lawa[c].iloc[0]) for c in ("window", "interval_tokens")]


# --- tables ---


def summary(t: Tables) -> pd.DataFrame:
    """LAWA, cooldown and stable trunk with as many tokens seen, over the late cooldowns, beside the paper's.

    Losses and ΔCE in nats per token, errors in per cent; means over seeds with 95 % t intervals. The paper's numbers
    are read by eye off its figure, at 100B tokens.
    """
    paper = read_yaml(paths.reference() / "paper.yaml")[NAME]
    rows = []
    for name, q in _quantities(t, "runs").items():
        late = matched(q, "y").query("late").groupby("seed")[["lawa", "cooldown", "stable"]].mean()
        row: dict[str, Any] = {"quantity": name, "seeds": len(late)}
        for column, label in (("lawa", "LAWA"), ("cooldown", "cooldown"), ("stable", "stable")):
            row |= statistics.columns(label, claims.mean(late[column]))
        row |= statistics.columns("LAWA − cooldown", claims.mean(behind(q, "y").values()))
        if name.endswith("loss"):
            row |= statistics.columns("share of the way", claims.mean(gap_closed(q, "y").values()))
        if name in PAPER:
            key, factor = PAPER[name]
            row |= {f"paper, {k.replace('lawa', 'LAWA')} [e]": factor * v for k, v in paper[key].items()}
        rows.append(row)
    return pd.DataFrame(rows)


def budgets(t: Tables) -> pd.DataFrame:
    """As ``summary``, for every cooldown that ends where a LAWA was measured; means over seeds."""
    rows = [
        {"tokens (M)": tokens / 1e6, "late": bool(g["late"].all()), "quantity": name}
        | {k: g[k].mean() for k in ("lawa", "cooldown", "stable")}
        | statistics.columns("LAWA − cooldown", claims.mean(g["lawa"] - g["cooldown"]))
        for name, q in _quantities(t, "runs").items()
        for tokens, g in matched(q, "y").groupby("tokens")
    ]
    return pd.DataFrame(rows)


def at_end(t: Tables) -> pd.DataFrame:
    """Averages of other windows and intervals, and EMAs, at the end of the trunk; its own last checkpoint is window 1."""
    a = t.averages[t.averages["purpose"].isin(["trajectory", "ablation"])]
    own = ends(t.trunk).assign(kind="none", window=1)
    return pd.concat([own, ends(a)], ignore_index=True)


def ablation(t: Tables) -> pd.DataFrame:
    """``at_end`` as a table: means over seeds with 95 % t intervals; window in checkpoints, interval in tokens."""
    keys = ["kind", "window", "interval_tokens", "ema_decay"]
    found: dict[tuple, dict[str, Any]] = {}
    for name, rows in statistics.quantities(at_end(t)).items():
        for values, g in rows.groupby(keys, dropna=False):
            key = tuple(None if pd.isna(v) else v for v in values)
            row = found.setdefault(key, dict(zip(keys, key, strict=True)) | {"seeds": g["seed"].nunique()})
            row |= statistics.columns(name, claims.mean(g["y"]))
    return pd.DataFrame(list(found.values()))


def soups(t: Tables) -> pd.DataFrame:
    """Per seed: the ingredients' mean and best, the soup and the soup of LAWAs."""
    rows = []
    for name, q in _quantities(t, "soups").items():
        plain = against_best(q, "y").rename(columns={"value": "soup", "best": "best ingredient"})
        mean = against_best(q, "y", fold="mean")["best"]
        nested = against_best(q, "y", "soup_of_lawas")["value"]
        rows.append(plain.assign(quantity=name, mean_ingredient=mean, soup_of_lawas=nested))
    found = pd.concat(rows, ignore_index=True)
    names = {"mean_ingredient": "mean ingredient", "soup_of_lawas": "soup of LAWAs"}
    order = [
        "quantity",
        "seed",
        "branch_tokens",
        "mean ingredient",
        "best ingredient",
        "soup",
        "soup of LAWAs",
    ]
    return found.rename(columns=names)[order]


def _quantities(t: Tables, of: str) -> dict[str, Tables]:
    """``statistics.quantities`` that both the averages and the table ``of`` ("runs" or "soups") have: rows with the
    number in the column ``y``."""
    averages, other = statistics.quantities(t.averages), statistics.quantities(getattr(t, of))
    return {n: dataclasses.replace(t, averages=averages[n], **{of: other[n]}) for n in averages if n in other}


# --- figure ---

LAWA, DECAY = (sns.color_palette("colorblind")[i] for i in (0, 3))


def figure(t: Tables) -> Figure:
    """Loss in full precision and quantized against tokens: trunk, LAWA along it, cooldowns. Below: window and interval
    at the trunk's end; soups and their ingredients."""
    style.use()
    losses, soup = _losses(t), _quantities(t, "soups")
    fig, axes = plt.subplots(4, 2, figsize=(style.WIDTH, 9.6))
    for ax, (name, rows) in zip(axes.flat, losses.items(), strict=False):
        _along(ax, rows)
        ax.set_ylabel(f"{name} (nats/token)")
    for ax in list(axes.flat)[len(losses) : 4]:
        ax.set_visible(False)
    for ax, name in zip(axes[2], ("full-precision loss", f"{LAWA_BITS}-bit loss"), strict=True):
        if name in losses:
            _windows(ax, at_end(losses[name]))
            if ax is axes[2, 1]:  # where there is room, for both
                ax.legend(frameon=False, loc="upper center")
        ax.set_ylabel(f"{name} (nats/token)")
    _soups(axes[3, 0], {"full-precision loss": soup["full-precision loss"]})
    axes[3, 0].set_ylabel("full-precision loss (nats/token)")
    _soups(axes[3, 1], {n: soup[n] for n in (f"{b}-bit error (%)" for b in (4, 3)) if n in soup}, log=True)
    axes[3, 1].set_ylabel("error (%)")
    for i, ax in enumerate([ax for ax in axes.flat if ax.get_visible()]):
        style.letter(ax, i)
    handles = [
        Line2D([], [], color=style.TRUNK, marker="o", markersize=3, label="constant LR (trunk)"),
        Line2D([], [], color=LAWA, marker="s", markersize=3, label="LAWA along the trunk"),
        Line2D([], [], color=DECAY, marker="v", markersize=4, label="cooldown (marker: its end)"),
    ]
    fig.legend(handles=handles, loc="outside upper center", ncol=3, frameon=False)
    return fig


def _losses(t: Tables) -> dict[str, Tables]:
    """Full precision, then the bit widths."""
    found = _quantities(t, "runs")
    return {n: found[n] for n in ("full-precision loss", *(f"{b}-bit loss" for b in BITS)) if n in found}


def _along(ax: Axes, t: Tables) -> None:
    lawa, trunk, ended = t.lawa, t.trunk, ends(t.cooldowns)
    style.band(ax, trunk, "y", color=style.TRUNK, marker="o", markersize=2.5, zorder=3)
    style.band(ax, lawa, "y", color=LAWA, marker="s", markersize=3, zorder=5)
    for budget, branch in t.cooldowns.groupby("branch_tokens"):
        joined = pd.concat([trunk[trunk["tokens"] == budget], branch])
        style.band(ax, joined, "y", color=DECAY, linewidth=0.9, zorder=4)
    ends_ = ended.groupby("tokens")["y"].mean()
    ax.plot(ends_.index / 1e6, ends_, "v", color=DECAY, markersize=4.5, zorder=6)
    # the loss of the first checkpoints would flatten all that follows
    shown = pd.concat([d[d["tokens"] >= lawa["tokens"].min()]["y"] for d in (trunk, lawa, ended)])
    margin = 0.06 * (shown.max() - shown.min()) or 0.01
    ax.set_ylim(shown.min() - margin, shown.max() + margin)
    ax.set_xlabel("training tokens (millions)")


def _windows(ax: Axes, rows: pd.DataFrame) -> None:
    own = rows[rows["kind"] == "none"]
    spacings = sorted(rows.loc[rows["kind"] == "lawa", "interval_tokens"].unique())
    for spacing, colour in zip(spacings, style.gradient(len(spacings)), strict=True):
        line = pd.concat([own, rows[(rows["kind"] == "lawa") & (rows["interval_tokens"] == spacing)]])
        by = line.groupby("window")["y"].agg(["mean", "min", "max"])
        ax.plot(
            by.index, by["mean"], color=colour, marker="o", markersize=3, label=f"every {spacing / 1e6:g}M tokens"
        )  # fmt: skip
        ax.fill_between(by.index, by["min"], by["max"], color=colour, alpha=0.15, linewidth=0)
    for decay, g in rows[rows["kind"] == "ema"].groupby("ema_decay"):
        ax.axhline(g["y"].mean(), color=style.RATE, linestyle=":", label=f"EMA, decay {decay:g}")
    windows = sorted(rows.loc[rows["kind"] != "ema", "window"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(windows, [f"{w:g}" for w in windows])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("checkpoints averaged at the trunk's end")


def _soups(ax: Axes, quantities: Mapping[str, Tables], log: bool = False) -> None:
    marks = [("soup", "soup", "*", 9), ("soup_of_lawas", "soup of LAWAs", "D", 4)]
    colours = sns.color_palette("colorblind")
    for colour, (name, t) in zip((colours[2], colours[1]), quantities.items(), strict=False):
        of = ingredients(t).groupby("seed")["y"].apply(list)
        seeds = list(of.index)
        for x, seed in enumerate(seeds):
            ys = of[seed]
            ax.plot(np.linspace(x - 0.2, x, len(ys)), ys, "o", color="0.6", markersize=3.5, zorder=2)
            for dx, (kind, _, marker, size) in zip((0.15, 0.27), marks, strict=True):
                rows = t.averages[(t.averages["kind"] == kind) & (t.averages["seed"] == seed)]
                y = rows["y"]
                ax.plot(
                    [x + dx] * len(y), y, marker, color=colour, markersize=size, markeredgewidth=0, zorder=4
                )
        if len(quantities) > 1:
            label = name.removesuffix(" error (%)")
            last = of[seeds[-1]]
            ax.annotate(
                label, (len(seeds) - 0.62, float(np.mean(last))), color=colour, fontsize=7.5, va="center"
            )
        ax.set_xticks(range(len(seeds)), [f"seed {s}" for s in seeds])
        ax.set_xlim(-0.5, len(seeds) - 0.3)
    if log and all(line.get_ydata().min() > 0 for line in ax.lines):
        ax.set_yscale("log")
        style.plain_log(ax.yaxis)
    ax.set_xlabel("trunk")
    handles = [Line2D([], [], color="0.6", marker="o", linestyle="none", markersize=3.5, label="ingredient")]
    handles += [
        Line2D([], [], color="0.35", marker=m, linestyle="none", markersize=s, markeredgewidth=0, label=label)
        for _, label, m, s in marks
    ]
    if not log:
        ax.legend(handles=handles, frameon=False, loc="best")


def caption(t: Tables) -> str:
    """The figure's caption."""
    n, (window, spacing) = t.lawa["seed"].nunique(), _window(t.lawa)
    shown, letters = len(_losses(t)), "abcdefgh"
    decay = t.averages.loc[t.averages["kind"] == "soup_of_lawas", "window"]
    of = ingredients(t)
    count = int(of[of["method"] == "none"].groupby("seed").size().min()) if len(of) else 0
    return (
        f"Averaging. ({letters[0]}–{letters[shown - 1]}) Loss in full precision and under GPTQ (symmetric) against tokens "
        f"seen: the trunk at constant LR, LAWA along it (mean of the last {window} checkpoints, one every {spacing / 1e6:g}M "
        "tokens) and linear cooldowns to zero. A cooldown is compared with the LAWA that has seen as many tokens, those of "
        f"the cooldown included. Lines: mean; bands: {f'the range over {n} seeds' if n > 1 else 'not shown (one seed)'}; the "
        f"loss of the first checkpoints lies outside. ({letters[shown]}, {letters[shown + 1]}) Other windows and intervals at "
        "the trunk's end; one checkpoint is the trunk itself. Nothing there chose the window of the panels above. "
        f"({letters[shown + 2]}, {letters[shown + 3]}) Soups: per seed the uniform mean of {count} branches of one trunk "
        "that differ in the order of their data alone, and of their LAWAs (the last "
        f"{int(decay.iloc[0]) if len(decay) else 0} checkpoints of each decay). Error: CE(Ŵ)/CE(W) − 1 in per cent on "
        f"{int(t.runs['evaluation_tokens'].max()):,} held-out tokens ({', '.join(sorted(t.runs['evaluation_set'].unique()))})."
    )


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, tables, metrics and judged claims."""
    t = read()
    fig = figure(t)
    style.save(fig, NAME, caption(t))
    ours, entries = summary(t), judge(t, verdicts)
    tables = {
        NAME: ours,
        f"{NAME}-budgets": budgets(t),
        f"{NAME}-windows": ablation(t),
        f"{NAME}-soups": soups(t),
    }
    numbers = {f"{r['quantity']}, LAWA − cooldown": r["LAWA − cooldown"] for r in ours.to_dict("records")}
    statistics.write(NAME, tables, numbers, entries)
    return fig, ours, entries
