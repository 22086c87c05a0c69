"""In the wild: C14 on tables of known truth, figures and captions."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy import stats

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.findings import wild
from ptq_dynamics.trajectories.families import load_families

ROOT = Path(__file__).parents[2]
RULE = {
    "C14": {
        "statement": "s", "statistic": "t", "low": 1.0, "provided": "higher in every open family", "paper": "p [e]",
        "finding": "wild",
    }
}  # fmt: skip


def table(
    ratio: float = 2.0, stable: bool = True, soup: bool = False, bits=(4, 3), per=10**9
) -> pd.DataFrame:
    """A trajectory whose error is ``ratio`` times as high at the end of its decay as before it, at any bit width."""
    points = [(1, 5e-4, "warmup", 0.2), (5, 1e-3, "stable", 0.9), (10, 1e-3, "stable", 1.0)][
        : 3 if stable else 1
    ]
    points += [(12, 1e-3, "decay", 1.0)] if not stable else []
    points += [(14, 5e-4, "decay", (1 + ratio) / 2), (18, 1e-5, "decay", ratio)]
    rows = []
    for tokens, lr, phase, size in points + ([(18, None, "average", 0.1)] if soup else []):
        loss = 3.5 - tokens / 20
        base = {
            "checkpoint": f"step{tokens}" if phase != "average" else "soup", "kind": "checkpoint", "run": "x",
            "tokens": tokens * per, "step": tokens, "lr": lr, "phase": phase, "parameters": 10**9,
            "evaluation_tokens": 204800, "members": None,
        }  # fmt: skip
        rows.append({**base, "method": "none", "bits": None, "ce": loss})
        for b in bits:
            e = {4: 0.01, 3: 0.03}[b] * size
            rows.append(
                {**base, "method": "gptq", "bits": b, "ce": loss * (1 + e), "ce_fp": loss, "relative_error": e,
                 "group_size": 64}
            )  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture
def rules(tmp_path, monkeypatch) -> Path:
    """A root with the facts on families and, until the repository has it, a rule for C14."""
    (tmp_path / "data").mkdir()
    shutil.copytree(ROOT / "data" / "reference", tmp_path / "data" / "reference")
    yaml = YAML(typ="safe", pure=True)
    known = yaml.load((ROOT / "claims.yaml").read_text(encoding="utf-8"))
    with open(tmp_path / "claims.yaml", "w", encoding="utf-8") as f:
        YAML().dump(RULE | known, f)
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    return tmp_path


def write(root: Path, **tables: pd.DataFrame) -> None:
    (root / "reports" / "tables" / "wild").mkdir(parents=True)
    for key, t in tables.items():
        t.to_csv(root / "reports" / "tables" / "wild" / f"{key}.csv", index=False)


def recomputed(t: pd.DataFrame) -> float:
    """The rule's statistic by plain loops over the rows."""
    last_before, first_in, last_in = None, None, None
    for r in sorted(t[(t.method == "gptq") & (t.bits == 3)].itertuples(), key=lambda r: r.tokens):
        if r.phase == "decay":
            first_in = first_in or r.relative_error
            last_in = r.relative_error
        elif r.phase == "stable" and first_in is None:
            last_before = r.relative_error
    return last_in / (last_before or first_in)


@pytest.mark.parametrize("ratio", [0.5, 1.9, 4.1])
@pytest.mark.parametrize("stable", [True, False])
def test_the_ratio_over_the_decay_is_that_of_the_table(ratio, stable):
    t = table(ratio, stable, soup=True)
    assert wild.decay_ratio(t, 3) == pytest.approx(ratio) == pytest.approx(recomputed(t))
    assert wild.decay_ratio(t.sample(frac=1, random_state=0), 4) == pytest.approx(ratio)


def test_averages_that_we_made_do_not_count():
    t = table(2.0)
    extra = t[(t["phase"] == "decay") & (t["bits"] == 3)].tail(1).assign(kind="average", relative_error=9.0)
    assert wild.decay_ratio(pd.concat([t, extra]), 3) == pytest.approx(2.0)


def test_without_a_decay_there_is_no_ratio():
    t = table()
    assert math.isnan(wild.decay_ratio(t[t["phase"] == "stable"], 3))


