"""A predictor (P2): what quantization will cost, from curvature and grid step, before anything is quantized.

Round to nearest moves each weight by an error that is uniform over one grid step s, of variance s²/12. To second order
the loss then rises by ½ · tr(H) · s²/12, with the Hessian H over the quantized matrices. The formula keeps that form and
fits its three constants: ΔCE = A · tr(H)^a · s^b, where the physics says a = 1, b = 2. GPTQ, which chooses its errors,
should stay below, by a factor. Rivals with as many constants: a law in the tokens seen (the form of Kumar et al. 2024,
with tokens per parameter for tokens and parameters) and one in the peak LR.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from ..core import paths
from ..evaluation.intervals import Estimate
from . import claims, statistics, style
from .statistics import log

NAME = "prediction"
FIT = "peak_lr"  # the study that the laws are fitted to
SIZE = "schedules_small"  # the study of the other model size
OTHERS = ("schedules", "weight_decay", "cooldowns", "token_budgets")
BITS = (4, 3)
UNIFORM = 12.0  # a uniform error over one grid step has this part of the step's square as its variance


@dataclass(frozen=True)
class Law:
    """ln ΔCE as a linear function of ``features``, constants fitted; with ``offset``, that column added as it is."""

    name: str
    features: tuple[str, ...]
    offset: str | None = None


FORMULA = Law("trace and step", ("ln_trace", "ln_step"))
TOKENS = Law("tokens", ("ln_per_parameter", "bits"))
RATE = Law("peak LR", ("ln_rate", "bits"))
DETAILS = (
    Law("½·trace·step²/12, one factor fitted", (), "ln_core"),
    Law("trace, step and peak LR", ("ln_trace", "ln_step", "ln_rate")),
    Law("tokens and peak LR", ("ln_per_parameter", "ln_rate", "bits")),
)
LAWS = (FORMULA, TOKENS, RATE, *DETAILS)
SPLITS = {
    "seed": "other seed",
    "rate": "other seed and peak LR",
    "study": "other seed and study",
    "size": "other seed and width",
}
BEYOND = {"bits": "other seed, and 2 bit"}  # described, not judged


# --- rows ---


def read() -> tuple[pd.DataFrame, list[str]]:
    """``prepare`` of every study of which there is curvature, and the studies of which there is none.

    Raises:
        UserError: a table of the study that the laws are fitted to is missing.
    """
    found, lacking = [], []
    for study in (FIT, *OTHERS, SIZE):
        if study != FIT and not (paths.tables() / f"curvature-{study}.csv").is_file():
            lacking.append(study)
            continue
        curvature = statistics.table(f"curvature-{study}", "curvature")
        found.append(prepare(statistics.read(study)[0], curvature).assign(study=study))
    rows = pd.concat(found, ignore_index=True)
    # runs of several studies may be the same weights: they count where they come first, the fit before all
    return rows.drop_duplicates(["weights_id", "method", "bits", "group_size"]), lacking


def prepare(table: pd.DataFrame, curvature: pd.DataFrame) -> pd.DataFrame:
    """One row per checkpoint and quantizer, with everything that a law may use.

    Args:
        table: measurements of a study. curvature: ``trace_quantized`` and ``weight_scale`` by run, tokens and group size.

    Returns:
        The measurements with the columns ``ln_error`` (of ΔCE, what is predicted), ``ln_trace``, ``ln_step`` (2 · mean
        over groups of the largest |w| / (2^bits − 1)), ``ln_core`` (½ · trace · step²/12), ``ln_rate`` (peak LR),
        ``ln_per_parameter`` (tokens seen per parameter). NaN where there is no logarithm.
    """
    keys = ["run", "tokens", "group_size"]
    own = curvature[[*keys, "trace_quantized", "weight_scale"]]
    rows = table[table["method"] != "none"].merge(own, on=keys)
    step = 2 * rows["weight_scale"] / (2 ** rows["bits"] - 1)
    return rows.assign(
        ln_error=log(rows["delta_ce"]),
        ln_trace=log(rows["trace_quantized"]),
        ln_step=log(step),
        ln_core=log(0.5 * rows["trace_quantized"] * step**2 / UNIFORM),
        ln_rate=log(rows["peak_lr"]),
        ln_per_parameter=log(rows["tokens"] / rows["parameters"]),
    )


def usable(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose error and trace have logarithms."""
    return rows[np.isfinite(rows["ln_error"]) & np.isfinite(rows["ln_trace"])]


