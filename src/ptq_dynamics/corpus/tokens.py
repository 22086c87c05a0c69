"""Reading token sets: training batches, evaluation blocks and calibration windows.

A set is a stream of token ids (documents one after another, each closed by ``<|endoftext|>``) in a
memory-mapped file. What a training step sees depends on (seed, step) alone, never on what was read before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..core.files import read_json, sha256_file

RERUN = "run the corpus stage again (dvc repro corpus)"


def read_corpus(folder: Path) -> dict[str, Any]:
    """``corpus.json`` of a built corpus: sources, sets, counts, hashes.

    Raises:
        UserError: the folder holds no finished corpus.
    """
    return read_json(Path(folder) / "corpus.json", hint=RERUN)


@functools.lru_cache(maxsize=64)
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    return sha256_file(path)  # once per process and version of the file


def _check(path: Path, size: int, sha256: str) -> None:
    if not path.is_file():
        raise UserError(f"{path}: no such file; {RERUN}")
    stat = path.stat()
    if stat.st_size != size:
        raise UserError(f"{path}: {stat.st_size} bytes instead of {size}, the file is cut or stale; {RERUN}")
    if _sha256(path, stat.st_size, stat.st_mtime_ns) != sha256:
        raise UserError(f"{path}: its contents differ from the SHA-256 in corpus.json; {RERUN}")


@dataclass(frozen=True)
class TokenSet:
    """One set of a corpus. Open it where it is used: a pickled memory map would travel as a copy.

    Attributes:
        tokens: ids, memory-mapped, ``[n_tokens]``, uint16 or uint32.
        documents: start of each document in ``tokens``, and the end of the last, int64 ``[n_documents + 1]``.
        id: content hash, to be recorded with every number measured on the set.
        bytes_per_token: UTF-8 bytes of text per token (``<|endoftext|>`` counts as a token of none):
            cross-entropy in nats per token / ln 2 / ``bytes_per_token`` is bits per byte.
    """

    name: str
    tokens: np.ndarray
    documents: np.ndarray
    id: str
    vocab_size: int
    bytes_per_token: float

    @classmethod
    def open(cls, folder: Path, name: str) -> TokenSet:
        """Memory-map the set ``name`` of the corpus in ``folder``; sizes and hashes are checked.

        Raises:
            UserError: no corpus, no such set, or a file that is missing, cut or altered.
        """
        folder = Path(folder)
        corpus = read_corpus(folder)
        if name not in corpus["sets"]:
            raise UserError(f"{folder}: no set '{name}' in this corpus; it has {', '.join(corpus['sets'])}")
        entry = corpus["sets"][name]
        dtype = np.dtype(corpus["dtype"]).newbyteorder("<")
        shard, index = folder / f"{name}.bin", folder / f"{name}.idx"
        _check(shard, entry["tokens"] * dtype.itemsize, entry["sha256"])
        _check(index, (entry["documents"] + 1) * 8, entry["index_sha256"])
        return cls(
            name=name,
            tokens=np.memmap(shard, dtype=dtype, mode="r"),
            documents=np.fromfile(index, dtype="<i8"),
            id=entry["sha256"][:12],
            vocab_size=corpus["tokenizer"]["vocab_size"],
            bytes_per_token=entry["bytes_per_token"],
        )

    def n_windows(self, length: int) -> int:
        """Windows of ``length`` inputs in one epoch: the last is kept when it (with its label) fits exactly.

        Raises:
            UserError: the set holds not even one.
        """
        n = (len(self.tokens) - 1) // length
        if length < 1 or n < 1:
            raise UserError(
                f"set '{self.name}' has {len(self.tokens)} tokens, too few for one sequence of {length} and its "
                "label; use a shorter sequence or add text to the corpus"
            )
        return n

    def batch(self, seed: int, step: int, batch_size: int, length: int) -> np.ndarray:
        """Training batch number ``step`` (from 0): int64 ``[batch_size, length + 1]``.

        Inputs are ``[:, :-1]``, labels ``[:, 1:]``: already shifted, do not shift them again. Window k holds
        tokens k·length … (k+1)·length; the border token is the label of one window and the first input of
        the next, so every token but the first is a label once per epoch. An epoch's order is a permutation
        drawn from (seed, epoch), and batches run across the border of epochs.
        """
        n = self.n_windows(length)
        position = step * batch_size + np.arange(batch_size)
        window = np.empty(batch_size, dtype=np.int64)
        for epoch in range(position[0] // n, position[-1] // n + 1):
            here = position // n == epoch
            window[here] = _order(n, seed, epoch)[position[here] % n]
        return self._rows(window * length, length + 1)

    def blocks(self, length: int, max_tokens: int | None = None) -> np.ndarray:
        """Evaluation blocks in order: int64 ``[n, length + 1]``, labels shifted as in `batch`.

        They predict n·length tokens, n = (n_tokens − 1) // length, each once; at most ``max_tokens``.
        """
        n = self.n_windows(length)
        if max_tokens is not None:
            n = min(n, max_tokens // length)
            if n < 1:
                raise UserError(
                    f"max_tokens {max_tokens} is less than one block of {length}; raise max_tokens"
                )
        return self._rows(np.arange(n) * length, length + 1)

    def calibration(self, n_sequences: int, length: int, seed: int) -> np.ndarray:
        """Random windows for quantization, none overlapping another: int64 ``[n_sequences, length]``.

        Raises:
            UserError: the set does not hold so many.
        """
        fit = len(self.tokens) // length if length >= 1 else 0
        if not 1 <= n_sequences <= fit:
            raise UserError(
                f"set '{self.name}' has {len(self.tokens)} tokens: at most {fit} calibration sequences of "
                f"{length}, {n_sequences} asked for; ask for 1 to {fit}, shorter ones, or add text"
            )
        draw = _draw(fit + 1, seed, 2**64 - 1)
        phase = int(draw[-1] % (len(self.tokens) - fit * length + 1))  # what is left over shifts the grid
        window = np.argsort(draw[:-1], kind="stable")[:n_sequences]
        return self._rows(phase + window * length, length)

    def _rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        return self.tokens[starts[:, None] + np.arange(length)].astype(np.int64)


def _draw(n: int, seed: int, stream: int) -> np.ndarray:
    """``n`` random uint64: a generator's raw output, which numpy keeps across versions (unlike `permutation`)."""
    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(n)


@functools.lru_cache(maxsize=4)
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of ``range(n)`` for an epoch."""
    return np.argsort(_draw(n, seed, epoch), kind="stable")
