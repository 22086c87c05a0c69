from __future__ import annotations

import dataclasses
import json
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import synthetic_curvature
from scipy import stats
from synthetic_curvature import tables

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.findings import curvature, style
from ptq_dynamics.findings.curvature import Tables

LENGTH, END = 2_048_000, 24_576_000


def told(values: list[float], back=lambda x: x) -> list[float]:
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    return [back(np.mean(values)), back(low), back(high)]


def entry(t: Tables, id: str, verdicts: bool = True) -> dict:
    return {e["id"]: e for e in curvature.judge(t, verdicts)}[id]


def ranks(values: list[float]) -> np.ndarray:
    order = sorted(values)
    return np.array([order.index(v) for v in values], dtype=float)


# --- C12


@pytest.mark.parametrize(
    ("exponent", "spread", "verdict"),
    [(1.0, 0.05, "supported"), (-1.0, 0.05, "contradicted"), (0.0, 0.3, "contradicted")],
)
def test_c12_recomputed_from_its_wording(rules_root, exponent, spread, verdict) -> None:
    t = tables(exponent=exponent, spread=spread)
    error = {
        (r["run"], r["tokens"]): r["relative_error"]
        for r in t.measured.to_dict("records")
        if (r["method"], r["bits"]) == ("gptq", 3)
    }
    values = []
    for seed in range(3):
        rows = [r for r in t.curvature.to_dict("records") if r["seed"] == seed]
        assert len(rows) == 12 + 2 * 5
        x = ranks([r["trace"] for r in rows])
        y = ranks([error[(r["run"], r["tokens"])] for r in rows])
        values.append(float(np.corrcoef(x, y)[0, 1]))
    found = entry(t, "C12")
    assert [found["value"], *found["interval"]] == pytest.approx(told(values), rel=1e-4, abs=1e-6)
    assert (found["seeds"], found["verdict"]) == (3, verdict)
    assert entry(t, "C12", verdicts=False)["verdict"] == "inconclusive"


def test_c12_needs_a_rise_at_every_budget(rules_root) -> None:
    t = tables(spread=0.0)
    assert curvature.rises_everywhere(t.curvature) is True
    assert curvature.rises_everywhere(tables(spread=0.0, top=-0.5).curvature) is False
    # at one budget the top eigenvalue falls: contradicted, however well the trace goes with the error
    first = (t.curvature["member"] == "cooldown") & (t.curvature["branch_tokens"] == LENGTH)
    t.curvature.loc[first, "top_eigenvalue"] = 0.1
    found = entry(t, "C12")
    assert found["value"] > 0.9 and found["verdict"] == "contradicted"
    # a negative eigenvalue has no logarithm: it cannot be told
    t.curvature.loc[first, "top_eigenvalue"] = -0.1
    assert curvature.rises_everywhere(t.curvature) is None and entry(t, "C12")["verdict"] == "inconclusive"


def test_rise_and_lead_by_hand() -> None:
    t = tables(spread=0.0, seeds=[0])
    rows = curvature.together(t, 3)
    trunk = rows["member"] == "trunk"
    done = (rows["tokens"] - rows["branch_tokens"]) / LENGTH
    # the trace rises by 4 at once, the top eigenvalue evenly in its logarithm
    rows["trace"] = np.where(trunk, 10.0, np.where(done > 0, 40.0, 10.0))
    rows["top_eigenvalue"] = np.where(trunk, 1.0, 3.0**done)
    assert curvature.late_rise(rows, "trace") == pytest.approx({0: 4.0})
    assert curvature.done_halfway(rows, "trace") == pytest.approx({0: 1.0})
    assert curvature.late_rise(rows, "top_eigenvalue") == pytest.approx({0: 3.0})
    assert curvature.done_halfway(rows, "top_eigenvalue") == pytest.approx({0: 0.5})
    late = curvature.changes(rows, "trace").query("late")
    assert sorted(late["branch_tokens"].unique()) == [14_336_000, END]
    # without a checkpoint in the middle of the decay it cannot be told
    assert math.isnan(curvature.done_halfway(rows[trunk | (done == 1)], "trace")[0])


def test_growth_in_the_stable_phase_by_hand() -> None:
    t = tables(spread=0.0)
    rows = t.curvature.assign(top_eigenvalue=lambda d: 1.3 ** np.log2(d["tokens"]))
    assert curvature.plateau_growth(rows, "top_eigenvalue") == pytest.approx(dict.fromkeys(range(3), 1.3))


def test_an_error_or_trace_that_does_not_vary_has_no_rank_correlation() -> None:
    t = tables()
    rows = curvature.together(t, 3).assign(trace=1.0)
    assert all(math.isnan(v) for v in curvature.rank_correlation(rows).values())


