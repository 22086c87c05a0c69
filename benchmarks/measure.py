"""Measuring one checkpoint: our code path against the same work with transformers' own forward in float32.

The work: load the checkpoint, evaluate it in full precision on the tokens that the mini profile names, then GPTQ at
4 and 3 bit, each evaluated on the same tokens, with paired intervals. Both sides use our GPTQ. Text is random ids:
speed does not depend on it. Prints and records seconds, without compilation (once per process, some seconds).

    python benchmarks/measure.py [--rounds 5]
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import common
import numpy as np
import torch
import torch.nn.functional as F
import transformers

from ptq_dynamics.core.files import sha256_file, write_json
from ptq_dynamics.corpus.tokens import TokenSet
from ptq_dynamics.evaluation.intervals import paired_bootstrap
from ptq_dynamics.evaluation.measure import MeasureConfig, measure_checkpoint, read_row
from ptq_dynamics.models import neox
from ptq_dynamics.quantization.quantizer import quantize, restore, snapshot
from ptq_dynamics.trajectories import checkpoints
from ptq_dynamics.trajectories.checkpoints import Checkpoint

BATCH = 16


def random_corpus(folder: Path, vocab_size: int, sets: dict[str, int]) -> None:
    """A corpus of random ids in the corpus stage's format: one document of so many tokens per set."""
    rng = np.random.default_rng(0)
    entries = {}
    for name, count in sets.items():
        rng.integers(vocab_size, size=count, dtype="<u2").tofile(folder / f"{name}.bin")
        np.array([0, count], dtype="<i8").tofile(folder / f"{name}.idx")
        entries[name] = {
            "tokens": count,
            "documents": 1,
            "sha256": sha256_file(folder / f"{name}.bin"),
            "index_sha256": sha256_file(folder / f"{name}.idx"),
            "bytes_per_token": 1.0,
        }
    write_json(
        folder / "corpus.json", {"dtype": "uint16", "tokenizer": {"vocab_size": vocab_size}, "sets": entries}
    )


@torch.no_grad()
def plain_losses(model: torch.nn.Module, blocks: np.ndarray) -> np.ndarray:
    """Per-sequence cross-entropy through the model's own forward pass."""
    out = []
    for start in range(0, len(blocks), BATCH):
        tokens = torch.from_numpy(blocks[start : start + BATCH])
        labels = tokens[:, 1:]
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        out.append(loss.double().mean(1))
    return torch.cat(out).numpy()


def ours(checkpoint: Checkpoint, config: MeasureConfig, corpus: Path) -> Callable[[], list[float]]:
    """The measuring stage's own function, told each time that nothing is there yet."""
    transformers.utils.logging.disable_progress_bar()
    fresh = (corpus.parent / f"rows{i}" for i in itertools.count())

    def measure() -> list[float]:
        rows = next(fresh)
        return [
            read_row(rows / f"{key}.parquet")["ce"]
            for key in measure_checkpoint(checkpoint, config, corpus, rows)
        ]

    return measure


def peer(checkpoint: Checkpoint, config: MeasureConfig, corpus: Path) -> Callable[[], list[float]]:
    """The same work through transformers; returns the cross-entropies of the base and every quantized model."""
    transformers.utils.logging.disable_progress_bar()
    e, c = config.evaluation, config.calibration

    def measure() -> list[float]:
        blocks = TokenSet.open(corpus, e.set).blocks(e.length, e.tokens)
        ids = torch.from_numpy(TokenSet.open(corpus, c.set).calibration(c.sequences, c.length, c.seed))
        model = checkpoints.load_model(checkpoint)
        base = plain_losses(model, blocks)
        before = snapshot(model)
        means = [float(base.mean())]
        for spec in config.quantizers:
            quantize(model, ids, spec)
            losses = plain_losses(model, blocks)
            paired_bootstrap(base, losses, lambda q, b: q / b - 1.0)
            paired_bootstrap(base, losses, lambda q, b: q - b)
            restore(model, before)
            means.append(float(losses.mean()))
        return means

    return measure


def main() -> None:
    rounds = common.rounds(__doc__, 5)
    params = common.mini()
    model_config, vocab_size = params.studies["token_budgets"].model, params.corpus.vocab_size
    wanted = [q for q in params.measure.quantizers if q.method == "gptq" and q.bits in (3, 4)]
    assert {q.bits for q in wanted} == {3, 4}
    config = dataclasses.replace(params.measure, quantizers=tuple(wanted), device="cpu")
    e, c = config.evaluation, config.calibration
    assert e.tokens >= 200_000

    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        for name in ("corpus", "tokenizer"):
            (folder / name).mkdir()
        random_corpus(folder / "corpus", vocab_size, {e.set: e.tokens + 1, c.set: 4 * c.sequences * c.length})
        checkpoint = checkpoints.save(
            folder / "checkpoint", neox.build(model_config, vocab_size, seed=0), folder / "tokenizer",
            tokens=0, step=0, lr=0.0, phase="stable", parent=None,
        )  # fmt: skip
        result = common.compare(ours, peer, (checkpoint, config, folder / "corpus"), rounds)

    if not np.allclose(*result.first, rtol=1e-3):
        raise SystemExit(f"the two sides measure different things: {result.first}")
    name = f"measuring one checkpoint, seconds, width {model_config.width}, {model_config.layers} layers"
    print(
        f"{name}: {result.ours:.2f} against {result.peer:.2f}, ratio {result.ratio:.2f} "
        f"({result.lowest:.2f} to {result.highest:.2f})"
    )
    common.record(
        name, result.ours, result.peer, result.ratio,
        f"transformers {transformers.__version__} GPTNeoX forward in float32, our GPTQ",
    )  # fmt: skip


if __name__ == "__main__":
    main()
