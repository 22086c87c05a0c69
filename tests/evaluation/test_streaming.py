"""Block by block from disk against the whole model in memory: weights, losses, memory, bad checkpoints."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import toy
from architectures import CONTEXT, FAMILIES, SIZE, VOCABULARY
from safetensors.torch import load_file, save_file
from test_architectures import (
    calibration,
    checkpoint,
    evaluation,
    trained,
)
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.evaluation import streaming
from ptq_dynamics.evaluation.losses import sequence_losses
from ptq_dynamics.evaluation.streaming import INDEX, RECIPE, SINGLE, stream_measure
from ptq_dynamics.models import neox
from ptq_dynamics.quantization import quantizer
from ptq_dynamics.quantization.quantizer import quantize, restore, snapshot
from ptq_dynamics.quantization.spec import QuantSpec
from ptq_dynamics.trajectories.checkpoints import load_model

GPTQ = QuantSpec(bits=3, group_size=16)
RTN = QuantSpec(method="rtn", bits=3, group_size=16)
SPECS = [QuantSpec(bits=b, group_size=16, act_order=a) for b in (3, 4) for a in (False, True)] + [RTN]
LAYOUTS = {  # tied, sharded, dtype of the files, precision of the evaluation
    "untied, one file, fp32": (False, False, torch.float32, "fp32"),
    "tied, sharded, bf16": (True, True, torch.bfloat16, "bf16"),
    "tied, one file, bf16": (True, False, torch.bfloat16, "fp32"),
    "untied, sharded, fp32": (False, True, torch.float32, "bf16"),
}


def written(
    folder: Path, family: str = "llama", tied: bool = False, sharded: bool = False, **options
) -> Path:
    """A trained model as transformers writes it."""
    trained(family, tied, **options).save_pretrained(folder, max_shard_size="9KB" if sharded else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 3) == sharded
    return folder


def one_weight_file(folder: Path, change) -> Path:
    """A written checkpoint with its tensors changed."""
    written(folder)
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """As they are stored."""
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_model_in_memory_bit_for_bit(family, layout, tmp_path, monkeypatch):
    tied, sharded, dtype, precision = LAYOUTS[layout]
    folder = written(tmp_path / "source", family, tied, sharded, dtype=dtype)
    out = {spec: tmp_path / spec.label for spec in SPECS}
    streamed = stream_measure(
        folder, SPECS, calibration=calibration(), evaluation=evaluation(), precision=precision, save=out
    )

    # the lean pass of GPTNeoX, which rounds otherwise, has a test of its own
    monkeypatch.setattr(neox, "supports", lambda model: False)
    model = load_model(checkpoint(folder))
    before = snapshot(model)
    assert np.array_equal(streamed.losses, sequence_losses(model, evaluation(), precision=precision))
    assert streamed.parameters == sum(p.numel() for p in model.parameters())
    norm = sum(w.double().square().sum() for w in before.values()).sqrt().item()
    assert streamed.weight_norm == pytest.approx(norm, rel=1e-12)
    assert list(streamed.quantized) == list(streamed.quantized_losses) == SPECS
    for spec in SPECS:
        done = quantize(model, None if spec.method == "rtn" else calibration(), spec)
        assert streamed.quantized[spec].layers == done.layers
        losses = sequence_losses(model, evaluation(), precision=precision)
        assert np.array_equal(streamed.quantized_losses[spec], losses)
        saved = load_model(checkpoint(out[spec]))
        assert type(saved) is type(model) and saved.config.tie_word_embeddings == tied
        for (name, ours), theirs in zip(saved.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), name
        restore(model, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_throughout(family, tmp_path):
    """Weights held, calibrated and quantized in bfloat16, as ``load_model(…, torch.bfloat16)`` gives them."""
    folder = written(tmp_path / "source", family, dtype=torch.bfloat16)
    streamed = stream_measure(
        folder, [GPTQ], calibration=calibration(), dtype=torch.bfloat16, save={GPTQ: tmp_path / "out"}
    )
    assert streamed.losses is None and not streamed.quantized_losses
    model = load_model(checkpoint(folder), torch.bfloat16)
    assert quantize(model, calibration(), GPTQ).layers == streamed.quantized[GPTQ].layers
    saved = load_model(checkpoint(tmp_path / "out"), torch.bfloat16).state_dict()
    assert all(torch.equal(saved[n], t) for n, t in model.state_dict().items())
    assert {t.dtype for t in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}


@pytest.mark.parametrize(("precision", "rounding"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_gpt_neox_differs_from_the_lean_pass_by_rounding(precision, rounding, tmp_path):
    folder = written(tmp_path, "gpt_neox")
    streamed = stream_measure(
        folder, [GPTQ], calibration=calibration(), evaluation=evaluation(), precision=precision
    )
    model = load_model(checkpoint(folder))
    assert neox.supports(model)
    np.testing.assert_allclose(
        streamed.losses, sequence_losses(model, evaluation(), precision=precision), rtol=rounding
    )
    quantize(model, calibration(), GPTQ)
    lean = sequence_losses(model, evaluation(), precision=precision)
    np.testing.assert_allclose(streamed.quantized_losses[GPTQ], lean, rtol=rounding)


def test_padded_calibration_and_activations_on_disk(tmp_path):
    folder, spill = written(tmp_path / "source", "smollm3"), tmp_path / "spill"
    mask = torch.ones(len(calibration()), CONTEXT, dtype=torch.int64)
    mask[::2, :7] = 0
    options = dict(calibration=calibration(), attention_mask=mask, evaluation=evaluation(), batch_size=5)
    model = load_model(checkpoint(folder))
    done = quantize(model, calibration(), GPTQ, attention_mask=mask, batch_size=5)
    mapped = []
    real = torch.from_file
    with mock.patch.object(torch, "from_file", lambda *a, **k: mapped.append(real(*a, **k)) or mapped[-1]):
        on_disk = stream_measure(folder, [GPTQ, RTN], **options, spill=spill)
    in_memory = stream_measure(folder, [GPTQ, RTN], **options)
    assert done.layers == on_disk.quantized[GPTQ].layers == in_memory.quantized[GPTQ].layers
    assert np.array_equal(on_disk.losses, in_memory.losses)
    for spec in (GPTQ, RTN):
        assert np.array_equal(on_disk.quantized_losses[spec], in_memory.quantized_losses[spec])
    tokens = [12 * CONTEXT] + 3 * [19 * (CONTEXT - 1)]  # calibration for GPTQ, evaluation for all three
    assert sorted(t.numel() for t in mapped) == sorted(n * SIZE["hidden_size"] for n in tokens)
    assert list(spill.iterdir()) == []


def test_never_more_than_one_block_in_memory(tmp_path):
    folder, most = written(tmp_path / "source", "llama", tied=True), []
    real = streaming._Weights.fill

    def fill(self, *args):
        real(self, *args)
        _, blocks = quantizer.decoder_blocks(self.model)
        here = [any(not p.is_meta for p in block.parameters()) for block in blocks]
        stem = [n for n, p in self.model.named_parameters() if ".layers." not in n and not p.is_meta]
        most.append((sum(here), any(here) and bool(stem)))

    with mock.patch.object(streaming._Weights, "fill", fill):
        stream_measure(
            folder,
            [GPTQ, RTN],
            calibration=calibration(),
            evaluation=evaluation(),
            save={RTN: tmp_path / "o"},
        )
    assert max(most) == (1, False)  # nor anything else beside a block


def test_a_saved_model_is_a_normal_checkpoint(tmp_path):
    folder, out = written(tmp_path / "source", "gpt_neox"), tmp_path / "out"
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("of the source")
    result = stream_measure(folder, [GPTQ, RTN], calibration=calibration(), save={RTN: out})
    assert set(result.quantized) == {GPTQ, RTN}
    shards = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(f.name for f in out.iterdir()) == sorted(
        ["config.json", "generation_config.json", "tokenizer.json", INDEX, RECIPE, *shards]
    )
    source, ours = tensors_of(folder), tensors_of(out)
    assert "embed_out.weight" in source  # a name that transformers 5 reads under another
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in source.items()}
    index = json.loads((out / INDEX).read_text())
    assert index["weight_map"] == {n: s for s in shards for n in load_file(out / s)}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in ours.values())
    told = json.loads((out / RECIPE).read_text())
    assert told["source"] == "source" and told["spec"]["method"] == "rtn" and told["spec"]["bits"] == 3
    theirs = AutoModelForCausalLM.from_pretrained(out)
    model = load_model(checkpoint(folder))
    quantize(model, None, RTN)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in theirs.state_dict().items())


def differing_head(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.5


def without_embedding(tensors):
    del tensors["model.embed_tokens.weight"]


def without_base_prefix(tensors):
    for name in [n for n in tensors if n.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def with_old_frequencies(tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


@pytest.mark.parametrize(
    ("change", "tied"),
    [(differing_head, True), (without_embedding, True), (without_base_prefix, False), (with_old_frequencies, False)],
)  # fmt: skip
def test_odd_checkpoints_are_read_as_transformers_reads_them(change, tied, tmp_path):
    folder = one_weight_file(tmp_path, change)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    model = load_model(checkpoint(folder))
    streamed = stream_measure(folder, [], evaluation=evaluation(), precision="fp32")
    assert np.array_equal(streamed.losses, sequence_losses(model, evaluation(), precision="fp32"))
    assert streamed.parameters == sum(p.numel() for p in model.parameters())


# --- bad input ---

DOWN, HEAD = "model.layers.1.mlp.down_proj.weight", "lm_head.weight"


def not_finite(name):
    def change(tensors):
        tensors[name][0, 0] = torch.nan

    return lambda folder: one_weight_file(folder, change)


def lacking(name):
    return lambda folder: one_weight_file(folder, lambda tensors: tensors.pop(name))


def reshaped(folder):
    def change(tensors):
        tensors[DOWN] = tensors[DOWN].T.contiguous()

    return one_weight_file(folder, change)


def lacking_a_shard(folder):
    sorted(written(folder, sharded=True).glob("*.safetensors"))[3].unlink()
    return folder


def truncated(folder):
    file = written(folder) / SINGLE
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def pickled(folder):
    (written(folder) / SINGLE).rename(folder / "pytorch_model.bin")
    return folder


def broken_index(folder):
    (written(folder, sharded=True) / INDEX).write_text('{"weights": {}}')
    return folder


def quantized_already(folder):
    config = json.loads((written(folder) / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
    )
    return folder


def without_linears(folder):
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def experts(folder):
    config = MixtralConfig(**SIZE, num_key_value_heads=2, num_local_experts=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def no_decoder(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "t5"}')
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (not_finite(DOWN), f"{{}}: parameter '{DOWN}' is not finite; the checkpoint is unusable"),
        (not_finite(HEAD), f"{{}}: parameter '{HEAD}' is not finite; the checkpoint is unusable"),
        (lacking(DOWN), f"{{}}: the weights lack parameter '{DOWN}'; the checkpoint is unusable"),
        (lacking(HEAD), f"{{}}: the weights lack parameter '{HEAD}'; the checkpoint is unusable"),
        (reshaped, f"{{}}/{SINGLE}: '{DOWN}' has shape (48, 32), but the model of config.json needs (32, 48)"),
        (lacking_a_shard, "{}/model-00004-of-"),
        (truncated, f"{{}}/{SINGLE}: not a readable safetensors file"),
        (pickled, "{}: holds no safetensors weights"),
        (broken_index, f"{{}}/{INDEX}: names no weight files"),
        (quantized_already, "{}: its weights are quantized already; name the original checkpoint"),
        (without_linears, "{}: cannot be streamed block by block; GPT2LMHeadModel: no list of blocks"),
        (experts, "{}/model.safetensors: transformers builds 'model.layers.0.mlp.experts.gate_up_proj' from several"),
        (no_decoder, "{}: cannot be built as a causal language model (Unrecognized configuration class"),
        (lambda folder: folder, "{}: cannot be built as a causal language model ("),
    ],
)  # fmt: skip
def test_a_bad_checkpoint_is_one_line_and_leaves_nothing(make, says, tmp_path):
    folder = make(tmp_path / "source")
    with pytest.raises(UserError) as e:
        stream_measure(
            folder, [GPTQ], calibration=calibration(), evaluation=evaluation(), spill=tmp_path / "spill",
            save={GPTQ: tmp_path / "out"},
        )  # fmt: skip
    assert str(e.value).startswith(says.format(folder)) and "\n" not in str(e.value)
    assert not [f for f in tmp_path.rglob("*") if folder not in (f, *f.parents) and f.name != "spill"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(calibration=None), "calibration: GPTQ needs token ids"),
        (dict(evaluation=evaluation()[:0]), "evaluation: no block of text"),
        (
            dict(evaluation=evaluation() + 1),
            "evaluation: token id 97 is outside the model's vocabulary of 97",
        ),
        (dict(save={RTN: Path("out")}), "save: rtn-3bit-g16 is not among the quantizers"),
    ],
)
def test_texts_that_do_not_fit(options, says, tmp_path):
    assert evaluation().max() == VOCABULARY - 1
    folder = written(tmp_path)
    with pytest.raises(UserError) as e:
        stream_measure(folder, [GPTQ], **(dict(calibration=calibration(), evaluation=evaluation()) | options))
    assert str(e.value).startswith(says) and "\n" not in str(e.value)


def test_no_room_for_activations(tmp_path):
    folder = written(tmp_path / "source")
    with mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device")):
        with pytest.raises(UserError, match=r"spill: no room for 0\.0 GB of activations \(No space left"):
            stream_measure(folder, [], evaluation=evaluation(), spill=tmp_path / "spill")
    assert list((tmp_path / "spill").iterdir()) == []


# --- memory ---


class _EnoughSeen(Exception):
    pass


def _by_stream(folder: Path, ids: torch.Tensor, blocks: np.ndarray) -> None:
    stream_measure(
        folder, [QuantSpec(bits=4, group_size=64)], calibration=ids, evaluation=blocks, precision="bf16"
    )


def _in_memory(folder: Path, ids: torch.Tensor, blocks: np.ndarray) -> None:
    """What measuring does, up to the first quantized block: its peak is at least that of the whole."""
    model = load_model(checkpoint(folder))
    sequence_losses(model, blocks, precision="bf16")
    before = snapshot(model)
    real = quantizer.quantize_block

    def first(*args, **kwargs):
        real(*args, **kwargs)
        raise _EnoughSeen

    try:
        with mock.patch.object(quantizer, "quantize_block", first):
            quantize(model, ids, QuantSpec(bits=4, group_size=64))
    except _EnoughSeen:
        restore(model, before)


def _write_peak(measure, small: Path, large: Path, out: Path) -> None:
    """In a process of its own: the most memory that ``measure`` takes beyond what imports and a first call take."""
    torch.set_num_threads(1)
    status = Path("/proc/self/status")

    def kib(key: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(key))

    ids = torch.randint(VOCABULARY, (4, CONTEXT), generator=torch.Generator().manual_seed(0))
    measure(small, ids, ids.numpy())
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = kib("VmRSS")
    measure(large, ids, ids.numpy())
    out.write_text(str((kib("VmHWM") - before) * 1024))


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from Linux's /proc")
def test_peak_memory_is_under_a_third(tmp_path):
    config = LlamaConfig(
        **SIZE | dict(hidden_size=512, intermediate_size=1376, num_hidden_layers=12, num_attention_heads=8)
    )
    peaks = {}
    with tempfile.TemporaryDirectory(dir=tmp_path) as large:  # not kept with the other files of tests
        AutoModelForCausalLM.from_config(config).save_pretrained(large)
        weights = (Path(large) / SINGLE).stat().st_size
        small = written(tmp_path / "small")
        for measure in (_by_stream, _in_memory):
            process = toy.process(_write_peak, measure, small, Path(large), tmp_path / measure.__name__)
            process.join(120)
            assert process.exitcode == 0
            peaks[measure] = int((tmp_path / measure.__name__).read_text())
    assert peaks[_in_memory] > weights
    assert peaks[_by_stream] < peaks[_in_memory] / 3
