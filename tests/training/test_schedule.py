from __future__ import annotations

import dataclasses
import math

import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from ptq_dynamics.training.schedule import Schedule, decay_start, lr_at, phase_at

SHAPES = ["constant", "wsd", "cosine", "linear"]


@st.composite
def schedules(draw, shapes=SHAPES):
    """Any valid schedule: no warmup, a decay longer than the run and runs of one update are among them."""
    shape = draw(st.sampled_from(shapes))
    steps = draw(st.integers(1, 400))
    return Schedule(
        shape=shape,
        peak_lr=draw(st.floats(1e-8, 10.0)),
        steps=steps,
        warmup_steps=draw(st.sampled_from([0, draw(st.integers(0, steps - 1))])),
        decay_steps=draw(st.integers(1, 2 * steps)) if shape == "wsd" else 0,
        cooldown=draw(st.sampled_from(["linear", "1-sqrt", "cosine"])),
        final_fraction=draw(st.sampled_from([0.0, 0.1, draw(st.floats(0, 1))])),
    )


def rates(s: Schedule) -> list[float]:
    return [lr_at(s, step) for step in range(s.steps)]


@given(schedules())
def test_never_negative_never_above_the_peak_and_at_the_peak_once(s):
    told = rates(s)
    assert all(0.0 <= lr <= s.peak_lr and math.isfinite(lr) for lr in told)
    assert told[s.warmup_steps] == s.peak_lr  # of a decay longer than what follows the warmup, too
    assert all(lr > 0.0 for lr in told)  # no update is wasted


@given(schedules(), st.integers(0, 10**9))
def test_defined_and_constant_past_the_end(s, beyond):
    past = lr_at(s, s.steps + beyond)
    assert past == lr_at(s, s.steps)
    if decay_start(s) < s.steps:
        assert past == pytest.approx(s.final_fraction * s.peak_lr, rel=1e-12)
        assert past <= lr_at(s, s.steps - 1)
    else:
        assert past == s.peak_lr


@given(schedules())
def test_warmup_rises_in_even_steps_then_flat_then_falls(s):
    told = rates(s)
    warm, decay = s.warmup_steps, decay_start(s)
    for step in range(warm):
        assert told[step] == pytest.approx(s.peak_lr * (step + 1) / (warm + 1), rel=1e-12)
    assert all(lr == s.peak_lr for lr in told[warm:decay])
    falling = [s.peak_lr, *told[decay:]]
    if s.final_fraction < 0.9:
        assert all(a > b for a, b in zip(falling, falling[1:], strict=False))
    assert all(a >= b for a, b in zip(falling, falling[1:], strict=False))


@given(schedules(shapes=["wsd"]))
def test_continuous_at_the_start_of_the_decay(s):
    """The first update of the decay is one grid step of its shape below the peak: no jump, no pause."""
    n = s.steps - decay_start(s)
    if n < 1:
        return
    drop = {
        "linear": 1 / (n + 1),
        "1-sqrt": math.sqrt(1 / (n + 1)),
        "cosine": math.sin(math.pi / (n + 1) / 2) ** 2,
    }
    assert lr_at(s, decay_start(s) - 1) == s.peak_lr
    expected = s.peak_lr * (1 - (1 - s.final_fraction) * drop[s.cooldown])
    assert lr_at(s, decay_start(s)) == pytest.approx(expected, rel=1e-9)


@given(schedules(), st.data())
def test_a_pure_function_of_the_step(s, data):
    """Whatever was asked before, and for a copy of the configuration, as after a resume."""
    step = data.draw(st.integers(0, s.steps + 10))
    first = lr_at(s, step)
    for other in data.draw(st.lists(st.integers(0, s.steps + 10), max_size=5)):
        lr_at(s, other)
    assert lr_at(dataclasses.replace(s), step) == lr_at(s, step) == first


@given(
    schedules(shapes=["constant"]),
    st.integers(1, 300),
    st.sampled_from(["linear", "1-sqrt", "cosine"]),
    st.data(),
)
def test_a_branch_equals_its_trunk_until_it_branches(trunk, decay, cooldown, data):
    begin = data.draw(st.integers(trunk.warmup_steps + 1, max(trunk.steps, trunk.warmup_steps + 1)))
    branch = Schedule(
        shape="wsd", peak_lr=trunk.peak_lr, steps=begin + decay, warmup_steps=trunk.warmup_steps, decay_steps=decay,
        cooldown=cooldown,
    )  # fmt: skip
    for step in range(begin):
        assert lr_at(branch, step) == lr_at(trunk, step)
        assert phase_at(branch, step) == phase_at(trunk, step)
    assert phase_at(branch, begin) == phase_at(trunk, begin) == "stable"
    assert all(lr_at(branch, step) < trunk.peak_lr for step in range(begin, begin + decay))
    assert phase_at(branch, begin + 1) == "decay"


@given(schedules())
def test_phase_tells_what_the_last_update_was(s):
    for done in range(1, s.steps + 1):
        lr, phase = lr_at(s, done - 1), phase_at(s, done)
        expected = "warmup" if done <= s.warmup_steps else "stable" if done <= decay_start(s) else "decay"
        assert phase == expected
        if s.final_fraction < 0.9:
            assert (lr == s.peak_lr) == (phase == "stable")


@pytest.mark.parametrize(
    ("shape", "reference"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
def test_from_the_peak_on_equal_to_transformers(shape, reference):
    """(Its warmup starts with a rate of zero, which wastes an update.)"""
    s = Schedule(shape=shape, peak_lr=2.0, steps=50, warmup_steps=10)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    theirs = reference(optimizer, num_warmup_steps=10, num_training_steps=50)
    told = []
    for _ in range(50):
        told.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    told.append(optimizer.param_groups[0]["lr"])
    assert [lr_at(s, step) for step in range(10, 51)] == pytest.approx(told[10:51], abs=1e-12)


def test_cooldown_shapes_by_hand():
    def wsd(cooldown, **more):
        return Schedule(shape="wsd", peak_lr=1.0, steps=13, decay_steps=3, cooldown=cooldown, **more)

    assert rates(wsd("linear"))[9:] == pytest.approx([1, 3 / 4, 2 / 4, 1 / 4])
    assert rates(wsd("1-sqrt"))[9:] == pytest.approx([1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)])
    assert rates(wsd("cosine"))[9:] == pytest.approx([1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)])
    assert rates(wsd("linear", final_fraction=0.2))[9:] == pytest.approx([1, 0.8, 0.6, 0.4])
    assert lr_at(wsd("linear", final_fraction=0.2), 13) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": "wsd"}, "needs decay_steps of at least 1"),
        ({"shape": "cosine", "decay_steps": 3}, "decay_steps belongs to shape 'wsd'"),
        ({"warmup_steps": 10}, "warmup_steps 10 must be less than steps 10"),
        ({"warmup_steps": -1}, "greater than or equal to 0"),
        ({"peak_lr": 0.0}, "greater than 0"),
        ({"peak_lr": math.nan}, "finite number"),
        ({"steps": 0, "warmup_steps": 0}, "greater than or equal to 1"),
        ({"final_fraction": 1.5}, "less than or equal to 1"),
        ({"shape": "triangle"}, "'constant', 'wsd', 'cosine' or 'linear'"),
    ],
)
def test_what_makes_no_schedule_is_refused(changes, says):
    with pytest.raises(pydantic.ValidationError, match=says):
        Schedule(**{"shape": "constant", "peak_lr": 1.0, "steps": 10, "warmup_steps": 2, **changes})
