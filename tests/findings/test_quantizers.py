"""Other quantizers and options: statistics on tables where every error is known."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pandas as pd
import pytest
import synthetic
import test_ledger

from ptq_dynamics.findings import claims, options, quantizers

METHODS = {  # name: (level, rise over the decay, growth per tenfold LR)
    ("gptq", "none"): (0.01, 1.6, 0.5),
    ("rtn", "none"): (0.02, 1.4, 0.6),
    ("awq", "none"): (0.012, 1.5, 0.55),
    ("nf4", "none"): (0.015, 1.3, 0.45),
    ("gptq", "hadamard"): (0.009, 1.1, 0.7),
}
TRUNK, BUDGETS, RATES = 8_000_000, (2_000_000, 4_000_000, 8_000_000), (0.002, 0.01, 0.06)


def rows(seeds=(0, 1, 2), methods=None, noise=0.0) -> pd.DataFrame:
    """Errors by formula, as `variants` lays them out; each seed has its own level and rise."""
    found = []
    for (method, rotation), (level, up, growth) in (methods or METHODS).items():
        for seed in seeds:
            own = 1 + 0.05 * seed
            like = synthetic.LABELS | {
                "seed": seed,
                "method": method,
                "rotation": rotation,
                "group_size": 64,
                "study": "token_budgets",
            }
            for bits, factor in ((4, 1.0), (3, 4.0)):
                if method == "nf4" and bits == 3:
                    continue
                for b in BUDGETS:
                    error = level * factor * own * (1 + b / 1e8)
                    trunk = like | {
                        "run": f"trunk-seed{seed}",
                        "member": "trunk",
                        "run_tokens": TRUNK,
                        "tokens": b,
                    }
                    end = like | {
                        "run": f"cooldown-{b}-seed{seed}",
                        "member": "cooldown",
                        "run_tokens": b + 10**6,
                        "tokens": b + 10**6,
                        "branch_tokens": b,
                    }
                    found += [
                        trunk | {"bits": bits, "relative_error": error},
                        end | {"bits": bits, "relative_error": error * up**own},
                    ]
                for lr in RATES:
                    at = like | {
                        "study": "peak_lr",
                        "run": f"wsd-lr{lr}-seed{seed}",
                        "peak_lr": lr,
                        "run_tokens": 8192000,
                        "tokens": 8192000,
                    }
                    found.append(
                        at | {"bits": bits, "relative_error": level * factor * growth ** np.log10(lr / 0.01)}
                    )
    table, g = pd.DataFrame(found), np.random.default_rng(0)
    return table.assign(relative_error=table["relative_error"] * np.exp(noise * g.normal(size=len(table))))


@pytest.fixture
def written(rules_root):
    """A root with tables of which nothing is missing."""

    def write(table: pd.DataFrame, missing: str = "") -> None:
        tables = rules_root / "reports" / "tables"
        tables.mkdir(parents=True, exist_ok=True)
        table.to_csv(tables / "measurements-quantizers.csv", index=False)
        (tables / "quantizers-missing.csv").write_text("method,bits,quantizer,reason\n" + missing)

    return write


def test_statistics_are_what_the_table_was_made_of():
    table = quantizers.named(rows())
    for (method, rotation), (_, up, growth) in METHODS.items():
        name = method.upper() + (", rotated" if rotation == "hadamard" else "")
        mine = quantizers.of(table, name, 4)
        assert quantizers.rise(mine) == pytest.approx({s: up ** (1 + 0.05 * s) for s in range(3)})
        assert quantizers.lr_growth(mine) == pytest.approx(dict.fromkeys(range(3), growth))
    assert quantizers.agreement(quantizers.of(table, "GPTQ", 4), quantizers.of(table, "GPTQ", 4)) == {
        0: 1,
        1: 1,
        2: 1,
    }


def test_the_ledger_follows_and_agrees_with_the_independent_code(rules_root, written):
    written(rows(noise=0.03))
    figure, table, entries = quantizers.report(True)
    by = {e["id"]: e for e in json.loads(json.dumps(entries, allow_nan=False))}
    assert by["C15"]["verdict"] == "supported" and by["P4"]["verdict"] == "supported"
    for e in by.values():
        test_ledger.check(e, rules_root, True)
    assert set(table["quantizer"]) == {"GPTQ", "RTN", "AWQ", "NF4", "GPTQ, rotated"}
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]
    assert "Not measured" not in (rules_root / "reports/figures/quantizers.txt").read_text()


def test_a_spike_that_stays_and_a_direction_that_turns_are_contradicted(rules_root, written):
    turned = METHODS | {("nf4", "none"): (0.015, 1.3, 1.8), ("gptq", "hadamard"): (0.009, 1.7, 0.7)}
    written(rows(methods=turned, noise=0.03))
    entries = {e["id"]: e for e in quantizers.report(True)[2]}
    assert [entries[i]["verdict"] for i in ("C15", "P4")] == ["contradicted"] * 2
    for e in entries.values():
        test_ledger.check(e, rules_root, True)


def test_without_an_extra_c15_is_not_judged_and_says_why(rules_root, written):
    less = {k: v for k, v in METHODS.items() if k[0] != "awq"}
    written(rows(methods=less), missing='awq,4,awq-4bit-g64,"awq: install the extra"\n')
    entries = {e["id"]: e for e in quantizers.report(True)[2]}
    e = entries["C15"]
    assert (e["value"], e["seeds"], e["verdict"]) == (None, 0, "inconclusive")
    assert e["details"]["not measured"] == ["AWQ"] and entries["P4"]["verdict"] == "supported"
    caption = (rules_root / "reports/figures/quantizers.txt").read_text()
    assert caption.rstrip().endswith("Not measured: awq-4bit-g64 (awq: install the extra).")
    test_ledger.check(e, rules_root, True)


def test_one_seed_gives_no_intervals(rules_root, written):
    written(rows(seeds=(0,)))
    assert {e["verdict"] for e in quantizers.report(True)[2]} == {"inconclusive"}


def varied(seeds=(0, 1, 2)) -> pd.DataFrame:
    base = rows(seeds, {("gptq", "none"): METHODS[("gptq", "none")]}).query(
        "bits == 3 and study == 'token_budgets'"
    )
    base = base.assign(variant="base", damping=0.01, calibration_sequences=128, calibration_set="calibration")
    higher = base.assign(variant="level", relative_error=base["relative_error"] * (1.3 + 0.01 * base["seed"]))
    end = base["member"] == "cooldown"
    steeper = base.assign(
        variant="rise",
        relative_error=base["relative_error"].where(
            ~end, base["relative_error"] * (1.2 + 0.01 * base["seed"])
        ),
    )
    return pd.concat([base, higher, steeper], ignore_index=True)  # fmt: skip


def test_options_tell_a_change_of_level_from_a_change_of_the_rise(rules_root):
    found = options.summary(varied()).set_index("variant")
    assert found.loc["level", "level over base"] == pytest.approx(1.31, rel=1e-3)
    assert found.loc["level", "rise over base"] == pytest.approx(1.0)
    assert found.loc["rise", "rise over base"] == pytest.approx(1.21, rel=1e-3)
    assert found.loc["level", "moves the level"] and not found.loc["level", "moves the rise"]
    assert found.loc["rise", "moves the rise"]
    assert options.moves(claims.mean([1.0])) is None  # one seed
    tables = rules_root / "reports" / "tables"
    tables.mkdir(parents=True, exist_ok=True)
    varied().to_csv(tables / "measurements-options.csv", index=False)
    figure, table = options.report()
    assert len(table) == 3 and len(figure.axes) == 2
    assert "from 2.0M, 4.0M, 8.0M tokens" in (rules_root / "reports/figures/options.txt").read_text()


@pytest.mark.parametrize("name", ["quantizers", "options"])
def test_a_missing_table_names_its_stage(rules_root, name):
    finding = importlib.import_module(f"ptq_dynamics.findings.{name}")
    with pytest.raises(Exception, match=f"measurements-{name}.csv: no such file; run `dvc repro {name}`"):
        finding.read()
