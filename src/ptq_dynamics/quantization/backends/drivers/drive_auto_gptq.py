"""Run auto-gptq on what `backends.subprocesses` left in a folder; run as a script, imports nothing of ours.

auto-gptq 0.7.1 wants a GPU for three calls that a CPU can do without, and transformers 4.47, which knows rotary
settings and GPTNeoX's head under older names. Weights are taken as rounded, in float32, before they would be packed with float16 scales.
"""

import json
import pathlib
import sys
import time

import auto_gptq
import torch
import transformers
from auto_gptq.modeling import _base
from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP
from auto_gptq.quantization.gptq import GPTQ
from safetensors.torch import load_file, save_file

folder = pathlib.Path(sys.argv[1])
request = json.loads((folder / "request.json").read_text())
spec, names = request["spec"], request["names"]
torch.set_num_threads(1)

config_file = folder / "source" / "config.json"
config = json.loads(config_file.read_text())
if config["model_type"] not in GPTQ_CAUSAL_LM_MODEL_MAP:
    raise SystemExit(f"auto-gptq does not know models of type {config['model_type']}")
if spec["bits"] not in (2, 3, 4, 8):
    raise SystemExit(f"auto-gptq rounds to 2, 3, 4 or 8 bits, not to {spec['bits']}")
if spec["damping"] >= 1:
    raise SystemExit(f"auto-gptq wants damping below 1, not {spec['damping']}")
if rope := config.get("rope_parameters"):  # transformers 5 writes them so
    config |= {"rope_theta": rope["rope_theta"], "rotary_emb_base": rope["rope_theta"]}
    if "partial_rotary_factor" in rope:
        config |= {k: rope["partial_rotary_factor"] for k in ("partial_rotary_factor", "rotary_pct")}
    config_file.write_text(json.dumps(config))
stored = load_file(folder / "source" / "model.safetensors")
if config["model_type"] == "gpt_neox" and "lm_head.weight" in stored:  # the head's name in transformers 5
    stored["embed_out.weight"] = stored.pop("lm_head.weight")
    save_file(stored, folder / "source" / "model.safetensors", metadata={"format": "pt"})

torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_, **__: None
_base.CUDA_0 = torch.device("cpu")
_base.pack_model = lambda **_: None
fasterquant = GPTQ.fasterquant
GPTQ.fasterquant = lambda self, **options: fasterquant(self, blocksize=spec["block_size"], **options)

calibration = load_file(folder / "calibration.safetensors")
ids = calibration["ids"]
examples = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in ids]
options = _base.BaseQuantizeConfig(
    bits=spec["bits"],
    group_size=spec["group_size"],
    damp_percent=spec["damping"],
    desc_act=spec["act_order"],
    sym=spec["symmetric"],
    true_sequential=spec["true_sequential"],
)
seconds = []
for _ in range(request["repeat"]):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "source", torch_dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.seqlen = ids.shape[1]
    model.config.pad_token_id = 0  # sequences are of one length, nothing is padded
    with torch.inference_mode():
        logits = model(ids[:1]).logits
    if (logits - calibration["logits"]).abs().max() > 1e-3 * logits.std():
        raise SystemExit("transformers 4 computes another function from this checkpoint than transformers 5")
    wrapped = GPTQ_CAUSAL_LM_MODEL_MAP[config["model_type"]](model, False, options)
    start = time.perf_counter()
    wrapped.quantize(examples, batch_size=16, use_triton=False, cache_examples_on_gpu=False)
    seconds.append(time.perf_counter() - start)

modules = dict(model.named_modules())
save_file({n: modules[n].weight.detach().float().contiguous() for n in names}, folder / "weights.safetensors")
versions = {m.__name__: m.__version__ for m in (auto_gptq, torch, transformers)}
(folder / "done.json").write_text(json.dumps({"seconds": seconds, "versions": versions}))