# --- C13


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "supported"),
        ({"along_step": 1.5}, "contradicted"),
        ({"distance": 0.8}, "contradicted"),  # sharper basins, but further apart
        ({"rise": 1.2}, "contradicted"),  # sharper basins, but the quantized model lies lower
    ],
)
def test_c13_recomputed_from_its_wording(rules_root, changes, verdict) -> None:
    t = tables(spread=0.03, **changes)
    slopes = []
    for seed in range(3):
        rows = [
            r for r in t.steps.to_dict("records") if (r["seed"], r["method"], r["bits"]) == (seed, "gptq", 4)
        ]
        x, y = [np.log10(r["peak_lr"]) for r in rows], [np.log(r["rayleigh"]) for r in rows]
        slopes.append(float(np.polyfit(x, y, 1)[0]))
    found = entry(t, "C13")
    assert [found["value"], *found["interval"]] == pytest.approx(told(slopes, math.exp), rel=1e-4)
    assert (found["seeds"], found["verdict"]) == (3, verdict)
    expected = {"distance to the previous checkpoint": changes.get("distance", 3.0)}
    expected["rise in loss to the quantized weights"] = changes.get("rise", 0.7)
    for name, value in expected.items():
        assert found["details"][f"{name}, per tenfold LR"]["value"] == pytest.approx(value, rel=0.1)


def test_c13_reads_the_ends_of_the_longest_runs_alone(rules_root) -> None:
    t = tables(spread=0.0)
    short = t.steps.assign(run_tokens=4_096_000, tokens=4_096_000, rayleigh=9.0, norm2=1.0)
    early = t.steps.assign(tokens=6_553_600, rayleigh=9.0, norm2=1.0)
    more = dataclasses.replace(t, steps=pd.concat([t.steps, short, early], ignore_index=True))
    assert entry(more, "C13")["value"] == entry(t, "C13")["value"] == pytest.approx(0.3)


def test_curvature_without_a_logarithm_is_not_judged(rules_root) -> None:
    t = tables()
    t.steps.loc[(t.steps["bits"] == 4) & (t.steps["seed"] == 1), "rayleigh"] = -0.1
    found = entry(t, "C13")
    assert (found["value"], found["verdict"]) == (None, "inconclusive")


# --- tables, figures, report


def test_the_tables_hold_what_they_say() -> None:
    t = tables(spread=0.0)
    ours = curvature.summary(t).set_index("cooldown from (M tokens)")
    start, end = (
        t.curvature[(t.curvature["member"] == m) & (t.curvature["tokens"] == 14_336_000 + more)]["trace"]
        for m, more in (("trunk", 0), ("cooldown", LENGTH))
    )
    by_hand = np.exp(np.log(end.to_numpy() / start.to_numpy()).mean())
    assert ours.loc[14.336, "trace"] == pytest.approx(by_hand) and len(ours) == 5
    told = curvature.correlations(t)
    assert not told.duplicated(["curvature", "quantizer", "checkpoints"]).any()
    assert told[told["curvature"] == "trace"]["correlation"].between(-1, 1).all()
    rates = curvature.rates_table(t)
    assert not rates.duplicated(["bits", "quantity", "peak LR"]).any()
    assert len(rates) == 4 * (3 * 2 + 2)


def test_a_toy_profile_writes_everything_and_judges_nothing(rules_root, monkeypatch) -> None:
    t = tables(seeds=[0], rates=[0.01, 0.02])
    t.curvature.loc[t.curvature["tokens"] == LENGTH, "trace"] = -1.0
    synthetic_curvature.write(rules_root, t)
    real = style.use
    monkeypatch.setattr(style, "use", lambda: (real(), plt.rcParams.update({"savefig.dpi": 30})))
    fig, table, entries = curvature.report(False)
    reports = rules_root / "reports"
    for name in ("curvature", "curvature-planes"):
        for ending in ("png", "pdf", "txt"):
            assert (reports / "figures" / f"{name}.{ending}").stat().st_size > 100
    for name in ("curvature", "curvature-correlations", "curvature-rates"):
        assert len(pd.read_csv(reports / "tables" / f"{name}.csv"))
    assert [e["verdict"] for e in entries] == ["inconclusive"] * 2 and len(table)
    assert json.loads((reports / "claims" / "curvature.json").read_text()) == json.loads(json.dumps(entries))
    metrics = json.loads((reports / "metrics" / "curvature.json").read_text())
    assert all(math.isfinite(v) for v in metrics.values())
    letters = [ax.get_title(loc="left") for ax in fig.axes if ax.get_title(loc="left")]
    assert sorted(letters) == [f"({c})" for c in "abcdef"]


def test_a_missing_table_is_told_with_the_stage_that_makes_it(tables_root, monkeypatch) -> None:
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tables_root))
    with pytest.raises(
        UserError, match="reports/tables/curvature-token_budgets.csv: .*`dvc repro curvature`"
    ):
        curvature.read()
