"""What the monitor's finding says, on tables whose best choices are known; its verdict recomputed by other code."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy import stats

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.findings import monitor

RTN, GPTQ = "rtn-3bit-g64", "gptq-3bit-g64"


def candidates(full: dict[str, list[float]], low: dict[str, list[float]]) -> pd.DataFrame:
    """Losses by candidate and seed."""
    return pd.DataFrame(
        [
            {"seed": s, "candidate": c, monitor.FULL: full[c][s], "3 bit": low[c][s]}
            for c in full
            for s in range(len(full[c]))
        ]
    )


def test_a_choice_is_made_without_the_seed_that_it_is_read_on() -> None:
    rows = candidates({"a": [3.0, 3.1, 3.2], "b": [3.3, 3.0, 3.1]}, {"a": [3.5] * 3, "b": [3.4, 3.6, 3.4]})
    # full precision, without seed 0: a 3.15, b 3.05; without 1: a 3.1, b 3.2; without 2: a 3.05, b 3.15
    assert monitor.chosen(rows, monitor.FULL) == {0: "b", 1: "a", 2: "a"}
    # 3 bit, without seed 0: a 3.5, b 3.5 (the first of equals); without 1: b 3.4; without 2: a 3.5, b 3.5
    assert monitor.chosen(rows, "3 bit")[1] == "b"
    assert monitor.outcome(rows, monitor.FULL, "3 bit") == {0: 3.4, 1: 3.5, 2: 3.5}
    assert monitor.regret(rows, monitor.FULL, "3 bit") == pytest.approx({0: 0.0, 1: 0.0, 2: 0.1})
    assert monitor.regret(rows, monitor.FULL, monitor.FULL) == pytest.approx({0: 0.3, 1: 0.1, 2: 0.1})


def test_the_order_of_the_table_breaks_ties() -> None:
    rows = candidates({"z": [3.0, 3.0], "a": [3.0, 3.0]}, {"z": [3.5, 3.5], "a": [3.5, 3.5]})
    assert monitor.chosen(rows, monitor.FULL) == {0: "z", 1: "z"}


def test_one_seed_chooses_nothing() -> None:
    rows = candidates({"a": [3.0], "b": [3.1]}, {"a": [3.5], "b": [3.4]})
    assert monitor.chosen(rows, monitor.FULL) == {} == monitor.gain(rows, 3)


def peak_lr(error_per_tenfold: float):
    """Two good LRs: 0.01 is 5 mnats better in full precision, the larger has the error that the argument gives."""
    losses = {0.002: 3.2, 0.01: 3.0, 0.03: 3.005, 0.06: 3.3}
    return synthetic.peak_lr(
        per_tenfold=error_per_tenfold, spread=0.01,
        loss=lambda at: losses[at["peak_lr"]] + synthetic.noise(9, at["seed"], size=0.01),
    )  # fmt: skip


def readings(seeds=(0, 1, 2)) -> pd.DataFrame:
    """Readings whose rank is that of GPTQ's error in ``synthetic.token_budgets``, but for RTN, the reverse of it."""
    table, _ = synthetic.token_budgets(seeds=seeds)
    rows = table[(table["method"] == "gptq") & (table["bits"] == 3)]
    last = (rows["member"] == "cooldown") & (rows["tokens"] == rows["run_tokens"])
    kept = ["run", "member", "seed", "tokens", "step", "branch_tokens", "run_tokens", "lr"]
    return rows[kept].assign(
        study="token_budgets", ce=rows["ce_fp"], diverging=GPTQ,
        warned=np.where(last & (rows["branch_tokens"] > 5e6), GPTQ, ""),
        **{GPTQ: rows["relative_error"] ** 2, RTN: 1 - rows["relative_error"]},
    )  # fmt: skip


def write(root, error_per_tenfold: float = 0.4, seeds=(0, 1, 2)) -> None:
    studies = {"peak_lr": peak_lr(error_per_tenfold), "cooldowns": synthetic.cooldowns(), "token_budgets": synthetic.token_budgets()}  # fmt: skip
    studies = {k: tuple(t[t["seed"].isin(seeds)] for t in v) for k, v in studies.items()}
    synthetic.write(root, **studies)
    readings(seeds).to_csv(root / "reports" / "tables" / "monitor.csv", index=False)


