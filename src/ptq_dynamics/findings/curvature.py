"""Curvature (C12, C13): does the basin sharpen when the LR decays, as the error rises, and where lies the quantized model?"""

from __future__ import annotations

from collections.abc import Iterable
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
from scipy.interpolate import RectBivariateSpline

from ..core.errors import UserError
from ..evaluation.intervals import Estimate
from . import claims, statistics, style
from .statistics import branches, ends, errors, growth, log, longest, table

NAME = "curvature"
ALONG, RATES = (
    "token_budgets",
    "peak_lr",
)  # the studies whose trunk and cooldowns, and whose peak LRs, are read
SHAPE_BITS, PLANE_BITS = 3, 4  # of C12 and of C13
BITS = (4, 3)
KEYS = ["run", "seed", "tokens"]
MEASURES = {
    "trace": "trace",
    "top eigenvalue": "top_eigenvalue",
    "trace, quantized matrices": "trace_quantized",
}
PREVIOUS = "previous"  # the way back to the checkpoint before, in the table of expansions


@dataclass(frozen=True)
class Tables:
    """Curvature and measurements along trunk and cooldowns with their learning rate; expansions by peak LR; planes."""

    curvature: pd.DataFrame
    measured: pd.DataFrame
    training: pd.DataFrame
    steps: pd.DataFrame
    slices: pd.DataFrame


def read() -> Tables:
    """The tables in git.

    Raises:
        UserError: one is missing, or has no top eigenvalue.
    """
    measured, training = statistics.read(ALONG)
    along = table(f"curvature-{ALONG}", "curvature")
    if "top_eigenvalue" not in along:
        raise UserError(
            f"params.yaml: curvature.studies.{ALONG}.top_eigenvalue: C12 needs it; set it to true"
        )
    steps, slices = table(f"expansion-{RATES}", "curvature"), table("slices", "curvature")
    return Tables(along, measured, training, steps, slices)


# --- along trunk and cooldowns (C12) ---


def together(t: Tables, bits: int, method: str = "gptq") -> pd.DataFrame:
    """Curvature and error of every measured checkpoint."""
    error = errors(t.measured, bits, method)[[*KEYS, "relative_error", "delta_ce", "ce_fp"]]
    return t.curvature.merge(error, on=KEYS)


def rank_correlation(rows: pd.DataFrame, x: str = "trace", y: str = "relative_error") -> dict[int, float]:
    """C12, per seed: Spearman's rank correlation of ``x`` and ``y``; NaN if one of them does not vary."""
    out = {}
    for seed, g in rows.groupby("seed"):
        varies = g[x].nunique() > 1 and g[y].nunique() > 1
        out[int(seed)] = float(stats.spearmanr(g[x], g[y]).statistic) if varies else float("nan")
    return out


