from __future__ import annotations

import datetime
from typing import Annotated

import pydantic
import pytest
from pydantic import Field

from ptq_dynamics.core.config import asdict, config_dataclass, digest, load, one_of, read_yaml
from ptq_dynamics.core.errors import UserError

Positive = Annotated[float, Field(gt=0)]


@config_dataclass()
class Inner:
    width: Annotated[int, Field(ge=1)]
    names: tuple[str, ...] = ()


@config_dataclass()
class Outer:
    rate: Positive | tuple[Positive, ...]
    inner: Inner
    on: bool = True
    table: dict[str, Inner] | None = None
    several: Inner | tuple[Inner, ...] = ()


GOOD = {"rate": 0.5, "inner": {"width": 3}}


def told(data):
    with pytest.raises(UserError) as e:
        load(Outer, data, "params.yaml: x")
    message = str(e.value)
    assert message.startswith("params.yaml: x: ") and "\n" not in message
    return message.removeprefix("params.yaml: x: ")


def test_yamls_lists_and_whole_numbers_are_taken():
    config = load(Outer, {"rate": [1, 2.5], "inner": {"width": 3, "names": ["a"]}}, "x")
    assert config == Outer(rate=(1.0, 2.5), inner=Inner(width=3, names=("a",)))
    assert isinstance(config.rate[0], float) and isinstance(config.inner.names, tuple)
    assert load(dict[str, Inner], {"a": {"width": 1}}, "x") == {"a": Inner(width=1)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rat": 1}, "unknown key 'rat'; did you mean 'rate'?"),
        ({"zzz": 1}, "unknown key 'zzz'; known keys: inner, on, rate, several, table"),
        ({"inner": {"widht": 3}}, "unknown key 'inner.widht'; did you mean 'width'? (and 1 more)"),
        ({"width": 3}, "unknown key 'width'; known keys: inner, on, rate, several, table"),
        ({"table": {"a": {"width": 1, "nams": []}}}, "unknown key 'table.a.nams'; did you mean 'names'?"),
        ({"table": {"a": {"width": 1, "rat": 1}}}, "unknown key 'table.a.rat'; known keys: names, width"),
        ({"several": [{"width": 1}, {"width": 1, "nams": []}]}, "unknown key 'several.1.nams'; did you mean 'names'?"),
        ({"several": {"width": 1, "nams": []}}, "unknown key 'several.nams'; did you mean 'names'?"),
        ({"inner": {}}, "key 'inner.width' is missing"),
        ({"inner": {"width": "3"}}, "key 'inner.width': Input should be a valid integer, got '3'"),
        ({"inner": {"width": 3.5}}, "key 'inner.width': Input should be a valid integer, got 3.5"),
        ({"inner": {"width": True}}, "key 'inner.width': Input should be a valid integer, got True"),
        ({"inner": {"width": None}}, "key 'inner.width': Input should be a valid integer, got None"),
        ({"inner": {"width": 0}}, "key 'inner.width': Input should be greater than or equal to 1, got 0"),
        ({"inner": {"width": datetime.date(2026, 1, 2)}}, "key 'inner.width': Input should be a valid integer, got '2026-01-02'"),
        ({"inner": 3}, "key 'inner': Input should be an object, got 3"),
        ({"inner": {"width": 1, "names": ["a", 2]}}, "key 'inner.names.1': Input should be a valid string, got 2"),
        ({"on": "yes"}, "key 'on': Input should be a valid boolean, got 'yes'"),
        ({"on": 1}, "key 'on': Input should be a valid boolean, got 1"),
        # "one value or a list": the alternative that was meant
        ({"rate": "fast"}, "key 'rate': Input should be a valid number, got 'fast'"),
        ({"rate": -1}, "key 'rate': Input should be greater than 0, got -1"),
        ({"rate": [0.1, -1]}, "key 'rate.1': Input should be greater than 0, got -1"),
        ({"rate": [0.1, "x"]}, "key 'rate.1': Input should be a valid number, got 'x'"),
        ({"rate": float("nan")}, "key 'rate': Input should be a finite number, got nan"),
        ({"rate": float("inf")}, "key 'rate': Input should be a finite number, got inf"),
        ({"rate": 0, "inner": {"width": 0}}, "key 'rate': Input should be greater than 0, got 0 (and 1 more)"),
    ],
)  # fmt: skip
def test_faults_name_the_key_and_the_nearest(changes, message):
    assert told({**GOOD, **changes}) == message


@pytest.mark.parametrize("data", [None, 3, "text", [GOOD]])
def test_no_mapping_at_all(data):
    assert told(data).startswith("key '(top level)': Input should be an object, got ")


def test_a_long_value_is_cut():
    message = told({**GOOD, "inner": list(range(1000))})
    assert message.endswith("...") and len(message) < 150


def test_frozen_and_keyword_only():
    config = load(Outer, GOOD, "x")
    with pytest.raises(AttributeError):
        config.rate = 3.0
    with pytest.raises(pydantic.ValidationError):
        Inner(3)


def test_digest_is_of_the_content():
    a = load(Outer, GOOD, "x")
    b = load(Outer, dict(reversed(GOOD.items())) | {"on": True}, "x")
    assert digest(a) == digest(b) == digest(asdict(a)) and len(digest(a)) == 12
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})
    assert digest(load(Outer, {**GOOD, "rate": 0.25}, "x")) != digest(a)
    assert digest("x", length=16)[:12] == digest("x")
    assert digest({"a": 1}) == "015abd7f5cc5"  # sha256 of {"a":1}: the same on every machine and day


def test_digest_refuses_what_json_cannot_say():
    with pytest.raises(ValueError):
        digest({"a": float("nan")})


def test_one_of():
    assert one_of("mini", ["mini", "smoke"], "profile") == "mini"
    with pytest.raises(UserError, match="unknown profile 'mimi'; did you mean 'mini'?"):
        one_of("mimi", ["mini", "smoke"], "profile")
    with pytest.raises(UserError, match="unknown profile 'xyz'; known keys: mini, smoke"):
        one_of("xyz", ["mini", "smoke"], "profile")


def test_yaml_is_that_of_dvc(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: 1e-2\nb: [1, 2]\nc: no\n")
    assert read_yaml(file) == {"a": 0.01, "b": [1, 2], "c": "no"}


@pytest.mark.parametrize(
    ("text", "says"),
    [("a: [1, 2", "not valid YAML"), ("a: 1\na: 2\n", "not valid YAML"), ("a:\n\t- b", "not valid YAML"), (None, "no such file")],
)  # fmt: skip
def test_yaml_that_cannot_be_read(tmp_path, text, says):
    file = tmp_path / "params.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError) as e:
        read_yaml(file)
    assert says in str(e.value) and str(e.value).startswith(str(file)) and "\n" not in str(e.value)