def test_without_an_open_family_c14_is_not_judged(rules):
    (entry,) = wild.judge({"mini": table(3.0)}, True)
    assert (entry["value"], entry["interval"], entry["seeds"], entry["verdict"]) == (
        None,
        [None] * 2,
        0,
        "inconclusive",
    )
    assert entry["details"]["mini (ours, 0.2M), 3 bit"] == 3.0
    assert entry["details"]["open families measured"] == [] and "OLMo 2 1B" in str(entry["details"])
    assert "no open family" in entry["details"]["not judged"] and "no open family" in entry["scale"]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((2.0, 2.2, 2.1), "supported"),
        ((2.0, 3.0, 0.9), "contradicted"),  # not in every family
        ((0.5, 0.6, 0.55), "contradicted"),
        ((1.1, 60.0, 1.2), "inconclusive"),  # higher in all, but the interval reaches below 1
        ((2.0,), "inconclusive"),
    ],
)
def test_verdicts(rules, ratios, verdict):
    keys = ("olmo2_1b", "smollm3_3b", "amber_7b")
    tables = {"mini": table(0.1)} | {k: table(r) for k, r in zip(keys, ratios, strict=False)}
    (entry,) = wild.judge(tables, True)
    assert entry["verdict"] == verdict and entry["seeds"] == len(ratios)
    logs = np.log([recomputed(tables[k]) for k in keys[: len(ratios)]])
    assert entry["value"] == pytest.approx(math.exp(logs.mean()), rel=1e-5)
    if len(logs) > 1:
        interval = np.exp(stats.t.interval(0.95, len(logs) - 1, loc=logs.mean(), scale=stats.sem(logs)))
        assert entry["interval"] == pytest.approx(list(interval), rel=1e-5)
    assert wild.judge(tables, False)[0]["verdict"] == "inconclusive"


def test_report_writes_everything_and_says_what_did_not_run(rules):
    write(rules, mini=table(per=10**6))
    figure, ours, entries = wild.report(True)
    reports = rules / "reports"
    for name in (
        "figures/wild.png",
        "figures/wild.pdf",
        "tables/wild.csv",
        "claims/wild.json",
        "metrics/wild.json",
    ):
        assert (reports / name).stat().st_size > 50
    text = (reports / "figures" / "wild.txt").read_text()
    assert "No open family ran" in text and "SmolLM3" in text and "Not certain" not in text
    assert [a.get_title(loc="left") for a in figure.axes if a.get_title(loc="left")] == ["(a)", "(b)", "(c)"]
    row = ours.set_index("bits").loc[3]
    assert (
        row["end of decay over its start"] == pytest.approx(2.0)
        and not row["open"]
        and row["checkpoints"] == 5
    )
    assert len(entries) == 1


def test_uncertain_facts_are_in_the_caption(rules):
    text = wild.caption({"mini": table(), "apertus_8b": table()})
    assert (
        "Open families: Apertus 8B" in text
        and "Not certain: Apertus 8B:" in text
        and "No open family ran" not in text
    )
    assert "Apertus 8B" not in text.split("Not measured:")[1].split("Not certain")[0]


def test_families_are_in_the_order_of_the_file(rules):
    write(rules, smollm3_3b=table(), mini=table(), olmo2_1b=table())
    known = list(load_families())
    assert list(wild.read()) == sorted(("mini", "olmo2_1b", "smollm3_3b"), key=known.index)


def test_no_family_at_all(rules):
    with pytest.raises(UserError, match="no family is measured; run `dvc repro wild@mini`"):
        wild.read()


@pytest.mark.parametrize("axis", ["tokens", "step"])
def test_the_figure_of_one_trajectory(rules, tmp_path, axis):
    t = table(soup=True)
    if axis == "step":
        t = t.assign(tokens=np.nan, lr=np.nan, phase="unknown")
    figure = wild.trajectory_figure(t, axis)
    labelled = [a for a in figure.axes if a.get_title(loc="left")]
    assert [a.get_ylabel() for a in labelled] == [
        "4-bit error (%)",
        "3-bit error (%)",
        "quantized loss (nats/token)",
    ]
    assert labelled[0].get_xlabel() == ("training tokens (billions)" if axis == "tokens" else "step")
    rates = [a for a in figure.axes if a.get_ylabel() == "learning rate"]
    assert len(rates) == (1 if axis == "tokens" else 0)
    wild.save_trajectory(figure, tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"figure.png", "figure.pdf"}
    said = wild.trajectory_caption({"title": "mine", "axis": axis, "caveats": ["LR guessed"]}, t)
    assert said.startswith("mine. Error") and said.endswith("Not certain: LR guessed.")
    assert ("tells steps, not tokens" in said) == (axis == "step")
