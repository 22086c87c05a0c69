"""Run gptqmodel (GPTQ, or AWQ) on what `backends.subprocesses` left in a folder; run as a script, imports nothing of ours.

AWQ scales input channels up before it rounds and folds the inverse into what comes before (norms, the linear before, the
activation). Our contract is that only the linears' weights change, so these scales are recorded as the tool applies them
and undone in the weights that are handed back: W_eff = diag(out) Q diag(1/in), the same function.
"""

import json
import pathlib
import sys
import time

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

folder = pathlib.Path(sys.argv[1])
request = json.loads((folder / "request.json").read_text())
spec, names = request["spec"], request["names"]
torch.set_num_threads(1)

# the tool wants a tokenizer, though it gets ids
fast = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
transformers.PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", pad_token="<unk>", eos_token="<unk>").save_pretrained(folder / "source")  # fmt: skip

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # noqa: E402
from gptqmodel.looper import awq_processor  # noqa: E402
from gptqmodel.models.base import BaseQModel  # noqa: E402
from gptqmodel.quantization.gptq import GPTQ  # noqa: E402

awq = spec["method"] == "awq"
common = dict(
    bits=spec["bits"],
    group_size=spec["group_size"],
    sym=spec["symmetric"],
    device="cpu",
    offload_to_disk=False,
)
if awq:
    config = dict(method="awq", format="gemm", **common)
else:
    config = dict(
        desc_act=spec["act_order"], act_group_aware=False, damp_percent=spec["damping"],
        true_sequential=spec["true_sequential"], **common,
    )  # fmt: skip

scaled: list = []  # (block, the operation before, linears, their input scales)
apply_scale = awq_processor.apply_scale


def recorded(module, scales_list, input_feat_dict=None):
    for before, layers, scales, _ in scales_list:
        scaled.append((module, before, layers, scales.detach().float().clone()))
    return apply_scale(module, scales_list, input_feat_dict=input_feat_dict)


awq_processor.apply_scale = recorded
nodes_of = BaseQModel.awq_get_modules_for_scaling


def without_gelu(self, module, input_feat, module_kwargs):
    """gptqmodel 7.6 also scales GPTNeoX's second MLP layer through the GELU before it, which makes it another function."""
    nodes = nodes_of(self, module, input_feat, module_kwargs)
    neox = self.model.config.model_type == "gpt_neox"
    return [n for n in nodes if not (neox and isinstance(n["prev_op"], torch.nn.Linear))]


BaseQModel.awq_get_modules_for_scaling = without_gelu
# its packed format knows float16 and bfloat16 alone; the weights are rounded by then
awq_processor.AWQProcessor.pack_module = lambda self, module: None

by_blocks = GPTQ.quantize
# columns per block: no option of the tool, yet it decides which weights a group's grid is fitted to
GPTQ.quantize = lambda self, blocksize=128: by_blocks(self, blocksize=spec["block_size"])

ids = load_file(folder / "calibration.safetensors")["ids"]
rows = [{"input_ids": r.tolist(), "attention_mask": [1] * len(r)} for r in ids]
# AWQ's search for scales restores the weights from a float32 copy, which on a CPU is no copy if they are float32 already
dtype = torch.float64 if awq else torch.float32
seconds = []
for _ in range(request["repeat"]):
    scaled.clear()
    model = GPTQModel.load(str(folder / "source"), QuantizeConfig(**config), dtype=dtype)
    start = time.perf_counter()
    model.quantize(rows, batch_size=16, backend=BACKEND.AWQ_TORCH if awq else BACKEND.AUTO)
    seconds.append(time.perf_counter() - start)

if awq:
    theirs = model.model.float().eval()
    modules = dict(theirs.named_modules())
    names_of = {id(m): n for n, m in modules.items()}
    with torch.inference_mode():
        weights = {n: modules[n].weight.clone() for n in names}
        for block, before, layers, scales in scaled:
            root = names_of[id(block)]
            for layer in layers:
                weights[f"{root}.{layer}"] /= scales
            if (first := f"{root}.{before}") in weights:  # the last rows were divided
                weights[first][-len(scales) :] *= scales[:, None]
        ours = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "source", dtype=torch.float32
        ).eval()
        for name, linear in ours.named_modules():
            if name in weights:
                linear.weight.copy_(weights[name])
        a, b = theirs(ids[:4]).logits, ours(ids[:4]).logits
    if (a - b).abs().max() > 1e-3 * a.std():
        raise SystemExit("the weights without scales are another function than the tool's own model")
else:
    model.save(str(folder / "quantized"))
    # the packed format keeps scales in float16; read as the default bfloat16 they would lose three more bits
    found = GPTQModel.load(
        str(folder / "quantized"), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16
    ).model
    modules = dict(found.named_modules())
    for name in names:
        modules[name].scales = modules[name].scales.float()
    weights = {n: modules[n].dequantize_weight().detach().float().T.contiguous() for n in names}
save_file({n: w.contiguous() for n, w in weights.items()}, folder / "weights.safetensors")

import gptqmodel  # noqa: E402

versions = {
    "gptqmodel": gptqmodel.__version__,
    "torch": torch.__version__,
    "transformers": transformers.__version__,
}
(folder / "done.json").write_text(
    json.dumps({"seconds": seconds, "versions": versions, "scaled": len(scaled)})
)
