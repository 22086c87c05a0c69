"""The five architectures of the published families, tiny and briefly trained: layers, losses, saved and reloaded."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import CONTEXT, FAMILIES, LAYERS, VOCABULARY
from transformers import AutoModelForCausalLM, PreTrainedModel

from ptq_dynamics.evaluation.losses import sequence_losses
from ptq_dynamics.quantization.quantizer import quantize
from ptq_dynamics.quantization.spec import QuantSpec
from ptq_dynamics.trajectories.checkpoints import Checkpoint, load_model

every = pytest.mark.parametrize("family", FAMILIES)
tied_or_not = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def text(sequences: int, length: int, seed: int) -> torch.Tensor:
    """A language to learn: mostly x → 5 x + 3 mod the vocabulary, one token in ten at random."""
    g = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCABULARY, (sequences,), generator=g)]
    for _ in range(length - 1):
        noise = torch.randint(VOCABULARY, (sequences,), generator=g)
        surprise = torch.rand(sequences, generator=g) < 0.1
        tokens.append(torch.where(surprise, noise, (5 * tokens[-1] + 3) % VOCABULARY))
    return torch.stack(tokens, dim=1)


@functools.cache
def _trained(family: str, tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family][0](tie_word_embeddings=tied)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        ids = text(16, CONTEXT, seed=step)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def trained(family: str, tied: bool, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A copy of the family's model after 60 updates, to be saved if not in float32 (buffers are cast as well)."""
    return copy.deepcopy(_trained(family, tied)).to(dtype)


def calibration() -> torch.Tensor:
    return text(12, CONTEXT, seed=1000)


def evaluation(sequences: int = 19) -> np.ndarray:
    return text(sequences, CONTEXT, seed=2000).numpy()


def checkpoint(folder: Path) -> Checkpoint:
    """A folder as a checkpoint of some trajectory."""
    return Checkpoint(
        name=folder.name, tokens=0, step=None, lr=None, phase="stable", path=folder, weights_id="0" * 64
    )


def transformers_loss(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Each sequence's loss by transformers, which shifts the labels itself."""
    rows = torch.from_numpy(tokens).split(1)
    with torch.no_grad():
        return np.array([model(row, labels=row).loss.item() for row in rows])


@tied_or_not
@every
def test_layers_of_a_trained_model(family, tied):
    _, prefix, names = FAMILIES[family]
    model, before = trained(family, tied), trained(family, tied).state_dict()
    result = quantize(model, calibration(), QuantSpec(bits=3, group_size=16))
    expected = [f"{prefix}.{i}.{n}" for i in range(LAYERS) for n in names]
    assert sorted(result.names) == sorted(expected)
    # embeddings, head, norms, biases and activations' parameters and buffers are as they were
    changed = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
    assert sorted(changed) == sorted(f"{n}.weight" for n in expected)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == tied


@tied_or_not
@every
def test_losses_are_those_of_transformers(family, tied):
    model = trained(family, tied)
    base = sequence_losses(model, evaluation(), precision="fp32")
    np.testing.assert_allclose(base, transformers_loss(model, evaluation()), rtol=2e-6)
    assert base.mean() < 0.6 * np.log(VOCABULARY)  # it has learned, so that there is something to damage
    relative = {}
    for bits in (8, 2):
        damaged = trained(family, tied)
        quantize(damaged, calibration(), QuantSpec(bits=bits, group_size=16))
        losses = sequence_losses(damaged, evaluation(), precision="fp32")
        np.testing.assert_allclose(losses, transformers_loss(damaged, evaluation()), rtol=2e-6)
        relative[bits] = losses.mean() / base.mean() - 1
    assert abs(relative[8]) < 1e-3 and relative[2] > 10 * abs(relative[8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@tied_or_not
@every
def test_saved_and_reloaded_quantized_model_has_the_same_losses(family, tied, dtype, tmp_path):
    trained(family, tied, dtype).save_pretrained(tmp_path / "source")
    model = load_model(checkpoint(tmp_path / "source"), dtype)
    base = sequence_losses(model, evaluation(), precision="fp32")
    quantize(model, calibration(), QuantSpec(bits=3, group_size=16))
    losses = sequence_losses(model, evaluation(), precision="fp32")
    model.save_pretrained(tmp_path / "quantized")
    again = load_model(checkpoint(tmp_path / "quantized"), dtype)
    assert np.array_equal(sequence_losses(again, evaluation(), precision="fp32"), losses)
    assert not np.array_equal(losses, base)
    wider = load_model(checkpoint(tmp_path / "quantized"))  # the default: float32, which holds every bfloat16
    assert np.array_equal(sequence_losses(wider, evaluation(), precision="fp32"), losses)