def changes(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """The cooldowns as ``statistics.branches`` has them, with the column ``rise``: ln of ``column`` less that at the branch
    point; NaN for what has no logarithm."""
    found = branches(rows, [column])
    return found.assign(rise=log(found[column]) - log(found[f"{column}, start"]))


def rises_everywhere(rows: pd.DataFrame, columns: Iterable[str] = ("trace", "top_eigenvalue")) -> bool | None:
    """C12's condition: each of ``columns`` ends above the branch point in the cooldown from every budget, in the
    geometric mean over seeds; None if one has no logarithm or there is no cooldown."""
    told = []
    for column in columns:
        c = changes(rows, column)
        told += list(c[c["end"]].groupby("branch_tokens")["rise"].agg(lambda x: x.mean(skipna=False)))
    return all(v > 0 for v in told) if told and np.isfinite(told).all() else None


def late_rise(rows: pd.DataFrame, column: str) -> dict[int, float]:
    """Per seed: ``column`` at the end of a cooldown over that at its branch point, geometric mean over the cooldowns
    that begin in the last half of the trunk."""
    c = changes(rows, column).query("end and late")
    return {
        int(s): float(np.exp(v))
        for s, v in c.groupby("seed")["rise"].agg(lambda x: x.mean(skipna=False)).items()
    }


def done_halfway(rows: pd.DataFrame, column: str) -> dict[int, float]:
    """Per seed: the part of the rise over the late cooldowns that has happened in the middle of the decay."""
    c = changes(rows, column)
    out = {}
    for seed, g in c[c["late"]].groupby("seed"):
        middle = g[g["done"].between(0.45, 0.55)]["rise"]
        whole = g[g["end"]]["rise"].sum(skipna=False)
        same = len(middle) == g["end"].sum()
        out[int(seed)] = float(middle.sum(skipna=False) / whole) if same and whole else float("nan")
    return out


def plateau_growth(rows: pd.DataFrame, column: str) -> dict[int, float]:
    """Per seed: growth of ``column`` per doubling of tokens over the last half of the constant-LR trunk."""
    trunk = rows[rows["member"] == "trunk"]
    late = trunk[2 * trunk["tokens"] >= trunk["run_tokens"]]
    return {int(s): growth(np.log2(g["tokens"]), g[column]) for s, g in late.groupby("seed")}


# --- by peak LR (C13) ---

BY_RATE = {  # method in the table of expansions (None: the quantizer), column
    "distance to the previous checkpoint": (PREVIOUS, "distance"),
    "distance to the quantized weights": (None, "distance"),
    "curvature along the way to the previous checkpoint": (PREVIOUS, "rayleigh"),
    "curvature along the quantization step": (None, "rayleigh"),
    "rise in loss to the quantized weights": (None, "true"),
}


def by_rate(t: Tables, quantity: str, bits: int = PLANE_BITS) -> pd.DataFrame:
    """A quantity of ``BY_RATE`` at the end of the longest runs, in the column ``y``."""
    method, column = BY_RATE[quantity]
    rows = longest(ends(t.steps.assign(distance=lambda d: np.sqrt(d["norm2"]))))
    rows = errors(rows, bits) if method is None else rows[rows["method"] == method]
    return rows.assign(y=rows[column])


def per_tenfold(rows: pd.DataFrame) -> dict[int, float]:
    """C13, per seed: growth of ``y`` per tenfold peak LR."""
    return {int(s): growth(np.log10(g["peak_lr"]), g["y"]) for s, g in rows.groupby("seed")}


# --- verdicts ---


def judge(t: Tables, verdicts: bool) -> list[dict[str, Any]]:
    """Ledger entries for C12 and C13."""
    return [_c12(t, verdicts), _c13(t, verdicts)]


def _c12(t: Tables, verdicts: bool) -> dict[str, Any]:
    rows = together(t, SHAPE_BITS)
    values = rank_correlation(rows)
    plain, mean, geometric = claims.plain, claims.mean, claims.geometric
    details: dict[str, Any] = {}
    for r in correlations(t).to_dict("records"):
        if (r["curvature"], r["quantizer"], r["checkpoints"]) != ("trace", _name("gptq", SHAPE_BITS), "all"):
            name = f"{r['curvature']} with {r['quantizer']} error, {r['checkpoints']} checkpoints"
            details[name] = plain(Estimate(*(r[f"correlation{x}"] for x in ("", ", low", ", high"))))
    columns = MEASURES | {f"{SHAPE_BITS}-bit error": "relative_error"}
    for name, c in columns.items():
        details[f"{name}: end of the late cooldowns over branch point"] = plain(
            geometric(late_rise(rows, c).values())
        )
    for name, c in columns.items():
        details[f"{name}: part of that rise done halfway"] = plain(mean(done_halfway(rows, c).values()))
    lead = {s: v - done_halfway(rows, "relative_error")[s] for s, v in done_halfway(rows, "trace").items()}
    details["lead of the trace (its part done halfway minus the error's)"] = plain(mean(lead.values()))
    for name, c in columns.items():
        details[f"{name}: growth per doubling of tokens in the stable phase"] = plain(
            geometric(plateau_growth(rows, c).values())
        )
    details["relative standard error of the trace, median"] = claims.number(
        float((rows["trace_se"] / rows["trace"].abs()).median())
    )
    details["top eigenvalues that did not converge"] = int((~rows["top_converged"].astype(bool)).sum())
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    size = statistics.scale(rows, f"GPTQ {SHAPE_BITS} bit, {int(rows['probes'].max())} probes")
    return claims.entry(
        "C12", mean(values.values()), len(values), size, details, provided=rises_everywhere(rows), verdicts=verdicts
    )  # fmt: skip


def _c13(t: Tables, verdicts: bool) -> dict[str, Any]:
    names = list(BY_RATE)
    found = {n: claims.geometric(per_tenfold(by_rate(t, n)).values()) for n in names}
    details: dict[str, Any] = {f"{n}, per tenfold LR": claims.plain(e) for n, e in found.items()}
    for bits in [b for b in BITS if b != PLANE_BITS and len(errors(t.steps, b))]:
        for n in (n for n, (method, _) in BY_RATE.items() if method is None):
            e = claims.geometric(per_tenfold(by_rate(t, n, bits)).values())
            details[f"{n}, {bits} bit, per tenfold LR"] = claims.plain(e)
    values = per_tenfold(by_rate(t, "curvature along the quantization step"))
    details["per seed"] = {str(k): claims.number(v) for k, v in values.items()}
    last = longest(ends(t.steps))
    details["tokens between the checkpoint and the previous one"] = int(last["step_tokens"].max())
    conditions = [found[names[0]].value - 1, found[names[1]].value - 1, 1 - found[names[4]].value]
    provided = all(c > 0 for c in conditions) if np.isfinite(conditions).all() else None
    size = statistics.scale(last, f"GPTQ {PLANE_BITS} bit")
    estimate = claims.geometric(values.values())
    return claims.entry("C13", estimate, len(values), size, details, provided=provided, verdicts=verdicts)


# --- tables ---


def _name(method: str, bits: int) -> str:
    return f"{bits}-bit {method.upper()}"


def correlations(t: Tables) -> pd.DataFrame:
    """Rank correlation of each measure of curvature with the error of each quantizer, over all checkpoints, over the
    trunk's and over the cooldowns' alone; means over seeds with 95 % t intervals."""
    parts = {"all": ("trunk", "cooldown"), "trunk": ("trunk",), "cooldown": ("cooldown",)}
    rows = []
    for method, bits in statistics.quantizers(t.measured):
        both = together(t, bits, method)
        for name, column in MEASURES.items():
            for part, members in parts.items():
                values = rank_correlation(both[both["member"].isin(members)], column).values()
                row = {
                    "curvature": name,
                    "quantizer": _name(method, bits),
                    "checkpoints": part,
                    "seeds": len(values),
                }
                rows.append(row | statistics.columns("correlation", claims.mean(values)))
    return pd.DataFrame(rows)


def summary(t: Tables) -> pd.DataFrame:
    """Per budget: trace, top eigenvalue and errors at the end of the cooldown over those at the branch point.

    Geometric means over seeds with 95 % t intervals.
    """
    of = {f"{b}-bit error": (together(t, b), "relative_error") for b in BITS if len(errors(t.measured, b))}
    of |= {name: (together(t, SHAPE_BITS), column) for name, column in MEASURES.items()}
    rows: dict[int, dict[str, Any]] = {}
    for name, (both, column) in of.items():
        for budget, g in changes(both, column).query("end").groupby("branch_tokens"):
            row = rows.setdefault(int(budget), {"cooldown from (M tokens)": budget / 1e6, "seeds": len(g)})
            row |= statistics.columns(name, claims.geometric(np.exp(g["rise"])))
    return pd.DataFrame([rows[b] for b in sorted(rows)])


def rates_table(t: Tables) -> pd.DataFrame:
    """By peak LR at the end of the longest runs: what ``BY_RATE`` lists, for each bit width.

    Distances in weight units, curvatures in nats per token per (weight unit)², losses in nats per token; means over
    seeds with 95 % t intervals.
    """
    told = [b for b in BITS if len(errors(t.steps, b))]
    rows = []
    for name, (method, _) in BY_RATE.items():
        for bits in told if method is None else [None]:
            for lr, g in by_rate(t, name, bits or PLANE_BITS).groupby("peak_lr"):
                row = {"quantity": name, "bits": bits, "peak LR": lr, "seeds": len(g)}
                rows.append(row | statistics.columns("mean", claims.mean(g["y"])))
    return pd.DataFrame(rows)


# --- figures ---


def figure(t: Tables) -> Figure:
    """Error, trace and top eigenvalue along trunk and cooldowns, one above the other; their rise through the decay;
    distances and curvature by peak LR."""
    style.use()
    rows = together(t, SHAPE_BITS).assign(percent=lambda d: 100 * d["relative_error"])
    fig, axes = plt.subplots(3, 2, figsize=(style.WIDTH, 7.2), width_ratios=(1.25, 1))
    panels = [
        (f"{SHAPE_BITS}-bit error, GPTQ (%)", "percent"),
        ("Hessian trace", "trace"),
        ("top eigenvalue", "top_eigenvalue"),
    ]
    for i, (label, y) in enumerate(panels):
        ax = axes[i, 0]
        style.trunk_and_cooldowns(ax, rows, y)
        ax.set_ylabel(label)
        ax.set_ylim(min(0, 1.05 * rows[y].min()), None)
        style.overlay_rate(ax, t.training, label=True)
    axes[2, 0].set_xlabel("training tokens (millions)")
    _through(axes[0, 1], rows)
    _rates(
        axes[1, 1],
        t,
        [(r"to $\Theta_{K-1}$", "distance to the previous checkpoint", PLANE_BITS)]
        + [(f"to {b}-bit", "distance to the quantized weights", b) for b in BITS],
    )
    axes[1, 1].set_ylabel(r"distance from $\Theta_K$")
    _rates(
        axes[2, 1],
        t,
        [(r"to $\Theta_{K-1}$", "curvature along the way to the previous checkpoint", PLANE_BITS)]
        + [(f"to {b}-bit", "curvature along the quantization step", b) for b in BITS],
    )
    axes[2, 1].set_ylabel("curvature along it")
    for i, ax in enumerate(axes.T.flat):
        style.letter(ax, i)
    style.cooldown_legend(fig, rows)
    return fig


def _through(ax: Axes, rows: pd.DataFrame) -> None:
    """Error, trace and top eigenvalue through the late cooldowns, over those at the branch point."""
    drawn = [
        (f"{SHAPE_BITS}-bit error", "relative_error", "o"),
        ("trace", "trace", "s"),
        ("top eigenvalue", "top_eigenvalue", "^"),
    ]
    for (label, column, marker), colour in zip(drawn, sns.color_palette("colorblind"), strict=False):
        c = changes(rows, column).query("late")
        by = np.exp(c.groupby(["done", "seed"])["rise"].mean()).groupby("done").agg(["mean", "min", "max"])
        x = [0.0, *by.index]
        ax.plot(x, [1.0, *by["mean"]], color=colour, marker=marker, markersize=3, label=label)
        ax.fill_between(x, [1.0, *by["min"]], [1.0, *by["max"]], color=colour, alpha=0.15, linewidth=0)
    ax.axhline(1.0, color=style.RATE, linewidth=0.7, zorder=0)
    ax.set_xlabel("share of the decay done")
    ax.set_ylabel("over that at the branch point")
    ax.legend(frameon=False, loc="best")


def _rates(ax: Axes, t: Tables, lines: list[tuple[str, str, int]]) -> None:
    markers = ("D", "o", "s")
    colours = sns.color_palette("colorblind")
    positive = True
    for (label, quantity, bits), marker, colour in zip(
        lines, markers, (colours[7], colours[0], colours[1]), strict=True
    ):
        by = by_rate(t, quantity, bits).groupby("peak_lr")["y"].agg(["mean", "min", "max"])
        ax.plot(by.index, by["mean"], color=colour, marker=marker, markersize=3, label=label)
        ax.fill_between(by.index, by["min"], by["max"], color=colour, alpha=0.15, linewidth=0)
        positive &= bool((by["min"] > 0).all())
    ax.set_xscale("log")
    rates = sorted(t.steps["peak_lr"].unique())
    ax.set_xticks(rates, [f"{r:g}" for r in rates])
    ax.set_xticks([], minor=True)
    if positive:
        ax.set_yscale("log")
        style.plain_log(ax.yaxis)
    ax.set_xlabel("peak learning rate")
    ax.legend(frameon=False, loc="best")


MARKS = (
    ("checkpoint", "o", r"$\Theta_K$"),
    (PREVIOUS, "s", r"$\Theta_{K-1}$"),
    ("quantized", "X", r"$\hat{\Theta}_K$"),
)


def planes(t: Tables) -> Figure:
    """The loss above that of Θ(K) on the plane through Θ(K), Θ(K−1) and Θ̂(K): a column per peak LR, a row per bit width.

    Both axes of a panel have one scale; the bar is as long (in weight units) in every panel, and the shade means the
    same loss. The contours pass through the three points.
    """
    style.use()
    rates = sorted(t.slices["peak_lr"].unique())
    bits = [b for b in BITS if len(errors(t.slices, b))]
    height = (style.WIDTH / len(rates) + 0.15) * len(bits) + 0.3
    fig, axes = plt.subplots(len(bits), len(rates), figsize=(style.WIDTH, height), squeeze=False)
    drawn = {}
    for i, b in enumerate(bits):
        for j, lr in enumerate(rates):
            s = errors(t.slices[t.slices["peak_lr"] == lr], b)
            grid = s[s["kind"] == "grid"].pivot(index="y", columns="x", values="loss")
            drawn[i, j] = grid, s.set_index("kind").loc[[k for k, _, _ in MARKS], ["x", "y", "loss"]]
    rises = [grid.to_numpy() - points.loc["checkpoint", "loss"] for grid, points in drawn.values()]
    top = float(np.quantile(np.concatenate([r.ravel() for r in rises]), 0.8))
    shortest = min(float(np.ptp(grid.columns)) for grid, _ in drawn.values())
    bar = float(f"{shortest / 3:.0e}")  # one digit
    shade = None
    for (i, j), (grid, points) in drawn.items():
        ax, base = axes[i, j], points.loc["checkpoint", "loss"]
        x, y, z = _fine(grid)
        where = (x[0], x[-1], y[0], y[-1])
        shade = ax.imshow(z - base, extent=where, origin="lower", cmap="Greys", vmin=0, vmax=top)
        levels = sorted({float(v - base) for v in points["loss"] if v > base})
        if levels:
            ax.contour(x, y, z - base, levels=levels, colors=["0.25"], linewidths=0.7)
        for kind, marker, _ in MARKS:
            at = points.loc[kind]
            edge = {"markeredgecolor": "white", "markeredgewidth": 0.5}
            ax.plot(at["x"], at["y"], marker, color=_colour(kind), markersize=6, **edge)
        corner = x[0] + 0.06 * (x[-1] - x[0]), y[0] + 0.06 * (y[-1] - y[0])
        ax.plot([corner[0], corner[0] + bar], [corner[1]] * 2, color=_colour("bar"), linewidth=2.0)
        ax.set_xlim(x[0], x[-1])
        ax.set_ylim(y[0], y[-1])
        ax.set_xticks([])
        ax.set_yticks([])
        rate = f"peak LR {rates[j]:g}\n" if i == 0 else ""
        rise = points.loc["quantized", "loss"] - base
        ax.set_title(rf"{rate}$\hat{{\Theta}}_K$: {rise:+.3f}", fontsize=8)
        if j == 0:
            ax.set_ylabel(f"{bits[i]} bit")
    label = r"loss above $\Theta_K$ (nats/token)"
    fig.colorbar(shade, ax=axes, label=label, fraction=0.03, pad=0.01, extend="max")
    handles = [Line2D([], [], color=_colour(k), marker=m, linestyle="none", label=n) for k, m, n in MARKS]
    handles.append(Line2D([], [], color=_colour("bar"), linewidth=2.0, label=f"{bar:g} weight units"))
    fig.legend(handles=handles, loc="outside lower center", ncol=4, frameon=False)
    return fig


def _fine(grid: pd.DataFrame, n: int = 101) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, y and loss on a finer grid by splines, so that contours are smooth."""
    x, y = grid.columns.to_numpy(dtype=float), grid.index.to_numpy(dtype=float)
    order = min(3, len(x) - 1)
    spline = RectBivariateSpline(y, x, grid.to_numpy(), kx=order, ky=order)
    x, y = np.linspace(x[0], x[-1], n), np.linspace(y[0], y[-1], n)
    return x, y, spline(y, x)


def _colour(kind: str) -> Any:
    palette = sns.color_palette("colorblind")
    colours = {"checkpoint": palette[0], PREVIOUS: palette[7], "quantized": palette[3], "bar": palette[2]}
    return colours[kind]


def caption(t: Tables) -> str:
    """The figure's caption."""
    n, rows = t.curvature["seed"].nunique(), together(t, SHAPE_BITS)
    relative = 100 * float((rows["trace_se"] / rows["trace"].abs()).median())
    return (
        f"Curvature along the trajectory. (a) {SHAPE_BITS}-bit error, (b) Hessian trace over all parameters (Hutchinson, "
        f"{int(rows['probes'].max())} Rademacher probes; standard error about {relative:.0f} %) and (c) largest eigenvalue (Lanczos) "
        "along the trunk at constant LR and its cooldowns; dashed: learning rate. (d) The three through the cooldowns that "
        "begin in the last half of the trunk, over their values at the branch point. By peak LR, at the end of the longest "
        "WSD runs: (e) distance from the last checkpoint Θ(K) to the one before it, Θ(K−1), and to its quantized weights, "
        "in weight units; (f) curvature along these ways (Rayleigh quotient of the Hessian, nats per squared weight unit). "
        f"Lines: mean; bands: {f'the range over {n} seeds' if n > 1 else 'not shown (one seed)'}."
    )


def caption_planes(t: Tables) -> str:
    """The caption of ``planes``."""
    last = longest(ends(t.steps))
    return (
        "The loss on the plane through the last checkpoint Θ(K), the one before it Θ(K−1) "
        f"({last['step_tokens'].max() / 1e6:.1f}M tokens earlier) and the quantized weights Θ̂(K) (GPTQ), by peak LR; one seed "
        f"({int(t.slices['seed'].min())}). Both axes of a panel have one scale, and the green bar is as long in every panel; the way to "
        "Θ(K−1) points to the right. Contours pass through the points; the number is the rise in loss at Θ̂(K) in nats per "
        f"token, on the {int(t.steps['text_tokens'].max()):,} tokens that all curvature is taken on."
    )


def report(verdicts: bool) -> tuple[Figure, pd.DataFrame, list[dict[str, Any]]]:
    """Everything this finding writes: figures, tables, metrics and judged claims."""
    t = read()
    fig, ours, entries = figure(t), summary(t), judge(t, verdicts)
    style.save(fig, NAME, caption(t))
    style.save(planes(t), f"{NAME}-planes", caption_planes(t))
    tables = {NAME: ours, f"{NAME}-correlations": correlations(t), f"{NAME}-rates": rates_table(t)}
    numbers = {
        f"{e['id']}, {name}": value["value"]
        for e in entries
        for name, value in e["details"].items()
        if isinstance(value, dict) and "value" in value
    }
    statistics.write(NAME, tables, numbers, entries)
    return fig, ours, entries
