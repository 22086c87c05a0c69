"""Tables as the curvature stage writes them, given by formulas, beside synthetic measurements."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import synthetic

from ptq_dynamics.findings.curvature import Tables

RATES = (0.002, 0.01, 0.02, 0.06)
LABELS = ["run", "member", "seed", "peak_lr", "branch_tokens", "run_tokens", "tokens", "parameters"]
BITS = (2, 3, 4, 6, 8)


def tables(
    seeds: Iterable[int] = (0, 1, 2),
    exponent: float = 1.0,
    spread: float = 0.01,
    along_step: float = 0.3,
    distance: float = 3.0,
    rise: float = 0.7,
    rates: Iterable[float] = RATES,
    top: float = 1.0,
) -> Tables:
    """Trace and top eigenvalue that are powers (``exponent``, times ``top`` for the latter) of the 3-bit error, up to
    ``spread``; per tenfold LR the curvature along the quantization step grows by ``along_step``, both distances by
    ``distance`` and the rise in loss by ``rise``."""
    seeds, rates = list(seeds), list(rates)
    measured, training = synthetic.token_budgets(seeds, spread=0.02)
    three = measured[measured["bits"] == 3].reset_index(drop=True)

    def noise(*key: int) -> float:
        return float(np.exp(synthetic.noise(*key, size=spread)))

    key = [(int(r.seed), int(r.tokens) // 1000, len(r.run)) for r in three.itertuples()]
    curvature = three[LABELS].assign(
        trace=[
            100 * (e / 0.02) ** exponent * noise(1, *k)
            for e, k in zip(three["relative_error"], key, strict=True)
        ],
        top_eigenvalue=[
            5 * (e / 0.02) ** (exponent * top) * noise(2, *k)
            for e, k in zip(three["relative_error"], key, strict=True)
        ],
        top_converged=True,
        probes=10,
    )
    curvature = curvature.assign(trace_se=0.05 * curvature["trace"], trace_quantized=0.8 * curvature["trace"])
    rows = []
    for lr in rates:
        for seed in seeds:
            at = synthetic.run(f"wsd-lr{lr:g}", seed, 8_192_000, peak_lr=lr) | {"tokens": 8_192_000}
            x, wobble = np.log10(lr / 0.01), noise(3, seed, round(1e6 * lr))
            back = {
                "method": "previous",
                "bits": None,
                "norm2": (2 * distance**x * wobble) ** 2,
                "rayleigh": 0.1,
            }
            rows.append(at | back | {"true": 0.2, "step_tokens": 1_638_400})
            for bits in (4, 3):
                step = {
                    "method": "gptq",
                    "bits": bits,
                    "norm2": (0.5 * 2 ** (4 - bits) * distance**x * wobble) ** 2,
                }
                step |= {"rayleigh": 0.4 * along_step**x * wobble, "true": 0.05 * rise**x * wobble}
                rows.append(at | step)
    steps = pd.DataFrame(rows).assign(text_tokens=4096, group_size=64)
    return Tables(curvature, measured, training, steps, slices(rates))


def slices(rates: Iterable[float], n: int = 7) -> pd.DataFrame:
    """Bowls whose planes lie at the origin, sharper at smaller LRs."""
    rows = []
    for lr in rates:
        for bits in (4, 3):
            at = {
                "run": f"wsd-lr{lr:g}-seed0",
                "seed": 0,
                "peak_lr": lr,
                "tokens": 8_192_000,
                "method": "gptq",
                "bits": bits,
            }
            far = 10 * lr**0.5
            points = {"checkpoint": (0.0, 0.0), "previous": (far, 0.0), "quantized": (0.2 * far, 0.6 * far)}
            grid = np.linspace(-0.4 * far, 1.4 * far, n)
            named = [("grid", x, y) for y in grid for x in grid] + [(k, *p) for k, p in points.items()]
            rows += [
                at | {"kind": k, "x": x, "y": y, "loss": 3 + 0.1 * (x**2 + 2 * y**2)} for k, x, y in named
            ]
    return pd.DataFrame(rows)


def expansions(
    seeds: Iterable[int] = (0, 1, 2),
    rest: float = 1.1,
    curvature: float = 2.0,
    size: float = 1.2,
    weights: float = 0.9,
    spread: float = 0.0,
    per_tenfold: float = 0.7,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Expansions in which, over a cooldown, curvature, relative size and ‖W‖² grow by the given factors; the true rise
    at 4 bit is ``rest`` times the predicted one. And by peak LR, where curvature grows by ``per_tenfold`` alone."""
    measured, _ = synthetic.token_budgets(seeds)
    base = measured[measured["method"] == "none"]
    rows = [
        _terms(at, method, bits, _done(at), rest, curvature, size, weights, spread)
        for at in base[LABELS].to_dict("records")
        for method in ("gptq", "rtn")
        for bits in BITS
    ]
    by_rate = []
    for lr in RATES:
        for seed in seeds:
            at = synthetic.run(f"wsd-lr{lr:g}", seed, 8_192_000, peak_lr=lr) | {"tokens": 8_192_000}
            done = np.log10(lr / 0.01)
            by_rate += [_terms(at, "gptq", b, done, 1.0, per_tenfold, 1.0, 1.0, spread) for b in (4, 3)]
    return tuple(
        pd.DataFrame(r).assign(predicted=lambda t: t["linear"] + t["quadratic"]) for r in (rows, by_rate)
    )


def _done(at: dict) -> float:
    if at["member"] == "trunk":
        return 0.0
    return (at["tokens"] - at["branch_tokens"]) / (at["run_tokens"] - at["branch_tokens"])


def _terms(at, method, bits, done, rest, curvature, size, weights, spread) -> dict:
    weight_norm2 = 400 * weights**done
    norm2 = weight_norm2 * 0.01 * 4.0 ** (4 - bits) * (1.5 if method == "rtn" else 1.0) * size**done
    wobble = np.exp(synthetic.noise(9, at["seed"], at["tokens"] // 1000, len(at["run"]), bits, size=spread))
    rayleigh = 0.02 * curvature**done * wobble
    quadratic = 0.5 * norm2 * rayleigh
    linear = 0.02 * quadratic
    true = (linear + quadratic) * (rest if bits <= 4 else 1.0)
    terms = {"linear": linear, "quadratic": quadratic, "true": true, "norm2": norm2, "rayleigh": rayleigh}
    terms["measured"] = 0.9 * quadratic if bits <= 4 else np.nan
    return at | {"method": method, "bits": bits, "group_size": 64, "weight_norm2": weight_norm2} | terms


def write(root: Path, t: Tables, expansion: pd.DataFrame | None = None) -> None:
    """The tables of the curvature stage and the measurements beside them."""
    synthetic.write(root, token_budgets=(t.measured, t.training))
    folder = root / "reports" / "tables"
    t.curvature.to_csv(folder / "curvature-token_budgets.csv", index=False)
    t.slices.to_csv(folder / "slices.csv", index=False)
    t.steps.to_csv(folder / "expansion-peak_lr.csv", index=False)
    if expansion is not None:
        expansion.drop(columns=["predicted", "measured"]).to_csv(
            folder / "expansion-token_budgets.csv", index=False
        )
