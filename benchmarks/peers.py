"""GPTQ and evaluation the way that a tool's own documentation shows; run by quantizers.py in the tool's environment.

    python benchmarks/peers.py gptqmodel|llmcompressor FOLDER

FOLDER holds a checkpoint in ``source`` and ``ids.safetensors`` with calibration ids ``[sequences, length]`` and evaluation
blocks ``[n, length + 1]``. Does all twice in one process, since the first pays for imports and kernels, and prints
the seconds of the second as JSON.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

BATCH = 16


@torch.inference_mode()
def evaluate(model: torch.nn.Module, blocks: torch.Tensor) -> float:
    """Mean cross-entropy through the tool's model, nats per token."""
    total = 0.0
    for tokens in blocks.split(BATCH):
        logits = model(tokens[:, :-1]).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
    return total / blocks[:, 1:].numel()


def gptqmodel(folder: pathlib.Path, ids: torch.Tensor) -> torch.nn.Module:
    """Load, quantize, save, and load the quantized model."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=4, group_size=64, act_group_aware=False, device="cpu", offload_to_disk=False)
    model = GPTQModel.load(str(folder / "source"), config, dtype=torch.float32)
    rows = [{"input_ids": r.tolist(), "attention_mask": [1] * len(r)} for r in ids]
    model.quantize(rows, batch_size=BATCH)
    model.save(str(folder / "quantized"))
    return GPTQModel.load(str(folder / "quantized"), device="cpu", backend=BACKEND.GPTQ_TORCH).model


def llmcompressor(folder: pathlib.Path, ids: torch.Tensor) -> torch.nn.Module:
    """Load and quantize; its model rounds in memory."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "source", dtype=torch.float32).eval()
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=64)
    modifier = GPTQModifier(
        dampening_frac=0.01, actorder=None, ignore=["lm_head", "embed_out"],
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
    )  # fmt: skip
    batches = [{"input_ids": b, "attention_mask": torch.ones_like(b)} for b in ids.split(BATCH)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    oneshot(model=model, dataset=loader, recipe=modifier, pipeline="sequential")
    return model


def main() -> None:
    tool, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    torch.set_num_threads(1)
    given = load_file(folder / "ids.safetensors")
    for _ in range(2):
        start = time.perf_counter()
        model = {"gptqmodel": gptqmodel, "llmcompressor": llmcompressor}[tool](folder, given["calibration"])
        quantized = time.perf_counter()
        loss = evaluate(model, given["blocks"])
        done = time.perf_counter()
    package = __import__(tool)
    versions = f"{tool} {package.__version__}, transformers {transformers.__version__}"
    told = {
        "quantize": quantized - start,
        "evaluate": done - quantized,
        "loss": loss,
        "versions": versions,
    }
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
