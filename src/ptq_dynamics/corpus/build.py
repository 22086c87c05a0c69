"""Text to token sets: extract, drop repeated paragraphs, split by document, train the tokenizer, encode.

    data/corpus/  corpus.json  tokenizer/  train.bin train.idx  validation.bin …

``.bin`` holds token ids (uint16, or uint32 above 65,536 of them, little endian), ``.idx`` the start of each
document (int64). The folder appears whole or not at all: until everything is there, the former one stays.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tokenizers
from pydantic import Field, model_validator
from tqdm import tqdm

from ..core import paths
from ..core.config import asdict, config_dataclass, digest
from ..core.errors import UserError
from ..core.files import TMP_MARK, atomic_dir, atomic_file, read_json, sha256_file, write_json
from ..core.provenance import fingerprint
from .readers import normalise
from .sources import Source, documents, input_hash, version

END_OF_TEXT = "<|endoftext|>"  # id 0
IN_DOMAIN = ("train", "validation", "calibration-in-domain")  # parts of the sources whose role is train
ENCODE_CHARS = 4_000_000  # text handed to the tokenizer at a time

Fraction = Annotated[float, Field(gt=0, lt=0.5)]


@config_dataclass
class Splits:
    """Fractions of the training sources' documents that are held out; the rest trains."""

    validation: Fraction
    calibration: Fraction


