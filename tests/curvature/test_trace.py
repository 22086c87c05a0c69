from __future__ import annotations

import exact
import pytest
import torch

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.curvature.operator import Hessian, quantized_names
from ptq_dynamics.curvature.trace import trace

DIAGONAL = torch.tensor([5.0, -3.0, 0.5, 0.0, -0.25, 2.0])


def test_a_diagonal_with_negative_entries_is_exact_from_any_probe():
    t = trace(exact.Matrix(torch.diag(DIAGONAL)), probes=2, seed=0)
    assert t.value == DIAGONAL.sum().item() and t.standard_error == 0 and t.probes == 2
    assert t.by_parameter == {"all": (4.25, 0.0)}


def test_intervals_cover_the_exact_trace_of_a_model(truth):
    hessian = exact.Matrix(truth[2])
    wanted = truth[2].trace().item()
    found = [trace(hessian, probes=20, seed=s, batch=20) for s in range(100)]
    covered = sum(t.low <= wanted <= t.high for t in found)
    assert 90 <= covered <= 99
    # the stated standard error is the spread over repeats
    spread = torch.tensor([t.value for t in found]).std().item()
    assert spread == pytest.approx(sum(t.standard_error for t in found) / 100, rel=0.2)


def test_of_a_model_whole_by_parameter_and_by_block(small, truth):
    h = Hessian(*small)
    t = trace(h, probes=200, seed=1)
    assert abs(t.value - truth[2].trace()) < 4 * t.standard_error
    assert t.low < t.value < t.high and not t.stopped and t.probes == 200
    diagonal = truth[2].diagonal()
    for name, (value, error) in t.by_parameter.items():
        assert abs(value - diagonal[h.layout[name]].sum()) < 4.5 * error
    assert sum(v for v, _ in t.by_parameter.values()) == pytest.approx(t.value)
    quantized = quantized_names(small[0])
    block = [n for n in h.names if ".layers.1." in n]
    for names in (quantized, block):
        value, error = t.over(names)
        assert abs(value - sum(diagonal[h.layout[n]].sum() for n in names)) < 4 * error
    # probes are shared, so the parts' errors are not independent: theirs is the spread of the sum
    assert t.over(h.names) == pytest.approx((t.value, t.standard_error))


def test_probes_do_not_depend_on_how_many_go_together(truth):
    one, many = (trace(exact.Matrix(truth[2]), probes=13, seed=2, batch=b) for b in (1, 8))
    assert one.value == pytest.approx(many.value, rel=1e-12)
    a, b = (trace(exact.Matrix(truth[2]), probes=400, seed=2, batch=b, atol=5.0) for b in (1, 64))
    assert a.probes == b.probes and a.stopped and b.stopped


def test_the_stop_rule_is_absolute_and_needs_ten_probes(truth):
    exactly = trace(exact.Matrix(torch.diag(DIAGONAL)), probes=50, seed=0, atol=1e-9)
    assert exactly.probes == 10 and exactly.stopped

    # a trace of zero, where a relative rule would never end
    h = exact.Matrix(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    zero = trace(h, probes=10_000, seed=0, atol=0.1)
    assert zero.stopped and zero.high - zero.low <= 0.2 and zero.probes < 2_000
    assert abs(zero.value) < 0.2

    short = trace(exact.Matrix(truth[2]), probes=12, seed=0, atol=1e-9)
    assert not short.stopped and short.probes == 12


def test_hutch_plus_plus(truth):
    generator = torch.Generator().manual_seed(5)
    root = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    low_rank = root @ torch.diag(torch.tensor([3.0, -2.0, 1.0], dtype=torch.float64)) @ root.T
    h = exact.Matrix(low_rank, {"first": slice(0, 20), "rest": slice(20, 50)})
    t = trace(h, probes=15, seed=0, method="hutch++")
    assert t.value == pytest.approx(low_rank.trace().item(), rel=1e-9) and h.products == 15 == t.probes
    assert t.over(["first"])[0] == pytest.approx(low_rank.diagonal()[:20].sum().item(), rel=1e-9)

    hessian, wanted = exact.Matrix(truth[2]), truth[2].trace().item()
    plus = [trace(hessian, probes=90, seed=s, method="hutch++") for s in range(20)]
    plain = [trace(hessian, probes=90, seed=s) for s in range(20)]

    def error(found):
        return sum((t.value - wanted) ** 2 for t in found)

    assert error(plus) < 0.5 * error(plain)
    assert sum(t.low <= wanted <= t.high for t in plus) >= 16
    assert sum(v for v, _ in plus[0].by_parameter.values()) == pytest.approx(plus[0].value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"probes": 0}, "probes must be at least 2 for hutchinson"),
        ({"probes": 1}, "probes must be at least 2 for hutchinson"),
        ({"probes": 5, "method": "hutch++"}, r"probes must be at least 6 for hutch\+\+"),
        ({"method": "exact"}, "method 'exact' is unknown"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"atol": 0.0}, "atol must be above 0"),
        ({"atol": 1.0, "min_probes": 9}, "needs at least 10 probes, got min_probes 9"),
        ({"atol": 1.0, "method": "hutch++"}, r"hutch\+\+ spends all its probes"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        trace(exact.Matrix(torch.diag(DIAGONAL)), **({"probes": 20, "seed": 0} | arguments))


def test_an_unknown_part():
    with pytest.raises(UserError, match="no parameter 'head' in it"):
        trace(exact.Matrix(torch.diag(DIAGONAL)), probes=2, seed=0).over(["head"])