def by_hand(root) -> dict[int, float]:
    """P3 per seed from the tables, in plain loops."""
    out: dict[int, list[float]] = {}
    for study in ("peak_lr", "cooldowns"):
        t = pd.read_csv(root / "reports" / "tables" / f"measurements-{study}.csv")
        t = t[(t.method == "gptq") & (t.bits == 3) & (t.tokens == t.run_tokens)]
        if study == "peak_lr":
            t = t[t.run_tokens == t.run_tokens.max()]
        else:
            t = t[t.sequences == t[t.member == "linear"].sequences.iloc[0]]
        t = t.assign(name=[r.rsplit("-seed", 1)[0] for r in t.run])
        for seed in sorted(set(t.seed)):
            others, own = t[t.seed != seed], t[t.seed == seed].set_index("name").ce
            by = {c: min((others[others.name == n][c].mean(), i, n) for i, n in enumerate(dict.fromkeys(t.name)))[2] for c in ("ce_fp", "ce")}  # fmt: skip
            out.setdefault(int(seed), []).append(own[by["ce_fp"]] - own[by["ce"]])
    return {s: sum(v) / len(v) for s, v in out.items()}


@pytest.mark.parametrize(("per_tenfold", "verdict"), [(0.2, "supported"), (1.0, "contradicted")])
def test_the_verdict_against_other_code(rules_root, per_tenfold, verdict) -> None:
    write(rules_root, per_tenfold)
    (entry,) = monitor.judge(monitor.read(), True)
    values = by_hand(rules_root)
    assert entry["value"] == pytest.approx(np.mean(list(values.values())), rel=1e-4, abs=1e-9)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(list(values.values())), scale=stats.sem(list(values.values())))  # fmt: skip
    told = [0.0, 0.0] if math.isnan(low) else [low, high]
    assert entry["interval"] == pytest.approx(told, rel=1e-4, abs=1e-9)
    assert (entry["seeds"], entry["verdict"]) == (3, verdict)
    json.dumps(entry, allow_nan=False)


def test_details_tell_what_was_chosen_and_what_it_costs(rules_root) -> None:
    write(rules_root, 0.2)
    details = monitor.judge(monitor.read(), True)[0]["details"]
    assert details["peak LR, chosen by full precision (beside 3 bit)"] == ["0.01"] * 3
    assert details["peak LR, chosen by 3 bit"] == ["0.03"] * 3
    cost = details["peak LR, full-precision loss that choosing by 3 bit costs"]
    assert cost["value"] == pytest.approx(0.005, rel=1e-3)
    assert "batch" not in str(details["cooldown, chosen by 3 bit"])  # another batch is no cooldown


def test_what_the_monitor_sees(rules_root) -> None:
    write(rules_root)
    t = monitor.read()
    found = monitor.agreement(t)
    assert found[GPTQ] == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})
    assert found[RTN] == pytest.approx({0: -1.0, 1: -1.0, 2: -1.0})
    assert monitor.warned(t) == {
        "cooldowns": {s: (3, 5) for s in range(3)},
        "readings of the trunk's first half": {s: (0, 5) for s in range(3)},
        "readings of its last half": {s: (0, 7) for s in range(3)},
    }


def test_report_writes_figure_tables_and_claim(rules_root) -> None:
    write(rules_root)
    figure, table, _ = monitor.report(True)
    reports = rules_root / "reports"
    assert (reports / "figures" / "monitor.png").stat().st_size > 10_000
    assert [e["id"] for e in json.loads((reports / "claims" / "monitor.json").read_text())] == ["P3"]
    assert len(table) == 2 * 2 * 2 * 2 and (table["regret"] >= 0).all()
    told = pd.read_csv(reports / "tables" / "monitor-regret.csv")
    assert tuple(told["choice"].unique()) == monitor.CHOICES


def test_one_seed_is_described_and_not_judged(rules_root) -> None:
    write(rules_root, seeds=[0])
    _, table, (entry,) = monitor.report(True)
    assert (entry["value"], entry["seeds"], entry["verdict"]) == (None, 0, "inconclusive")
    assert "at least two seeds" in entry["details"]["not judged"] and table["regret"].isna().all()


def test_missing_readings_are_one_line(rules_root) -> None:
    with pytest.raises(UserError, match="monitor.csv: no such file; run `dvc repro monitor`"):
        monitor.read()