# --- fits ---


def fit(law: Law, rows: pd.DataFrame) -> np.ndarray:
    """Constants by least squares of ln ΔCE: intercept first, then one per feature; NaN where the rows cannot tell them."""
    x, y = _design(law, rows)
    if len(y) < x.shape[1]:
        return np.full(x.shape[1], np.nan)
    mean = x[:, 1:].mean(axis=0)
    centred = np.column_stack([x[:, :1], x[:, 1:] - mean])  # so that the rank shows which features vary
    c, _, rank, _ = np.linalg.lstsq(centred, y, rcond=1e-8)
    if rank < x.shape[1]:
        return np.full(x.shape[1], np.nan)
    c[0] -= mean @ c[1:]
    return c


def predict(law: Law, constants: np.ndarray, rows: pd.DataFrame) -> np.ndarray:
    """ln ΔCE of ``rows``."""
    x, _ = _design(law, rows)
    return x @ constants + (rows[law.offset].to_numpy(float) if law.offset else 0.0)


def _design(law: Law, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    x = np.column_stack([np.ones(len(rows)), *(rows[f].to_numpy(float) for f in law.features)])
    y = rows["ln_error"].to_numpy(float)
    return x, y - rows[law.offset].to_numpy(float) if law.offset else y


def held_out(rows: pd.DataFrame, laws: Sequence[Law] = LAWS) -> pd.DataFrame:
    """Every law's prediction of every row that its fit has not seen.

    Fits use GPTQ at ``BITS`` along the runs of ``FIT``, without the seed that is predicted. What is predicted: that
    seed's runs (split "seed"); those at a peak LR that the fit did not see either ("rate"); those of other studies,
    where they are other weights ("study"); those of the other width ("size"); 2 bit in any study ("bits").

    Returns:
        Columns law, split, seed, study, run, tokens, bits, ln_error, predicted.
    """
    rows = usable(errors_of(rows, "gptq"))
    judged = rows[rows["bits"].isin(BITS)]
    of = judged[judged["study"] == FIT]
    parts = []
    for seed in sorted(rows["seed"].unique()):
        fitted, seen = of[of["seed"] != seed], judged[judged["seed"] == seed]
        tests = [("seed", fitted, seen[seen["study"] == FIT])]
        for rate in sorted(of["peak_lr"].unique()):
            at = seen[(seen["study"] == FIT) & (seen["peak_lr"] == rate)]
            tests.append(("rate", fitted[fitted["peak_lr"] != rate], at))
        tests.append(("study", fitted, seen[seen["study"].isin(OTHERS)]))
        tests.append(("size", fitted, seen[seen["study"] == SIZE]))
        tests.append(("bits", fitted, rows[(rows["seed"] == seed) & ~rows["bits"].isin(BITS)]))
        for split, train, test in tests:
            if len(train) and len(test):
                for law in laws:
                    kept = test[["seed", "study", "run", "tokens", "bits", "ln_error"]]
                    found = predict(law, fit(law, train), test)
                    parts.append(kept.assign(law=law.name, split=split, predicted=found))
    columns = ["law", "split", "seed", "study", "run", "tokens", "bits", "ln_error", "predicted"]
    if not parts:
        return pd.DataFrame({c: pd.Series(dtype=float) for c in columns})
    return pd.concat(parts, ignore_index=True)[columns]


def errors_of(rows: pd.DataFrame, method: str) -> pd.DataFrame:
    """The rows of one method, all bit widths."""
    return rows[rows["method"] == method]


def scores(predictions: pd.DataFrame) -> pd.DataFrame:
    """Mean absolute error of ln ΔCE (``mae``) per law, split and seed; NaN where a law could not be fitted."""
    off = (predictions["predicted"] - predictions["ln_error"]).abs()
    by = [predictions[c] for c in ("law", "split", "seed")]
    return off.groupby(by, sort=False).agg(lambda v: v.mean(skipna=False)).rename("mae").reset_index()


def r_squared(predictions: pd.DataFrame) -> Estimate:
    """R² within bit widths, all seeds together, with its jackknife interval over seeds (Tukey 1958).

    1 − Σ(y − ŷ)² / Σ(y − mean of y at that bit width)²: telling 3 from 4 bit, which every law does, earns nothing.
    """

    def of(p: pd.DataFrame) -> float:
        off = (p["predicted"] - p["ln_error"]).to_numpy(float)
        spread = (p["ln_error"] - p.groupby("bits")["ln_error"].transform("mean")).to_numpy(float)
        return float(1 - off @ off / (spread @ spread)) if (spread != 0).any() else float("nan")

    whole, seeds = of(predictions), predictions["seed"].unique()
    n = len(seeds)
    if n < 2:
        return Estimate(whole, float("nan"), float("nan"))
    half = float(
        statistics.jackknife_half_width(np.array([of(predictions[predictions["seed"] != s]) for s in seeds]))
    )
    return Estimate(whole, whole - half, whole + half)


def per_seed(scored: pd.DataFrame, law: Law) -> dict[int, float]:
    """Mean absolute error over the four kinds of held-out runs, for the seeds that have all four."""
    own = scored[(scored["law"] == law.name) & scored["split"].isin(list(SPLITS))]
    whole = own.groupby("seed").filter(lambda g: len(g) == len(SPLITS))
    return {int(s): float(g["mae"].mean(skipna=False)) for s, g in whole.groupby("seed")}


def difference(scored: pd.DataFrame, law: Law, rival: Law) -> dict[int, float]:
    """P2, per seed: mean absolute error under ``law`` minus that under ``rival``."""
    a, b = per_seed(scored, law), per_seed(scored, rival)
    return {s: a[s] - b[s] for s in a.keys() & b.keys()}


def exponents(rows: pd.DataFrame, law: Law = FORMULA, method: str = "gptq") -> dict[str, Estimate]:
    """The law's constants, fitted to each seed's runs of ``FIT`` alone: mean over seeds. A as ln A."""
    of = usable(errors_of(rows[(rows["study"] == FIT) & rows["bits"].isin(BITS)], method))
    by = [fit(law, g) for _, g in of.groupby("seed")]
    return {n: claims.mean(c[i] for c in by) for i, n in enumerate(("ln A", *law.features))}


def over_core(rows: pd.DataFrame) -> dict[tuple[str, int], dict[int, float]]:
    """By method and bits, per seed: ΔCE over ½ · trace · step²/12, nothing fitted (geometric mean over checkpoints)."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for (method, bits, seed), g in usable(rows).groupby(["method", "bits", "seed"]):
        ratio = np.exp((g["ln_error"] - g["ln_core"]).mean())
        found.setdefault((str(method), int(bits)), {})[int(seed)] = float(ratio)
    return found


# --- verdict ---


def judge(rows: pd.DataFrame, lacking: Sequence[str], verdicts: bool) -> list[dict[str, Any]]:
    """Ledger entry for P2; splits, other laws, constants and the unfitted core as details."""
    scored = scores(held_out(rows))
    values = difference(scored, FORMULA, TOKENS)
    against_rate = claims.mean(difference(scored, FORMULA, RATE).values())
    details: dict[str, Any] = {"against the peak LR alone": claims.plain(against_rate)}
    for law in LAWS:
        details[f"mean absolute log error, {law.name}"] = claims.plain(
            claims.mean(per_seed(scored, law).values())
        )
    for split, words in (SPLITS | BEYOND).items():
        a, b = (_by_seed(scored, law, split) for law in (FORMULA, TOKENS))
        details[f"{words}: formula − tokens"] = claims.plain(claims.mean((a - b).dropna()))
    for name, e in exponents(rows).items():
        details[f"fitted constant: {name}"] = claims.plain(e)
    for (method, bits), by in over_core(rows).items():
        details[f"ΔCE over ½·trace·step²/12, {method} {bits} bit"] = claims.plain(
            claims.geometric(by.values())
        )
    dropped = errors_of(rows[rows["bits"].isin(BITS)], "gptq")
    details["errors or traces of 0 or less, which have no logarithm"] = len(dropped) - len(usable(dropped))
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    if not values:
        lacks = [w for s, w in SPLITS.items() if s not in set(scored["split"])]
        details["not judged"] = f"nothing held out: {', '.join(lacks)}" + (
            f" (no curvature of {', '.join(lacking)})" if lacking else ""
        )
    if lost := sorted(set(rows["seed"]) - set(values)):
        details["seeds without all four kinds of held-out runs, left out"] = lost
    size = statistics.scale(rows[rows["study"] == FIT], f"GPTQ {BITS[0]} and {BITS[1]} bit, fitted")
    provided = bool(against_rate.value < 0) if np.isfinite(against_rate.value) else None
    return [
        claims.entry(
            "P2",
            claims.mean(values.values()),
            len(values),
            size,
            details,
            provided=provided,
            verdicts=verdicts and bool(values),
        )  # fmt: skip
    ]


def _by_seed(scored: pd.DataFrame, law: Law, split: str) -> pd.Series:
    return scored[(scored["law"] == law.name) & (scored["split"] == split)].set_index("seed")["mae"]


# --- tables ---


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Per law and kind of held-out runs: mean absolute log error with its 95 % t interval over seeds, and
    ``r_squared``. The last row of each law: the mean of the four kinds, which P2 judges."""
    predictions = held_out(rows)
    scored = scores(predictions)
    found = []
    for law in LAWS:
        own = predictions[predictions["law"] == law.name]
        kinds = {w: (_by_seed(scored, law, s), own[own["split"] == s]) for s, w in (SPLITS | BEYOND).items()}
        of_all = pd.Series(per_seed(scored, law), dtype=float)
        kinds["mean of the four kinds"] = (of_all, own[own["split"].isin(list(SPLITS))])
        for words, (mae, predicted) in kinds.items():
            if len(mae):
                row = {"law": law.name, "held out": words, "predictions": len(predicted), "seeds": len(mae)}
                row |= statistics.columns("mean absolute log error", claims.mean(mae))
                found.append(row | statistics.columns("R²", r_squared(predicted)))
    columns = ["law", "held out", "predictions", "seeds", "mean absolute log error", "R²"]
    return pd.DataFrame(found) if found else pd.DataFrame(columns=columns)


def constants(rows: pd.DataFrame) -> pd.DataFrame:
    """The fitted constants of every law, means over fits to single seeds, with 95 % t intervals."""
    found = [
        {"law": law.name, "constant": name} | statistics.columns("value", e)
        for law in LAWS
        for name, e in exponents(rows, law).items()
    ]
    return pd.DataFrame(found)


# --- figure ---

_COLOURS = sns.color_palette("colorblind")
COLOURS = dict(zip(SPLITS, (_COLOURS[i] for i in (0, 1, 2, 4)), strict=True))
MARKS = {4: "o", 3: "^"}


def figure(rows: pd.DataFrame) -> Figure:
    """Predicted against measured ΔCE of held-out runs under the formula and its rivals; mean absolute log errors."""
    style.use()
    predictions = held_out(rows)
    fig, axes = plt.subplots(2, 2, figsize=(style.WIDTH, 6.6))
    shown = predictions[predictions["split"].isin(list(SPLITS))]
    for ax, law in zip(axes.flat, (FORMULA, TOKENS, RATE), strict=False):
        _against(ax, shown, law)
    _bars(axes[1, 1], scores(predictions))
    for i, ax in enumerate(axes.flat):
        style.letter(ax, i)
    handles = [
        Line2D([], [], color=c, marker="s", linestyle="none", markersize=4, label=SPLITS[s])
        for s, c in COLOURS.items()
    ]
    handles += [
        Line2D([], [], color="0.35", marker=m, linestyle="none", markersize=4, label=f"{b} bit")
        for b, m in MARKS.items()
    ]
    fig.legend(handles=handles, loc="outside upper center", ncol=6, frameon=False, columnspacing=1.0, handletextpad=0.2)  # fmt: skip
    return fig


def _against(ax: Axes, shown: pd.DataFrame, law: Law) -> None:
    own = shown[(shown["law"] == law.name) & np.isfinite(shown["predicted"])]
    for (split, bits), g in own.groupby(["split", "bits"]):
        ax.plot(
            np.exp(g["ln_error"]), np.exp(g["predicted"]), MARKS[bits], color=COLOURS[split], markersize=3,
            alpha=0.6, markeredgewidth=0,
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    if len(shown):
        span = np.exp([shown["ln_error"].min() - 0.3, shown["ln_error"].max() + 0.3])
        ax.plot(span, span, color=style.RATE, linewidth=0.8, zorder=0)
        ax.set_xlim(*span)
        ax.set_ylim(*span)  # equal scales; what a rival predicts beyond lies outside
        beyond = int(((np.exp(own["predicted"]) < span[0]) | (np.exp(own["predicted"]) > span[1])).sum())
        if beyond:
            ax.text(0.97, 0.03, f"{beyond} outside", transform=ax.transAxes, ha="right", fontsize=7, color="0.45")  # fmt: skip
    for axis in (ax.xaxis, ax.yaxis):
        style.plain_log(axis)
        if len(shown) and span[1] > 50 * span[0]:
            axis.set_major_locator(LogLocator())  # decades alone, for room
    ax.set_title(_words(law), fontsize=8)
    ax.set_xlabel("measured ΔCE (nats/token)")
    ax.set_ylabel("predicted ΔCE (nats/token)")


def _words(law: Law) -> str:
    return {
        FORMULA: r"$A\,\mathrm{tr}(H)^a\,s^b$",
        TOKENS: r"$A\,(D/N)^g\,e^{h\,\mathrm{bits}}$",
        RATE: r"$A\,\mathrm{LR}^g\,e^{h\,\mathrm{bits}}$",
    }[law]


def _bars(ax: Axes, scored: pd.DataFrame) -> None:
    """Mean absolute log error by kind of held-out runs, three laws side by side."""
    laws = dict(zip((FORMULA, TOKENS, RATE), ("0.15", _COLOURS[3], _COLOURS[5]), strict=True))
    for i, (law, colour) in enumerate(laws.items()):
        for x, split in enumerate(SPLITS):
            values = _by_seed(scored, law, split)
            if len(values):
                label = law.name if x == 0 else None
                style.interval(ax, x + 0.22 * (i - 1), claims.mean(values), color=colour, label=label)
    short = {"seed": "seed", "rate": "LR", "study": "study", "size": "width"}
    ax.set_xticks(range(len(SPLITS)), [short[s] for s in SPLITS])
    ax.set_xlim(-0.5, len(SPLITS) - 0.5)
    ax.set_ylim(0, None)
    ax.set_xlabel("held out, besides the seed")
    ax.set_ylabel("mean |ln predicted − ln measured|")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, loc="upper left")


def caption(rows: pd.DataFrame, lacking: Iterable[str]) -> str:
    """The figure's caption."""
    n = rows["seed"].nunique()
    fitted = rows[rows["study"] == FIT]
    rates = ", ".join(f"{r:g}" for r in sorted(fitted["peak_lr"].unique()))
    e = exponents(rows)
    told = (
        f"a = {_told(e['ln_trace'])}, b = {_told(e['ln_step'])}"
        if np.isfinite(e["ln_trace"].value)
        else "not fitted"
    )
    missing = ", ".join(lacking)
    return (
        "Predicting what quantization costs. (a–c) Predicted against measured ΔCE = CE(Ŵ) − CE(W) under GPTQ of runs that the "
        "fit has not seen, under three laws of three constants each: trace of the Hessian over the quantized matrices and "
        "mean grid step s; tokens per parameter D/N and bits; peak LR and bits. Line: equality. All are fitted by least "
        f"squares of logarithms to the runs of study {FIT} (peak LRs of {rates}) without the seed that is predicted; further "
        "held out: nothing, the peak LR, the study (cosine, weight decays, cooldowns, token budgets), the width. (d) Mean "
        f"absolute log error by what is held out; {f'means over {n} seeds with 95 % t intervals' if n > 1 else 'one seed, nothing held out'}. "
        f"Fitted to single seeds the formula's exponents are {told}; noise of one grid step's width would give 1 and 2."
        + (f" No curvature of: {missing}." if missing else "")
    )  # fmt: skip


def _told(e: Estimate) -> str:
    known = np.isfinite(e.low)
    return f"{e.value:.2f} [{e.low:.2f}, {e.high:.2f}]" if known else f"{e.value:.2f}"


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figure, tables, metrics and the judged claim."""
    rows, lacking = read()
    fig = figure(rows)
    style.save(fig, NAME, caption(rows, lacking))
    ours, entries = summary(rows), judge(rows, lacking, verdicts)
    numbers = {
        f"mean absolute log error, {r['law']}, {r['held out']}": r["mean absolute log error"]
        for r in ours.to_dict("records")
    }
    numbers |= {f"fitted {n}": e.value for n, e in exponents(rows).items()}
    tables = {NAME: ours, f"{NAME}-constants": constants(rows)}
    statistics.write(NAME, tables, numbers, entries)
    return fig, ours, entries
