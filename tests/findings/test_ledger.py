"""The ledger against the tables: every verdict recomputed from claims.yaml's wording, by code that shares nothing with
the package but the text of the rules."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy import stats

ROOT = Path(__file__).parents[2]
FIELDS = set(
    "id statement statistic rule value interval seeds verdict paper scale figure notebook stage command".split()
)
JUDGED = (*(f"C{i}" for i in range(1, 11)), "C12", "C13", "C14", "C15", "P1", "P2", "P3", "P4")
WITHOUT_OPEN_FAMILY = ("C11",)  # in the ledger without a value
SYNTHETIC = JUDGED[:8]  # the others: test_averaging.py, test_wild.py, test_curvature.py, …
TABLES = {  # of findings that are not called like the measurements that they judge
    "averaging": "measurements-averages", "curvature": "curvature-token_budgets", "expansion": "expansion-token_budgets",
    "prediction": "curvature-peak_lr", "monitor": "monitor",
}  # fmt: skip
Recomputed = tuple[dict[int, float], bool, bool, bool]  # per seed, is a ratio, condition holds, is judged


def yaml(path: Path):
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def table(root: Path, study: str, bits: int) -> pd.DataFrame:
    t = pd.read_csv(root / "reports" / "tables" / f"measurements-{study}.csv")
    return t[(t.method == "gptq") & (t.bits == bits)]


def line(x, y) -> float:
    """Slope by the normal equations; none if a logarithm failed."""
    if not np.all(np.isfinite(y)) or len(set(x)) < 2:
        return math.nan
    return float(
        np.linalg.lstsq(np.column_stack([np.ones(len(x)), x]), np.asarray(y, dtype=float), rcond=None)[0][1]
    )


def ln(values) -> np.ndarray:
    return np.array([math.log(v) if v > 0 else math.nan for v in np.atleast_1d(values)])


def c1(root: Path) -> Recomputed:
    t = table(root, "token_budgets", 4)
    t = t[(t.member == "trunk") & (2 * t.tokens >= t.run_tokens)]
    return {s: line(np.log2(g.tokens), ln(g.relative_error)) for s, g in t.groupby("seed")}, True, True, True


def c2(root: Path) -> Recomputed:
    t = table(root, "token_budgets", 4)
    trunk = {(r.seed, r.tokens): r for r in t[t.member == "trunk"].itertuples()}
    longest = t[t.member == "trunk"].run_tokens.max()
    ratios, falls = {}, True
    for r in t[(t.member == "cooldown") & (t.tokens == t.run_tokens)].itertuples():
        if 2 * r.branch_tokens >= longest:
            start = trunk[(r.seed, r.branch_tokens)]
            ratios.setdefault(r.seed, []).append(float(ln(r.relative_error)[0] - ln(start.relative_error)[0]))
            falls &= r.ce_fp < start.ce_fp
    return {s: sum(v) / len(v) for s, v in ratios.items()}, True, falls, True


def c3(root: Path) -> Recomputed:
    t = table(root, "token_budgets", 4)
    t = t[(t.member == "cooldown") & (t.tokens == t.run_tokens)]
    return {s: line(np.log10(g.tokens), ln(g.relative_error)) for s, g in t.groupby("seed")}, True, True, True


def ends_of_longest(root: Path, study: str, bits: int) -> pd.DataFrame:
    t = table(root, study, bits)
    t = t[t.member == "wsd"]
    return t[(t.run_tokens == t.run_tokens.max()) & (t.tokens == t.run_tokens)]


def c4(root: Path) -> Recomputed:
    t = ends_of_longest(root, "peak_lr", 4)
    return (
        {s: line(np.log10(g.peak_lr), ln(g.relative_error)) for s, g in t.groupby("seed")},
        True,
        True,
        True,
    )


def c5(root: Path) -> Recomputed:
    t = ends_of_longest(root, "peak_lr", 3)
    mean = {lr: g.ce_fp.mean() for lr, g in t.groupby("peak_lr")}
    rates = sorted(mean)
    gap, low, high = min((abs(mean[a] - mean[b]), a, b) for i, a in enumerate(rates) for b in rates[i + 1 :])
    loss = {(r.seed, r.peak_lr): r.ce for r in t.itertuples()}
    values = {s: loss[(s, high)] - loss[(s, low)] for s in sorted(set(t.seed))}
    return values, False, mean[high] - mean[low] <= 0.01, gap <= 0.05


def c6(root: Path) -> Recomputed:
    differences: dict[int, list[float]] = {}
    for study in ("schedules", "schedules_small"):
        t = table(root, study, 4)
        t = t[t.tokens == t.run_tokens]
        for seed, g in t.groupby("seed"):
            slope = {m: line(np.log(h.tokens / h.parameters), ln(h.delta_ce)) for m, h in g.groupby("member")}
            differences.setdefault(seed, []).append(slope["cosine"] - slope["wsd"])
    return {s: sum(v) / 2 for s, v in differences.items()}, False, True, True


def c7(root: Path) -> Recomputed:
    t = table(root, "schedules", 3)
    t = t[(t.member == "cosine") & (t.run_tokens == t.run_tokens.max())]
    out = {}
    for seed, g in t.groupby("seed"):
        by = dict(zip(g.tokens, g.relative_error, strict=True))
        whole = int(g.run_tokens.iloc[0])
        middle = min(by, key=lambda tokens: (abs(2 * tokens - whole), -tokens))  # noqa: B023 (used at once)
        out[seed] = float(ln(by[whole])[0] - ln(by[middle])[0])
    return out, True, True, True


def c8(root: Path) -> Recomputed:
    t = ends_of_longest(root, "weight_decay", 4)
    mean = {d: g.ce_fp.mean() for d, g in t.groupby("weight_decay")}
    near = {d for d, v in mean.items() if v <= min(mean.values()) + 0.05 and d > 0}
    t = t[t.weight_decay.isin(near)]
    values = {s: line(np.log10(g.weight_decay), ln(g.relative_error)) for s, g in t.groupby("seed")}
    rate, decay = np.mean(list(c4(root)[0].values())), np.mean(list(values.values()))
    return values, True, abs(rate) > abs(decay), bool(np.isfinite(rate))


def c9(root: Path) -> Recomputed:
    t, a = table(root, "token_budgets", 3), table(root, "averages", 3)
    lawa = {(r.seed, r.tokens): r for r in a[a.purpose == "trajectory"].itertuples()}
    longest = t[t.member == "trunk"].run_tokens.max()
    low, full = {}, {}
    for r in t[
        (t.member == "cooldown") & (t.tokens == t.run_tokens) & (2 * t.tokens >= longest)
    ].itertuples():
        if (mean := lawa.get((r.seed, r.tokens))) is not None:
            low.setdefault(r.seed, []).append(mean.ce - r.ce)
            full.setdefault(r.seed, []).append(mean.ce_fp - r.ce_fp)
    values = {s: sum(v) / len(v) for s, v in low.items()}
    return values, False, all(sum(v) > 0 for v in full.values()), bool(values)


def c10(root: Path) -> Recomputed:
    t, a = table(root, "soups", 4), table(root, "averages", 4)
    t = t[(t.member == "cooldown") & (t.tokens == t.run_tokens)]
    out = {}
    for r in a[a.kind == "soup"].itertuples():
        best = t[(t.parent == r.source) & (t.branch_tokens == r.branch_tokens)].relative_error.min()
        out[r.seed] = float((ln(r.relative_error) - ln(best))[0])
    return out, True, True, True


def c14(root: Path) -> Recomputed:
    """One value per open family; ours, ``mini``, is none."""
    known = set(yaml(ROOT / "data" / "reference" / "families.yaml")["families"]) - {"mini"}
    out = {}
    for file in sorted((root / "reports" / "tables" / "wild").glob("*.csv")):
        t = pd.read_csv(file)
        t = t[(t.method == "gptq") & (t.bits == 3) & (t.kind == "checkpoint")].sort_values("tokens")
        first = t[t.phase == "decay"].tokens.min()
        before = t[(t.phase == "stable") & (t.tokens < first)].relative_error.to_list()
        path = before[-1:] + t[t.phase == "decay"].relative_error.to_list()
        if file.stem in known and len(path) > 1:
            out[file.stem] = float(ln(path[-1] / path[0])[0])
    return out, True, all(v > 0 for v in out.values()), bool(out)


def c12(root: Path) -> Recomputed:
    tables = root / "reports" / "tables"
    t = pd.read_csv(tables / "curvature-token_budgets.csv")
    error = {(r.run, r.tokens): r.relative_error for r in table(root, "token_budgets", 3).itertuples()}
    values = {}
    for seed, g in t.groupby("seed"):
        pairs = [(r.trace, error[(r.run, r.tokens)]) for r in g.itertuples() if (r.run, r.tokens) in error]
        values[seed] = float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)
    rises, finite = {}, True
    trunk = {(r.seed, r.tokens): r for r in t[t.member == "trunk"].itertuples()}
    for r in t[(t.member == "cooldown") & (t.tokens == t.run_tokens)].itertuples():
        start = trunk[(r.seed, r.branch_tokens)]
        for name in ("trace", "top_eigenvalue"):
            change = float(ln(getattr(r, name))[0] - ln(getattr(start, name))[0])
            rises.setdefault((name, r.branch_tokens), []).append(change)
            finite &= math.isfinite(change)
    return values, False, all(sum(v) > 0 for v in rises.values()), finite and bool(rises)


def c13(root: Path) -> Recomputed:
    t = pd.read_csv(root / "reports" / "tables" / "expansion-peak_lr.csv")
    t = t[(t.run_tokens == t.run_tokens.max()) & (t.tokens == t.run_tokens)]
    q, back = t[(t.method == "gptq") & (t.bits == 4)], t[t.method == "previous"]

    def slopes(rows: pd.DataFrame, column: str) -> dict[int, float]:
        return {s: line(np.log10(g.peak_lr), ln(g[column])) for s, g in rows.groupby("seed")}

    def mean(rows: pd.DataFrame, column: str) -> float:
        return float(np.mean(list(slopes(rows, column).values())))

    conditions = [mean(q, "norm2"), mean(back, "norm2"), -mean(q, "true")]
    return slopes(q, "rayleigh"), True, all(c > 0 for c in conditions), bool(np.isfinite(conditions).all())


def turning(root: Path, method: str, rotation: str = "none") -> pd.DataFrame:
    t = pd.read_csv(root / "reports" / "tables" / "measurements-quantizers.csv")
    return t[(t.method == method) & (t.bits == 4) & (t.rotation == rotation)]


def late_rises(t: pd.DataFrame) -> dict[int, float]:
    """Mean of ln(error at the end / error at the branch point) over the late cooldowns, per seed."""
    start = {(r.seed, r.tokens): r.relative_error for r in t[t.member == "trunk"].itertuples()}
    half, found = t[t.member == "trunk"].run_tokens.max() / 2, {}
    for r in t[t.member == "cooldown"].itertuples():
        if r.branch_tokens >= half:
            found.setdefault(r.seed, []).append(
                float(ln(r.relative_error / start[(r.seed, r.branch_tokens)])[0])
            )
    return {s: sum(v) / len(v) for s, v in found.items()}


def c15(root: Path) -> Recomputed:
    def directions(t: pd.DataFrame) -> tuple[bool, bool]:
        last = t[(t.study == "peak_lr") & (t.run_tokens == t[t.study == "peak_lr"].run_tokens.max())]
        slopes = [line(np.log10(g.peak_lr), ln(g.relative_error)) for _, g in last.groupby("seed")]
        return np.mean(list(late_rises(t).values())) > 0, np.mean(slopes) > 0

    gptq, others = turning(root, "gptq"), [turning(root, "awq"), turning(root, "nf4")]
    if any(t.empty for t in others):
        return {}, False, True, False
    values: dict[int, float] = {}
    for t in others:
        error = {(r.run, r.tokens): r.relative_error for r in t.itertuples()}
        for seed, g in gptq.groupby("seed"):
            pairs = [(r.relative_error, error[(r.run, r.tokens)]) for r in g.itertuples()]
            rank = float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)
            values[seed] = min(rank, values.get(seed, 1.0))
    return values, False, all(directions(t) == directions(gptq) for t in others), True


def p4(root: Path) -> Recomputed:
    values, without = late_rises(turning(root, "gptq", "hadamard")), late_rises(turning(root, "gptq"))
    return values, True, math.exp(np.mean(list(without.values()))) >= 1.25, True


def p1(root: Path) -> Recomputed:
    t = pd.read_csv(root / "reports" / "tables" / "expansion-token_budgets.csv")
    t = t[(t.method == "gptq") & (t.bits == 4)]
    values = {
        s: float((g.linear + g.quadratic - g.true).abs().sum() / g.true.abs().sum())
        for s, g in t.groupby("seed")
    }
    return values, False, True, True


def p2(root: Path) -> Recomputed:
    studies = ("peak_lr", "schedules", "weight_decay", "cooldowns", "token_budgets", "schedules_small")
    known, rows = set(), []
    for study in studies:
        own = pd.read_csv(root / "reports" / "tables" / f"curvature-{study}.csv")
        at = {(r.run, r.tokens): r for r in own.itertuples()}
        for bits in (4, 3):
            for r in table(root, study, bits).itertuples():
                here = at.get((r.run, r.tokens))
                if here is not None and (r.weights_id, bits) not in known:
                    known.add((r.weights_id, bits))
                    if r.delta_ce > 0 and here.trace_quantized > 0:
                        step = 2 * here.weight_scale / (2**bits - 1)
                        numbers = (
                            math.log(here.trace_quantized),
                            math.log(step),
                            math.log(r.tokens / r.parameters),
                        )
                        rows.append(
                            (
                                study,
                                r.seed,
                                r.peak_lr,
                                bits,
                                *numbers,
                                math.log(r.peak_lr),
                                math.log(r.delta_ce),
                            )
                        )
    names = ["study", "seed", "lr", "bits", "trace", "step", "ratio", "rate", "y"]
    t = pd.DataFrame(rows, columns=names).assign(one=1.0)

    def off(columns: list[str], train: pd.Series, test: pd.Series) -> list[float]:
        x, y = t[["one", *columns]].to_numpy(float), t.y.to_numpy()
        c = np.linalg.lstsq(x[train], y[train], rcond=None)[0]
        return list(abs(x[test] @ c - y[test]))

    def error(columns: list[str], s: int) -> float:
        fit, own = (t.study == "peak_lr") & (t.seed != s), (t.study == "peak_lr") & (t.seed == s)
        others = ~t.study.isin(["peak_lr", "schedules_small"]) & (t.seed == s)
        rates = [off(columns, fit & (t.lr != lr), own & (t.lr == lr)) for lr in sorted(set(t[own].lr))]
        kinds = [off(columns, fit, own), sum(rates, []), off(columns, fit, others)]
        kinds.append(off(columns, fit, (t.study == "schedules_small") & (t.seed == s)))
        return float(np.mean([np.mean(k) for k in kinds]))

    laws = {"formula": ["trace", "step"], "tokens": ["ratio", "bits"], "rate": ["rate", "bits"]}
    e = {k: {int(s): error(c, s) for s in sorted(set(t.seed))} for k, c in laws.items()}
    values = {s: e["formula"][s] - e["tokens"][s] for s in e["formula"]}
    return values, False, np.mean(list(e["formula"].values())) < np.mean(list(e["rate"].values())), True


def p3(root: Path) -> Recomputed:
    out: dict[int, list[float]] = {}
    for study in ("peak_lr", "cooldowns"):
        t = table(root, study, 3)
        t = t[t.tokens == t.run_tokens]
        t = t[t.run_tokens == t.run_tokens.max()]
        if study == "cooldowns":
            t = t[t.sequences == t[t.member == "linear"].sequences.iloc[0]]
        t = t.assign(name=[r.rsplit("-seed", 1)[0] for r in t.run])
        for seed in sorted(set(t.seed)):
            others, own = t[t.seed != seed], t[t.seed == seed].set_index("name").ce
            mean = others.groupby("name", sort=False)[["ce_fp", "ce"]].mean()
            out.setdefault(int(seed), []).append(own[mean.ce_fp.idxmin()] - own[mean.ce.idxmin()])
    return {s: sum(v) / len(v) for s, v in out.items()}, False, True, True


RECOMPUTE: dict[str, Callable[[Path], Recomputed]] = {
    f.__name__.upper(): f
    for f in (c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c12, c13, c14, c15, p1, p2, p3, p4)
}


def check(entry: dict, root: Path, judging: bool) -> None:
    """One entry of the ledger against the tables under ``root``."""
    rule = yaml(root / "claims.yaml")[entry["id"]]
    values, ratio, provided, judged = RECOMPUTE[entry["id"]](root)
    numbers = np.array(list(values.values()))
    back = np.exp if ratio else np.positive
    value = back(numbers.mean()) if len(numbers) else math.nan
    low = high = math.nan
    if len(numbers) > 1:
        low, high = back(
            stats.t.interval(0.95, len(numbers) - 1, loc=numbers.mean(), scale=stats.sem(numbers))
        )
    told = [math.nan if v is None else v for v in (entry["value"], *entry["interval"])]
    assert told == pytest.approx([value, low, high], rel=1e-4, abs=1e-6, nan_ok=True)
    assert entry["seeds"] == len(numbers)
    least, most = rule.get("low", -math.inf), rule.get("high", math.inf)
    if not (judging and judged and math.isfinite(low) and math.isfinite(high)):
        verdict = "inconclusive"
    elif not provided or high < least or low > most:
        verdict = "contradicted"
    else:
        verdict = "supported" if least <= low and high <= most else "inconclusive"
    assert entry["verdict"] == verdict


@functools.cache
def ledger() -> dict[str, dict]:
    path = ROOT / "reports" / "claims.json"
    if not path.exists():
        pytest.fail("reports/claims.json is missing; it is committed, and `dvc repro claims` writes it")
    entries = json.loads(path.read_text(encoding="utf-8"))
    assert len({e["id"] for e in entries}) == len(entries)
    return {e["id"]: e for e in entries}


def test_every_claim_with_a_table_is_in_the_ledger() -> None:
    rules = yaml(ROOT / "claims.yaml")
    assert set(JUDGED) <= set(rules)
    tables = {p.stem for p in (ROOT / "reports" / "tables").glob("*.csv")}
    expected = {i for i in JUDGED if TABLES.get(f := rules[i]["finding"], f"measurements-{f}") in tables}
    assert {"C1", "C2", "C3"} <= expected <= set(ledger())
    assert set(ledger()) <= set(rules)


def test_entries_say_what_the_rules_say_and_point_to_what_exists() -> None:
    rules, pipeline = yaml(ROOT / "claims.yaml"), yaml(ROOT / "dvc.yaml")["stages"]
    for id, e in ledger().items():
        rule = rules[id]
        assert set(e) >= FIELDS
        assert [e[k] for k in ("statement", "statistic", "paper")] == [
            rule[k] for k in ("statement", "statistic", "paper")
        ]
        for bound in ("low", "high"):
            if bound in rule:
                assert f"{rule[bound]:g}" in e["rule"]
        if "provided" in rule:
            assert rule["provided"] in e["rule"]
        assert e["verdict"] in ("supported", "contradicted", "inconclusive")
        assert len(e["interval"]) == 2 and e["seeds"] >= (e["value"] is not None) and e["scale"]
        for path in (e["figure"], e["notebook"]):
            assert not Path(path).is_absolute() and (ROOT / path).is_file(), path
        assert e["stage"].split("@")[0] in pipeline and e["stage"] in e["command"]


def test_every_verdict_follows_from_the_committed_tables() -> None:
    for id, entry in ledger().items():  # which must be there: the test on claims with a table
        if id in WITHOUT_OPEN_FAMILY:
            assert (entry["value"], entry["seeds"], entry["verdict"]) == (None, 0, "inconclusive")
        else:
            check(entry, ROOT, yaml(ROOT / "params.yaml")["verdicts"])


@pytest.fixture(scope="module")
def judged(tables_root) -> dict[str, dict]:
    """The package's entries for synthetic tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PTQ_DYNAMICS_ROOT", str(tables_root))
        from ptq_dynamics.findings import peak_lr, schedules, token_budgets, weight_decay

        entries = token_budgets.judge(token_budgets.read()[0], True) + peak_lr.judge(peak_lr.read()[0], True)
        entries += schedules.judge(schedules.read()[0], True) + weight_decay.judge(*weight_decay.read(), True)
    return {e["id"]: e for e in json.loads(json.dumps(entries, allow_nan=False))}


@pytest.mark.parametrize("id", SYNTHETIC)
def test_the_package_and_the_independent_code_agree_on_synthetic_tables(id, judged, tables_root) -> None:
    check(judged[id], tables_root, True)


@pytest.mark.parametrize("field", ["value", "seeds", "verdict"])
def test_a_wrong_entry_is_found(field, judged, tables_root) -> None:
    wrong = {"value": judged["C4"]["value"] + 2e-4, "seeds": 2, "verdict": "inconclusive"}[field]
    with pytest.raises(AssertionError):
        check(judged["C4"] | {field: wrong}, tables_root, True)
