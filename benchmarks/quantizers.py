"""Our GPTQ against other tools': quantize one checkpoint at 4 bit and evaluate it, at equal options.

Ours: ``quantize`` and ``sequence_losses``, as the measuring stage calls them. The peer: the tool's own call, its second in
one process (the first pays for imports and kernels), and an evaluation of its weights through transformers' own forward
pass in float32. Both on one thread, taken in turns; text is random ids. A tool that is not installed is left out.

    python benchmarks/quantizers.py [--rounds 3]
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import common
import numpy as np
import torch
import transformers
from measure import plain_losses

from ptq_dynamics.evaluation.losses import sequence_losses
from ptq_dynamics.models import neox
from ptq_dynamics.quantization import backends
from ptq_dynamics.quantization.backends import subprocesses
from ptq_dynamics.quantization.quantizer import block_linears, quantize, restore, snapshot
from ptq_dynamics.quantization.spec import QuantSpec

PEERS = ("gptqmodel", "auto-gptq", "llmcompressor")
WIDE = neox.ModelConfig(width=512, layers=8, heads=8, context=128)


def race(method: str, model: transformers.PreTrainedModel, ids: torch.Tensor, blocks: np.ndarray, rounds: int) -> tuple[list[tuple[float, float]], str]:  # fmt: skip
    """Seconds of ours and of the tool, once per round, and the tool's versions; also checks that they agree."""
    spec, compiled = QuantSpec(bits=4, group_size=64), neox.can_compile()
    before, took, versions = snapshot(model), [], ""

    def ours() -> float:
        start = time.perf_counter()
        quantize(model, ids, spec)
        sequence_losses(model, blocks, precision="bf16", compiled=compiled)
        return time.perf_counter() - start

    def peer() -> float:
        nonlocal versions
        names = list(block_linears(model))
        weights, told = subprocesses.run(
            model, names, ids, dataclasses.replace(spec, method=method), repeat=2
        )
        versions = ", ".join(f"{k} {v.split('+')[0]}" for k, v in told["versions"].items())
        restore(model, dict(weights))
        start = time.perf_counter()
        plain_losses(model, blocks)
        return told["seconds"][-1] + time.perf_counter() - start

    def both(order: tuple) -> dict:
        seconds = {}
        for side in order:
            seconds[side] = side()
            restore(model, before)
        return seconds

    both((ours, ours))  # compilation
    for i in range(rounds):
        seconds = both((ours, peer) if i % 2 == 0 else (peer, ours))
        took.append((seconds[ours], seconds[peer]))
    return took, versions


def main() -> None:
    rounds = common.rounds(__doc__, 3)
    transformers.utils.logging.disable_progress_bar()
    params = common.mini()
    vocab_size, c = params.corpus.vocab_size, params.measure.calibration
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(vocab_size, size=(c.sequences, c.length)))
    for config, tokens in (
        (params.studies["token_budgets"].model, params.measure.evaluation.tokens),
        (WIDE, 16384),
    ):
        blocks = rng.integers(vocab_size, size=(tokens // c.length, c.length + 1))
        model = neox.build(config, vocab_size, seed=0).eval().requires_grad_(False)
        for method in PEERS:
            if lacking := backends.missing(method):
                print(f"left out: {lacking}")
                continue
            took, versions = race(method, model, ids, blocks, rounds)
            ours, peer = (statistics.median(t) for t in zip(*took, strict=True))
            ratios = [p / o for o, p in took]
            ratio = statistics.median(ratios)
            name = (
                f"GPTQ at 4 bit and evaluation on {tokens:,} tokens, against {method}, seconds, "
                f"width {config.width}, {config.layers} layers"
            )
            print(
                f"{name}: {ours:.2f} against {peer:.2f}, ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
            common.record(name, ours, peer, ratio, f"{versions}; GPTNeoX forward in float32")


if __name__ == "__main__":
    main()
