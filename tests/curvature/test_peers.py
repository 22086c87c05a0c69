"""The mini profile's architecture against curvlinops: stored numbers always, the package itself where it is installed.

curvlinops is an oracle, never a dependency (its own pull torchvision, which breaks transformers); to run the skipped
test: pip install --no-deps curvlinops-for-pytorch backpack-for-pytorch einconv unfoldNd, or put them on PYTHONPATH.
"""

from __future__ import annotations

import exact
import pytest
import torch
import torch.nn.functional as F

from ptq_dynamics.curvature.lanczos import top_eigenvalues
from ptq_dynamics.curvature.operator import Hessian, quantized_names
from ptq_dynamics.curvature.trace import trace
from ptq_dynamics.models import neox

# curvlinops 3.0.1 and scipy's eigsh (tolerance 1e-3) on the model and tokens below: (value, standard error) of 100
# Rademacher probes, and the two eigenvalues at each end
TRACE, TRACE_QUANTIZED = (85.444, 4.807), (13.680, 3.407)
LARGEST, SMALLEST = (1.52424, 1.47722), (-1.33442, -1.25960)


@pytest.fixture(scope="module")
def mini():
    config = neox.ModelConfig(width=64, layers=2, heads=4, context=128)
    model = exact.randomise(neox.build(config, 1024, seed=0), scale=0.05)
    return model, torch.randint(1024, (4, 129), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def h(mini):
    h = Hessian(*mini)
    assert h.size == 231_168 and h.loss() == pytest.approx(
        6.999537, abs=1e-4
    )  # the model the numbers belong to
    return h


def within(ours, theirs, errors=3.0):
    return abs(ours[0] - theirs[0]) <= errors * (ours[1] ** 2 + theirs[1] ** 2) ** 0.5


def test_traces_agree_within_their_standard_errors(mini, h):
    t = trace(h, probes=30, seed=0)
    assert within((t.value, t.standard_error), TRACE)
    assert within(t.over(quantized_names(mini[0])), TRACE_QUANTIZED)
    assert t.standard_error < 15


@pytest.mark.parametrize(("end", "wanted"), [("largest", LARGEST), ("smallest", SMALLEST)])
def test_the_ends_of_the_spectrum_agree(h, end, wanted):
    found = top_eigenvalues(h, 2, tolerance=2e-3, end=end)
    assert all(e.converged for e in found)
    assert [e.value for e in found] == pytest.approx(wanted, abs=2e-3 * LARGEST[0])


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.shape = model, neox.Shape.of(model.config)

    def forward(self, ids):
        return neox.lean_logits(self.shape, dict(self.model.named_parameters()), ids).flatten(0, 1)


def plain_norm(x, shape, weight=None, bias=None, eps=1e-5):
    # torch's own layer norm has a wrong second derivative in the way that curvlinops 3.0.1 composes its transforms
    # (torch 2.13: its products are off by 0.4 % here, those of double backward are not)
    centred = x - x.mean(-1, keepdim=True)
    out = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return out if weight is None else out * weight + bias


def test_products_are_those_of_curvlinops(mini, h, monkeypatch):
    curvlinops = pytest.importorskip(
        "curvlinops", reason="curvlinops is not installed (see this file's head)"
    )
    monkeypatch.setattr(F, "layer_norm", plain_norm)
    model, tokens = mini
    module = Logits(model)
    peer = curvlinops.HessianLinearOperator(
        module, torch.nn.CrossEntropyLoss(), [p.requires_grad_() for p in module.parameters()],
        [(tokens[:, :-1], tokens[:, 1:].flatten())], num_data=len(tokens), check_deterministic=False,
    )  # fmt: skip
    v = torch.randn(h.size, 2, generator=torch.Generator().manual_seed(3))
    ours, theirs = h @ v, peer @ v
    model.requires_grad_(False)
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
