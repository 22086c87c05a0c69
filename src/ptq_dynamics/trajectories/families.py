"""Facts about public pretraining trajectories: revisions, tokens, learning-rate schedules, and how sure they are.

The facts lie in ``data/reference/families.yaml``. A learning rate is kept as the schedule it came from, so it
can be computed at any step, not only at the listed revisions.

    >>> family = load_families()["smollm3_3b"]
    >>> lr_at(family, 4_400_000)
    0.00012260...
    >>> row(family, "stage3-step-4400000").phase
    'decay'
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ..core import paths
from ..core.config import config_dataclass, load, one_of, read_yaml
from ..core.errors import UserError

Certainty = Literal["certain", "inferred", "unverified", "unknown"]
PerStep = int | tuple[tuple[int, int], ...]  # tokens per step, or ((from_step, tokens per step), …)


@config_dataclass
class Piece:
    """One piece of a schedule: from the end of the previous piece to ``to`` (in the stage's unit)."""

    to: float
    shape: Literal["linear", "constant", "cosine", "1-sqrt"]
    from_lr: float
    to_lr: float

    def __post_init__(self) -> None:
        if min(self.from_lr, self.to_lr) < 0:
            raise ValueError("a learning rate is negative")
        if self.shape == "constant" and self.from_lr != self.to_lr:
            raise ValueError("a constant piece needs from_lr == to_lr")


@config_dataclass
class Stage:
    """One run with one schedule; steps count from its own start."""

    tokens_per_step: PerStep
    last_step: int
    lr: tuple[Piece, ...]
    certainty: Certainty
    source: tuple[str, ...]  # keys of the file's ``sources``
    unit: Literal["steps", "tokens"] = "steps"  # what the pieces' ``to`` counts
    after_tokens: int = 0  # tokens that the model had seen before this stage
    published_end: float | None = None  # LR at last_step as its source states it
    published_rtol: float = 1e-5  # how far the computed one may lie from it (or 1e-9 absolute)
    note: str = ""

    def __post_init__(self) -> None:
        ends = [p.to for p in self.lr]
        if not ends or sorted(set(ends)) != ends or ends[0] <= 0:
            raise ValueError("the pieces of 'lr' must end at increasing positive positions")
        if not isinstance(self.tokens_per_step, int) and self.tokens_per_step[0][0] != 0:
            raise ValueError("the first entry of 'tokens_per_step' must be for step 0")


@config_dataclass
class Revisions:
    """Revisions of one stage whose names follow one rule.

    ``name`` is a format string of ``step``, ``billions`` (tokens of the stage in 1e9, rounded as
    ``rounding`` says) and ``index`` (step = first_step + every · index). ``names`` holds the
    exceptions to it, by step.
    """

    stage: str
    name: str
    steps: tuple[int, ...]
    rounding: Literal["ceil", "floor", "round"] = "round"
    names: dict[str, str] | None = None
    name_tokens_per_step: PerStep | None = None  # where names count with rounded batch sizes
    first_step: int = 0
    every: int = 1
    certainty: Certainty = "certain"
    note: str = ""


@config_dataclass
class Final:
    """What the released weights are: one checkpoint, or an average of several revisions."""

    name: str
    kind: Literal["checkpoint", "soup", "unknown"]
    of: tuple[str, ...]
    certainty: Certainty
    weights: tuple[float, ...] | None = None  # None: uniform
    repo: str | None = None  # where it lies, if not in the family's repository
    stage: str | None = None
    step: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.weights is not None and len(self.weights) != len(self.of):
            raise ValueError("'weights' and 'of' differ in length")


@config_dataclass
class Family:
    """A published trajectory."""

    display: str
    repo: str
    architecture: str
    transformers: str  # version specifier under which its class loads
    licence: str
    context: int
    weight_decay: float
    stages: dict[str, Stage]
    revisions: tuple[Revisions, ...]
    final: Final
    tokenizer: str | None = None  # repository of the tokenizer; None: the family's own
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # None: not seen, read it from config.json
    tied: bool | None = None
    remote_code: str | None = None  # why its repository's own code must be trusted; None: it need not be
    requires: str | None = None  # a further package
    hub: str | None = None  # folder (from the root) in the Hub client's cache layout; None: the public Hub
    post_training: tuple[str, ...] = ()  # revisions after pretraining, without step and LR
    doubts: tuple[str, ...] = ()  # further facts that are not certain, told in captions
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            SpecifierSet(self.transformers)
        except InvalidSpecifier:
            raise ValueError(f"transformers: '{self.transformers}' is not a version specifier") from None
        for stage in [r.stage for r in self.revisions] + ([self.final.stage] if self.final.stage else []):
            if stage not in self.stages:
                raise ValueError(f"stage '{stage}' is not among {', '.join(self.stages)}")


@config_dataclass
class _File:
    sources: dict[str, str]
    families: dict[str, Family]


@dataclass(frozen=True)
class Row:
    """One revision of a family. ``step`` counts within ``stage``, ``tokens`` from the very start."""

    name: str
    repo: str
    stage: str | None
    step: int | None
    tokens: int | None
    lr: float | None
    phase: str  # warmup | stable | decay | average | other
    certainty: str


def load_families(path: Path | None = None) -> dict[str, Family]:
    """All families of ``data/reference/families.yaml`` (or of another file of its form), by key.

    Raises:
        UserError: no such file, or it breaks the schema; the message names the key.
    """
    path = path or paths.reference() / "families.yaml"
    file = load(_File, read_yaml(path), str(path))
    for key, family in file.families.items():
        for name, stage in family.stages.items():
            for source in stage.source:
                if source not in file.sources:
                    raise UserError(
                        f"{path}: families.{key}.stages.{name}: unknown source '{source}'; list it under 'sources'"
                    )
    return file.families


def lr_at(family: Family, step: int, stage: str | None = None) -> float:
    """Learning rate of the optimizer at ``step`` of ``stage`` (default: the first stage).

    Defined for every step ≥ 0: past the last piece it stays where that piece ends.

    Raises:
        UserError: the family has no such stage.
        ValueError: a negative step.
    """
    part = _stage(family, stage)
    x = _position(part, step)
    left = 0.0
    for piece in part.lr:
        if x <= piece.to:
            return _value(piece, (x - left) / (piece.to - left))
        left = piece.to
    return part.lr[-1].to_lr


def phase_at(family: Family, step: int, stage: str | None = None) -> str:
    """``"warmup"``, ``"stable"`` or ``"decay"``: whether the LR rises, stays or falls at ``step``."""
    part = _stage(family, stage)
    x = _position(part, step)
    piece = next((p for p in part.lr if x <= p.to), part.lr[-1])
    if piece.to_lr > piece.from_lr:
        return "warmup"
    return "stable" if piece.to_lr == piece.from_lr else "decay"


def tokens_at(family: Family, step: int, stage: str | None = None) -> int:
    """Training tokens seen after ``step`` steps of ``stage``, earlier stages included."""
    part = _stage(family, stage)
    return part.after_tokens + _tokens(part.tokens_per_step, step)


def rows(family: Family) -> list[Row]:
    """The listed revisions in training order (branches side by side), post-training and released weights last."""
    found = [
        _row(family, group, step, _name(family, group, step))
        for group in family.revisions
        for step in group.steps
    ]
    found.sort(key=lambda r: (r.tokens, r.name))
    return found + [row(family, name) for name in (*family.post_training, family.final.name)]


def row(family: Family, name: str) -> Row:
    """The facts of one revision by its name; names that follow a rule need not be listed.

    Raises:
        UserError: the name fits no rule of the family; the nearest listed name is offered.
    """
    final = family.final
    if name == final.name:
        at = (final.step, final.stage)
        known = final.step is not None
        return Row(
            name=name,
            repo=final.repo or family.repo,
            stage=final.stage,
            step=final.step,
            tokens=tokens_at(family, *at) if known else None,
            lr=lr_at(family, *at) if known else None,
            phase="average" if final.kind == "soup" else phase_at(family, *at) if known else "other",
            certainty=final.certainty,
        )
    if name in family.post_training:
        return Row(name, family.repo, None, None, None, None, "other", "certain")
    for listed in (True, False):  # a listed revision may carry its own certainty: look there first
        for group in family.revisions:
            step = _parse(group, name)
            if step is None or (listed and step not in group.steps):
                continue
            if listed and _name(family, group, step) != name:
                continue
            return _row(family, group, step, name)
    one_of(name, [r.name for r in rows(family)], f"revision of {family.repo}")
    raise AssertionError("unreachable: every listed name parses")


def caveats(family: Family) -> list[str]:
    """What is not certain about the family, one short sentence each, for the caption of a figure."""
    told = []
    for name, stage in family.stages.items():
        if stage.certainty != "certain":
            told.append(f"LR of {name} {stage.certainty}{_because(stage.note)}")
    for certainty in ("inferred", "unverified", "unknown"):
        for note in sorted({g.note for g in family.revisions if g.certainty == certainty}):
            groups = [g for g in family.revisions if (g.certainty, g.note) == (certainty, note)]
            count = sum(len(g.steps) for g in groups)
            total = sum(len(g.steps) for g in family.revisions)
            which = f"{count} of {total} revision names" if total else "revision names"
            told.append(f"{which} {certainty}{_because(note)}")
    if family.final.certainty != "certain":
        told.append(
            f"what '{family.final.name}' holds is {family.final.certainty}{_because(family.final.note)}"
        )
    return told + list(family.doubts)


def check_transformers(family: Family, version: str) -> None:
    """Raise ``UserError`` if the family does not load under this version of transformers."""
    if not SpecifierSet(family.transformers).contains(version, prereleases=True):
        more = f" and the package {family.requires}" if family.requires else ""
        raise UserError(
            f"{family.repo}: needs transformers{family.transformers}{more}, this is {version}; "
            "measure it in an environment of its own"
        )


def _because(note: str) -> str:
    return f" ({note})" if note else ""


def _stage(family: Family, stage: str | None) -> Stage:
    if stage is None:
        return next(iter(family.stages.values()))
    return family.stages[one_of(stage, family.stages, f"stage of {family.repo}")]


def _position(stage: Stage, step: int) -> float:
    if step < 0:
        raise ValueError(f"step {step} is negative")
    return step if stage.unit == "steps" else _tokens(stage.tokens_per_step, step)


def _tokens(per_step: PerStep, step: int) -> int:
    if isinstance(per_step, int):
        return per_step * step
    starts = [start for start, _ in per_step] + [math.inf]
    return sum(
        tokens * int(min(step, end) - start)
        for (start, tokens), end in zip(per_step, starts[1:], strict=True)
        if step > start
    )


def _value(piece: Piece, t: float) -> float:
    """Value at the fraction ``t`` in [0, 1] of a piece."""
    if t >= 1.0:
        return piece.to_lr  # exactly: interpolation may leave a rounding error behind
    fall = {
        "constant": 0.0,
        "linear": t,
        "cosine": (1 - math.cos(math.pi * t)) / 2,
        "1-sqrt": math.sqrt(t),
    }[piece.shape]
    return piece.from_lr + (piece.to_lr - piece.from_lr) * fall


def _name(family: Family, group: Revisions, step: int) -> str:
    if group.names and str(step) in group.names:
        return group.names[str(step)]
    per_step = group.name_tokens_per_step or family.stages[group.stage].tokens_per_step
    rounded = {"ceil": math.ceil, "floor": math.floor, "round": round}[group.rounding]
    return group.name.format(
        step=step,
        billions=rounded(_tokens(per_step, step) / 1e9),
        index=(step - group.first_step) // group.every,
    )


def _parse(group: Revisions, name: str) -> int | None:
    """The step that ``name`` stands for under the group's rule; None if it does not fit."""
    for step, exception in (group.names or {}).items():
        if name == exception:
            return int(step)
    found = re.fullmatch(_pattern(group.name), name)
    if not found:
        return None
    values = found.groupdict()
    if "index" in values:
        return group.first_step + group.every * int(values["index"])
    return int(values["step"])


def _pattern(name: str) -> str:
    """The regular expression of the names that a format string makes."""
    parts = []
    for part in re.split(r"(\{[^}]*\})", name):
        field = part.strip("{}").split(":")[0] if part.startswith("{") else None
        parts.append(
            re.escape(part) if field is None else r"\d+" if field == "billions" else rf"(?P<{field}>\d+)"
        )
    return "".join(parts)


def _row(family: Family, group: Revisions, step: int, name: str) -> Row:
    return Row(
        name=name,
        repo=family.repo,
        stage=group.stage,
        step=step,
        tokens=tokens_at(family, step, group.stage),
        lr=lr_at(family, step, group.stage),
        phase=phase_at(family, step, group.stage),
        certainty=group.certainty,
    )
