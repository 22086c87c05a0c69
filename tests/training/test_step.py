"""One update against transformers' own loss, autograd and torch's AdamW on the model's own parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import toy

from ptq_dynamics.models import neox
from ptq_dynamics.training.step import Learner, OptimizerConfig


def fresh(**changes):
    return neox.build(toy.model_config(init_std=0.1, **changes), vocab_size=300, seed=0)


def learner(model=None, precision="fp32", compiled=False, **optimizer):
    return Learner(model or fresh(), OptimizerConfig(**optimizer), precision, compiled)


def batches(n, size=4, length=16):
    return torch.randint(300, (n, size, length + 1), generator=torch.Generator().manual_seed(0))


def gradient(of, tokens):
    """The learner's loss and gradients by parameter name."""
    flat, value = of.gradient(
        *(f.detach() for f in of.flat), tokens, neox.Shape.of(of.model.config).rotation(16, "cpu")
    )
    return value, of.views(flat)


def reference_gradient(model, tokens):
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def close(ours, theirs, rel):
    for name, value in theirs.items():
        error = (ours[name] - value).norm() / value.norm().clamp_min(1e-12)
        assert error < rel, (name, error)


def test_gradient_is_that_of_transformers_loss():
    model = fresh(layers=2)
    loss, grads = reference_gradient(copy.deepcopy(model), batches(1)[0])
    value, ours = gradient(learner(model), batches(1)[0])
    assert value.item() == pytest.approx(loss.item(), rel=1e-6)
    assert ours.keys() == grads.keys()
    close(ours, grads, 2e-5)


def test_gradient_in_bfloat16_is_close():
    loss, grads = reference_gradient(fresh(layers=2), batches(1)[0])
    value, ours = gradient(learner(fresh(layers=2), "bf16"), batches(1)[0])
    assert all(g.dtype == torch.float32 for g in ours.values())
    assert value.item() == pytest.approx(loss.item(), rel=2e-3) and value.item() != loss.item()
    close(ours, grads, 0.05)


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_updates_are_those_of_adamw_with_decay_on_matrices_only(clip):
    steps, config = batches(6), dict(weight_decay=0.5, beta1=0.8, beta2=0.9, eps=1e-4, clip=clip)
    # (a large eps: the bias of the keys has no gradient but rounding, which a small one would blow up)
    rates = [0.01, 0.02, 0.02, 0.005, 0.001, 0.0005]
    reference = fresh(layers=2)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.ndim >= 2], "weight_decay": 0.5},
            {"params": [p for p in reference.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.9), eps=1e-4, fused=False, foreach=False,
    )  # fmt: skip
    model = fresh(layers=2)
    ours = learner(model, **config)
    for tokens, lr in zip(steps, rates, strict=True):
        loss, _ = reference_gradient(reference, tokens)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        assert (norm > clip) == (clip < 1)  # the case is what it says
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        told = ours.update(tokens, lr, micro_batch=len(tokens))
        assert told[0].item() == pytest.approx(loss.item(), rel=1e-5)
        assert told[1].item() == pytest.approx(norm.item(), rel=1e-4)  # before clipping
    own = dict(model.named_parameters())
    for name, p in reference.named_parameters():
        torch.testing.assert_close(own[name].detach(), p.detach(), rtol=1e-4, atol=1e-5)


def test_the_models_parameters_are_the_flat_vectors():
    model = fresh()
    ours = learner(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert sum(f.numel() for f in ours.flat) == sum(p.numel() for p in model.parameters())
    ours.update(batches(1)[0], 0.01, 4)
    views = ours.views(ours.flat)
    for name, p in model.named_parameters():
        assert torch.equal(p, views[name]) and not torch.equal(p, before[name]), name
    assert all(model.get_parameter(n).ndim >= 2 for n, _ in ours.layout[0])
    assert all(model.get_parameter(n).ndim == 1 for n, _ in ours.layout[1])


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 8])  # 8 sequences: with one left over, even and whole
def test_accumulated_gradients_are_those_of_the_whole_batch(micro_batch):
    tokens = batches(1, size=8)[0]
    whole, parts = learner(clip=0.1), learner(clip=0.1)
    a, b = whole.update(tokens, 0.01, 8), parts.update(tokens, 0.01, micro_batch)
    assert a[0].item() == pytest.approx(b[0].item(), rel=1e-6)
    assert a[1].item() == pytest.approx(b[1].item(), rel=1e-5)
    for key, value in whole.state().items():  # the moments hold the clipped gradient itself
        torch.testing.assert_close(parts.state()[key], value, rtol=1e-4, atol=1e-8)


def test_restored_state_goes_on_to_the_last_bit():
    steps = batches(6)
    straight, first = learner(), learner()
    for tokens in steps:
        straight.update(tokens, 0.01, 4)
    for tokens in steps[:3]:
        first.update(tokens, 0.01, 4)
    model = fresh()
    second = learner(model)
    with torch.no_grad():
        for mine, p in zip(model.parameters(), first.model.parameters(), strict=True):
            mine.copy_(p)
    second.load_state(first.state())
    for tokens in steps[3:]:
        second.update(tokens, 0.01, 4)
    assert all(torch.equal(a, b) for a, b in zip(straight.flat, second.flat, strict=True))
    assert all(torch.equal(a, second.state()[k]) for k, a in straight.state().items())


@pytest.mark.skipif(not neox.can_compile(), reason="no compiler")
def test_compiled_equals_eager():
    tokens = batches(2)
    eager, compiled = learner(), learner(compiled=True)
    for step in tokens:
        a, b = eager.update(step, 0.003, 4), compiled.update(step, 0.003, 4)
        assert a[0].item() == pytest.approx(b[0].item(), rel=1e-6)
        assert a[1].item() == pytest.approx(b[1].item(), rel=1e-5)
    for key, value in eager.state().items():
        torch.testing.assert_close(compiled.state()[key], value, rtol=1e-3, atol=1e-7)