@config_dataclass
class CorpusConfig:
    """The ``corpus`` section of params.yaml."""

    seed: Annotated[int, Field(ge=0)]  # of the split and of the order of documents
    vocab_size: Annotated[int, Field(ge=257)]  # 256 bytes and <|endoftext|> at least
    splits: Splits
    bpe_sample_mb: Annotated[float, Field(gt=0)]  # training text that the tokenizer is fitted to
    min_paragraph_chars: Annotated[int, Field(ge=1)] = 40  # shorter paragraphs are dropped
    sources: tuple[Source, ...]

    @model_validator(mode="after")
    def _sources_make_sense(self) -> CorpusConfig:
        names = [s.name for s in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources need names of their own, got {', '.join(names)}")
        if not any(s.role == "train" for s in self.sources):
            raise ValueError("no source has role train")
        return self


def build(config: CorpusConfig, folder: Path | None = None, downloads: Path | None = None) -> dict[str, Any]:
    """Make the corpus, or what is missing of it; returns the contents of ``corpus.json``.

    Every source's text is kept extracted beside the downloads, and tokenizer and sets are kept as they are
    finished, so that a killed run goes on where it was. Same configuration, same bytes.

    Args:
        folder: the corpus (default ``paths.corpus()``).
        downloads: package files and extracted text (default ``paths.downloads()``).

    Raises:
        UserError: a source that cannot be reached or read, too little text; an existing corpus stays.
    """
    folder, downloads = folder or paths.corpus(), downloads or paths.downloads()
    hashes = [input_hash(s) for s in config.sources]
    key = digest([asdict(config), hashes, _code(), tokenizers.__version__])
    if (done := _finished(folder, key)) is not None:
        return done

    texts = [_extract(s, h, config, downloads) for s, h in zip(config.sources, hashes, strict=True)]
    kept = first_occurrences([t.hashes for t in texts], [t.source.role != "train" for t in texts])
    rows = assign(texts, kept, config.splits)
    if empty := [name for name in rows if not len(rows[name])]:
        raise UserError(
            f"corpus set '{empty[0]}' got none of {sum(map(len, rows.values()))} documents; "
            "raise its fraction in corpus.splits, change corpus.seed or add text"
        )

    building = folder.parent / f"{TMP_MARK}{folder.name}-{key}"
    sample = _sample(_texts(texts, kept, rows["train"]), config.bpe_sample_mb * 1e6)
    tokenizer = _tokenizer(building / "tokenizer", sample, config.vocab_size)
    dtype = "uint16" if config.vocab_size <= 65_536 else "uint32"
    sets = {name: _encode(building, name, texts, kept, rows[name], tokenizer, dtype) for name in rows}

    tokenizer_hash = sha256_file(building / "tokenizer" / "tokenizer.json")
    corpus = {
        "id": digest([tokenizer_hash, {n: s["sha256"] for n, s in sets.items()}]),
        "inputs": key,
        "dtype": dtype,
        "tokenizer": {"vocab_size": config.vocab_size, "sha256": tokenizer_hash},
        "sets": sets,
        "sources": [_told(t, h, k, sets) for t, h, k in zip(texts, hashes, kept, strict=True)],
        "config": asdict(config),
    }
    for name in sets:
        (building / f"{name}.json").unlink()
    write_json(building / "corpus.json", corpus)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(building, folder)
    for leftover in folder.parent.glob(f"{TMP_MARK}{folder.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return corpus


def sets_table(corpus: dict[str, Any]) -> pd.DataFrame:
    """One row per set: documents, tokens, megabytes of text, bytes per token, id."""
    columns = {
        name: {
            "documents": s["documents"],
            "tokens": s["tokens"],
            "MB": round(s["bytes"] / 1e6, 2),
            "bytes per token": round(s["bytes_per_token"], 3),
            "id": s["sha256"][:12],
        }
        for name, s in corpus["sets"].items()
    }
    return pd.DataFrame.from_dict(columns, orient="index").rename_axis("set")


def sources_table(corpus: dict[str, Any]) -> pd.DataFrame:
    """One row per source: role, release, licence, what was kept of it and what was dropped."""
    shown = ["name", "role", "version", "license", "documents", "tokens", "paragraphs"]
    shown += ["dropped_duplicate", "dropped_short"]
    return pd.DataFrame([{k: s[k] for k in shown} for s in corpus["sources"]]).set_index("name")


@functools.cache
def _code() -> str:
    here = __name__.rpartition(".")[0]
    return fingerprint(f"{here}.build", f"{here}.readers", f"{here}.sources")


def _finished(folder: Path, key: str) -> dict[str, Any] | None:
    """The corpus in ``folder``, if it was made from the same inputs and every file is whole."""
    try:
        corpus = read_json(folder / "corpus.json", hint="")
        if corpus["inputs"] != key:
            return None
        files = {"tokenizer/tokenizer.json": corpus["tokenizer"]["sha256"]}
        for name, entry in corpus["sets"].items():
            files |= {f"{name}.bin": entry["sha256"], f"{name}.idx": entry["index_sha256"]}
        return corpus if all(sha256_file(folder / f) == h for f, h in files.items()) else None
    except (UserError, OSError, KeyError, TypeError):
        return None  # absent or torn: made anew


# --- extraction: one source's paragraphs on disk, with a hash of each


@dataclass(frozen=True)
class Text:
    """A source's documents as JSON lines ``[id, [paragraph, …]]``, no paragraph twice in a document.

    Attributes:
        starts: byte offset of each document's line, int64 ``[documents]``.
        first: index of each document's first paragraph, and the end, int64 ``[documents + 1]``.
        order: position of each document in the split and in the shuffled stream, uint64 ``[documents]``.
        hashes: BLAKE2b of each paragraph, uint64 ``[paragraphs]``.
    """

    source: Any
    file: Path
    starts: np.ndarray
    first: np.ndarray
    order: np.ndarray
    hashes: np.ndarray
    dropped_short: int
    dropped_repeat: int


def document_order(seed: int, source: str, document: str) -> int:
    """64 bits from (seed, source, document) alone: a source added later moves no other source's document."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{source}\n{document}".encode()).digest()[:8], "big")


def _extract(source: Any, source_hash: str, config: CorpusConfig, downloads: Path) -> Text:
    key = digest([asdict(source), source_hash, config.min_paragraph_chars, config.seed, _code()])
    folder = downloads / "extracted" / f"{source.name}-{key}"
    if not folder.is_dir():
        with atomic_dir(folder) as tmp:
            _extract_to(tmp, source, config, downloads)
    with np.load(folder / "index.npz") as index:
        parts = {k: index[k] for k in ("starts", "first", "order", "hashes")}
        short, repeat = (int(n) for n in index["dropped"])
    return Text(
        source=source, file=folder / "documents.jsonl", dropped_short=short, dropped_repeat=repeat, **parts
    )


def _extract_to(folder: Path, source: Any, config: CorpusConfig, downloads: Path) -> None:
    starts, first, order, hashes = array("q"), array("q", [0]), array("Q"), bytearray()
    room = float("inf") if source.limit_mb is None else source.limit_mb * 1e6
    short = repeat = at = 0
    with open(folder / "documents.jsonl", "wb") as out:
        for name, raw in documents(source, downloads):
            told = [p for p in map(normalise, raw) if p]
            long = [p for p in told if len(p) >= config.min_paragraph_chars]
            paragraphs = []
            for p in dict.fromkeys(long):
                if room <= 0:
                    break
                data = p.encode()
                room -= len(data)
                hashes += hashlib.blake2b(data, digest_size=8).digest()
                paragraphs.append(p)
            short += len(told) - len(long)
            repeat += len(long) - len(set(long))
            if paragraphs:
                line = json.dumps([name, paragraphs], ensure_ascii=False).encode() + b"\n"
                out.write(line)
                starts.append(at)
                first.append(first[-1] + len(paragraphs))
                order.append(document_order(config.seed, source.name, name))
                at += len(line)
            if room <= 0:
                break
    if not starts:
        raise UserError(
            f"corpus source '{source.name}': no paragraph of at least {config.min_paragraph_chars} characters "
            "(corpus.min_paragraph_chars); is the text empty, or the reader the wrong one?"
        )
    np.savez(
        folder / "index.npz",
        starts=np.array(starts, dtype=np.int64),
        first=np.array(first, dtype=np.int64),
        order=np.array(order, dtype=np.uint64),
        hashes=np.frombuffer(hashes, dtype=np.uint64),
        dropped=np.array([short, repeat]),
    )


# --- deduplication and split


def first_occurrences(hashes: list[np.ndarray], later: list[bool]) -> list[np.ndarray]:
    """Which paragraphs to keep (bool, shaped as ``hashes``): of equal ones the first, over all sources.

    Args:
        later: sources that yield to the others whatever their place in the list (sets from other domains
            give up a paragraph that the training text has, never the other way round).
    """
    turn = sorted(range(len(hashes)), key=lambda i: later[i])
    merged = np.concatenate([hashes[i] for i in turn])
    keep = np.zeros(len(merged), dtype=bool)
    keep[np.unique(merged, return_index=True)[1]] = True
    parts = np.split(keep, np.cumsum([len(hashes[i]) for i in turn])[:-1])
    return [part for _, part in sorted(zip(turn, parts, strict=True), key=lambda p: p[0])]


def assign(texts: list[Text], kept: list[np.ndarray], splits: Splits) -> dict[str, np.ndarray]:
    """Rows (source, document) of every set in the order of its stream, int64 ``[documents, 2]``.

    A document whose every paragraph is a repetition belongs to no set.
    """
    source = np.concatenate([np.full(len(t.starts), i) for i, t in enumerate(texts)])
    document = np.concatenate([np.arange(len(t.starts)) for t in texts])
    order = np.concatenate([t.order for t in texts])
    filled = np.concatenate([_kept_per_document(t, k) > 0 for t, k in zip(texts, kept, strict=True)])
    role = np.array([t.source.role for t in texts])[source]
    u = order / 2.0**64
    part = np.where(u < splits.validation, 1, np.where(u < splits.validation + splits.calibration, 2, 0))
    chosen = {name: (role == "train") & (part == i) for i, name in enumerate(IN_DOMAIN)}
    chosen |= {r: role == r for r in ("calibration", "evaluation") if (role == r).any()}
    rows = {}
    for name, mask in chosen.items():
        here = np.flatnonzero(mask & filled)
        here = here[np.argsort(order[here], kind="stable")]
        rows[name] = np.stack([source[here], document[here]], axis=1)
    return rows


def _kept_per_document(text: Text, kept: np.ndarray) -> np.ndarray:
    total = np.concatenate([[0], np.cumsum(kept)])
    return total[text.first[1:]] - total[text.first[:-1]]


def _texts(texts: list[Text], kept: list[np.ndarray], rows: np.ndarray) -> Iterator[str]:
    """The documents of ``rows`` as they are encoded: kept paragraphs, one per line."""
    files = {i: open(texts[i].file, "rb") for i in np.unique(rows[:, 0])}
    try:
        for i, n in rows:
            files[i].seek(texts[i].starts[n])
            paragraphs = json.loads(files[i].readline())[1]
            flags = kept[i][texts[i].first[n] : texts[i].first[n + 1]]
            yield "\n".join(p for p, keep in zip(paragraphs, flags, strict=True) if keep)
    finally:
        for file in files.values():
            file.close()


# --- tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE: GPT-2's splitting of text into words, every byte in the vocabulary, no normaliser.

    ``<|endoftext|>`` is id 0. Any text encodes without an unknown token and decodes to itself.

    Raises:
        UserError: the text is too small to learn so many tokens from.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise UserError(
            f"corpus: the text yields {tokenizer.get_vocab_size()} tokens, vocab_size is {vocab_size}; lower it, "
            "raise bpe_sample_mb or add text"
        )
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write a folder that ``AutoTokenizer.from_pretrained`` loads as a ``PreTrainedTokenizerFast``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{kind}_token": END_OF_TEXT for kind in ("bos", "eos", "pad", "unk")}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,  # decoding gives back the very text
            **special,
        },
    )


def _sample(texts: Iterable[str], size: float) -> Iterator[str]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


def _tokenizer(folder: Path, sample: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    if not folder.is_dir():
        told = tqdm(sample, desc="fit tokenizer", unit="doc", leave=False)
        with atomic_dir(folder) as tmp:
            save_tokenizer(train_tokenizer(told, vocab_size), tmp)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # a document that mentions <|endoftext|> does not end there
    return tokenizer


# --- token sets


def _encode(
    folder: Path,
    name: str,
    texts: list[Text],
    kept: list[np.ndarray],
    rows: np.ndarray,
    tokenizer: tokenizers.Tokenizer,
    dtype: str,
) -> dict[str, Any]:
    """Write ``name.bin`` and ``name.idx``; returns the set's entry of corpus.json."""
    note = folder / f"{name}.json"  # written last: the set is finished
    if note.is_file():
        return read_json(note, hint="delete the folder")
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = tqdm(_texts(texts, kept, rows), f"encode {name}", len(rows), unit="doc", leave=False)
    lengths, size = [], 0
    with atomic_file(folder / f"{name}.bin") as tmp, open(tmp, "wb") as out:
        for batch in _batches(stream, ENCODE_CHARS):
            size += sum(len(text.encode()) for text in batch)
            for encoding in tokenizer.encode_batch_fast(batch):
                ids = [*encoding.ids, end]
                out.write(np.array(ids, dtype=np.dtype(dtype).newbyteorder("<")).tobytes())
                lengths.append(len(ids))
    with atomic_file(folder / f"{name}.idx") as tmp:
        np.concatenate([[0], np.cumsum(lengths)]).astype("<i8").tofile(tmp)
    by_source = np.bincount(rows[:, 0], weights=lengths, minlength=len(texts))
    entry = {
        "documents": len(lengths),
        "tokens": sum(lengths),
        "bytes": size,
        "bytes_per_token": size / sum(lengths),
        "sha256": sha256_file(folder / f"{name}.bin"),
        "index_sha256": sha256_file(folder / f"{name}.idx"),
        "tokens_by_source": {t.source.name: int(n) for t, n in zip(texts, by_source, strict=True) if n},
    }
    write_json(note, entry)
    return entry


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    batch, length = [], 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length >= size:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _told(text: Text, source_hash: str, kept: np.ndarray, sets: dict[str, Any]) -> dict[str, Any]:
    """A source's entry of corpus.json."""
    source = text.source
    return {
        "name": source.name,
        "kind": source.kind,
        "role": source.role,
        "license": source.license,
        "version": version(source),
        "sha256": source_hash,
        "documents": int((_kept_per_document(text, kept) > 0).sum()),
        "paragraphs": int(kept.sum()),
        "dropped_duplicate": int((~kept).sum()) + text.dropped_repeat,
        "dropped_short": text.dropped_short,
        "tokens": sum(s["tokens_by_source"].get(source.name, 0) for s in sets.values()),
    }
