"""Tables as `measure` writes them, with errors and losses given by formulas, so that every statistic is known."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).parents[2]
UPDATE = 2048  # tokens
LABELS: dict[str, Any] = {
    "member": "wsd", "shape": "wsd", "peak_lr": 0.01, "weight_decay": 0.1, "branch_tokens": 0, "width": 64,
    "sequences": 16, "cooldown": "linear", "final_fraction": 0.0, "parent": "", "parameters": 231000,
    "evaluation_set": "validation", "evaluation_tokens": 204800,
}  # fmt: skip


def run(name: str, seed: int, run_tokens: int, decay: float = 0.2, **labels: Any) -> dict[str, Any]:
    """A run's labels."""
    decay_tokens = round(run_tokens * decay)
    return (
        LABELS
        | {"run": f"{name}-seed{seed}", "seed": seed, "run_tokens": run_tokens, "decay_tokens": decay_tokens}
        | labels
    )


def measured(
    runs: Iterable[Mapping[str, Any]],
    loss: Callable[[Mapping[str, Any]], float],
    error: Callable[[Mapping[str, Any], int], float],
    points: Callable[[Mapping[str, Any]], Iterable[int]] = lambda r: [r["run_tokens"]],
    bits: tuple[int, ...] = (4, 3),
) -> pd.DataFrame:
    """The measurements: ``loss`` and relative ``error`` are functions of the row (labels, tokens, lr) and the bits."""
    rows = []
    for r in runs:
        for tokens in points(r):
            at = dict(r) | {
                "tokens": tokens,
                "step": tokens // UPDATE,
                "checkpoint": f"step-{tokens // UPDATE:07d}",
            }
            at["lr"] = rate(r, tokens)
            ce = loss(at)
            rows.append(at | {"method": "none", "bits": None, "ce": ce})
            for b in bits:
                e = error(at, b)
                rows.append(
                    at | {"method": "gptq", "bits": b, "group_size": 64, "ce": ce * (1 + e), "ce_fp": ce, "delta_ce": ce * e, "relative_error": e}
                )  # fmt: skip
    return pd.DataFrame(rows)


def rate(r: Mapping[str, Any], tokens: float) -> float:
    """The learning rate after ``tokens``: cosine, or constant with a linear decay at the end."""
    done = tokens / r["run_tokens"]
    if r["shape"] == "cosine":
        return r["peak_lr"] * 0.5 * (1 + np.cos(np.pi * done))
    left = min(1.0, (r["run_tokens"] - tokens) / max(r["decay_tokens"], 1))
    return r["peak_lr"] * (r["final_fraction"] + (1 - r["final_fraction"]) * left)


