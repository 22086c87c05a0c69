"""Training throughput: our update against a plain float32 loop over transformers' GPTNeoX.

Same model, same batch, one thread each, in turns. The peer is what one writes first: the model with its
default attention, cross-entropy, backward, clipping, AdamW. Prints and records tokens per second.

    python benchmarks/training.py [--rounds 15]
"""

from __future__ import annotations

from collections.abc import Callable

import common
import torch
import torch.nn.functional as F
import transformers

from ptq_dynamics.core import devices
from ptq_dynamics.models import neox
from ptq_dynamics.models.neox import ModelConfig
from ptq_dynamics.training.step import Learner, OptimizerConfig

LR = 1e-3
CALLS = 10  # updates per timing


def batch(config: ModelConfig, vocab_size: int, sequences: int) -> torch.Tensor:
    """Random ids ``[sequences, context + 1]``, the same on both sides."""
    return torch.randint(
        vocab_size, (sequences, config.context + 1), generator=torch.Generator().manual_seed(0)
    )


def ours(config: ModelConfig, vocab_size: int, sequences: int) -> Callable[[], float]:
    """Our update, as the training loop calls it; returns the loss."""
    tokens = batch(config, vocab_size, sequences)
    model = neox.build(config, vocab_size, seed=0)
    learner = Learner(model, OptimizerConfig(), common.PRECISION, compiled=neox.can_compile())
    return lambda: learner.update(tokens, LR, sequences)[0].item()


def peer(config: ModelConfig, vocab_size: int, sequences: int) -> Callable[[], float]:
    """The plain loop's update; returns the loss."""
    tokens = batch(config, vocab_size, sequences)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    model = neox.build(config, vocab_size, seed=0)
    o = OptimizerConfig()
    optimizer = torch.optim.AdamW(
        model.parameters(), LR, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
    )

    def update() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
        return loss.item()

    return update


def peer_keeping_memory(config: ModelConfig, vocab_size: int, sequences: int) -> Callable[[], float]:
    """The plain loop with our allocator setting, which is part of what makes ours faster."""
    devices.keep_freed_memory()
    return peer(config, vocab_size, sequences)


def measure(
    config: ModelConfig, vocab_size: int, sequences: int, rounds: int, other: common.Make, note: str = ""
) -> None:
    """Compare, print and record one size."""
    result = common.compare(ours, other, (config, vocab_size, sequences), rounds, CALLS)
    a, b = result.first
    if abs(a - b) > 0.02:
        raise SystemExit(f"the two sides train different models: first losses {a} and {b}")
    per_call = sequences * config.context
    name = f"training, tokens/s, width {config.width}, {config.layers} layers{note}"
    print(
        f"{name}: {per_call / result.ours:,.0f} against {per_call / result.peer:,.0f}, "
        f"ratio {result.ratio:.2f} ({result.lowest:.2f} to {result.highest:.2f})",
        flush=True,
    )
    common.record(
        name, per_call / result.ours, per_call / result.peer, result.ratio,
        f"transformers {transformers.__version__} GPTNeoX, float32, default attention, torch AdamW",
    )  # fmt: skip


def main() -> None:
    rounds = common.rounds(__doc__, 15)
    params = common.mini()
    study = params.studies["token_budgets"]
    sizes = [study.model, ModelConfig(width=64, layers=3, heads=2, context=128)]
    sizes += [ModelConfig(width=128, layers=3, heads=4, context=128)]
    for config in sizes:
        measure(config, params.corpus.vocab_size, study.sequences, rounds, peer)
    note = ", the peer keeps freed memory too"
    measure(study.model, params.corpus.vocab_size, study.sequences, rounds, peer_keeping_memory, note)


if __name__ == "__main__":
    main()
