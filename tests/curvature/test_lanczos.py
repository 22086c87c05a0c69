from __future__ import annotations

import exact
import pytest
import torch

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.curvature.lanczos import spectral_density, top_eigenvalues
from ptq_dynamics.curvature.operator import Hessian

DIAGONAL = torch.tensor([-10.0, 4.0, 3.0, 1.0, 0.5, -2.0, 0.0, 0.25])


def values(found):
    return torch.tensor([e.value for e in found], dtype=torch.float64)


def test_all_eigenvalues_of_a_models_exact_hessian(truth):
    hessian = truth[2][
        -400:, -400:
    ]  # of the last parameters: those of the last block, the last norm and the head
    wanted = torch.linalg.eigvalsh(hessian)
    found = top_eigenvalues(exact.Matrix(hessian), len(wanted), max_steps=len(wanted), tolerance=1e-10)
    torch.testing.assert_close(values(found), wanted.flip(0), atol=1e-9, rtol=0)
    assert wanted.min() < -1e-3  # a signed spectrum


@pytest.mark.parametrize("end", ["largest", "smallest"])
def test_the_ends_of_a_models_spectrum(small, truth, end):
    wanted = torch.linalg.eigvalsh(truth[2])
    wanted = wanted.flip(0)[:4] if end == "largest" else wanted[:4]
    for precision, tolerance in (("fp64", 1e-6), ("fp32", 1e-3)):
        h = Hessian(*small, precision=precision)
        found = top_eigenvalues(h, 4, tolerance=tolerance, max_steps=150, end=end)
        assert all(e.converged for e in found) and found[0].steps < 150
        scale = torch.linalg.matrix_norm(truth[2], 2).item()
        # |λ − value| <= residual for some eigenvalue λ; here the outermost ones, in order
        assert (values(found) - wanted).abs().max() <= tolerance * scale
        for e in found:
            assert (truth[2] @ e.vector.double() - e.value * e.vector.double()).norm() == pytest.approx(
                e.residual, abs=1e-4 * scale
            )
            assert e.vector.norm() == pytest.approx(1, abs=1e-5)


def test_signed_and_not_by_size():
    h = exact.Matrix(torch.diag(DIAGONAL))
    assert [round(e.value, 9) for e in top_eigenvalues(h, 2)] == [4, 3]
    assert [round(e.value, 9) for e in top_eigenvalues(h, 2, end="smallest")] == [-10, -2]


def test_repeated_eigenvalues_once_the_space_is_exhausted():
    found = top_eigenvalues(exact.Matrix(torch.diag(torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0]))), 5)
    assert [round(e.value, 9) for e in found] == [2, 2, 2, -1, -1] and all(e.converged for e in found)


def test_an_operator_of_zeros():
    found = top_eigenvalues(exact.Matrix(torch.zeros(4, 4)), 2)
    assert [e.value for e in found] == [0, 0] and all(e.converged for e in found)


def test_what_has_not_converged_says_so(truth):
    h = exact.Matrix(truth[2])
    (early,) = top_eigenvalues(h, 1, max_steps=3, tolerance=1e-6)
    assert not early.converged and early.steps == 3
    assert early.residual > 1e-6 * truth[2].norm()
    assert (
        early.value <= torch.linalg.eigvalsh(truth[2]).max() + 1e-12
    )  # from below, never |λ| of the other end


def test_spectral_density_is_that_of_the_exact_spectrum(truth):
    eigenvalues = torch.linalg.eigvalsh(truth[2])
    grid = torch.linspace(-0.5, eigenvalues.max().item() + 0.5, 300, dtype=torch.float64)
    width = 0.05
    wanted = torch.exp(-0.5 * ((grid[:, None] - eigenvalues) / width) ** 2).mean(1) / (
        width * (2 * torch.pi) ** 0.5
    )
    found = spectral_density(exact.Matrix(truth[2]), probes=8, steps=60, grid=grid, width=width)
    assert torch.trapezoid((found.density - wanted).abs(), grid) < 0.1
    default = spectral_density(exact.Matrix(truth[2]), probes=2, steps=20)
    assert torch.trapezoid(default.density, default.grid) == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(8, dtype=torch.float64))
    mean = (found.nodes * found.weights).sum(1)  # of the spectrum, by each probe
    assert abs(mean.mean() - eigenvalues.mean()) < 4 * mean.std() / 8**0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k must be from 1 to 8"),
        ({"k": 9}, "k must be from 1 to 8"),
        ({"k": 3, "max_steps": 2}, "k must be from 1 to 2"),
        ({"end": "both"}, "end 'both' is unknown"),
        ({"tolerance": 0.0}, "tolerance must be above 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        top_eigenvalues(exact.Matrix(torch.diag(DIAGONAL)), **({"k": 1} | arguments))


def test_bad_arguments_of_the_density():
    h = exact.Matrix(torch.diag(DIAGONAL))
    with pytest.raises(UserError, match="probes and steps must be at least 1, got 0 and 5"):
        spectral_density(h, probes=0, steps=5)
    with pytest.raises(UserError, match="width must be above 0"):
        spectral_density(h, probes=1, steps=5, width=0)
