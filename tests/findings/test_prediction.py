"""The predictor on tables whose law is known, its fits against scipy, its verdict recomputed by other code."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy import optimize, stats

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.findings import prediction
from ptq_dynamics.findings.prediction import FORMULA, RATE, TOKENS

RATES = (0.002, 0.01, 0.02, 0.06)
A, a, b = 0.03, 0.9, 1.8  # of the synthetic errors


def scale_of(at) -> float:
    """Mean over groups of the largest weight: grows with the LR and shrinks with the weight decay."""
    grown = 0.3 * (at["peak_lr"] / 0.01) ** 0.2 * (at["weight_decay"] / 0.1) ** -0.1
    return grown * np.exp(synthetic.noise(5, at["seed"], len(at["run"]), size=0.05))


def trace_of(at) -> float:
    """Falls with the LR, rises in the decay, is smaller in the smaller model."""
    level = 400 * (at["peak_lr"] / 0.01) ** -0.5 * at["parameters"] / 231_000
    level *= 1.5 if at["shape"] == "cosine" else 1.0
    decayed = 1 - at["lr"] / at["peak_lr"]
    return level * (0.4 + 0.6 * decayed) * np.exp(synthetic.noise(6, at["seed"], at["step"], size=0.1))


def runs_of(study: str, seeds) -> list[dict]:
    run = synthetic.run
    if study == "peak_lr":
        grid = itertools.product(RATES, (2_048_000, 4_096_000, 8_192_000), seeds)
        return [run(f"wsd-{t}-lr{lr}", s, t, peak_lr=lr) for lr, t, s in grid]
    if study in ("schedules", "schedules_small"):
        size = {"parameters": 91_000, "width": 32} if study.endswith("small") else {}
        grid = itertools.product(("wsd", "cosine"), (1_024_000, 4_096_000), seeds)
        return [run(f"{m}-{t}", s, t, member=m, shape=m, **size) for m, t, s in grid]
    if study == "weight_decay":
        return [run(f"wsd-wd{d}", s, 4_096_000, weight_decay=d) for d in (0.01, 0.1, 1.0) for s in seeds]
    return [
        run("trunk", s, 8_192_000, decay=0, member="trunk", shape="constant", **{"cooldown": ""})
        for s in seeds
    ]


def study(name: str, seeds=(0, 1, 2), law=None, spread: float = 0.03, bits=(4, 3)):
    """Measurements and curvature of one study; ΔCE is A · trace^a · step^b, or ``law(row, bits)``."""

    def gap(at, bits: int) -> float:
        step = 2 * scale_of(at) / (2**bits - 1)
        value = A * trace_of(at) ** a * step**b if law is None else law(at, bits)
        return value * math.exp(synthetic.noise(bits, at["seed"], at["step"], len(at["run"]), size=spread))

    def points(r) -> list[int]:
        return [r["run_tokens"] // 2, r["run_tokens"]] if r["member"] == "trunk" else [r["run_tokens"]]

    runs = runs_of(name, seeds)
    table = synthetic.measured(runs, lambda at: 3.0, lambda at, q: gap(at, q) / 3.0, points, bits)
    table = table.assign(group_size=64, weights_id=table["run"] + table["checkpoint"] + name)
    ends = table[table["method"] == "none"]
    curvature = pd.DataFrame(
        [
            {"run": r["run"], "tokens": r["tokens"], "group_size": 64, "trace_quantized": trace_of(r), "weight_scale": scale_of(r)}
            for r in ends.to_dict("records")
        ]
    )  # fmt: skip
    return table, curvature


STUDIES = (prediction.FIT, "schedules", "weight_decay", "token_budgets", prediction.SIZE)


def rows_of(studies=STUDIES, **how) -> pd.DataFrame:
    return pd.concat([prediction.prepare(*study(s, **how)).assign(study=s) for s in studies])


def test_prepared_columns_against_hand_counts() -> None:
    table, curvature = study("peak_lr", seeds=[0])
    row = prediction.prepare(table, curvature).query("bits == 3").iloc[-1]
    scale, trace = (
        curvature.set_index("run").loc[row["run"], c] for c in ("weight_scale", "trace_quantized")
    )
    assert math.exp(row["ln_step"]) == pytest.approx(2 * scale / 7)
    assert math.exp(row["ln_core"]) == pytest.approx(trace * (2 * scale / 7) ** 2 / 24)
    assert math.exp(row["ln_per_parameter"]) == pytest.approx(8_192_000 / 231_000)
    assert math.exp(row["ln_error"]) == pytest.approx(row["ce"] - row["ce_fp"])


def test_the_core_is_what_uniform_rounding_costs_a_quadratic() -> None:
    """½ δᵀHδ of round to nearest, averaged over many weights, in a diagonal quadratic whose H ignores the weights."""
    rng = np.random.default_rng(0)
    n, bits, scale = 200_000, 4, 0.5
    w, h = rng.uniform(-scale, scale, n), rng.uniform(0, 2, n)
    s = 2 * scale / (2**bits - 1)
    q = np.clip(np.round(w / s), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * s
    cost = 0.5 * (h * (q - w) ** 2).sum()
    table = pd.DataFrame(
        {"run": ["r"], "tokens": [1], "method": ["rtn"], "bits": [bits], "group_size": [64], "delta_ce": [cost], "peak_lr": [1.0], "parameters": [1], "seed": [0]}
    )  # fmt: skip
    curvature = pd.DataFrame({"run": ["r"], "tokens": [1], "group_size": [64], "trace_quantized": [h.sum()], "weight_scale": [scale]})  # fmt: skip
    rows = prediction.prepare(table, curvature)
    assert prediction.over_core(rows)["rtn", bits][0] == pytest.approx(1.0, rel=0.07)


def test_a_known_law_is_recovered_and_seeds_give_its_interval() -> None:
    rows = rows_of(["peak_lr"], spread=0.0)
    e = prediction.exponents(rows)
    assert [e[k].value for k in ("ln A", "ln_trace", "ln_step")] == pytest.approx(
        [math.log(A), a, b], abs=1e-9
    )
    assert e["ln_step"].high - e["ln_step"].low == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("law", prediction.LAWS, ids=lambda law: law.name)
def test_fits_agree_with_a_numerical_minimum(law) -> None:
    rows = prediction.usable(rows_of(["peak_lr"], spread=0.1))

    def residuals(c: np.ndarray) -> np.ndarray:
        offset = rows[law.offset] if law.offset else 0.0
        return (
            c[0]
            + sum(k * rows[f] for k, f in zip(c[1:], law.features, strict=True))
            + offset
            - np.log(rows["delta_ce"])
        ).to_numpy()

    start = np.zeros(1 + len(law.features))
    best = optimize.least_squares(residuals, start, xtol=1e-14, ftol=1e-14, gtol=1e-14)
    assert prediction.fit(law, rows) == pytest.approx(best.x, rel=1e-5, abs=1e-5)
    assert prediction.predict(law, best.x, rows) - rows["ln_error"].to_numpy() == pytest.approx(
        residuals(best.x), abs=1e-9
    )


def test_constants_that_the_rows_cannot_tell_are_not_made_up() -> None:
    rows = prediction.usable(rows_of(["peak_lr"]))
    one_rate = rows[rows["peak_lr"] == 0.01]
    assert np.isnan(prediction.fit(RATE, one_rate)).all()
    assert np.isfinite(prediction.fit(TOKENS, one_rate)).all()
    assert np.isnan(prediction.fit(FORMULA, rows.iloc[:2])).all()


def test_no_prediction_is_of_a_row_that_its_fit_has_seen(monkeypatch) -> None:
    seen: list[pd.DataFrame] = []
    real = prediction.fit
    monkeypatch.setattr(prediction, "fit", lambda law, rows: seen.append(rows) or real(law, rows))
    found = prediction.held_out(rows_of(), [FORMULA])
    tests = [
        g
        for _, g in found.groupby([found["seed"], found["split"]], sort=False)
        if g["split"].iloc[0] != "rate"
    ]
    assert len(tests) == 3 * 3 and len(seen) == 3 * (1 + 4 + 2)
    at = {r["run"]: r["peak_lr"] for r in rows_of(["peak_lr"]).to_dict("records")}
    fits = iter(seen)
    for seed in range(3):
        for i in range(1 + len(RATES) + 2):
            rows = next(fits)
            assert set(rows["study"]) == {"peak_lr"} and set(rows["bits"]) == {3, 4}
            assert seed not in set(rows["seed"])
            assert set(rows["peak_lr"]) == set(RATES) - ({RATES[i - 1]} if 1 <= i <= len(RATES) else set())
    rate = found[found["split"] == "rate"]
    assert {at[r] for r in rate["run"]} == set(RATES)
    assert set(found.loc[found["split"] == "size", "study"]) == {"schedules_small"}
    assert set(found.loc[found["split"] == "study", "study"]) == {
        "schedules",
        "weight_decay",
        "token_budgets",
    }


def by_hand(rows: pd.DataFrame, columns: list[str]) -> dict[int, float]:
    """Mean absolute log error over the four kinds of held-out runs, by other means (normal equations)."""
    rows = rows[(rows["method"] == "gptq") & rows["bits"].isin([3, 4]) & (rows["delta_ce"] > 0)]
    x = {
        "ln_trace": np.log(rows["trace_quantized"]),
        "ln_step": np.log(2 * rows["weight_scale"] / (2 ** rows["bits"] - 1)),
        "ln_per_parameter": np.log(rows["tokens"] / rows["parameters"]),
        "ln_rate": np.log(rows["peak_lr"]),
        "bits": rows["bits"],
    }
    x = np.column_stack([np.ones(len(rows)), *(x[c] for c in columns)]).astype(float)
    y = np.log(rows["delta_ce"].to_numpy(float))
    seed, rate, name = (rows[c].to_numpy() for c in ("seed", "peak_lr", "study"))

    def off(train, test) -> list[float]:
        c = np.linalg.solve(x[train].T @ x[train], x[train].T @ y[train])
        return list(np.abs(x[test] @ c - y[test]))

    out = {}
    for s in sorted(set(seed)):
        fit = (name == "peak_lr") & (seed != s)
        kinds = [
            off(fit, (name == "peak_lr") & (seed == s)),
            sum((off(fit & (rate != r), (name == "peak_lr") & (seed == s) & (rate == r)) for r in RATES), []),
            off(fit, ~np.isin(name, ["peak_lr", "schedules_small"]) & (seed == s)),
            off(fit, (name == "schedules_small") & (seed == s)),
        ]
        out[int(s)] = float(np.mean([np.mean(k) for k in kinds]))
    return out


@pytest.mark.parametrize("law", [FORMULA, TOKENS, RATE], ids=lambda law: law.name)
def test_scores_agree_with_other_code(law) -> None:
    rows = rows_of(spread=0.05)
    scored = prediction.scores(prediction.held_out(rows))
    assert prediction.per_seed(scored, law) == pytest.approx(by_hand(rows, list(law.features)), rel=1e-6)


def predicted(ys, hats, seeds=0) -> pd.DataFrame:
    return pd.DataFrame(
        {"seed": seeds, "bits": [3, 3, 4, 4] * (len(ys) // 4), "ln_error": ys, "predicted": hats}
    )


def test_r2_is_within_bit_widths() -> None:
    ys = [1.0, 3.0, -1.0, 1.0]
    assert prediction.r_squared(predicted(ys, [2.0, 2.0, 0.0, 0.0])).value == 0  # the mean of each bit width
    assert prediction.r_squared(predicted(ys, ys)).value == 1
    assert prediction.r_squared(predicted(ys, [1.0, 2.0, 0.0, 0.0])).value == pytest.approx(1 - 3 / 4)


def test_r2_and_its_jackknife_over_seeds_by_hand() -> None:
    rng = np.random.default_rng(3)
    ys, hats, seeds = rng.normal(size=12), rng.normal(size=12), np.repeat([0, 1, 2], 4)
    bits = np.array([3, 3, 4, 4] * 3)

    def r2(keep) -> float:
        total = sum(np.var(ys[keep & (bits == q)]) * (keep & (bits == q)).sum() for q in (3, 4))
        return 1 - ((ys - hats)[keep] ** 2).sum() / total

    parts = [r2(seeds != s) for s in range(3)]
    half = stats.t.ppf(0.975, 2) * math.sqrt(2 / 3 * sum((p - np.mean(parts)) ** 2 for p in parts))
    e = prediction.r_squared(predicted(ys, hats, seeds))
    whole = r2(np.full(12, True))
    assert (e.value, e.low, e.high) == pytest.approx((whole, whole - half, whole + half))


def by_tokens(at, bits: int) -> float:
    return 0.001 * (at["tokens"] / at["parameters"]) ** 0.5 * math.exp(1.6 * (4 - bits))


@pytest.mark.parametrize(("law", "verdict"), [(None, "supported"), (by_tokens, "contradicted")])
def test_the_verdict_follows_the_law_behind_the_errors(rules_root, law, verdict) -> None:
    rows = rows_of(law=law, spread=0.05)
    (entry,) = prediction.judge(rows, [], True)
    formula, tokens = (by_hand(rows, list(x.features)) for x in (FORMULA, TOKENS))
    values = [formula[s] - tokens[s] for s in range(3)]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert entry["value"] == pytest.approx(np.mean(values), rel=1e-4)
    assert entry["interval"] == pytest.approx([low, high], rel=1e-4)
    assert (entry["seeds"], entry["verdict"]) == (3, verdict)
    assert prediction.judge(rows, [], False)[0]["verdict"] == "inconclusive"
    json.dumps(entry, allow_nan=False)


def test_runs_that_cannot_be_held_out_are_told_and_nothing_is_judged(rules_root) -> None:
    for how in ({"studies": ["peak_lr", "schedules"]}, {"seeds": [0]}):
        (entry,) = prediction.judge(rows_of(**how), ["schedules_small"], True)
        assert (entry["value"], entry["seeds"], entry["verdict"]) == (None, 0, "inconclusive")
        assert (
            "width" in entry["details"]["not judged"] and "schedules_small" in entry["details"]["not judged"]
        )


def test_errors_below_zero_are_left_out_and_counted(rules_root) -> None:
    rows = rows_of()
    table, curvature = study("peak_lr")
    table.loc[(table["bits"] == 4) & (table["seed"] == 0) & (table["peak_lr"] == 0.002), "delta_ce"] = -1e-4
    rows = pd.concat(
        [prediction.prepare(table, curvature).assign(study="peak_lr"), rows[rows["study"] != "peak_lr"]]
    )
    (entry,) = prediction.judge(rows, [], True)
    assert entry["details"]["errors or traces of 0 or less, which have no logarithm"] == 3
    assert entry["verdict"] == "supported"


def write(root, studies=STUDIES, **how) -> None:
    for name in studies:
        table, curvature = study(name, bits=(4, 3, 2) if name == "token_budgets" else (4, 3), **how)
        synthetic.write(
            root, **{name: (table, synthetic.trained(runs_of(name, how.get("seeds", (0, 1, 2)))))}
        )
        curvature.to_csv(root / "reports" / "tables" / f"curvature-{name}.csv", index=False)


def test_equal_weights_in_two_studies_count_once(rules_root) -> None:
    write(rules_root, ["peak_lr", "schedules"])
    path = rules_root / "reports" / "tables" / "measurements-schedules.csv"
    table = pd.read_csv(path)
    first = pd.read_csv(rules_root / "reports" / "tables" / "measurements-peak_lr.csv")["weights_id"].iloc[0]
    table.loc[table["run"] == "wsd-1024000-seed1", "weights_id"] = first
    table.to_csv(path, index=False)
    rows, lacking = prediction.read()
    assert set(rows[rows["weights_id"] == first]["study"]) == {"peak_lr"}
    assert not ((rows["study"] == "schedules") & (rows["run"] == "wsd-1024000-seed1")).any()
    assert lacking == ["weight_decay", "cooldowns", "token_budgets", "schedules_small"]


def test_report_writes_figure_tables_and_claim(rules_root) -> None:
    write(rules_root)
    fig, table, entries = prediction.report(True)
    reports = rules_root / "reports"
    assert (reports / "figures" / "prediction.png").stat().st_size > 10_000
    assert "cooldowns" in (reports / "figures" / "prediction.txt").read_text()  # has no curvature here
    assert json.loads((reports / "claims" / "prediction.json").read_text())[0]["id"] == "P2"
    of = table[table["law"] == FORMULA.name].set_index("held out")
    assert of.loc["other seed, and 2 bit", "mean absolute log error"] < 0.1
    assert of.loc["mean of the four kinds", "mean absolute log error"] == pytest.approx(
        np.mean(list(by_hand(prediction.read()[0], list(FORMULA.features)).values())), rel=1e-5
    )
    told = pd.read_csv(reports / "tables" / "prediction-constants.csv")
    assert told.query("law == @FORMULA.name and constant == 'ln_step'")["value"].item() == pytest.approx(
        b, abs=0.1
    )


def test_a_toy_profile_is_described_and_not_judged(rules_root) -> None:
    write(rules_root, ["peak_lr", "schedules"], seeds=[0])
    _, table, (entry,) = prediction.report(False)
    assert table.empty and entry["verdict"] == "inconclusive"


def test_missing_curvature_is_one_line(rules_root) -> None:
    with pytest.raises(UserError, match="curvature-peak_lr.csv: no such file; run `dvc repro curvature`"):
        prediction.read()
