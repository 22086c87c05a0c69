from __future__ import annotations

import copy

import exact
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.curvature import operator
from ptq_dynamics.curvature.operator import Hessian, quantized_names
from ptq_dynamics.models import neox
from ptq_dynamics.quantization.quantizer import quantize
from ptq_dynamics.quantization.spec import QuantSpec


def close(a, b, tolerance):
    assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


def vectors(size, k, dtype=torch.float64):
    return torch.randn(size, k, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-6), ("fp32", 1e-4)])
def test_loss_gradient_and_products_are_those_of_autograd_in_float64(small, truth, precision, tolerance):
    h = Hessian(*small, precision=precision)
    loss, gradient, hessian = truth
    v = vectors(h.size, 3)
    assert h.loss() == pytest.approx(loss, rel=tolerance)
    close(h.gradient(), gradient, tolerance)
    close(h @ v, hessian @ v, tolerance)
    close(h @ v[:, 0], hessian @ v[:, 0], tolerance)
    assert (h @ v[:, 0]).shape == (h.size,) and (h @ v).dtype == h.dtype


def test_every_entry_of_the_hessian(small, truth):
    h = Hessian(*small, precision="fp64")
    close(h @ torch.eye(h.size, dtype=torch.float64), truth[2], 1e-6)


def test_restriction_to_the_quantized_matrices_is_a_block_of_the_hessian(small, truth):
    model, tokens = small
    whole, part = (
        Hessian(model, tokens),
        Hessian(model, tokens, names=quantized_names(model), precision="fp64"),
    )
    assert len(part.names) == 8 and all("layers" in n and n.endswith("weight") for n in part.names)
    of = torch.cat([torch.arange(whole.size)[whole.layout[n]] for n in part.names])
    v = vectors(part.size, 2)
    close(part @ v, truth[2][of][:, of] @ v, 1e-6)
    close(part.gradient(), truth[1][of], 1e-6)


@pytest.mark.parametrize("name", ["gpt_neox.embed_in.weight", "gpt_neox.layers.1.input_layernorm.bias"])
def test_any_single_parameter(small, truth, name):
    whole, part = Hessian(*small), Hessian(*small, names=[name], precision="fp64")
    s = whole.layout[name]
    v = vectors(part.size, 1)
    close(part @ v, truth[2][s, s] @ v, 1e-6)


def test_micro_batches_and_memory_change_nothing(small, monkeypatch):
    v = vectors(Hessian(*small).size, 2)
    wanted = Hessian(*small, precision="fp64") @ v
    h = Hessian(*small, precision="fp64", micro_batch=2)
    close(h @ v, wanted, 1e-12)
    monkeypatch.setattr(operator, "KEEP_BYTES", 0)
    tight = Hessian(*small, precision="fp64", micro_batch=2)
    close(tight @ v, wanted, 1e-12)
    assert tight._records is None and len(h._records) == 3
    close(tight.gradient(), h.gradient(), 1e-12)


def test_several_vectors_at_once_as_a_gpu_takes_them(small):
    h = Hessian(*small, precision="fp64", names=quantized_names(small[0]))
    v = vectors(h.size, 3)
    (record,) = list(h._each_record())
    h._here.in_place = False
    together = torch.vmap(lambda column: h._product(record, column))(v.T.contiguous()).T
    close(together, Hessian(*small, precision="fp64", names=h.names) @ v, 1e-12)


def test_an_odd_rotary_width_and_one_layer():
    config = neox.ModelConfig(width=12, layers=1, heads=2, context=8, mlp_ratio=1, rotary_fraction=0.5)
    model, tokens = exact.randomise(neox.build(config, exact.VOCAB, seed=0)), exact.small_tokens()
    h = Hessian(model, tokens, precision="fp64")
    loss, theta = exact.plain_loss(model, tokens)
    v = vectors(h.size, 1)[:, 0]
    _, wanted = torch.autograd.functional.hvp(loss, theta, v)
    close(h @ v, wanted, 1e-6)


