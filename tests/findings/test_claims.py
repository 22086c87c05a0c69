from __future__ import annotations

import json
import math

import pytest
from scipy import stats

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.evaluation.intervals import Estimate
from ptq_dynamics.findings import claims

BOTH = {"low": 0.8, "high": 1.25}


def claim(**bounds) -> claims.Claim:
    return claims.Claim(statement="s", statistic="t", paper="p", finding="peak_lr", **bounds)


@pytest.mark.parametrize(
    ("bounds", "low", "high", "verdict"),
    [
        (BOTH, 0.9, 1.1, "supported"),
        (BOTH, 0.8, 1.25, "supported"),  # the bounds belong to the range
        (BOTH, 0.79, 1.1, "inconclusive"),
        (BOTH, 0.7, 1.5, "inconclusive"),  # wider than the range: neither inside nor outside
        (BOTH, 0.5, 0.79, "contradicted"),
        (BOTH, 1.26, 1.5, "contradicted"),
        (BOTH, 1.25, 1.5, "inconclusive"),  # touches the range
        ({"high": 0.0}, -2.0, -1.0, "supported"),
        ({"high": 0.0}, -1.0, 0.001, "inconclusive"),
        ({"high": 0.0}, 0.001, 1.0, "contradicted"),
        ({"low": 1.25}, 1.3, 9.0, "supported"),
        ({"low": 1.25}, 1.2, 9.0, "inconclusive"),
        ({"low": 1.25}, 0.1, 1.2, "contradicted"),
    ],
)
def test_verdicts_follow_where_the_interval_lies(bounds, low, high, verdict) -> None:
    assert claims.judge(claim(**bounds), Estimate((low + high) / 2, low, high)) == verdict


def test_a_condition_contradicts_and_an_unknown_one_decides_nothing() -> None:
    inside = Estimate(1.0, 0.9, 1.1)
    assert claims.judge(claim(**BOTH), inside, provided=False) == "contradicted"
    assert claims.judge(claim(**BOTH), inside, provided=None) == "inconclusive"


def test_without_an_interval_nothing_is_decided() -> None:
    single = claims.mean([1.0])
    assert single.value == 1.0 and math.isnan(single.low)
    for provided in (True, False, None):
        assert claims.judge(claim(**BOTH), single, provided) == "inconclusive"
    unknown = claims.mean([1.0, math.nan, 1.1])
    assert math.isnan(unknown.value) and claims.judge(claim(**BOTH), unknown) == "inconclusive"


def test_a_rule_needs_a_bound() -> None:
    with pytest.raises(ValueError, match="a rule needs low, high or both"):
        claim()


def test_geometric_mean_and_its_interval() -> None:
    logs = [math.log(v) for v in (0.5, 0.7, 0.8)]
    low, high = stats.t.interval(0.95, 2, loc=sum(logs) / 3, scale=stats.sem(logs))
    found = claims.geometric([0.5, 0.7, 0.8])
    assert found.value == pytest.approx((0.5 * 0.7 * 0.8) ** (1 / 3))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))
    for values in ([], [1.0, -1.0], [1.0, 0.0], [1.0, math.nan]):
        assert math.isnan(claims.geometric(values).value)


def test_an_entry_without_numbers_is_valid_json(rules_root) -> None:
    nothing = claims.entry("C4", claims.mean([]), 0, "scale", {"x": claims.plain(claims.mean([]))})
    told = json.loads(json.dumps(nothing, allow_nan=False))
    assert told["value"] is None and told["interval"] == [None, None] and told["verdict"] == "inconclusive"
    assert told["details"] == {"x": {"value": None, "low": None, "high": None}}


def test_a_profile_that_judges_nothing_is_inconclusive(rules_root) -> None:
    sure = Estimate(0.6, 0.5, 0.7)
    assert claims.entry("C4", sure, 3, "scale", {})["verdict"] == "supported"
    assert claims.entry("C4", sure, 3, "scale", {}, verdicts=False)["verdict"] == "inconclusive"


def test_an_unknown_claim_is_told(rules_root) -> None:
    with pytest.raises(UserError, match="unknown claim 'C99'"):
        claims.entry("C99", Estimate(1, 1, 1), 3, "scale", {})


def test_the_rule_is_told_in_words() -> None:
    rule = claim(low=0.8, high=1.25, provided="loss falls").rule
    assert "at least 0.8 and at most 1.25" in rule and rule.endswith("and contradicted unless loss falls")


def test_the_ledger_is_ordered_by_number_and_refuses_a_claim_judged_twice(rules_root) -> None:
    claims.write("one", [{"id": "C10"}, {"id": "C2"}])
    claims.write("two", [{"id": "C1"}])
    assert [e["id"] for e in claims.collect(["one", "two"])] == ["C1", "C2", "C10"]
    assert [e["id"] for e in json.loads((rules_root / "reports" / "claims.json").read_text())] == [
        "C1",
        "C2",
        "C10",
    ]
    claims.write("two", [{"id": "C2"}])
    with pytest.raises(UserError, match="C2 is judged twice, the second time by 'two'"):
        claims.collect(["one", "two"])
    with pytest.raises(UserError, match="run `dvc repro finding_three`"):
        claims.collect(["three"])
