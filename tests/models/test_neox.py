"""The lean forward pass against transformers' own, and the models that it is for."""

from __future__ import annotations

import pydantic
import pytest
import torch
import toy
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from ptq_dynamics.models import neox
from ptq_dynamics.models.neox import Shape, lean_logits


def params(model):
    return dict(model.named_parameters())


def tokens(model, batch, length, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, length), generator=g)


@settings(max_examples=25)
@given(
    heads=st.sampled_from([1, 2, 3]),
    head=st.sampled_from([8, 10, 12]),
    layers=st.integers(1, 3),
    rotary=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    mlp=st.sampled_from([1, 4]),
    batch=st.integers(1, 3),
    length=st.sampled_from([1, 2, 7, 16]),
)
def test_lean_logits_equal_those_of_transformers(heads, head, layers, rotary, mlp, batch, length):
    config = toy.model_config(
        width=heads * head, heads=heads, layers=layers, rotary_fraction=rotary, mlp_ratio=mlp, init_std=0.3
    )
    model = neox.build(config, vocab_size=50, seed=1).eval()
    with torch.no_grad():
        for p in model.parameters():  # biases and norms are 0 and 1 at the start: make them count
            if p.ndim == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
        ids = tokens(model, batch, length)
        theirs = model(ids).logits
        ours = lean_logits(Shape.of(model.config), params(model), ids)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_lean_logits_in_bfloat16_are_close_and_norms_stay_float32(model):
    ids = tokens(model, 4, 16)
    full = params(model)
    with torch.no_grad():
        low = {n: p.bfloat16() for n, p in full.items()}
        ours = lean_logits(Shape.of(model.config), full, ids, low)
        theirs = model(ids).logits
    assert ours.dtype == torch.bfloat16
    spread = theirs.std()
    assert (ours.float() - theirs).abs().mean() < 0.02 * spread  # bfloat16 carries 8 bits
    assert (ours.float() - theirs).abs().max() > 0  # and was really used


def test_no_token_sees_a_later_one(model):
    ids = tokens(model, 1, 12)
    other = ids.clone()
    other[:, 8:] = (other[:, 8:] + 1) % 300
    with torch.no_grad():
        a, b = (lean_logits(Shape.of(model.config), params(model), x) for x in (ids, other))
    assert torch.equal(a[:, :8], b[:, :8]) and not torch.equal(a[:, 8:], b[:, 8:])


def test_cross_entropy_is_transformers_own_loss(model):
    block = tokens(model, 3, 17)
    with torch.no_grad():
        ours = neox.cross_entropy(Shape.of(model.config), params(model), block)
        theirs = model(block, labels=block).loss  # shifts the labels itself: the same 16 predictions
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_weights_depend_on_configuration_and_seed_alone():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    a = neox.build(toy.model_config(), 300, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's random numbers are left alone
    torch.manual_seed(6)
    b, c = neox.build(toy.model_config(), 300, seed=3), neox.build(toy.model_config(), 300, seed=4)
    for name, p in params(a).items():
        assert torch.equal(p, params(b)[name])
    assert any(not torch.equal(p, params(c)[name]) for name, p in params(a).items())
    assert params(a)["gpt_neox.embed_in.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert params(a)["gpt_neox.embed_in.weight"] is not params(a)[neox.head_name(params(a))]


def test_lean_logits_of_a_saved_and_reloaded_model(model, tmp_path):
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert Shape.of(again.config) == Shape.of(model.config)
    ids = tokens(model, 1, 8)
    with torch.no_grad():
        torch.testing.assert_close(lean_logits(Shape.of(again.config), params(again), ids), model(ids).logits)


TINY = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


@pytest.mark.parametrize(
    ("changes", "covered"),
    [
        ({}, True),
        ({"use_parallel_residual": False}, False),
        ({"attention_bias": False}, False),
        ({"hidden_act": "gelu_new"}, False),
        ({"tie_word_embeddings": True}, False),
        ({"hidden_dropout": 0.1}, False),
        ({"attention_dropout": 0.1}, False),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, False),
    ],
)
def test_supports_only_what_it_computes_right(changes, covered):
    assert neox.supports(GPTNeoXForCausalLM(GPTNeoXConfig(**TINY, **changes))) is covered


def test_supports_no_other_architecture():
    config = transformers.LlamaConfig(**TINY, num_key_value_heads=2)
    assert not neox.supports(transformers.LlamaForCausalLM(config))
    assert not neox.supports(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"heads": 3}, "width 16 is not a multiple of heads 3"),
        ({"width": 15, "heads": 3, "rotary_fraction": 1.0}, "needs an even width per head, not 5"),
    ],
)
def test_shapes_that_no_model_can_have(changes, says):
    with pytest.raises(pydantic.ValidationError, match=says):
        neox.ModelConfig(**{**toy.MODEL, **changes})
