"""Hadamard rotation before quantization: against plain matrices in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ptq_dynamics.quantization.gptq import gptq
from ptq_dynamics.quantization.grid import rotation_of, round_to_nearest
from ptq_dynamics.quantization.spec import QuantSpec

CPU = torch.device("cpu")
SPEC = QuantSpec(bits=3, group_size=16, rotation="hadamard", precision="float64")
PLAIN = dataclasses.replace(SPEC, rotation="none")


def problem(columns: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, columns, generator=g, dtype=torch.float64)
    x = torch.randn(400, columns, generator=g, dtype=torch.float64) @ torch.randn(
        columns, columns, generator=g, dtype=torch.float64
    )
    return weight, 2 / len(x) * x.T @ x


@pytest.mark.parametrize("columns", [1, 8, 48, 63, 64])
def test_rotation_is_orthogonal_and_flat_within_its_blocks(columns):
    r = rotation_of(SPEC, columns, CPU)
    np.testing.assert_allclose(r.T @ r, np.eye(columns), atol=1e-12)
    size = columns & -columns
    entries = set(np.round(r.abs().numpy().ravel(), 12))
    assert entries <= {0.0, round(size**-0.5, 12)} and rotation_of(PLAIN, columns, CPU) is None
    assert torch.equal(r, rotation_of(SPEC, columns, CPU))


@pytest.mark.parametrize("columns", [48, 64])
def test_quantizing_rotated_is_rotating_quantizing_and_rotating_back(columns):
    weight, hessian = problem(columns)
    r = rotation_of(SPEC, columns, CPU)
    ours, _ = gptq(weight, hessian, SPEC)
    inner, _ = gptq(weight @ r, r.T @ hessian @ r, PLAIN)
    assert (ours.codes == inner.codes).double().mean() > 0.999  # a tie may fall otherwise
    np.testing.assert_allclose(ours.dequantize(), inner.dequantize() @ r.T, atol=1e-2)
    rtn = round_to_nearest(weight, SPEC)
    assert torch.equal(rtn.codes, round_to_nearest(weight @ r, PLAIN).codes)
    np.testing.assert_allclose(
        rtn.dequantize(), round_to_nearest(weight @ r, PLAIN).dequantize() @ r.T, atol=1e-12
    )


def test_spreads_an_outlying_column():
    weight, _ = problem(64)
    weight[:, 5] *= 40
    row = {s: dataclasses.replace(s, group_size=-1) for s in (SPEC, PLAIN)}
    assert (round_to_nearest(weight, row[SPEC]).dequantize() - weight).norm() < 0.5 * (
        round_to_nearest(weight, row[PLAIN]).dequantize() - weight
    ).norm()
