"""Run llmcompressor's GPTQ on what `backends.subprocesses` left in a folder; run as a script, imports nothing of ours."""

import json
import pathlib
import sys
import time

import llmcompressor
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.torch import load_file, save_file

folder = pathlib.Path(sys.argv[1])
request = json.loads((folder / "request.json").read_text())
spec, names = request["spec"], request["names"]
torch.set_num_threads(1)

if spec["act_order"]:
    raise SystemExit(
        "llmcompressor orders columns only within groups of the original order; set act_order: false"
    )
if spec["true_sequential"]:
    raise SystemExit("llmcompressor quantizes a block's linear layers at once; set true_sequential: false")

calibration = load_file(folder / "calibration.safetensors")
ids = calibration["ids"]
row = spec["group_size"] == -1
weights = QuantizationArgs(
    num_bits=spec["bits"],
    type="int",
    symmetric=spec["symmetric"],
    strategy="channel" if row else "group",
    group_size=None if row else spec["group_size"],
)
seconds = []
for _ in range(request["repeat"]):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "source", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(ids[:1]).logits
    if (logits - calibration["logits"]).abs().max() > 1e-3 * logits.std():
        raise SystemExit("this version of transformers computes another function from the checkpoint")
    modules = dict(model.named_modules())
    if odd := [n for n in names if not row and modules[n].in_features % spec["group_size"]]:
        raise SystemExit(f"llmcompressor wants a group_size that divides {modules[odd[0]].in_features}")
    wanted = set(names)
    others = [n for n, m in modules.items() if isinstance(m, torch.nn.Linear) and n not in wanted]
    modifier = GPTQModifier(
        dampening_frac=spec["damping"],
        block_size=spec["block_size"],
        actorder=None,  # the default is its own static order
        ignore=others,
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
    )
    batches = [{"input_ids": b, "attention_mask": torch.ones_like(b)} for b in ids.split(16)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    start = time.perf_counter()
    llmcompressor.oneshot(model=model, dataset=loader, recipe=modifier, pipeline="sequential")
    seconds.append(time.perf_counter() - start)

modules = dict(model.named_modules())
save_file({n: modules[n].weight.detach().float().contiguous() for n in names}, folder / "weights.safetensors")
versions = {m.__name__: m.__version__ for m in (llmcompressor, torch, transformers)}
(folder / "done.json").write_text(json.dumps({"seconds": seconds, "versions": versions}))
