"""Evaluation and calibration text for a model of any tokenizer, as a small corpus that ``measure`` reads.

A model with the tokenizer of our corpus is measured on the corpus itself. For any other, plain text (files, or the
corpus' own text decoded) is tokenized anew with the model's tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import transformers

from ..core import paths
from ..core.config import digest
from ..core.errors import UserError
from ..core.files import atomic_dir, read_json, sha256_file, write_json
from ..corpus.tokens import TokenSet, read_corpus
from .measure import CalibrationText, EvaluationText, MeasureConfig

_CHUNK = 100_000  # characters tokenized at a time
_LONGEST = 2048  # tokens per sequence for models that could take more: the length usual for GPTQ


@dataclass(frozen=True)
class Texts:
    """A corpus folder with the sets to use, and what was chosen, in words."""

    corpus: Path
    evaluation: EvaluationText
    calibration: CalibrationText
    notes: tuple[str, ...]


def texts(
    tokenizer_folder: Path | None,
    context: int,
    config: MeasureConfig,
    work: Path,
    *,
    evaluation: Path | None = None,
    calibration: Path | None = None,
    length: int | None = None,
) -> Texts:
    """Choose the text, tokenize it anew where needed, and fit the amounts to what there is.

    Args:
        tokenizer_folder: holds the model's tokenizer; None where it has none.
        context: longest sequence that the model takes, in tokens.
        config: amounts of text (tokens, sequences) and the sets of our own corpus.
        work: where tokenized text is kept (by content, so that a second run finds it).
        evaluation, calibration: plain text files (UTF-8); None takes our corpus' text.
        length: tokens per sequence; None takes the configuration's for our tokenizer, else ``context``, at most 2,048.

    Raises:
        UserError: no text, no tokenizer, or too little text for one sequence.
    """
    own = _own_corpus()
    same = own is not None and tokenizer_folder is not None and _same_tokenizer(tokenizer_folder, own)
    if same and evaluation is None and calibration is None:
        corpus, sets, notes = own, (config.evaluation.set, config.calibration.set), []
        lengths = (config.evaluation.length, config.calibration.length)
    else:
        if own is None and (evaluation is None or calibration is None):
            raise UserError(
                "no text to measure on: give --evaluation FILE and --calibration FILE (plain text), "
                "or make the corpus with `dvc repro corpus`"
            )
        tokenizer = _tokenizer(tokenizer_folder)
        corpus = _tokenized(tokenizer, _sources(evaluation, calibration, own), work)
        sets, lengths = ("evaluation", "calibration"), (min(context, _LONGEST),) * 2
        notes = [f"text tokenized with the model's own tokenizer ({len(tokenizer):,} tokens)"]
    if length is not None:
        lengths = (length, length)
    lengths = tuple(min(x, context) for x in lengths)
    found = [TokenSet.open(corpus, s) for s in sets]
    blocks = min(config.evaluation.tokens // lengths[0], (len(found[0].tokens) - 1) // lengths[0])
    windows = min(config.calibration.sequences, len(found[1].tokens) // lengths[1])
    if min(blocks, windows) < 1:
        raise UserError(
            f"too little text for one sequence of {lengths[0]} tokens; give more, or a smaller --length"
        )
    if blocks * lengths[0] < config.evaluation.tokens - lengths[0]:
        notes.append(
            f"only {blocks * lengths[0]:,} evaluation tokens ({config.evaluation.tokens:,} asked for): errors are noisier"
        )
    if windows < config.calibration.sequences:
        notes.append(f"only {windows} calibration sequences ({config.calibration.sequences} asked for)")
    return Texts(
        corpus,
        EvaluationText(set=sets[0], tokens=blocks * lengths[0], length=lengths[0]),
        CalibrationText(set=sets[1], sequences=windows, length=lengths[1], seed=config.calibration.seed),
        tuple(notes),
    )


def _own_corpus() -> Path | None:
    return paths.corpus() if (paths.corpus() / "corpus.json").is_file() else None


def _same_tokenizer(folder: Path, corpus: Path) -> bool:
    file = folder / "tokenizer.json"
    return file.is_file() and sha256_file(file) == read_corpus(corpus)["tokenizer"]["sha256"]


def _tokenizer(folder: Path | None) -> transformers.PreTrainedTokenizerBase:
    if folder is None:
        raise UserError(
            "no tokenizer beside the checkpoints; copy tokenizer.json and tokenizer_config.json into their folder"
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{folder}: its tokenizer does not load ({str(e).splitlines()[0]})") from None


def _sources(evaluation: Path | None, calibration: Path | None, own: Path | None) -> dict[str, Iterator[str]]:
    """The documents of both sets."""
    out = {}
    for name, file, sets in (
        ("evaluation", evaluation, ("evaluation", "validation")),
        ("calibration", calibration, ("calibration", "calibration-in-domain")),
    ):
        if file is not None:
            out[name] = _read(Path(file), name)
        elif own is not None:
            has = read_corpus(own)["sets"]
            out[name] = _decoded(own, next(s for s in sets if s in has))
    return out


def _read(file: Path, name: str) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"--{name} {file}: cannot be read ({e.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"--{name} {file}: is not plain text in UTF-8") from None
    if not text.strip():
        raise UserError(f"--{name} {file}: holds no text")
    return iter([text])


def _decoded(corpus: Path, name: str) -> Iterator[str]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpus / "tokenizer", local_files_only=True)
    found = TokenSet.open(corpus, name)
    for start, end in zip(found.documents[:-1], found.documents[1:], strict=True):
        yield tokenizer.decode(found.tokens[start : end - 1].tolist())  # the last closes the document


def _tokenized(
    tokenizer: transformers.PreTrainedTokenizerBase, sources: dict[str, Iterator[str]], work: Path
) -> Path:
    """A folder that ``TokenSet.open`` reads, kept under a name made of its inputs."""
    documents = {name: list(texts) for name, texts in sources.items()}
    said = {n: hashlib.sha256("\0".join(d).encode()).hexdigest() for n, d in documents.items()}
    vocabulary = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
    folder = work / f"text-{digest([vocabulary, said])}"
    if not (folder / "corpus.json").is_file():
        dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
        with atomic_dir(folder) as tmp:
            write_json(
                tmp / "corpus.json",
                {
                    "dtype": dtype,
                    "tokenizer": {"vocab_size": len(tokenizer), "sha256": vocabulary},
                    "sets": {n: _write(tmp, n, d, tokenizer, dtype) for n, d in documents.items()},
                },
            )
    read_json(folder / "corpus.json", hint="delete the folder")
    return folder


def _write(
    folder: Path, name: str, documents: list[str], tokenizer: transformers.PreTrainedTokenizerBase, dtype: str
) -> dict[str, object]:
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    parts, lengths = [], []
    for text in documents:
        pieces = list(_pieces(text))
        found = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"] if pieces else []
        ids = [i for piece in found for i in piece] + end
        parts.append(np.array(ids, dtype=np.dtype(dtype).newbyteorder("<")))
        lengths.append(len(ids))
    (folder / f"{name}.bin").write_bytes(b"".join(p.tobytes() for p in parts))
    np.concatenate([[0], np.cumsum(lengths)]).astype("<i8").tofile(folder / f"{name}.idx")
    size = sum(len(d.encode()) for d in documents)
    return {
        "documents": len(documents),
        "tokens": sum(lengths),
        "bytes": size,
        "bytes_per_token": size / max(sum(lengths), 1),
        "sha256": sha256_file(folder / f"{name}.bin"),
        "index_sha256": sha256_file(folder / f"{name}.idx"),
    }


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that end with a line, so that no word is cut."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= _CHUNK:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)
