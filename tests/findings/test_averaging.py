from __future__ import annotations

import dataclasses
import json
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import synthetic_averages
from scipy import stats
from synthetic_averages import BRANCH, LENGTH, tables

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.findings import averaging, style
from ptq_dynamics.findings.averaging import Tables


def told(values: list[float], back=lambda x: x) -> list[float]:
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    return [back(np.mean(values)), back(low), back(high)]


def gptq(table: pd.DataFrame, bits: int) -> list[dict]:
    return table[(table["method"] == "gptq") & (table["bits"] == bits)].to_dict("records")


def entry(t: Tables, id: str, verdicts: bool = True) -> dict:
    return {e["id"]: e for e in averaging.judge(t, verdicts)}[id]


# --- C9


@pytest.mark.parametrize(
    ("loss", "error", "verdict"),
    [
        (3.1, 0.01, "supported"),  # 3.13 against about 3.15
        (3.1, 0.03, "contradicted"),  # 3.19
        (2.95, 0.01, "contradicted"),  # better at 3 bit, but in full precision too
    ],
)
def test_c9_recomputed_from_its_wording(rules_root, loss, error, verdict) -> None:
    t = tables(lawa_loss=loss, lawa_error={4: 0.004, 3: error, 2: 0.1})
    lawa = {(r["seed"], r["tokens"]): r for r in gptq(t.averages, 3) if r["purpose"] == "trajectory"}
    differences: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for r in gptq(t.runs, 3):
        ended = r["member"] == "cooldown" and r["tokens"] == r["branch_tokens"] + LENGTH
        if ended and r["tokens"] >= 12_288_000 and (r["seed"], r["tokens"]) in lawa:
            differences[r["seed"]].append(r["ce"] - lawa[(r["seed"], r["tokens"])]["ce"])
    assert all(len(v) == 1 for v in differences.values())  # 24.576M + 2.048M lies beyond the trunk
    found = entry(t, "C9")
    assert [found["value"], *found["interval"]] == pytest.approx(
        told([-np.mean(v) for v in differences.values()]), rel=1e-4
    )
    assert (found["seeds"], found["verdict"]) == (3, verdict)
    assert found["details"]["full precision"]["value"] == pytest.approx(loss - 3.0)


def test_c9_averages_over_the_late_budgets_and_tells_the_early_ones() -> None:
    t = tables(budgets=[2_048_000, 10_240_000, 14_336_000, 22_528_000], spread=0.0).quantizer(3)
    pairs = averaging.matched(t, "ce")
    assert sorted(pairs["tokens"].unique()) == [4_096_000, 12_288_000, 16_384_000, 24_576_000]
    assert pairs.groupby("tokens")["late"].all().tolist() == [False, True, True, True]
    late = pairs[(pairs["tokens"] >= 12_288_000) & (pairs["seed"] == 1)]
    by_hand = sum(late["lawa"] - late["cooldown"]) / 3
    assert averaging.behind(t, "ce")[1] == pytest.approx(by_hand)
    # at equal tokens seen the trunk is the stable one
    stable = {(r["seed"], r["tokens"]): r["ce"] for r in gptq(t.runs, 3) if r["member"] == "trunk"}
    assert all(stable[(r["seed"], r["tokens"])] == r["stable"] for r in pairs.to_dict("records"))


def test_the_share_of_the_way_from_stable_to_decay() -> None:
    # stable 3.2, cooldown 3.0 in full precision
    assert averaging.gap_closed(tables(lawa_loss=3.05).quantizer(3), "ce_fp") == pytest.approx(
        dict.fromkeys(range(3), 0.75)
    )
    # at 2 bit the cooldown ends above the trunk: there is no way down
    assert all(math.isnan(v) for v in averaging.gap_closed(tables().quantizer(2), "ce").values())


def test_c9_is_not_judged_where_no_cooldown_ends_late_enough(rules_root) -> None:
    found = entry(tables(budgets=[2_048_000, 4_096_000]), "C9")
    assert (found["value"], found["seeds"], found["verdict"]) == (None, 0, "inconclusive")
    assert "no cooldown ends" in found["details"]["not judged"]


# --- C10


@pytest.mark.parametrize(
    ("factor", "spread", "verdict"),
    [(0.8, 0.02, "supported"), (1.2, 0.02, "contradicted"), (1.0, 0.2, "inconclusive")],
)
def test_c10_recomputed_from_its_wording(rules_root, factor, spread, verdict) -> None:
    t = tables(soup_factor=factor, spread=spread)
    logs = []
    for seed in range(3):
        best = min(
            r["relative_error"]
            for r in gptq(t.soups, 4)
            if r["seed"] == seed and r["tokens"] == BRANCH + LENGTH and r["parent"] == f"trunk-seed{seed}"
        )
        (soup,) = [r for r in gptq(t.averages, 4) if r["kind"] == "soup" and r["seed"] == seed]
        logs.append(math.log(soup["relative_error"] / best))
    found = entry(t, "C10")
    assert [found["value"], *found["interval"]] == pytest.approx(told(logs, math.exp), rel=1e-4)
    assert (found["seeds"], found["verdict"]) == (3, verdict)
    assert found["details"]["ingredients per soup"] == 3
    assert "gptq 3 bit" in found["details"] and "gptq 2 bit" not in found["details"]  # ingredients have none