def llama():
    config = LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=11, max_position_embeddings=16, tie_word_embeddings=True, pad_token_id=None, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def test_another_architecture_with_attention_that_has_no_second_derivative(small):
    model, tokens = llama().train(), small[1]
    before = {n: p.clone() for n, p in model.named_parameters()}
    h = Hessian(model, tokens, precision="fp64")
    v = vectors(h.size, 2)
    with pytest.warns(
        UserWarning, match="attention 'sdpa' has no second derivative everywhere; computed with 'eager'"
    ):
        products = h @ v
    assert model.training and model.config._attn_implementation == "sdpa"
    assert all(torch.equal(before[n], p) and p.requires_grad for n, p in model.named_parameters())

    plain = copy.deepcopy(model).double().eval()
    plain.set_attn_implementation("eager")
    params = list(plain.parameters())
    logits = plain(tokens[:, :-1]).logits
    gradient = torch.autograd.grad(
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), params, create_graph=True
    )
    flat = torch.cat([g.flatten() for g in gradient])
    for i in range(2):
        wanted = torch.autograd.grad(flat, params, v[:, i], retain_graph=True)
        close(products[:, i], torch.cat([w.flatten() for w in wanted]), 1e-5)
    with pytest.warns(UserWarning):
        close(h.gradient(), flat, 1e-5)


def test_a_quantization_step(small):
    model, tokens = small
    h = Hessian(model, tokens)
    other = copy.deepcopy(model)
    quantize(other, None, QuantSpec(method="rtn", bits=3, group_size=8))
    delta = h.flat(other) - h.theta
    assert h.loss(delta) == pytest.approx(Hessian(other, tokens).loss(), abs=1e-6)
    assert h.loss(delta) != pytest.approx(h.loss(), abs=1e-4)
    moved = {n for n, d in h.named(delta).items() if d.abs().max() > 0}
    assert moved == set(quantized_names(model))
    assert torch.equal(h.flat(h.named(h.theta)), h.theta)

    h.gradient()
    h.set_weights(other)
    close(h.gradient(), Hessian(other, tokens).gradient(), 1e-6)


def test_the_model_may_change_afterwards(small):
    model, tokens = copy.deepcopy(small[0]), small[1]
    h = Hessian(model, tokens)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert h.loss() == Hessian(*small).loss()


def test_tokens_of_numpy(small):
    model, tokens = small
    assert Hessian(model, tokens.numpy().astype(np.int64)).loss() == Hessian(model, tokens).loss()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(small, truth):
    h = Hessian(copy.deepcopy(small[0]).cuda(), small[1], precision="fp64")
    v = vectors(h.size, 3)
    close((h @ v).cpu(), truth[2] @ v, 1e-6)
    assert h.loss() == pytest.approx(truth[0], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(0, 9, dtype=torch.long)}, "no next token to predict"),
        ({"tokens": torch.zeros(2, 1, dtype=torch.long)}, "no next token to predict"),
        ({"tokens": torch.zeros(2, 9)}, "needs integer token ids"),
        ({"tokens": torch.full((2, 9), 11)}, "token id 11 is outside the model's vocabulary of 11"),
        (
            {"tokens": torch.zeros(2, 10, dtype=torch.long)},
            "sequences of 9 tokens, but the model's context is 8",
        ),
        ({"names": ["gpt_neox.layer.0"]}, "the model has no parameter 'gpt_neox.layer.0'"),
        ({"names": []}, "at least one parameter, each once"),
        ({"precision": "bf16"}, "precision 'bf16' is unknown; use fp32 or fp64"),
        ({"micro_batch": 0}, "micro_batch must be at least 1"),
    ],
)
def test_bad_arguments(small, change, message):
    with pytest.raises(UserError, match=message):
        Hessian(**({"model": small[0], "tokens": small[1]} | change))


def test_bad_weights_and_vectors(small):
    h = Hessian(*small)
    broken = copy.deepcopy(small[0])
    broken.gpt_neox.layers[1].mlp.dense_h_to_4h.weight.data[0, 0] = torch.nan
    with pytest.raises(
        UserError, match=r"parameter 'gpt_neox.layers.1.mlp.dense_h_to_4h.weight' is not finite"
    ):
        Hessian(broken, small[1])
    with pytest.raises(UserError, match="is not finite"):
        h.flat(broken)
    with pytest.raises(UserError, match=r"'gpt_neox.embed_in.weight' has shape \[3\], expected \[11, 8\]"):
        h.flat(h.named(h.theta) | {"gpt_neox.embed_in.weight": torch.zeros(3)})
    with pytest.raises(UserError, match="parameter 'gpt_neox.embed_in.weight' is missing"):
        h.flat({})
    with pytest.raises(UserError, match=r"the vector has shape \[5\]"):
        h @ torch.zeros(5)
    with pytest.raises(UserError, match=r"shift has shape \[5\]"):
        h.loss(torch.zeros(5))
    with pytest.raises(UserError, match="product with the Hessian is not finite"):
        h @ torch.full((h.size,), torch.inf)
    with pytest.raises(UserError, match="the loss is not finite"):
        h.loss(torch.full((h.size,), 1e30))