def trained(runs: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The training curves of the runs."""
    return pd.DataFrame(
        [
            {"step": int(t) // UPDATE, "tokens": t, "lr": rate(r, t), "loss": 3.0, "grad_norm": 1.0}
            | {k: r[k] for k in ("run", "member", "seed")}
            for r in runs
            for t in np.linspace(r["run_tokens"] / 50, r["run_tokens"], 50)
        ]
    )


def write(root: Path, **studies: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    """A root that holds the studies' tables, this repository's rules and the paper's numbers."""
    for name in ("claims.yaml", "data/reference/paper.yaml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "reports" / "tables").mkdir(parents=True, exist_ok=True)
    for study, (table, training) in studies.items():
        table.to_csv(root / "reports" / "tables" / f"measurements-{study}.csv", index=False)
        training.to_csv(root / "reports" / "tables" / f"training-{study}.csv", index=False)


def noise(*key: int, size: float = 1.0) -> float:
    """A normal number that depends on ``key`` alone."""
    return size * float(np.random.default_rng(key).normal())


def peak_lr(
    seeds: Iterable[int] = (0, 1, 2),
    rates: Iterable[float] = (0.002, 0.01, 0.03, 0.06),
    tokens: Iterable[int] = (2_560_000, 5_120_000, 7_680_000),
    per_tenfold: float = 0.7,
    per_doubling: float = 1.1,
    spread: float = 0.02,
    loss: Callable[[Mapping[str, Any]], float] | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Errors that grow by ``per_tenfold`` of the peak LR and ``per_doubling`` of the tokens, and rise in the decay."""
    runs = [
        run(f"wsd-lr{lr:g}-{t}", s, t, peak_lr=lr)
        for lr in rates for t in tokens for s in seeds
    ]  # fmt: skip

    def error(at: Mapping[str, Any], bits: int) -> float:
        end = {4: 0.008, 3: 0.035, 2: 0.2}[bits]
        end *= per_tenfold ** np.log10(at["peak_lr"] / 0.01) * per_doubling ** np.log2(
            at["run_tokens"] / 2_560_000
        )
        wobble = np.exp(
            noise(bits, at["seed"], round(1e6 * at["peak_lr"]), at["run_tokens"], at["step"], size=spread)
        )
        return end * (0.45 + 0.55 * (1 - at["lr"] / at["peak_lr"])) * wobble

    def curve(at: Mapping[str, Any]) -> float:
        valley = 2.95 + 0.12 * (np.log10(at["peak_lr"] / 0.018)) ** 2
        seed = noise(7, at["seed"], round(1e6 * at["peak_lr"]), at["run_tokens"], size=0.004)
        return valley + 0.25 * at["lr"] / at["peak_lr"] + 2.5e5 / at["tokens"] + seed

    def points(r: Mapping[str, Any]) -> list[int]:
        start = r["run_tokens"] - r["decay_tokens"]
        grid = range(1_024_000, start, 1_024_000)
        return [*grid, start, start + r["decay_tokens"] // 2, r["run_tokens"]]

    return measured(runs, loss or curve, error, points), trained(runs)


def schedules(
    seeds: Iterable[int] = (0, 1, 2),
    tokens: Iterable[int] = (1_280_000, 2_560_000, 5_120_000, 10_240_000),
    parameters: int = 231_000,
    exponents: Mapping[str, float] = {"cosine": 0.6, "wsd": 0.2},  # noqa: B006 (read only)
    spread: float = 0.03,
    upturn: float = 0.6,
    half: bool = True,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """ΔCE at the end of the runs is a power of tokens per parameter; along cosine, the error turns up at the end."""
    runs = [
        run(f"{m}-{t}", s, t, member=m, shape=m, parameters=parameters)
        for m in exponents for t in tokens for s in seeds
    ]  # fmt: skip

    def error(at: Mapping[str, Any], bits: int) -> float:
        ratio = at["run_tokens"] / at["parameters"]
        gap = {4: 0.012, 3: 0.05}[bits] * (ratio / 10) ** exponents[at["member"]]
        done = at["tokens"] / at["run_tokens"]
        left = (
            1 - upturn * (1 - done) / 0.5
            if at["member"] == "cosine"
            else 0.5 + 0.5 * (1 - at["lr"] / at["peak_lr"])
        )
        wobble = np.exp(
            noise(bits, at["seed"], at["run_tokens"], at["step"], parameters, len(at["member"]), size=spread)
        )
        return gap * max(left, 0.15) * wobble / _loss(at)

    def points(r: Mapping[str, Any]) -> list[int]:
        if r["run_tokens"] < max(tokens):
            return [r["run_tokens"]]
        middle = [r["run_tokens"] // 2] if half else []
        return sorted({*range(2_048_000, r["run_tokens"], 2_048_000), *middle, r["run_tokens"]})

    return measured(runs, _loss, error, points), trained(runs)


def _loss(at: Mapping[str, Any]) -> float:
    return 2.9 + 0.2 * at["lr"] / at["peak_lr"] + 4e5 / at["tokens"]


def weight_decay(
    seeds: Iterable[int] = (0, 1, 2),
    decays: Iterable[float] = (0.01, 0.1, 0.3, 1.0),
    per_tenfold: float = 0.9,
    spread: float = 0.01,
    losses: Mapping[float, float] = {0.01: 3.0, 0.1: 2.98, 0.3: 2.99, 1.0: 3.2},  # noqa: B006 (read only)
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Errors that grow by ``per_tenfold`` of the weight decay; ``losses`` by weight decay."""
    runs = [run(f"wsd-wd{d:g}", s, 5_120_000, weight_decay=d) for d in decays for s in seeds]

    def error(at: Mapping[str, Any], bits: int) -> float:
        d = at["weight_decay"] or 0.003
        wobble = np.exp(noise(bits, at["seed"], round(1e6 * d), size=spread))
        return {4: 0.008, 3: 0.035}[bits] * per_tenfold ** np.log10(d / 0.1) * wobble

    def loss(at: Mapping[str, Any]) -> float:
        return losses.get(at["weight_decay"], 3.0) + noise(3, at["seed"], size=0.002)

    return measured(runs, loss, error), trained(runs)


def cooldowns(seeds: Iterable[int] = (0, 1, 2)) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A reference and variants whose differences from it are known up to noise that a seed's runs share."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("linear", {}),
        ("shapes", {"cooldown": "1-sqrt"}),
        ("shapes", {"cooldown": "cosine"}),
        ("length_05", {"decay": 0.05}),
        ("length_10", {"decay": 0.1}),
        ("length_40", {"decay": 0.4}),
        ("final_10", {"final_fraction": 0.1}),
        ("batch_32", {"sequences": 32}),
    ]
    runs = [
        run(f"{m}-{k.get('cooldown', '')}", s, 7_680_000, member=m, **k)
        for m, k in kinds for s in seeds
    ]  # fmt: skip

    def loss(at: Mapping[str, Any]) -> float:
        return (
            2.95
            + 0.02 * (0.2 - at["decay_tokens"] / at["run_tokens"])
            + 0.02 * at["final_fraction"]
            + noise(1, at["seed"], size=0.01)
        )

    def error(at: Mapping[str, Any], bits: int) -> float:
        change = (
            1 - 2 * at["final_fraction"] - 0.1 * (at["cooldown"] == "1-sqrt") + 0.05 * (at["sequences"] == 32)
        )
        return {4: 0.008, 3: 0.035}[bits] * change * (1 + noise(2, at["seed"], bits, size=0.05))

    return measured(runs, loss, error), trained(runs)


def token_budgets(
    seeds: Iterable[int] = (0, 1, 2),
    budgets: Iterable[int] = (2_048_000, 4_096_000, 8_192_000, 14_336_000, 24_576_000),
    plateau: float = 1.05,
    spike: float = 2.0,
    per_tenfold: float = 1.1,
    spread: float = 0.01,
    loss_change: float = -0.2,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A trunk whose error grows by ``plateau`` per doubling, and cooldowns that end ``spike`` times as high as the
    trunk's last error, by ``per_tenfold`` total tokens."""
    end, length = 24_576_000, 2_048_000
    trunks = [run("trunk", s, end, decay=0, member="trunk", shape="constant") for s in seeds]
    branches = [
        run(f"cooldown-{b}", s, b + length, decay=length / (b + length), member="cooldown", branch_tokens=b)
        for b in budgets
        for s in seeds
    ]

    def error(at: Mapping[str, Any], bits: int) -> float:
        base = {4: 0.005, 3: 0.025, 2: 0.2}[bits]
        wobble = np.exp(noise(bits, at["seed"], at["step"], len(at["member"]), size=spread))
        if at["member"] == "trunk":
            return base * plateau ** np.log2(at["tokens"] / end) * wobble
        high = base * spike * per_tenfold ** np.log10(at["run_tokens"] / end)
        return (base + (high - base) * (at["tokens"] - at["branch_tokens"]) / length) * wobble

    def loss(at: Mapping[str, Any]) -> float:
        done = (at["tokens"] - at["branch_tokens"]) / length if at["member"] == "cooldown" else 0.0
        return 3.2 + loss_change * done

    def points(r: Mapping[str, Any]) -> list[int]:
        if r["member"] == "trunk":
            return list(range(2_048_000, end + 1, 2_048_000))
        return [r["branch_tokens"] + length // 2, r["run_tokens"]]

    return measured([*trunks, *branches], loss, error, points, bits=(4, 3, 2)), trained([*trunks, *branches])


def studies() -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    """Tables of all studies, three seeds."""
    return {
        "token_budgets": token_budgets(),
        "peak_lr": peak_lr(),
        "schedules": schedules(half=False),
        "schedules_small": schedules(parameters=91_000, half=False),
        "weight_decay": weight_decay(),
        "cooldowns": cooldowns(),
    }


def toy_studies() -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    """One seed and few values of everything; some 4-bit errors lie below 0, as they do in models that learned little."""
    tables = {
        "token_budgets": token_budgets(seeds=[0], budgets=[2_048_000, 24_576_000]),
        "peak_lr": peak_lr(seeds=[0], rates=[0.01, 0.03], tokens=[2_560_000]),
        "schedules": schedules(seeds=[0], tokens=[2_560_000, 5_120_000]),
        "schedules_small": schedules(seeds=[0], tokens=[2_560_000, 5_120_000], parameters=91_000),
        "weight_decay": weight_decay(seeds=[0], decays=[0.0, 0.1]),
        "cooldowns": cooldowns(seeds=[0]),
    }
    for table, _ in tables.values():
        spoil(table, (table["tokens"] == table["tokens"].min()) & (table["bits"] == 4))
    return tables


def spoil(table: pd.DataFrame, where: pd.Series) -> None:
    """Errors below 0 ``where``."""
    table.loc[where, ["relative_error", "delta_ce"]] = [-1e-4, -3e-4]
