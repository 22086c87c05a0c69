from __future__ import annotations

import copy
import math

import pytest
import torch

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.curvature.expansion import expand, expand_all
from ptq_dynamics.curvature.operator import Hessian, quantized_names
from ptq_dynamics.quantization.quantizer import quantize
from ptq_dynamics.quantization.spec import QuantSpec


def step(h, length):
    v = torch.randn(h.size, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return length * v / v.norm()


def test_terms_against_the_exact_gradient_and_hessian(small, truth):
    h = Hessian(*small, precision="fp64")
    delta = step(h, 0.3)
    e = expand(h, delta)
    assert e.linear == pytest.approx((truth[1] @ delta).item(), rel=1e-6)
    assert e.quadratic == pytest.approx((0.5 * delta @ truth[2] @ delta).item(), rel=1e-6)
    assert e.norm2 == pytest.approx(0.09) and e.rayleigh == pytest.approx(2 * e.quadratic / 0.09)
    assert e.predicted == e.linear + e.quadratic
    assert e.true == h.loss(delta) - h.loss()
    for i, total in enumerate((e.linear, e.quadratic, e.norm2)):
        assert sum(p[i] for p in e.by_parameter.values()) == pytest.approx(total)


def test_what_is_left_out_is_of_third_order(small):
    h = Hessian(*small, precision="fp64")
    left = [abs(e.true - e.predicted) for e in expand_all(h, [step(h, s) for s in (0.02, 0.01, 0.005)])]
    assert left[0] / left[1] == pytest.approx(8, rel=0.15) and left[1] / left[2] == pytest.approx(8, rel=0.1)


def test_steps_by_name_of_a_quantized_model(small):
    model, tokens = small
    h = Hessian(model, tokens, names=quantized_names(model))
    deltas = []
    for bits in (3, 6):
        other = copy.deepcopy(model)
        quantize(other, None, QuantSpec(method="rtn", bits=bits, group_size=8))
        deltas.append(h.named(h.flat(other) - h.theta))
    coarse, fine = expand_all(h, deltas, batch=1)
    assert fine.predicted == pytest.approx(fine.true, rel=0.05)
    assert coarse.norm2 > 16 * fine.norm2  # (7 / 63)⁻² for rounding that is uniform
    assert expand(h, deltas[0]).quadratic == pytest.approx(coarse.quadratic)


def test_no_step(small):
    h = Hessian(*small)
    e = expand(h, torch.zeros(h.size))
    assert (e.linear, e.quadratic, e.true, e.norm2) == (0, 0, 0, 0) and math.isnan(e.rayleigh)
    assert expand_all(h, []) == []


def test_bad_steps(small):
    h = Hessian(*small)
    with pytest.raises(UserError, match=r"a step has shape \[3\]"):
        expand(h, torch.zeros(3))
    with pytest.raises(UserError, match="a step is not finite"):
        expand(h, torch.full((h.size,), torch.nan))
    with pytest.raises(UserError, match="'gpt_neox.embed_in.weight' is missing"):
        expand(h, {"other": torch.zeros(3)})
