from __future__ import annotations

import pytest
import torch

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.curvature.operator import Hessian
from ptq_dynamics.curvature.slices import plane


@pytest.fixture(scope="module")
def h(small):
    return Hessian(*small, precision="fp64")


@pytest.fixture(scope="module")
def points(h):
    generator = torch.Generator().manual_seed(7)
    steps = torch.randn(2, h.size, generator=generator, dtype=torch.float64)
    return h.theta + 0.02 * steps[0], h.theta + 0.05 * steps[1], h.theta.clone()


def test_distances_and_losses_are_those_of_weight_space(h, points):
    s = plane(h, *points, resolution=5, margin=0.2)
    for i in range(3):
        assert s.losses[i] == pytest.approx(h.loss(points[i] - h.theta))
        for j in range(3):
            apart = (points[i] - points[j]).norm().item()
            assert (s.points[i] - s.points[j]).norm().item() == pytest.approx(apart)
    assert s.points[0].tolist() == [0, 0] and s.points[1, 1] == 0 and s.points[2, 1] > 0
    torch.testing.assert_close(s.basis @ s.basis.T, torch.eye(2, dtype=torch.float64))


def test_the_window_has_equal_scales_and_holds_all_three(h, points):
    s = plane(h, *points, resolution=5, margin=0.2)
    assert torch.allclose(s.x.diff(), s.y.diff()) and torch.allclose(s.x.diff(), s.x.diff()[0])
    extent = (s.points.max(0).values - s.points.min(0).values).max()
    assert (s.x[-1] - s.x[0]).item() == pytest.approx(1.4 * extent.item())
    for axis, i in ((s.x, 0), (s.y, 1)):
        assert axis[0] < s.points[:, i].min() and axis[-1] > s.points[:, i].max()


def test_rows_are_y_and_columns_x(h, points):
    s = plane(h, *points, resolution=4, margin=0.5)
    for i, j in ((0, 0), (1, 3), (3, 1)):
        at = points[0] + s.x[j] * s.basis[0] + s.y[i] * s.basis[1]
        assert s.loss[i, j].item() == pytest.approx(h.loss(at - h.theta), abs=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, c: (a, a, c), "the first and second points are the same weights"),
        (lambda a, b, c: (a, b, a), "the first and third points are the same weights"),
        (lambda a, b, c: (a, b, b), "the second and third points are the same weights"),
        (lambda a, b, c: (a, b, 0.3 * a + 0.7 * b), "the three points lie on a line"),
        (
            lambda a, b, c: (a, b[:-1], c),
            r"the second point has shape .*must be checkpoints of one architecture",
        ),
        (lambda a, b, c: (a, b, c * torch.nan), "the third point is not finite"),
    ],
)
def test_planes_that_are_none(h, points, change, message):
    with pytest.raises(UserError, match=message):
        plane(h, *change(*points))


def test_bad_windows(h, points):
    with pytest.raises(UserError, match="resolution must be at least 2, got 1"):
        plane(h, *points, resolution=1)
    with pytest.raises(UserError, match="margin must not be negative"):
        plane(h, *points, margin=-0.1)
