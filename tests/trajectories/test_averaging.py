"""Averages against a float64 oracle on real checkpoints; selections against hand counts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.trajectories import averaging
from ptq_dynamics.trajectories import checkpoints as checkpoints_module
from ptq_dynamics.trajectories.averaging import (
    average,
    ema,
    ema_weights,
    lawa,
    lawa_indices,
    soup,
    soup_of_lawas,
)

torch.set_num_threads(1)

TINY = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ARCHITECTURES = ["GPTNeoX", "Llama", "Olmo2", "SmolLM3", "Apertus"]
MODELS = {}


def make(architecture: str, **more) -> transformers.PreTrainedModel:
    """A tiny model; one per architecture, its weights are drawn anew by ``save``."""
    key = (architecture, *sorted(more.items()))
    if key not in MODELS:
        config = getattr(transformers, f"{architecture}Config")(**{**TINY, **more})
        MODELS[key] = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    return MODELS[key]


def save(folder, model, seed: int, dtype=torch.float32, **options):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    was = model.dtype
    model.to(dtype).save_pretrained(folder, **options)
    model.to(was)
    return folder


def checkpoints(tmp_path, n, architecture="GPTNeoX", dtype=torch.float32, **more):
    model = make(architecture, **more)
    return [save(tmp_path / f"step{k}", model, k, dtype) for k in range(n)]


def read(folder) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def mean64(folders, weights=None) -> dict[str, torch.Tensor]:
    """The oracle: everything in memory, in float64."""
    weights = weights or [1 / len(folders)] * len(folders)
    members = [read(f) for f in folders]
    return {k: sum(w * m[k].double() for w, m in zip(weights, members, strict=True)) for k in members[0]}


def close(folder, oracle, rtol=3e-7, atol=3e-8):
    found = read(folder)
    assert found.keys() == oracle.keys()
    for name, value in oracle.items():
        torch.testing.assert_close(found[name].double(), value, rtol=rtol, atol=atol)


def test_lawa_indices_by_hand():
    assert lawa_indices(10, 3) == [7, 8, 9]
    assert lawa_indices(10, 3, 2) == [5, 7, 9]
    assert lawa_indices(10, 4, 3) == [0, 3, 6, 9]
    assert lawa_indices(5, 1, 4) == [4]
    assert lawa_indices(5, 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("n", "window", "interval"), [(4, 5, 1), (9, 4, 3), (0, 1, 1), (5, 0, 1), (5, 2, 0)])
def test_lawa_that_does_not_fit_is_refused(n, window, interval):
    with pytest.raises(UserError, match="LAWA: window"):
        lawa_indices(n, window, interval)


def test_ema_weights_are_the_recursion_written_out():
    assert ema_weights(1, 0.9) == [1.0]
    assert ema_weights(3, 0.5) == [0.25, 0.25, 0.5]
    values, decay = [3.0, -1.0, 2.0, 7.0, 0.5], 0.8
    mean = values[0]
    for v in values[1:]:
        mean = decay * mean + (1 - decay) * v
    weights = ema_weights(5, decay)
    assert sum(w * v for w, v in zip(weights, values, strict=True)) == pytest.approx(mean, rel=1e-12)
    assert sum(weights) == pytest.approx(1, rel=1e-12)
    with pytest.raises(UserError, match="decay in"):
        ema_weights(3, 1.0)


@pytest.mark.parametrize("accumulate", [torch.float32, torch.float64])
def test_a_hundred_bf16_checkpoints_equal_the_float64_mean_to_bf16_rounding(tmp_path, accumulate):
    folders = checkpoints(tmp_path, 100, dtype=torch.bfloat16, num_hidden_layers=1)
    out = average(folders, tmp_path / "out", accumulate=accumulate)
    oracle, found = mean64(folders), read(out)
    assert found.keys() == oracle.keys()
    for name, value in oracle.items():
        assert found[name].dtype == torch.bfloat16
        rounded = value.to(torch.bfloat16)
        if accumulate == torch.float64:
            assert torch.equal(found[name], rounded)
        # half a unit in the last place: the nearest bf16 number, or a tie that float32 cannot tell
        half = torch.exp2(torch.floor(torch.log2(value.abs().clamp_min(1e-30)))) * 2.0**-8
        assert ((found[name].double() - value).abs() <= half * 1.0001).all()
        assert (found[name] != rounded).float().mean() < 1e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_average_is_a_normal_checkpoint_of_its_architecture(tmp_path, architecture):
    folders = checkpoints(tmp_path, 3, architecture)
    (folders[-1] / "tokenizer.json").write_text("{}")
    (folders[-1] / "optimizer.pt").write_bytes(b"state")
    out = lawa(folders, tmp_path / "out", window=2)
    oracle = mean64(folders[1:])
    close(out, oracle)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, value in loaded.state_dict().items():
        if name in oracle:
            torch.testing.assert_close(value.double(), oracle[name], rtol=3e-7, atol=3e-8)
    assert (out / "tokenizer.json").exists() and not (out / "optimizer.pt").exists()
    recipe = json.loads((out / "average.json").read_text())
    assert recipe["kind"] == "lawa" and recipe["window"] == 2 and recipe["interval"] == 1
    assert recipe["members"] == ["step1", "step2"] and recipe["weights"] == [0.5, 0.5]


@pytest.mark.parametrize("architecture", ["Llama", "GPTNeoX"])
def test_a_tied_model_keeps_its_tie_and_its_embedding_is_averaged_once(tmp_path, architecture):
    folders = checkpoints(tmp_path, 3, architecture, tie_word_embeddings=True)
    oracle = mean64(folders)
    # one member stores the tied head all the same, as some converters do
    head = "lm_head.weight" if architecture == "Llama" else "embed_out.weight"
    embedding = next(n for n in oracle if "embed" in n)
    stored = read(folders[1])
    save_file(
        {**stored, head: stored[embedding].clone()},
        folders[1] / "model.safetensors",
        metadata={"format": "pt"},
    )
    out = soup(folders, tmp_path / "out")
    close(out, oracle)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    torch.testing.assert_close(
        loaded.get_output_embeddings().weight.double(), oracle[embedding], rtol=3e-7, atol=3e-8
    )


def test_ema_soup_and_soup_of_lawas_are_the_weighted_means_that_they_say(tmp_path):
    folders = checkpoints(tmp_path, 6)
    close(ema(folders[:4], tmp_path / "ema", decay=0.6), mean64(folders[:4], ema_weights(4, 0.6)))
    close(soup(folders[:2], tmp_path / "soup", weights=[9, 1]), mean64(folders[:2], [0.9, 0.1]))
    out = soup_of_lawas([folders[:3], folders[3:]], tmp_path / "sol", window=2, interval=2, weights=[3, 1])
    close(out, mean64([folders[i] for i in (0, 2, 3, 5)], [0.375, 0.375, 0.125, 0.125]))
    assert json.loads((out / "average.json").read_text())["runs"] == 2


def test_averaging_shards_keeps_the_layout_and_mixes_with_single_files(tmp_path):
    model = make("Llama")
    folders = [save(tmp_path / "a", model, 0), save(tmp_path / "b", model, 1, max_shard_size="8KB")]
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 2
    out = average(folders, tmp_path / "out")
    close(out, mean64(folders))
    assert {p.name for p in out.glob("model*")} == {p.name for p in folders[1].glob("model*")}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.numel() * 4 for v in read(out).values())
    assert not transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)[1][
        "missing_keys"
    ]


def test_pickled_weights_are_read_and_written_as_safetensors(tmp_path):
    folders = checkpoints(tmp_path, 2)
    oracle = mean64(folders)
    for f in folders:
        torch.save(read(f), f / "pytorch_model.bin")
        (f / "model.safetensors").unlink()
    out = average(folders, tmp_path / "out")
    close(out, oracle)
    assert [p.name for p in out.glob("*.bin")] == []


def test_integers_are_taken_from_the_last_checkpoint(tmp_path):
    folders = checkpoints(tmp_path, 3)
    for k, f in enumerate(folders):
        counts = {"seen": torch.tensor([k, 10 * k]), "mask": torch.tensor([k == 2, k == 0])}
        save_file({**read(f), **counts}, f / "model.safetensors", metadata={"format": "pt"})
    found = read(average(folders, tmp_path / "out"))
    assert found["seen"].tolist() == [2, 20] and found["mask"].tolist() == [True, False]


def test_the_written_dtype_can_be_wider_than_the_members(tmp_path):
    folders = checkpoints(tmp_path, 3, dtype=torch.bfloat16)
    out = average(folders, tmp_path / "out", dtype=torch.float32)
    close(out, mean64(folders))
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32


def test_the_average_of_our_own_checkpoints_is_one_of_them(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    folders = []
    for k in range(3):
        model = make("GPTNeoX")
        with torch.no_grad():
            model.gpt_neox.embed_in.weight.fill_(float(k))
        folders.append(tmp_path / f"own{k}")
        state = {"momentum": torch.ones(4)}
        where = dict(tokens=100 * k, step=k, lr=1e-3, phase="stable", parent=None)
        checkpoints_module.save(folders[-1], model, tokenizer, state=state, **where)
    out = lawa(folders, tmp_path / "out", window=2)
    found = checkpoints_module.verify(out)
    assert (found.tokens, found.step, found.lr, found.phase) == (200, 2, None, "average")
    assert found.weights_id not in {checkpoints_module.read(f).weights_id for f in folders}
    loaded = checkpoints_module.load_model(found)
    assert (loaded.get_input_embeddings().weight == 1.5).all()
    assert not (out / checkpoints_module.STATE).exists()


def test_groups_change_nothing(tmp_path, monkeypatch):
    folders = checkpoints(tmp_path, 4)
    whole = read(average(folders, tmp_path / "whole"))
    monkeypatch.setattr(averaging, "GROUP_BYTES", 5000)
    parts = read(average(folders, tmp_path / "parts"))
    assert all(torch.equal(whole[k], parts[k]) for k in whole)


def test_memory_does_not_grow_with_the_number_of_checkpoints(tmp_path, monkeypatch):
    """At any time: one open member, accumulators of one group, and the tensors of the file being written."""
    folders = checkpoints(tmp_path, 8)
    size = sum(v.numel() * 4 for v in read(folders[0]).values())
    monkeypatch.setattr(averaging, "GROUP_BYTES", size // 4)
    opened, most = 0, 0
    real = averaging._opened

    class counting:
        def __init__(self, path):
            self.inner = real(path)

        def __enter__(self):
            nonlocal opened, most
            opened += 1
            most = max(most, opened)
            return self.inner.__enter__()

        def __exit__(self, *exc):
            nonlocal opened
            opened -= 1
            return self.inner.__exit__(*exc)

    monkeypatch.setattr(averaging, "_opened", counting)
    sums = []
    real_sum = averaging._sum
    monkeypatch.setattr(averaging, "_sum", lambda *a: sums.append(real_sum(*a)) or dict(sums[-1]))
    average(folders, tmp_path / "out")
    biggest = max(v.numel() * 4 for v in read(folders[0]).values())
    assert most == 1
    assert max(sum(v.numel() * v.element_size() for v in s.values()) for s in sums) <= max(size // 4, biggest)


PEAK = """
import gc, pathlib, sys
import torch
from ptq_dynamics.trajectories.averaging import lawa

