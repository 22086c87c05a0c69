"""Strict configuration: plain mappings (YAML, JSON) into frozen dataclasses.

A key that no field has, a missing key or a value of the wrong type is an error of one line that names
the file, the key and, for a misspelling, the nearest valid key.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from pydantic import ConfigDict, TypeAdapter
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from .errors import UserError

T = TypeVar("T")

#: Decorator of every configuration class: frozen, keyword only, no unknown keys, no silent conversions.
config_dataclass = functools.partial(
    pydantic.dataclasses.dataclass,
    frozen=True,
    kw_only=True,
    config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False),
)


def load(cls: type[T], data: Any, where: str) -> T:
    """Build ``cls`` (a ``config_dataclass``, or any type of them such as ``dict[str, C]``) from ``data``.

    Args:
        where: what the data came from (``params.yaml: studies``), the head of every message.

    Raises:
        UserError: one line, the first fault found, with the key's dotted path.
    """
    adapter = TypeAdapter(cls)
    try:
        # through JSON, so that strict mode takes YAML's lists for tuples and whole numbers for floats
        return adapter.validate_json(json.dumps(data, default=str))  # a date is told as text
    except pydantic.ValidationError as e:
        # a misspelled required key is both unknown and missing: tell the unknown one, it shows the typo
        faults = [(_path(f, data), f) for f in e.errors(include_url=False)]
        first = min(faults, key=lambda f: f[1]["type"] != "unexpected_keyword_argument")[0]
        # of "one value or a list", each alternative has a fault: tell the one that lies deepest
        path, first = max((f for f in faults if f[0][: len(first)] == first), key=lambda f: len(f[0]))
        key = ".".join(path) or "(top level)"
        others = {p for p, _ in faults if p != path[: len(p)]}
        more = f" (and {len(others)} more)" if others else ""
        if first["type"] == "unexpected_keyword_argument":
            near = _nearest(path[-1], _known_keys(adapter.json_schema(), path[:-1]))
            raise UserError(f"{where}: unknown key '{key}'{near}{more}") from None
        if first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
            raise UserError(f"{where}: key '{key}' is missing{more}") from None
        shown = repr(first["input"])
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        got = "" if first["type"] == "value_error" else f", got {shown}"
        text = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: key '{key}': {text}{got}{more}") from None


def _path(fault: Any, data: Any) -> tuple[str, ...]:
    """Where in ``data`` a fault lies: pydantic's location without the names of a union's alternatives."""
    path = []
    for part in fault["loc"]:
        inside = part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int)
        if inside:
            data = data[part]
        if inside or (part == fault["loc"][-1] and "missing" in fault["type"]):
            path.append(str(part))
    return tuple(path)


def _known_keys(schema: dict[str, Any], path: tuple[str, ...]) -> set[str]:
    """The keys that a JSON schema allows at ``path``, those of all alternatives together."""

    def alternatives(node: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in node:
            return alternatives(schema["$defs"][node["$ref"].rpartition("/")[2]])
        inner = [*node.get("anyOf", []), *node.get("oneOf", [])]
        return [a for n in inner for a in alternatives(n)] if inner else [node]

    nodes = alternatives(schema)
    for part in path:
        below = [
            n.get("properties", {}).get(part, n.get("additionalProperties") or n.get("items")) for n in nodes
        ]
        nodes = [a for n in below if isinstance(n, dict) for a in alternatives(n)]
    return {name for n in nodes for name in n.get("properties", {})}


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(sorted(known))}"


def one_of(name: str, known: Any, what: str) -> str:
    """``name`` itself if it is among ``known``; else ``UserError`` with the nearest one."""
    if name in known:
        return name
    raise UserError(f"unknown {what} '{name}'{_nearest(name, set(known))}")


def read_yaml(path: Path) -> Any:
    """A YAML 1.2 file (the dialect of DVC: ``1e-2`` is a number) as plain Python values.

    Raises:
        UserError: no such file, or not valid YAML (with line and column).
    """
    try:
        return YAML(typ="safe", pure=True).load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run from the repository root or name another") from None
    except YAMLError as e:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(e).split())}") from None


def asdict(obj: Any) -> Any:
    """A configuration as plain values (JSON-ready)."""
    return TypeAdapter(type(obj)).dump_python(obj, mode="json")


def digest(data: Any, length: int = 12) -> str:
    """Short SHA-256 of a configuration or of plain values, independent of the order of keys."""
    plain = data if isinstance(data, (dict, list, tuple, str)) else asdict(data)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
