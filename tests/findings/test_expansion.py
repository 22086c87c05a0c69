from __future__ import annotations

import json
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import synthetic
import synthetic_curvature
from scipy import stats
from synthetic_curvature import expansions

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.findings import expansion, style
from ptq_dynamics.findings.statistics import errors


@pytest.mark.parametrize(
    ("rest", "spread", "verdict"),
    [(1.1, 0.05, "supported"), (1.6, 0.05, "contradicted"), (-1.0, 0.05, "contradicted")],
)
def test_p1_recomputed_from_its_wording(rules_root, rest, spread, verdict) -> None:
    table, by_rate = expansions(rest=rest, spread=spread)
    # half the checkpoints are predicted as much too low as the others too high: nothing cancels
    odd = (table["tokens"] // 1_024_000) % 4 == 0
    table.loc[odd, "true"] = 2 * (table["linear"] + table["quadratic"])[odd] - table["true"][odd]
    values = []
    for seed in range(3):
        rows = [
            r for r in table.to_dict("records") if (r["seed"], r["method"], r["bits"]) == (seed, "gptq", 4)
        ]
        assert len(rows) == 12 + 2 * 5
        off = sum(abs(r["linear"] + r["quadratic"] - r["true"]) for r in rows)
        values.append(off / sum(abs(r["true"]) for r in rows))
    (found,) = expansion.judge(table, by_rate, True)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert [found["value"], *found["interval"]] == pytest.approx(
        [np.mean(values), low, high], rel=1e-4, abs=1e-6
    )
    assert (found["id"], found["seeds"], found["verdict"]) == ("P1", 3, verdict)
    assert expansion.judge(table, by_rate, False)[0]["verdict"] == "inconclusive"


def test_the_bit_widths_at_which_it_holds_are_told(rules_root) -> None:
    table, by_rate = expansions(rest=1.5)  # at 4 bit and below the true rise is half as large again
    (found,) = expansion.judge(table, by_rate, True)
    assert found["details"]["bit widths at which at most 0.2 is left, GPTQ"] == [6, 8]
    assert found["details"]["gptq 8 bit"]["value"] == pytest.approx(0.0, abs=1e-9)
    assert found["details"]["predicted over true, sums"]["value"] == pytest.approx(1 / 1.5)
    assert found["details"]["½δᵀHδ alone"]["value"] == pytest.approx(1 - 1 / (1.5 * 1.02))


def test_the_split_of_the_rise_by_hand() -> None:
    table, _ = expansions(curvature=2.0, size=1.2, weights=0.9)
    rows = errors(table, 4)
    found = expansion.shares(rows)
    whole = math.log(2.0 * 1.2 * 0.9)
    expected = {
        "relative size": math.log(1.2),
        "relative curvature": math.log(2.0 * 0.9),
        "weights": math.log(0.9),
        "curvature": math.log(2.0),
        "rest": 0.0,
    }
    for factor, value in expected.items():
        assert found[factor] == pytest.approx(dict.fromkeys(range(3), value / whole), abs=1e-9)
    changes = expansion.decay_rises(rows)
    assert len(changes) == 15 and changes["total"].to_numpy() == pytest.approx(np.full(15, whole))
    assert sorted(changes.query("late")["branch_tokens"].unique()) == [14_336_000, 24_576_000]


def test_factors_always_multiply_to_the_measured_rise() -> None:
    table, _ = expansions(rest=1.7, spread=0.3)
    table["measured"] *= np.exp(np.random.default_rng(0).normal(size=len(table)))
    f = expansion.factors(table)
    product = np.exp(f[list(expansion.FACTORS)].sum(axis=1, skipna=False))
    assert product.to_numpy() == pytest.approx(table["measured"].to_numpy(), nan_ok=True)
    found = pd.DataFrame(expansion.shares(errors(table, 3)))
    assert found[list(expansion.FACTORS)].sum(axis=1).to_numpy() == pytest.approx(np.ones(3))
    parts = found["weights"] + found["curvature"]
    assert parts.to_numpy() == pytest.approx(found["relative curvature"].to_numpy())


def test_growth_per_tenfold_lr_by_hand() -> None:
    _, by_rate = expansions(per_tenfold=0.7)
    found = expansion.rate_slopes(errors(by_rate, 4))
    assert found["curvature"] == pytest.approx(dict.fromkeys(range(3), 0.7))
    assert found["total"] == pytest.approx(dict.fromkeys(range(3), 0.7))
    assert found["relative size"] == pytest.approx(dict.fromkeys(range(3), 1.0))


def test_what_has_no_logarithm_leaves_no_share_but_a_verdict(rules_root) -> None:
    table, by_rate = expansions()
    where = (
        (table["tokens"] == 14_336_000)
        & (table["member"] == "trunk")
        & (table["seed"] == 1)
        & (table["bits"] == 4)
    )
    table.loc[where, ["quadratic", "rayleigh"]] *= -1
    assert math.isnan(expansion.shares(errors(table, 4))["curvature"][1])
    (found,) = expansion.judge(table, by_rate, True)
    name = "share of the rise over the late cooldowns, 4-bit GPTQ: curvature"
    assert found["details"][name]["value"] is None and found["value"] is not None
    json.dumps(found, allow_nan=False)


def test_the_tables_hold_every_quantizer() -> None:
    table, by_rate = expansions()
    ours = expansion.summary(table)
    assert len(ours) == 10 and ours.loc[0, "predicted / true"] == pytest.approx(1.0)
    split = expansion.split(table, by_rate).set_index(["method", "bits", "factor"])
    assert split.loc[("gptq", 4, "curvature"), "growth over the decay"] == pytest.approx(2.0)
    assert split.loc[("gptq", 4, "curvature"), "growth per tenfold peak LR"] == pytest.approx(0.7)
    assert math.isnan(split.loc[("rtn", 4, "total"), "growth per tenfold peak LR"])


def test_a_toy_profile_writes_everything_and_judges_nothing(rules_root, monkeypatch) -> None:
    table, by_rate = expansions(seeds=[0])
    table = table[table["bits"].isin([4, 3])].copy()
    table.loc[table["tokens"] == table["tokens"].min(), ["true", "linear"]] = [-1e-4, -1.0]
    t = synthetic_curvature.tables(seeds=[0])
    synthetic_curvature.write(rules_root, t, table)
    own = {"predicted", "measured"}  # made by ``read``
    by_rate.drop(columns=own).to_csv(rules_root / "reports" / "tables" / "expansion-peak_lr.csv", index=False)
    synthetic.write(rules_root, peak_lr=synthetic.peak_lr(seeds=[0]))
    assert expansion.read()[1]["measured"].isna().all()  # other runs
    real = style.use
    monkeypatch.setattr(style, "use", lambda: (real(), plt.rcParams.update({"savefig.dpi": 30})))
    fig, ours, entries = expansion.report(False)
    reports = rules_root / "reports"
    for ending in ("png", "pdf", "txt"):
        assert (reports / "figures" / f"expansion.{ending}").stat().st_size > 100
    for name in ("expansion", "expansion-split"):
        assert len(pd.read_csv(reports / "tables" / f"{name}.csv"))
    assert [e["verdict"] for e in entries] == ["inconclusive"] and len(ours) == 4
    metrics = json.loads((reports / "metrics" / "expansion.json").read_text())
    assert metrics and all(math.isfinite(v) for v in metrics.values())
    assert all(ax.get_ylabel() for ax in fig.axes)


def test_expansions_meet_their_measurements(rules_root) -> None:
    table, by_rate = expansions()
    t = synthetic_curvature.tables()
    synthetic_curvature.write(rules_root, t, table)
    t.steps.assign(linear=0.0, quadratic=0.1).to_csv(
        rules_root / "reports" / "tables" / "expansion-peak_lr.csv", index=False
    )
    synthetic.write(rules_root, peak_lr=synthetic.peak_lr())
    along, rates = expansion.read()
    assert len(along) == len(table) and set(rates["method"]) == {"gptq"}  # no ways back
    measured = t.measured.set_index(["run", "tokens", "method", "bits"])["delta_ce"]
    for r in along.sample(20, random_state=0).to_dict("records"):
        key = (r["run"], r["tokens"], r["method"], r["bits"])
        assert r["measured"] == pytest.approx(measured.get(key, math.nan), nan_ok=True)
        assert r["predicted"] == r["linear"] + r["quadratic"]
    assert expansion._measured(along) == [("gptq", 4), ("gptq", 3), ("gptq", 2)]


def test_a_missing_table_is_told_with_the_stage_that_makes_it(tables_root, monkeypatch) -> None:
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tables_root))
    with pytest.raises(
        UserError, match="reports/tables/expansion-token_budgets.csv: .*`dvc repro curvature`"
    ):
        expansion.read()
