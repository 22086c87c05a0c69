"""A trajectory from anywhere: a folder of checkpoints, a Hub repository, or a family of ``families.yaml``.

    source = open_source("runs/my-run")            # or "owner/name", or "olmo2_1b"; downloads nothing
    for checkpoint in obtain(source):
        model = load_model(checkpoint)

Everything downstream takes ``Checkpoint`` and does not know where it came from.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import transformers
from safetensors import SafetensorError, safe_open

from ..core import paths
from ..core.config import one_of
from ..core.errors import UserError
from . import checkpoints, families, hub
from .checkpoints import META, Checkpoint
from .hub import Skipped

_REPO = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_MODEL_KEYS = (  # what makes two checkpoints models of one shape
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_TRAINER = "trainer_state.json"  # transformers' Trainer leaves it in each checkpoint


@dataclass(frozen=True)
class Item:
    """One checkpoint of a source, as far as it is known before it is read; None where it is not."""

    name: str
    step: int | None
    tokens: int | None
    lr: float | None
    phase: str
    size: int  # bytes of the files that loading takes
    to_download: int = 0  # bytes of them that are not on this machine yet


@dataclass(frozen=True)
class Source:
    """An ordered list of checkpoints, not read or downloaded yet.

    Attributes:
        name: short, fit for a file name.
        title: in words, for figures.
        skipped: what is not usable, and why.
        caveats: what is uncertain about its facts, for captions.
        tokenizer: repository of the tokenizer, where it is not that of the checkpoints.
        family: key in families.yaml.
    """

    name: str
    title: str
    kind: Literal["folder", "hub"]
    items: tuple[Item, ...]
    skipped: tuple[Skipped, ...] = ()
    caveats: tuple[str, ...] = ()
    folder: Path | None = None
    plan: hub.Plan | None = None
    tokenizer: str | None = None
    family: str | None = None

    def only(self, names: Iterable[str]) -> Source:
        """The source with the items of these names alone, nothing skipped."""
        wanted = set(names)
        plan = self.plan and dataclasses.replace(
            self.plan, revisions=tuple(r for r in self.plan.revisions if r.name in wanted), skipped=()
        )
        return dataclasses.replace(
            self, items=tuple(i for i in self.items if i.name in wanted), plan=plan, skipped=()
        )


def open_source(
    text: str,
    revisions: Sequence[str] | None = None,
    *,
    tokens_per_step: int | None = None,
    **where: Any,
) -> Source:
    """Find out what ``text`` is and list its checkpoints in training order. Downloads nothing.

    Args:
        text: a folder whose sub-folders are checkpoints (ours, or Hugging Face folders named after their step);
            ``owner/name`` on the Hub, whose branches and tags are; or a key of families.yaml.
        revisions: names to use; None takes all that state a step (of a family: all that are listed).
        tokens_per_step: turns steps into tokens where a source tells the former only.
        where: ``endpoint``, ``cache``, ``offline``, ``token`` of ``hub.resolve``.

    Raises:
        UserError: not a source, or none of its checkpoints is usable. One line, with the nearest name.
    """
    folder = Path(text).expanduser()
    if folder.is_dir():
        return _from_folder(folder, revisions, tokens_per_step)
    if folder.exists() or text.startswith(("/", ".", "~")) or text.count("/") > 1:
        raise UserError(f"{text}: no such folder; name one whose sub-folders are checkpoints")
    known = families.load_families()
    if "/" not in text:
        try:
            key = one_of(text, known, "source")
        except UserError as e:
            raise UserError(
                f"{e}; a source is a folder of checkpoints, a repository owner/name, or a family"
            ) from None
        return _from_family(key, known[key], revisions, where)
    if not _REPO.fullmatch(text):
        raise UserError(f"{text}: not a repository name; it reads owner/name")
    if Path(text.partition("/")[0]).is_dir():
        raise UserError(f"{text}: no such folder; name one whose sub-folders are checkpoints")
    for key, family in known.items():
        if family.repo == text:
            return _from_family(key, family, revisions, where)
    return _from_hub(text, revisions, tokens_per_step, where)


def obtain(
    source: Source,
    *,
    delete_after: bool = False,
    report: Callable[[Skipped], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Iterator[Checkpoint]:
    """The source's checkpoints one by one, downloaded and checked; what fails is reported and skipped.

    All have the shape of the first: another one is skipped like a broken one.

    Args:
        delete_after: of a Hub repository, remove each when the next is asked for (see ``hub.fetch``).
        report: called with every skipped one, those of the source first (default: a line on stderr).
        say: called with what is about to be downloaded (default: stderr).

    Raises:
        UserError: none came through, or a fault that all would meet.
    """
    report = report or (lambda s: print(s, file=sys.stderr))
    items = {i.name: i for i in source.items}
    first: tuple[str, dict[str, Any]] | None = None
    last: Skipped | None = None
    for name, folder in _folders(source, delete_after, report, say):
        try:
            found = _checkpoint(items[name], folder)
            model = _model(folder)
            if first and (differ := _difference(first[1], model)):
                raise UserError(f"{differ} in {first[0]}; it is another model")
            first = first or (name, model)
        except (UserError, ValueError) as e:
            last = Skipped(name, str(e))
            report(last)
            continue
        yield found
    if first is None:
        raise UserError(f"{source.title}: no checkpoint came through ({last})")


def phases(rates: Sequence[float | None]) -> list[str]:
    """Phase of each checkpoint from the learning rates of a run in order: it rises to its highest, stays, falls.

    >>> phases([0.5e-3, 1e-3, 1e-3, 2e-4])
    ['warmup', 'stable', 'stable', 'decay']
    """
    known = [r for r in rates if r is not None]
    if len(known) < max(len(rates), 2):
        return ["unknown"] * len(rates)
    peak = max(known)
    at = [i for i, r in enumerate(known) if r >= 0.999 * peak]
    return ["warmup" if i < at[0] else "stable" if i in at else "decay" for i in range(len(known))]


# --- folders ---


def _from_folder(folder: Path, revisions: Sequence[str] | None, tokens_per_step: int | None) -> Source:
    if (folder / "config.json").is_file():
        raise UserError(f"{folder}: is one checkpoint; name the folder that holds several")
    inside = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    found = [p for p in inside if (p / "config.json").is_file() or hub.step_and_tokens(p.name)[0] is not None]
    if not found:
        below = [p.name for p in inside if any((q / "config.json").is_file() for q in p.iterdir())]
        hint = f"; did you mean {folder / below[0]}?" if below else "; its sub-folders should be checkpoints"
        raise UserError(f"{folder}: no checkpoints in this folder{hint}")
    skipped = []
    if revisions is not None:
        names = [p.name for p in found]
        for name in revisions:
            if name not in names:
                near = hub.nearest(name, names)
                skipped.append(
                    Skipped(
                        name, f"no such checkpoint in {folder}" + (f"; nearest is '{near}'" if near else "")
                    )
                )
        found = [p for p in found if p.name in revisions]
    items = []
    for path in found:
        try:
            items.append(_folder_item(path, tokens_per_step))
        except (UserError, ValueError) as e:
            skipped.append(Skipped(path.name, str(e)))
    items = _in_order(items)
    if not items:
        raise UserError(f"{folder}: no usable checkpoint ({_first(skipped)})")
    models = [(i.name, _model(folder / i.name)) for i in items]
    for name, model in models[1:]:
        if differ := _difference(models[0][1], model):
            raise UserError(
                f"{folder}: {name}: {differ} in {models[0][0]}; a trajectory is checkpoints of one model"
            )
    if all(i.phase == "unknown" for i in items):
        items = [
            dataclasses.replace(i, phase=p) for i, p in zip(items, phases([i.lr for i in items]), strict=True)
        ]
    name = folder.resolve().name
    return Source(_slug(name), name, "folder", tuple(items), tuple(skipped), folder=folder)


def _folder_item(path: Path, tokens_per_step: int | None) -> Item:
    files = hub.needed_files(p.name for p in path.iterdir())
    size = sum((path / f).stat().st_size for f in files)
    if (path / META).is_file():
        return _told(path, Item(path.name, None, None, None, "unknown", size))
    step, tokens = hub.step_and_tokens(path.name)
    rate = None
    if (path / _TRAINER).is_file():
        state = json.loads((path / _TRAINER).read_text(encoding="utf-8"))
        step = state.get("global_step", step)
        tokens = state.get("num_input_tokens_seen") or tokens
        logged = [e["learning_rate"] for e in state.get("log_history", []) if "learning_rate" in e]
        rate = logged[-1] if logged else None
    if step is None and tokens is None:
        raise UserError("its name states no step; rename it like step1000")
    return Item(path.name, step, _tokens(tokens, step, tokens_per_step), rate, "unknown", size)


def _told(folder: Path, item: Item) -> Item:
    """The item with what a checkpoint of ours says of itself."""
    if not (folder / META).is_file():
        return item
    own = checkpoints.read(folder)
    return dataclasses.replace(item, step=own.step, tokens=own.tokens, lr=own.lr, phase=own.phase)


# --- the Hub ---


def _from_hub(
    repo: str, revisions: Sequence[str] | None, tokens_per_step: int | None, where: dict[str, Any]
) -> Source:
    refs = hub.list_refs(repo, **where)
    if revisions is None:
        revisions = [n for n in refs if hub.step_and_tokens(n)[0] is not None]
        if not revisions:
            raise UserError(
                f"{repo}: none of its {len(refs)} branches and tags states a step ({', '.join(sorted(refs)[:5])}); "
                "name some with --revisions"
            )
    plan = hub.resolve(repo, revisions, tokenizer=True, refs=refs, **where)
    items = []
    for r in plan.revisions:
        step, tokens = hub.step_and_tokens(r.name)
        tokens = _tokens(tokens, step, tokens_per_step)
        items.append(Item(r.name, step, tokens, None, "unknown", r.size, r.to_download))
    return _of_plan(_slug(repo), repo, items, plan)


def _from_family(
    key: str, family: families.Family, revisions: Sequence[str] | None, where: dict[str, Any]
) -> Source:
    families.check_transformers(family, transformers.__version__)
    if family.hub is not None:
        cache = paths.root() / family.hub
        if not cache.is_dir():
            raise UserError(
                f"{family.hub}: no such folder, {key} is not published yet; run `dvc repro publish`"
            )
        where = {**where, "cache": cache, "offline": True}
    refs = hub.list_refs(family.repo, **where)
    elsewhere: list[Skipped] = []
    if revisions is None and family.hub is not None:
        # what lies there, whichever profile published it; the released weights are the last of them
        revisions = [name for name in refs if name != family.final.name]
    elif revisions is None:
        rows = [r for r in families.rows(family) if r.phase != "other"]
        revisions = list(dict.fromkeys(r.name for r in rows if r.repo == family.repo))
        elsewhere = [Skipped(r.name, f"lies in {r.repo}") for r in rows if r.repo != family.repo]
    facts, unknown = {}, []
    for name in revisions:
        try:
            facts[name] = families.row(family, name)
        except UserError as e:
            if name in refs:
                unknown.append(Skipped(name, f"{e}; its place on the run is not known"))
            else:
                facts[name] = None  # hub.resolve tells the nearest that exists
    plan = hub.resolve(family.repo, list(facts), tokenizer=family.tokenizer is None, refs=refs, **where)
    items = []
    for r in plan.revisions:
        f = facts[r.name]
        items.append(Item(r.name, f.step, f.tokens, f.lr, f.phase, r.size, r.to_download))
    source = _of_plan(key, family.display, items, plan)
    return dataclasses.replace(
        source,
        skipped=(*elsewhere, *unknown, *source.skipped),
        caveats=tuple(families.caveats(family)),
        tokenizer=family.tokenizer,
        family=key,
    )


def _of_plan(name: str, title: str, items: Sequence[Item], plan: hub.Plan) -> Source:
    ordered = _in_order(items)
    by_name = {r.name: r for r in plan.revisions}
    plan = dataclasses.replace(plan, revisions=tuple(by_name[i.name] for i in ordered))
    return Source(name, title, "hub", tuple(ordered), plan.skipped, plan=plan)


# --- reading ---


def _folders(
    source: Source, delete_after: bool, report: Callable[[Skipped], None], say: Callable[[str], None] | None
) -> Iterator[tuple[str, Path]]:
    for s in source.skipped:
        report(s)
    if source.plan is not None:
        plan = dataclasses.replace(source.plan, skipped=())
        for revision, folder in hub.fetch(
            plan, delete_after=delete_after, progress=False, report=report, say=say
        ):
            yield revision.name, folder
    elif source.folder is not None:
        yield from ((i.name, source.folder / i.name) for i in source.items)


def _checkpoint(item: Item, folder: Path) -> Checkpoint:
    at = _told(folder, item)
    _check_whole(folder)
    id = hub.weights_id(folder)
    if (folder / META).is_file() and id != checkpoints.read(folder).weights_id:
        raise UserError(f"{folder}: its weights are not those that {META} names; write it again")
    return Checkpoint(item.name, at.tokens, at.step, at.lr, at.phase, folder, id)


def _check_whole(folder: Path) -> None:
    """Whether the weight files can be opened: a cut one cannot."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as e:
            raise UserError(f"{file.name}: cut short or broken ({e}); fetch or write it again") from None


def _model(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as e:
        raise UserError(f"{folder / 'config.json'}: cannot be read ({e})") from None
    return {k: config.get(k) for k in _MODEL_KEYS}


def _difference(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    key = next((k for k in _MODEL_KEYS if first[k] != other[k]), None)
    return f"{key} is {other[key]!r}, not {first[key]!r} as" if key else None


# --- small things ---


def _in_order(items: Sequence[Item]) -> list[Item]:
    if all(i.tokens is not None for i in items):
        return sorted(items, key=lambda i: (i.tokens, i.name))
    return sorted(items, key=lambda i: (i.step if i.step is not None else 0, i.name))


def _tokens(tokens: int | None, step: int | None, per_step: int | None) -> int | None:
    """An exact product goes before the rounded number in a name."""
    return step * per_step if per_step and step is not None else tokens


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "trajectory"


def _first(skipped: Sequence[Skipped]) -> str:
    return str(skipped[0]) + (f", and {len(skipped) - 1} more" if len(skipped) > 1 else "")
