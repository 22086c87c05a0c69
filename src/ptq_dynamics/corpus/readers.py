"""Readers: the members of an archive (or files) into documents. Pure functions of bytes.

A *document* is the unit of the train/validation split: one web service, one API, a run of dictionary
entries, an article. It is a pair of an id and its raw paragraphs, whose whitespace `normalise` settles.
"""

from __future__ import annotations

import gzip
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, Literal

from ..core.errors import UserError

Member = tuple[str, bytes]  # name and contents; readers expect them in the order of their names
Document = tuple[str, list[str]]
ReaderName = Literal["botocore", "google_discovery", "gcide", "wikiextractor", "lines", "plain"]

ENTRIES_PER_DOCUMENT = 100  # dictionary headwords
PLAIN_DOCUMENT_CHARS = 65_536  # a long file is cut here, at a paragraph, so that it can be split


def decode(name: str, data: bytes) -> str:
    """UTF-8 text without a byte order mark.

    Raises:
        UserError: another encoding; names the file and the first bad byte.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UserError(f"{name}: not UTF-8 (byte {e.start}); convert the file to UTF-8") from None


def normalise(paragraph: str) -> str:
    """One line: every run of whitespace (line breaks too) becomes one space; NUL characters go."""
    return " ".join(paragraph.replace("\0", "").split())


_LISTING = re.compile(r"(?s)<(pre|programlisting)\b.*?</\1>|<!--.*?-->")
_BLOCK = re.compile(
    r"(?i)</?(?:p|li|ul|ol|dl|dt|dd|br|hr|h\d|div|note|important|caution|warning|fullname|title|para|"
    r"table|thead|tbody|tr|td|th|section|example|examples|callout)\b[^<>]*>"
)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")


def strip_html(text: str) -> list[str]:
    """Paragraphs of an HTML fragment: block tags part them, inline tags and code listings go."""
    text = _BLOCK.sub("\n", _LISTING.sub("\n", text))
    text = html.unescape(_TAG.sub("", text))
    return _BLOCK.sub("\n", text).split("\n")  # again: some sources escape their markup twice


_FENCE = re.compile(r"(?s)```.*?(?:```|\Z)")
_LINK = re.compile(r"\[([^\[\]]+)\]\((?:https?:|/)[^()\s]*\)")


def strip_markdown(text: str) -> list[str]:
    """Paragraphs of a Markdown text: fenced code goes, a link leaves its words."""
    return re.split(r"\n\s*\n", _LINK.sub(r"\1", _FENCE.sub(" ", text)))


_NOT_PROSE = re.compile(r"[^\w\s,.'’]|[\d_]")


def is_prose(paragraph: str) -> bool:
    """Letters, spaces and plain punctuation make up nine tenths: false for JSON, shell lines and paths."""
    return len(_NOT_PROSE.findall(paragraph)) <= 0.1 * len(paragraph)


def _strings(node: Any, keys: tuple[str, ...]) -> Iterator[str]:
    """Every string (or list of strings) stored under one of ``keys``, at any depth, in the order of the file."""
    if isinstance(node, dict):
        for k, v in node.items():
            if k in keys and isinstance(v, str):
                yield v
            elif k in keys and isinstance(v, list):
                yield from (text for text in v if isinstance(text, str))
            else:
                yield from _strings(v, keys)
    elif isinstance(node, list):
        for v in node:
            yield from _strings(v, keys)


def _json(name: str, data: bytes) -> Any:
    try:
        return json.loads(decode(name, gzip.decompress(data) if name.endswith(".gz") else data))
    except (json.JSONDecodeError, gzip.BadGzipFile, EOFError) as e:
        raise UserError(f"{name}: not valid JSON ({e}); was another file meant?") from None


def botocore(members: Iterable[Member]) -> Iterator[Document]:
    """``botocore/data/<service>/<version>/service-2.json[.gz]``: one document per service."""
    for service, group in groupby(members, key=lambda m: m[0].split("/")[-3]):
        texts = (t for name, data in group for t in _strings(_json(name, data), ("documentation",)))
        yield service, [p for t in texts for p in strip_html(t) if is_prose(p)]


def google_discovery(members: Iterable[Member]) -> Iterator[Document]:
    """``…/documents/<api>.<version>.json``: one document per API, all its versions together."""
    for api, group in groupby(members, key=lambda m: m[0].split("/")[-1].split(".")[0]):
        keys = ("description", "enumDescriptions")
        texts = (t for name, data in group for t in _strings(_json(name, data), keys))
        yield api, [p for t in texts for p in strip_markdown(t) if is_prose(p)]


_MARKS = re.compile(
    r"<--.*?-->|\{\w{1,3}\}|\[?(?:1913 Webster|Webster 1913 Suppl\.?|WordNet 1\.5|PJC)[^\[\]]{0,20}\]"
)


def gcide(members: Iterable[Member]) -> Iterator[Document]:
    """``words_<letter>.json`` of GNU's dictionary: a paragraph per definition, in a dictionary's layout."""
    for name, data in members:
        letter = name.split("_")[-1].split(".")[0]
        entries = list(_json(name, data).values())
        for start in range(0, len(entries), ENTRIES_PER_DOCUMENT):
            paragraphs = [
                " ".join([f"{entry['entry']}, {pos['part_of_speech']}", sense["text"], *sense["examples"]])
                for entry in entries[start : start + ENTRIES_PER_DOCUMENT]
                for pos in entry["pos"]
                for sense in pos["definitions"]
            ]
            yield f"{letter}/{start:05d}", [_MARKS.sub(" ", p) for p in paragraphs]


_ARTICLE = re.compile(r'(?s)<doc id="([^"]*)"[^>]*>\n(.*?)\n</doc>')


def wikiextractor(members: Iterable[Member]) -> Iterator[Document]:
    """WikiExtractor's output: one document per ``<doc>``, one paragraph per line."""
    for name, data in members:
        for i, text in _ARTICLE.findall(decode(name, data)):
            yield f"{name}#{i}", html.unescape(text).split("\n")


def lines(members: Iterable[Member]) -> Iterator[Document]:
    """One document (of one paragraph) per line."""
    for name, data in members:
        for n, line in enumerate(decode(name, data).splitlines()):
            yield f"{name}#{n}", [line]


def plain(members: Iterable[Member]) -> Iterator[Document]:
    """Any text: blank lines part paragraphs; a long file becomes several documents."""
    for name, data in members:
        part, size, n = [], 0, 0
        for paragraph in re.split(r"\n\s*\n", decode(name, data)):
            part.append(paragraph)
            size += len(paragraph)
            if size >= PLAIN_DOCUMENT_CHARS:
                yield f"{name}#{n}", part
                part, size, n = [], 0, n + 1
        yield f"{name}#{n}", part


READERS: dict[str, Callable[[Iterable[Member]], Iterator[Document]]] = {
    "botocore": botocore,
    "google_discovery": google_discovery,
    "gcide": gcide,
    "wikiextractor": wikiextractor,
    "lines": lines,
    "plain": plain,
}
