from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptq_dynamics.quantization.grid import fit_grid, round_to_nearest
from ptq_dynamics.quantization.spec import QuantSpec


def spec(bits, group_size, symmetric):
    return QuantSpec(method="rtn", bits=bits, group_size=group_size, symmetric=symmetric)


@pytest.mark.parametrize("group", [-1, 1, 32, 48, 64, 500])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_equal_the_oracles(bits, symmetric, group):
    w = torch.randn(20, 160, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codes, weights = oracle.rtn(w.numpy(), bits, group, symmetric)
    result = round_to_nearest(w, spec(bits, group, symmetric))
    np.testing.assert_array_equal(result.codes.numpy(), codes)
    np.testing.assert_allclose(result.dequantize().numpy(), weights, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("symmetric", [True, False])
def test_equals_torchs_own_fake_quantization(symmetric):
    w = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    scale, zero = fit_grid(w.double(), 4, symmetric)
    theirs = torch.fake_quantize_per_channel_affine(w, scale.float(), zero.int(), 0, 0, 15)
    ours = round_to_nearest(w, spec(4, -1, symmetric)).dequantize().float()
    apart = ~torch.isclose(ours, theirs, rtol=1e-6, atol=0)
    # theirs rounds in float32, where the tie at -max|w| may go either way
    assert (w[apart] == -w.abs().amax(dim=1, keepdim=True).expand_as(w)[apart]).all()
    assert apart.sum() < len(w) and (symmetric or not apart.any())


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [0.0, 5e-324])
def test_group_of_zeros_or_of_denormals_gives_zeros(bits, symmetric, value):
    w = torch.full((3, 8), value, dtype=torch.float64)
    w[1, 4:] = torch.tensor([-1.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    q = round_to_nearest(w, spec(bits, 4, symmetric)).dequantize()
    assert torch.isfinite(q).all()
    assert (q[[0, 2]].abs() <= value).all() and (q[1, :4].abs() <= value).all() and q[1, 4:].any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_group_of_one_sign_keeps_its_largest_weight(symmetric):
    # GPTQ's own symmetric grid would clip these to half their size
    w = torch.tensor([[0.5, 0.75, 1.0, 0.9]])
    q = round_to_nearest(w, spec(4, -1, symmetric)).dequantize()
    assert (q - w).abs().max() <= 2 / 15


matrices = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=12),
    elements=st.floats(-1e3, 1e3, allow_subnormal=False),
)


@settings(max_examples=150, deadline=None)
@given(matrices, st.integers(2, 8), st.integers(1, 13), st.booleans())
def test_codes_are_in_range_and_weights_move_by_half_a_step(w, bits, group, symmetric):
    weight = torch.from_numpy(w)
    result = round_to_nearest(weight, spec(bits, group, symmetric))
    step = result.scales[:, result.g_idx]
    assert result.codes.dtype == torch.uint8 and result.codes.int().max() < 2**bits
    # the symmetric grid ends half a step before the largest weight, the asymmetric one may by its rounded zero
    moved = (result.dequantize() - weight).abs()
    assert (moved <= step * (0.5 + 1e-9) + 1e-300).all()
    assert (result.dequantize()[weight == 0] == 0).all()