def kib(key):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(key))

torch.set_num_threads(1)
folders = sorted(pathlib.Path(sys.argv[1]).glob("step*"))
lawa(folders[:2], folders[0].with_name("imports"), window=2)
gc.collect()
before = kib("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
lawa(folders, folders[0].with_name("out"), window=len(folders))
print(1024 * (kib("VmHWM") - before))
"""


@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="peak memory is read from Linux's /proc"
)
def test_lawa_of_fifty_checkpoints_takes_the_memory_of_two(tmp_path):
    """The process's own peak; the mini model made wide, so that its weights outweigh the interpreter's noise."""
    config = dict(hidden_size=512, intermediate_size=2048, num_attention_heads=2, vocab_size=1024)
    drawn = checkpoints(tmp_path / "drawn", 3, "GPTNeoX", **config)
    for k in range(50):
        shutil.copytree(drawn[k % 3], tmp_path / f"step{k:02d}", copy_function=os.link)
    size = (drawn[0] / "model.safetensors").stat().st_size
    run = [sys.executable, "-c", PEAK, str(tmp_path)]
    peak = int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert size > 25e6 and size < peak <= 2 * size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(intermediate_size=48), r"intermediate_size is 32 in one, 48 in the other"),
        (dict(rope_theta=5e5), r"rope.*in one"),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path, change, message):
    a = save(tmp_path / "a", make("Llama"), 0)
    b = save(tmp_path / "b", make("Llama", **change), 1)
    with pytest.raises(UserError, match=message) as e:
        average([a, b], tmp_path / "out")
    assert str(b) in str(e.value) and not (tmp_path / "out").exists()


def test_other_dtypes_shapes_and_tensors_are_refused_by_name(tmp_path):
    model = make("GPTNeoX")
    a = save(tmp_path / "a", model, 0)
    b = save(tmp_path / "b", model, 1)
    name = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"

    def changed(value):
        tensors = read(a) | {name: value}
        save_file(
            {k: v for k, v in tensors.items() if v is not None},
            b / "model.safetensors",
            metadata={"format": "pt"},
        )
        with pytest.raises(UserError) as e:
            average([a, b], tmp_path / "out")
        assert "\n" not in str(e.value)
        return str(e.value)

    value = read(a)[name]
    assert f"{name} is torch.float32 in one, torch.bfloat16 in the other" in changed(value.bfloat16())
    assert f"{name} has shape [16, 32] in one, [16, 31] in the other" in changed(value[:, 1:].contiguous())
    assert f"tensor {name} is in a only" in changed(None)


def test_bad_requests_are_told_in_one_line(tmp_path):
    folders = checkpoints(tmp_path, 2)
    out = tmp_path / "out"
    for call, message in [
        (lambda: average([], out), "at least one checkpoint"),
        (lambda: soup(folders, out, weights=[1]), "1 weights for 2 checkpoints"),
        (lambda: soup(folders, out, weights=[0, 0]), "must not all be zero"),
        (lambda: soup(folders, out, weights=[2, -1]), "must not be negative"),
        (lambda: average(folders, folders[0]), "is one of the averaged checkpoints"),
        (lambda: average(folders, out, accumulate=torch.bfloat16), "accumulate in torch.float32"),
        (lambda: average([tmp_path / "none"], out), "config.json: no such file"),
    ]:
        with pytest.raises(UserError, match=message):
            call()
    shutil.copyfile(folders[0] / "config.json", folders[1] / "config.json")
    with open(folders[1] / "model.safetensors", "r+b") as f:
        f.truncate(900)
    with pytest.raises(UserError, match=r"step1/model.safetensors: not a readable safetensors file"):
        average(folders, out)
    (folders[1] / "model.safetensors").unlink()
    with pytest.raises(UserError, match="step1: holds no weights"):
        average(folders, out)
    assert not out.exists()


def test_written_files_carry_the_format_that_transformers_asks_for(tmp_path):
    out = average(checkpoints(tmp_path, 1), tmp_path / "out")
    with safe_open(out / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}
