from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.trajectories import checkpoints
from ptq_dynamics.trajectories.checkpoints import META, STATE, WEIGHTS

PLACE = dict(tokens=640, step=10, lr=0.01, phase="stable", parent=None)


@pytest.fixture
def saved(model, corpus, tmp_path):
    state = {"decayed.step": torch.tensor(3.0)}
    return checkpoints.save(tmp_path / "step-0000010", model, corpus / "tokenizer", **PLACE, state=state)


def change(folder, **values):
    meta = json.loads((folder / META).read_text())
    (folder / META).write_text(json.dumps({**meta, **values}))


def rewrite(folder, tensors):
    """Other weights, and a description that vouches for them."""
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    change(folder, weights_sha256=checkpoints.sha256_file(folder / WEIGHTS))


def test_saved_read_and_loaded_by_transformers(saved, model):
    assert checkpoints.verify(saved.path) == checkpoints.read(saved.path) == saved
    assert (saved.name, saved.tokens, saved.step, saved.lr, saved.phase) == (
        "step-0000010",
        640,
        10,
        0.01,
        "stable",
    )
    again = AutoModelForCausalLM.from_pretrained(saved.path)
    ids = torch.arange(12)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert {"tokenizer.json", "config.json", STATE} <= {p.name for p in saved.path.iterdir()}


def test_the_id_follows_the_weights_alone(saved, model, corpus, tmp_path):
    same = checkpoints.save(
        tmp_path / "other", model, corpus / "tokenizer", **{**PLACE, "step": 11, "lr": 0.5}
    )
    assert same.weights_id == saved.weights_id
    with torch.no_grad():
        tensors = {n: p.clone() for n, p in model.named_parameters()}
        tensors["gpt_neox.final_layer_norm.bias"][0] += 1e-3
    rewrite(same.path, tensors)
    assert checkpoints.read(same.path).weights_id != saved.weights_id


def test_loaded_for_evaluation_in_the_dtype_asked_for(saved):
    for dtype in (torch.float32, torch.bfloat16):
        loaded = checkpoints.load_model(saved, dtype)
        assert not loaded.training and all(
            p.dtype == dtype and not p.requires_grad for p in loaded.parameters()
        )


@pytest.mark.parametrize("name", [WEIGHTS, STATE])
@pytest.mark.parametrize("damage", ["cut", "gone", "one bit", "empty"])
def test_torn_files_are_named_with_the_fix(saved, name, damage):
    path = saved.path / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {"cut": data[:-7], "one bit": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[damage]
        )
    with pytest.raises(UserError) as e:
        checkpoints.verify(saved.path)
    assert str(e.value) == f"{path}: torn or changed checkpoint; delete its folder and run pretrain again"
    assert not checkpoints.is_whole(saved.path)
    with pytest.raises(UserError):
        checkpoints.load_state(saved.path)


@pytest.mark.parametrize("text", ["", "{", '{"step": 1}', '{"weights_sha256": "x"}'])
def test_broken_descriptions(saved, text):
    (saved.path / META).write_text(text)
    with pytest.raises(UserError, match=r"checkpoint\.json: .*delete the folder and run pretrain again"):
        checkpoints.read(saved.path)
    assert not checkpoints.is_whole(saved.path)


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(
        UserError, match="no such file; not a whole checkpoint: delete the folder and run pretrain again"
    ):
        checkpoints.verify(tmp_path / "nowhere")
    assert not checkpoints.is_whole(tmp_path / "nowhere")


def test_saving_replaces_and_a_failed_save_leaves_what_was(saved, model, corpus, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("killed")

    monkeypatch.setattr(checkpoints, "sha256_file", fail)
    with pytest.raises(RuntimeError):
        checkpoints.save(saved.path, model, corpus / "tokenizer", **PLACE)
    monkeypatch.undo()
    assert checkpoints.verify(saved.path) == saved
    assert [p.name for p in tmp_path.iterdir()] == [saved.name]
    again = checkpoints.save(saved.path, model, corpus / "tokenizer", **{**PLACE, "step": 12})
    assert again.step == 12 and not (saved.path / STATE).exists()  # nothing of the former one is left


def test_weights_go_into_a_model_in_place(saved, model):
    other = type(model)(model.config)
    storage = {n: p.data_ptr() for n, p in other.named_parameters()}
    checkpoints.load_weights(other, saved.path)
    theirs = dict(model.named_parameters())
    for name, p in other.named_parameters():
        assert torch.equal(p, theirs[name]) and p.data_ptr() == storage[name]


def test_weights_of_another_configuration(saved, model):
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 2})
    with pytest.raises(UserError, match="was made with another model configuration"):
        checkpoints.load_weights(type(model)(config), saved.path)


def test_a_checkpoint_without_optimizer_state(model, corpus, tmp_path):
    checkpoints.save(tmp_path / "c", model, corpus / "tokenizer", **PLACE)
    with pytest.raises(UserError, match="carries no optimizer state; branch from a checkpoint of a trunk"):
        checkpoints.load_state(tmp_path / "c")


def refused(checkpoint):
    with pytest.raises(UserError) as e:
        checkpoints.load_model(checkpoint)
    assert "\n" not in str(e.value) and str(e.value).startswith(str(checkpoint.path))
    return str(e.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(saved, value):
    tensors = load_file(saved.path / WEIGHTS)
    tensors["gpt_neox.final_layer_norm.weight"][3] = value
    rewrite(saved.path, tensors)
    assert "parameter 'gpt_neox.final_layer_norm.weight' is not finite" in refused(saved)


def test_a_missing_weight_is_not_made_up(saved):
    """transformers would draw it at random and go on with a warning."""
    tensors = load_file(saved.path / WEIGHTS)
    del tensors["gpt_neox.layers.0.mlp.dense_h_to_4h.weight"]
    rewrite(saved.path, tensors)
    assert "the weights lack parameter 'gpt_neox.layers.0.mlp.dense_h_to_4h.weight'" in refused(saved)


def test_tied_embeddings_are_not_missing(tmp_path):
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    point = checkpoints.Checkpoint("main", 0, None, None, "stable", tmp_path, "x")
    loaded = checkpoints.load_model(point)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("damage", ["cut weights", "no weights", "cut config", "no config", "other shape"])
def test_folders_that_do_not_load(saved, damage):
    weights, config = saved.path / WEIGHTS, saved.path / "config.json"
    if damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut config":
        config.write_text(config.read_text()[:50])
    elif damage == "no config":
        config.unlink()
    else:
        change_config = json.loads(config.read_text()) | {"intermediate_size": 128}
        config.write_text(json.dumps(change_config))
    assert "cannot be loaded as a causal language model" in refused(saved)
