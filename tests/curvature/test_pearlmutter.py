from __future__ import annotations

import exact
import pytest
import torch

from ptq_dynamics.curvature.pearlmutter import Pass
from ptq_dynamics.models import neox


@pytest.fixture(scope="module")
def parts():
    model, tokens = exact.small_model(), exact.small_tokens()
    params = {n: p.detach().double() for n, p in model.named_parameters()}
    return Pass(neox.Shape.of(model.config), params, tuple(params)), model, tokens


def test_token_losses_are_those_of_transformers(parts):
    run, model, tokens = parts
    logits = model(tokens[:, :-1]).logits
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    torch.testing.assert_close(run.losses(tokens).float(), wanted, atol=1e-5, rtol=1e-5)


def test_records_of_parts_of_the_batch_sum_up(parts):
    run, _, tokens = parts
    share = 1 / tokens[:, 1:].numel()
    v = {n: torch.randn(p.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
         for n, p in run.params.items()}  # fmt: skip
    whole = run.product(run.record(tokens, share), v)
    halves = [run.product(run.record(t, share), v) for t in tokens.split(3)]
    for name, value in whole.items():
        torch.testing.assert_close(halves[0][name] + halves[1][name], value)


def test_only_what_is_asked_for_comes_back(parts):
    run, model, tokens = parts
    names = ("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", "gpt_neox.final_layer_norm.bias")
    part = Pass(run.shape, run.params, names)
    record = part.record(tokens, 0.01)
    out = part.product(record, {n: torch.ones_like(run.params[n]) for n in names})
    assert set(out) == set(record.gradient) == set(names)
    assert record.nbytes > 8 * record.p.numel()
