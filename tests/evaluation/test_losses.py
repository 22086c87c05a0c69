"""Losses against transformers' own loss, for the lean pass and for other architectures."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import transformers

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.corpus.tokens import TokenSet
from ptq_dynamics.evaluation import losses
from ptq_dynamics.evaluation.losses import sequence_losses
from ptq_dynamics.models import neox
from ptq_dynamics.quantization.quantizer import quantize
from ptq_dynamics.quantization.spec import QuantSpec

TINY = dict(
    vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.3,
)  # fmt: skip


def llama(**changes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, **changes})).eval()


@pytest.fixture(params=["neox", "llama", "tied llama", "olmo2"])
def any_model(request, model):
    """The lean pass's own architecture, and others that go through their own forward."""
    if request.param == "neox":
        return copy.deepcopy(model)
    if request.param == "olmo2":
        torch.manual_seed(0)
        return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**TINY)).eval()
    return llama(tie_word_embeddings=request.param == "tied llama")


def blocks(n=5, length=16):
    return np.random.default_rng(0).integers(0, 300, (n, length + 1))


def reference(model, tokens):
    """Each block's loss by transformers, which shifts the labels itself."""
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        return np.array([model(ids[i : i + 1], labels=ids[i : i + 1]).loss.item() for i in range(len(ids))])


def test_equal_to_transformers_own_loss(any_model):
    ours = sequence_losses(any_model, blocks(), precision="fp32")
    assert ours.dtype == np.float64 and ours.shape == (5,)
    np.testing.assert_allclose(ours, reference(any_model, blocks()), rtol=2e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_batch_size_does_not_matter(any_model, precision):
    told = [sequence_losses(any_model, blocks(7), precision=precision, batch=b) for b in (1, 3, 7, 16)]
    for other in told[1:]:
        np.testing.assert_allclose(other, told[0], rtol=1e-5 if precision == "fp32" else 5e-3)


def test_labels_and_counts_by_hand():
    """A model whose next token is its last plus one, with certainty: any other shift of labels would show."""
    ids = np.arange(20)[None] % 10
    config = transformers.LlamaConfig(**{**TINY, "vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 1})
    m = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in m.named_parameters():
            p.zero_() if "norm" not in name else p.fill_(1)
        m.model.embed_tokens.weight[torch.arange(10), torch.arange(10)] = 1.0
        m.lm_head.weight[(torch.arange(10) + 1) % 10, torch.arange(10)] = 1.0
    right = math.exp(4)  # the normed embedding is 4 (16 dims, one of them 1)
    expected = -math.log(right / (right + 9))
    assert sequence_losses(m, ids, precision="fp32") == pytest.approx([expected], rel=1e-4)


def test_every_token_but_the_first_is_predicted_once_and_the_last_block_kept(corpus):
    text = TokenSet.open(corpus, "validation")
    length = (len(text.tokens) - 1) // 8  # so that 8 blocks and the label after them fit
    found = text.blocks(length)
    assert len(found) == 8
    uniform = neox.build(neox.ModelConfig(width=8, layers=1, heads=1, context=8), 300, 0)
    with torch.no_grad():
        uniform.get_output_embeddings().weight.zero_()
    told = sequence_losses(uniform, found, precision="fp32")
    assert len(told) == 8 and told == pytest.approx([math.log(300)] * 8, rel=1e-6)
    labels = found[:, 1:].ravel()
    assert labels.tolist() == text.tokens[1 : 8 * length + 1].tolist()


def test_base_and_quantized_go_the_same_way(any_model):
    """8 bit in large groups is nearly nothing; what a second code path or dtype would add is far more."""
    base = sequence_losses(any_model, blocks(), precision="fp32")
    quantize(any_model, None, QuantSpec(method="rtn", bits=8, group_size=-1))
    quantized = sequence_losses(any_model, blocks(), precision="fp32")
    np.testing.assert_allclose(quantized, reference(any_model, blocks()), rtol=2e-6)
    assert 0 < np.abs(quantized / base - 1).max() < 0.02


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_is_left_as_it_was(any_model, precision):
    """Were it cast in place, what is quantized would depend on whether the base had been measured before."""
    before = {n: p.clone() for n, p in any_model.named_parameters()}
    sequence_losses(any_model, blocks(), precision=precision)
    for name, p in any_model.named_parameters():
        assert p.dtype == torch.float32 and torch.equal(p, before[name])


def test_relative_error_in_bfloat16_is_that_in_float32(any_model):
    def error(precision):
        base = sequence_losses(any_model, many, precision=precision)
        damaged = copy.deepcopy(any_model)
        quantize(damaged, None, QuantSpec(method="rtn", bits=3, group_size=-1))
        return base.mean(), sequence_losses(damaged, many, precision=precision).mean() / base.mean() - 1

    many = blocks(64)
    (full, exact), (low, rough) = error("fp32"), error("bf16")
    assert low == pytest.approx(full, rel=5e-3) and low != full
    assert abs(rough - exact) < 0.1 * abs(exact) + 5e-4


def test_compiled_code_sees_one_shape_and_the_filling_is_dropped(model, monkeypatch):
    """(What it compiles is tested in training; here the compiler is taken out to save its seconds.)"""
    seen = []

    def compile(function, **options):
        def watched(params, low, tokens, rotation):
            seen.append(tuple(tokens.shape))
            return function(params, low, tokens, rotation)

        return watched

    monkeypatch.setattr(torch, "compile", compile)
    losses._lean.cache_clear()
    ours = sequence_losses(model, blocks(5), precision="fp32", batch=2, compiled=True)
    losses._lean.cache_clear()
    assert seen == [(2, 17)] * 3
    np.testing.assert_allclose(ours, sequence_losses(model, blocks(5), precision="fp32"), rtol=1e-5)


def test_bfloat16_weights_measured_in_float32():
    m = llama().bfloat16()
    expected = reference(copy.deepcopy(m).float(), blocks())
    np.testing.assert_allclose(sequence_losses(m, blocks(), precision="fp32"), expected, rtol=2e-6)


def test_no_block(model):
    with pytest.raises(UserError, match="no block of text; the set is shorter than one sequence"):
        sequence_losses(model, blocks(0), precision="fp32")


@pytest.mark.parametrize("make", [llama, None])
def test_a_loss_that_is_not_finite(model, make):
    m = make() if make else copy.deepcopy(model)
    with torch.no_grad():
        m.get_input_embeddings().weight[7] = float("nan")
    with pytest.raises(UserError, match="the loss of a sequence is not finite"):
        sequence_losses(m, np.full((1, 9), 7), precision="fp32")
