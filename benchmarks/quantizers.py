"""GPTQ at 4 bit and evaluation of the quantized model: our path against other tools' own, at equal options.

Ours: ``quantize`` and ``sequence_losses``, as the measuring stage calls them. The peer: what its documentation shows, in a
process of its own, its second time there (``peers.py``); the model is evaluated as the tool leaves it. Loading and, for
gptqmodel, saving count, since there is no way around them. One thread each, in turns; text is random ids. A tool that is not
installed is left out.

    python benchmarks/quantizers.py [--rounds 3]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import common
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from ptq_dynamics.evaluation.losses import sequence_losses
from ptq_dynamics.models import neox
from ptq_dynamics.quantization import backends
from ptq_dynamics.quantization.backends import subprocesses
from ptq_dynamics.quantization.quantizer import quantize, restore, snapshot
from ptq_dynamics.quantization.spec import QuantSpec

PEERS = ("gptqmodel", "llmcompressor")
WIDE = neox.ModelConfig(width=512, layers=8, heads=8, context=128)
SPEC = QuantSpec(bits=4, group_size=64)


def ours(model: transformers.PreTrainedModel, ids: torch.Tensor, blocks: np.ndarray) -> dict[str, float]:
    """Seconds of quantizing and of evaluating, and the loss; the model comes back as it was."""
    before = snapshot(model)
    start = time.perf_counter()
    quantize(model, ids, SPEC)
    quantized = time.perf_counter()
    losses = sequence_losses(model, blocks, compiled=neox.can_compile())
    done = time.perf_counter()
    restore(model, before)
    return {"quantize": quantized - start, "evaluate": done - quantized, "loss": float(losses.mean())}


def peer(tool: str, folder: Path) -> dict[str, float]:
    """The same of a tool; also its versions."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": "2"}
    command = [
        str(subprocesses.interpreter(tool)),
        str(Path(__file__).with_name("peers.py")),
        tool,
        str(folder),
    ]
    # tools leave logs where they run
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{tool}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def race(tool: str, model: transformers.PreTrainedModel, ids: torch.Tensor, blocks: np.ndarray, rounds: int) -> None:  # fmt: skip
    """Both in turns; prints and records quantizing alone and with the evaluation."""
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(Path(tmp) / "source")
        given = {"calibration": ids.contiguous(), "blocks": torch.from_numpy(blocks)}
        save_file(given, Path(tmp) / "ids.safetensors")
        ours(model, ids, blocks)  # compilation
        took = []
        for i in range(rounds):
            pair = {}
            for side in (0, 1) if i % 2 == 0 else (1, 0):
                pair[side] = peer(tool, Path(tmp)) if side else ours(model, ids, blocks)
            took.append((pair[0], pair[1]))
    if abs(took[0][0]["loss"] - took[0][1]["loss"]) > 0.02:
        raise SystemExit(f"{tool}: the losses differ: {took[0][0]['loss']:.4f} and {took[0][1]['loss']:.4f}")
    shape = f"width {model.config.hidden_size}, {model.config.num_hidden_layers} layers"
    for what, parts in (
        ("GPTQ", ("quantize",)),
        (f"GPTQ and evaluation on {blocks[:, 1:].size:,} tokens", ("quantize", "evaluate")),
    ):
        pairs = [[sum(side[p] for p in parts) for side in pair] for pair in took]
        ratios = [p / o for o, p in pairs]
        mine, theirs = (statistics.median(t) for t in zip(*pairs, strict=True))
        name = f"{what} against {tool}, seconds, {shape}"
        print(f"{name}: {mine:.2f} against {theirs:.2f}, ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip
        common.record(
            name, mine, theirs, statistics.median(ratios), f"{took[0][1]['versions']}, its own model"
        )


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
        for tool in PEERS:
            if lacking := backends.missing(tool):
                print(f"left out: {lacking}")
                continue
            race(tool, model, ids, blocks, rounds)


if __name__ == "__main__":
    main()
