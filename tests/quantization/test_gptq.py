from __future__ import annotations

import functools
import itertools
import warnings

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.quantization.gptq import Hessian, gptq, reconstruction_error
from ptq_dynamics.quantization.grid import round_to_nearest
from ptq_dynamics.quantization.spec import QuantSpec

ROWS, COLUMNS = 48, 160


@functools.cache
def problem(tokens: int = 600, rows: int = ROWS, columns: int = COLUMNS, seed: int = 0):
    """Weights and correlated inputs of unequal size, float64."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=g, dtype=torch.float64)
    mix = torch.randn(columns, columns, generator=g, dtype=torch.float64) / columns**0.5
    sizes = torch.logspace(-0.5, 0.5, columns, dtype=torch.float64)[torch.randperm(columns, generator=g)]
    mix = mix + torch.eye(columns, dtype=torch.float64)
    x = torch.randn(tokens, columns, generator=g, dtype=torch.float64) @ mix * sizes
    return w, x, 2 / tokens * x.T @ x


@pytest.mark.parametrize("act_order", [False, True], ids=["in-order", "act-order"])
@pytest.mark.parametrize("group", [-1, 32, 48, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_equals_the_unblocked_float64_oracle(bits, symmetric, group, act_order):
    w, x, h = problem()
    codes, weights = oracle.gptq(w.numpy(), h.numpy(), bits, group, symmetric, act_order, 0.01)
    error = oracle.output_error(w.numpy(), weights, x.numpy())
    for precision, block_size in itertools.product(("float64", "float32"), (24, 128, 999)):
        spec = QuantSpec(
            bits=bits, group_size=group, symmetric=symmetric, act_order=act_order, damping=0.01,
            block_size=block_size, precision=precision,
        )  # fmt: skip
        H = Hessian(COLUMNS, dtype=spec.dtype)
        H.add(x.to(spec.dtype))
        result, damping = gptq(w.to(spec.dtype), H.value(), spec)
        assert damping == 0.01
        ours = reconstruction_error(w, result.dequantize(), h).item()
        if precision == "float64":
            np.testing.assert_array_equal(result.codes.numpy(), codes)
            np.testing.assert_allclose(result.dequantize().numpy(), weights, rtol=1e-9, atol=1e-9)
            assert ours == pytest.approx(error, rel=1e-9)
        else:
            assert (result.codes.numpy() == codes).mean() >= 0.999
            assert ours == pytest.approx(error, rel=5e-4)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 24),
    tokens=st.integers(1, 40),
    group=st.one_of(st.just(-1), st.integers(1, 30)),
    block_size=st.integers(1, 30),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_equals_the_oracle_at_any_shape(
    rows, columns, tokens, group, block_size, bits, symmetric, act_order, seed
):
    w, _, h = problem(tokens, rows, columns, seed)
    codes, _ = oracle.gptq(w.numpy(), h.numpy(), bits, group, symmetric, act_order, 0.05)
    spec = QuantSpec(
        bits=bits, group_size=group, symmetric=symmetric, act_order=act_order, damping=0.05,
        block_size=block_size, precision="float64",
    )  # fmt: skip
    np.testing.assert_array_equal(gptq(w, h, spec)[0].codes.numpy(), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_is_rounding_to_nearest_when_inputs_are_uncorrelated(bits, symmetric):
    w, _, _ = problem()
    spec = QuantSpec(bits=bits, group_size=48, symmetric=symmetric, precision="float64")
    diagonal = torch.diag(torch.linspace(0.5, 2, COLUMNS, dtype=torch.float64))
    assert torch.equal(gptq(w, diagonal, spec)[0].codes, round_to_nearest(w, spec).codes)


@pytest.mark.parametrize("group", [-1, 32, 48])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_beats_rounding_to_nearest_on_correlated_inputs(bits, group):
    w, _, h = problem()
    # at 2 bit in order, the last groups inherit corrections as large as themselves: no better than rounding
    for act_order in (False, True) if bits > 2 or group == -1 else (True,):
        spec = QuantSpec(bits=bits, group_size=group, act_order=act_order)
        ours = reconstruction_error(w, gptq(w, h.float(), spec)[0].dequantize(), h)
        nearest = reconstruction_error(w, round_to_nearest(w, spec).dequantize(), h)
        assert ours < 0.75 * nearest


def test_codes_scales_and_groups_say_what_the_weight_is():
    w, _, h = problem()
    result, _ = gptq(w, h, QuantSpec(bits=3, group_size=48, act_order=True, symmetric=False))
    by_hand = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    for r, c in itertools.product(range(ROWS), range(COLUMNS)):
        g = result.g_idx[c]
        by_hand[r, c] = (result.codes[r, c] - result.zeros[r, g]) * result.scales[r, g]
    torch.testing.assert_close(result.dequantize(), by_hand, rtol=0, atol=0)
    # groups are of neighbours in the order of the diagonal: three of 48 columns, and the 16 smallest
    assert torch.bincount(result.g_idx).tolist() == [48, 48, 48, 16]
    largest = torch.argsort(h.diagonal(), descending=True)
    assert (result.g_idx[largest].diff() >= 0).all()


def test_inputs_are_not_modified_even_where_a_transpose_is_a_view():
    w, _, h = problem(rows=1, columns=8)
    h = h.clone()
    h[3], h[:, 3] = 0, 0
    before = w.clone(), h.clone()
    gptq(w, h, QuantSpec(bits=3, precision="float64"))
    assert torch.equal(w, before[0]) and torch.equal(h, before[1])


@pytest.mark.parametrize("act_order", [False, True])
def test_dead_columns_become_zero_and_the_rest_is_as_the_oracle_says(act_order):
    w, x, _ = problem()
    x = x.clone()
    dead = [0, 47, 48, 100, 159]
    x[:, dead] = 0
    h = 2 / len(x) * x.T @ x
    spec = QuantSpec(bits=3, group_size=48, act_order=act_order, precision="float64")
    result, _ = gptq(w, h, spec)
    codes, weights = oracle.gptq(w.numpy(), h.numpy(), 3, 48, True, act_order, spec.damping)
    np.testing.assert_array_equal(result.codes.numpy(), codes)
    assert (result.dequantize()[:, dead] == 0).all() and torch.isfinite(result.dequantize()).all()
    ours = reconstruction_error(w, result.dequantize(), h).item()
    assert ours == pytest.approx(oracle.output_error(w.numpy(), weights, x.numpy()), rel=1e-9)


def test_inputs_that_are_all_zero_give_finite_zeros():
    w, _, h = problem()
    result, _ = gptq(w, torch.zeros_like(h), QuantSpec(bits=4, group_size=32))
    assert (result.dequantize() == 0).all()
    assert reconstruction_error(w, result.dequantize(), torch.zeros_like(h)) == 0


@pytest.mark.parametrize("tokens", [1, 8, 159])
def test_fewer_tokens_than_columns(tokens):
    w, x, h = problem(tokens)
    codes, weights = oracle.gptq(w.numpy(), h.numpy(), 3, 64, True, False, 0.01)
    error = oracle.output_error(w.numpy(), weights, x.numpy())
    for precision, agree in (("float64", 1.0), ("float32", 0.999)):
        spec = QuantSpec(bits=3, group_size=64, precision=precision)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result, _ = gptq(w, h.to(spec.dtype), spec)
        assert (result.codes.numpy() == codes).mean() >= agree
        assert reconstruction_error(w, result.dequantize(), h).item() == pytest.approx(error, rel=2e-3)
        assert error < oracle.output_error(
            w.numpy(), round_to_nearest(w, spec).dequantize().numpy(), x.numpy()
        )


def test_damping_grows_with_a_warning_that_names_the_layer():
    w, _, h = problem(8)
    h = h - 1e-3 * h.diagonal().mean() * torch.eye(COLUMNS, dtype=torch.float64)  # least eigenvalue < 0
    spec = QuantSpec(bits=3, group_size=64, damping=1e-4, precision="float64")
    with pytest.warns(UserWarning, match="not positive definite") as caught:
        result, damping = gptq(w, h, spec, name="layers.2.mlp")
    said = [str(c.message) for c in caught]
    assert [m.split(": ")[0] for m in said] == ["layers.2.mlp"] * 2
    assert "damping 0.0001; trying 0.001" in said[0] and "damping 0.001; trying 0.01" in said[1]
    assert damping == pytest.approx(1e-2)
    enough = QuantSpec(bits=3, group_size=64, damping=1e-2, precision="float64")
    assert torch.equal(result.codes, gptq(w, h, enough)[0].codes)


def test_hopeless_hessian_is_one_line_that_names_the_layer():
    w, _, _ = problem(rows=2, columns=2)
    h = torch.tensor([[1.0, 100.0], [100.0, 1.0]])
    with (
        pytest.warns(UserWarning),
        pytest.raises(UserError, match=r"^layers\.0\.q: .*positive definite.*more"),
    ):
        gptq(w, h, QuantSpec(bits=3), name="layers.0.q")
    h[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"^layers\.0\.q: .*not finite"):
        gptq(w, h, QuantSpec(bits=3), name="layers.0.q")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_hessian_of_batches_is_that_of_all_inputs(dtype):
    _, x, _ = problem(columns=300)
    x = x.to(dtype)
    expected = 2 / len(x) * x.double().T @ x.double()
    sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for size in (1, 7, 600):
        H = Hessian(300, dtype=sum_dtype)
        for batch in x.split(size):
            H.add(batch)
        value = H.value()
        assert H.n == 600 and torch.equal(value, value.T)
        rtol = 1e-12 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(
            value.double(), expected, rtol=rtol, atol=rtol * expected.abs().max().item()
        )


def test_reduced_matmul_precision_and_autocast_of_the_caller_do_not_reach_the_arithmetic():
    w, x, h = problem()
    spec = QuantSpec(bits=3, group_size=64)

    def run():
        H = Hessian(COLUMNS)
        H.add(x.float())
        result = gptq(w, H.value(), spec)[0]
        return H.value(), result.codes, reconstruction_error(w, result.dequantize(), H.value())

    expected = run()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = run()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("act_order", [False, True])
def test_cuda_agrees(act_order):
    w, _, h = problem()
    spec = QuantSpec(bits=4, group_size=48, act_order=act_order, precision="float64")
    there = gptq(w.cuda(), h.cuda(), spec)[0]
    assert torch.equal(there.codes.cpu(), gptq(w, h, spec)[0].codes)