def test_other_runs_of_the_soups_study_are_no_ingredients(rules_root) -> None:
    t = tables()
    other = t.soups.assign(branch_tokens=BRANCH // 2, relative_error=1e-6, ce=1.0, ce_fp=1.0)
    trunk = t.soups.assign(member="trunk", parent="", relative_error=1e-6, ce=1.0, ce_fp=1.0)
    more = dataclasses.replace(t, soups=pd.concat([t.soups, other, trunk], ignore_index=True))
    assert entry(more, "C10")["value"] == entry(t, "C10")["value"]


def test_an_error_without_a_logarithm_is_not_judged(rules_root) -> None:
    t = tables()
    t.soups.loc[(t.soups["bits"] == 4) & (t.soups["seed"] == 1), "relative_error"] = -1e-4
    found = entry(t, "C10")
    assert (found["value"], found["verdict"]) == (None, "inconclusive")
    assert found["details"]["errors of 0 or less, which have no logarithm"] == 3


# --- C11


def test_c11_has_no_verdict_and_tells_what_our_decays_show(rules_root) -> None:
    found = entry(tables(over_decay=-0.02), "C11")
    assert (found["value"], found["interval"], found["seeds"]) == (None, [None, None], 0)
    assert found["verdict"] == "inconclusive" and "published checkpoints" in found["details"]["not judged"]
    (full,) = [v for k, v in found["details"].items() if k.endswith(": full precision")]
    assert full["value"] == pytest.approx(-0.02)
    json.dumps(found, allow_nan=False)


# --- tables, figure, report


def test_the_summary_stands_beside_the_papers_numbers(rules_root) -> None:
    ours = averaging.summary(tables(spread=0.0)).set_index("quantity")
    assert ours.loc["full-precision loss", ["LAWA", "cooldown", "stable"]].tolist() == pytest.approx(
        [3.1, 3.0, 3.2]
    )
    paper = [f"paper, {k} [e]" for k in ("LAWA", "cooldown", "stable")]
    assert ours.loc["3-bit loss", paper].tolist() == [3.56, 3.605, 3.755]
    assert ours.loc["3-bit error (%)", paper].tolist() == pytest.approx([2.0, 5.8, 2.8])
    assert ours.loc["4-bit loss", paper].isna().all() and "2-bit loss" in ours.index


def test_windows_and_soups_hold_every_average_once() -> None:
    t = tables(spread=0.0)
    windows = averaging.ablation(t)
    assert not windows.duplicated(["kind", "window", "interval_tokens", "ema_decay"]).any()
    assert sorted(windows["kind"]) == ["ema", *["lawa"] * 5, "none"] and (windows["seeds"] == 3).all()
    assert windows.notna()["3-bit loss"].all()
    own = windows[windows["kind"] == "none"].iloc[0]
    assert own["full-precision loss"] == pytest.approx(3.2) and own["window"] == 1
    soups = averaging.soups(t).set_index(["quantity", "seed"])
    assert soups.loc[("4-bit error (%)", 2), ["best ingredient", "soup"]].tolist() == pytest.approx(
        [1.0, 0.8]
    )


def test_a_toy_profile_writes_everything_and_judges_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    t = tables(seeds=[0], budgets=[4_096_000, 24_576_000], orders=[0, 1])
    t = Tables(*(x[x["bits"] != 2].copy() for x in (t.averages, t.runs, t.soups)))
    for table in (t.averages, t.runs, t.soups):
        table.loc[table["bits"] == 4, ["relative_error", "delta_ce"]] = [-1e-4, -3e-4]
    synthetic_averages.write(tmp_path, t)
    real = style.use
    monkeypatch.setattr(style, "use", lambda: (real(), plt.rcParams.update({"savefig.dpi": 30})))
    figure, table, entries = averaging.report(False)
    reports = tmp_path / "reports"
    for ending in ("png", "pdf", "txt"):
        assert (reports / "figures" / f"averaging.{ending}").stat().st_size > 100
    for name in ("averaging", "averaging-budgets", "averaging-windows", "averaging-soups"):
        assert len(pd.read_csv(reports / "tables" / f"{name}.csv"))
    assert [e["verdict"] for e in entries] == ["inconclusive"] * 3 and len(table)
    assert json.loads((reports / "claims" / "averaging.json").read_text()) == json.loads(json.dumps(entries))
    metrics = json.loads((reports / "metrics" / "averaging.json").read_text())
    assert all(math.isfinite(v) for v in metrics.values())
    letters = [ax.get_title(loc="left") for ax in figure.axes if ax.get_title(loc="left")]
    assert letters == [f"({c})" for c in "abcdefg"]  # no panel for 2 bit
    assert all(ax.get_xlabel() for ax in figure.axes if ax.get_visible())


def test_a_missing_table_is_told_with_the_stage_that_makes_it(rules_root) -> None:
    with pytest.raises(UserError, match="reports/tables/measurements-averages.csv: .*`dvc repro average`"):
        averaging.read()
