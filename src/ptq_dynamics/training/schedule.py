"""Learning-rate schedules: pure functions of the step.

Step ``s`` counts updates from 0: ``lr_at(schedule, s)`` is the rate that update number ``s`` uses. Every shape is
non-negative everywhere, constant past its end, and the same after a resume since it keeps no state. A cooldown
branch is the trunk's schedule with an end: same warmup and peak, ``shape="wsd"``, ``steps`` = branch step + decay.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..core.config import config_dataclass

Shape = Literal["constant", "wsd", "cosine", "linear"]
Cooldown = Literal["linear", "1-sqrt", "cosine"]
Phase = Literal["warmup", "stable", "decay"]


@config_dataclass()
class Schedule:
    """Linear warmup, then one of four shapes.

    ``constant`` stays at the peak; ``wsd`` (warmup-stable-decay, Hu et al. 2024) stays at the peak and decays over
    the last ``decay_steps``; ``cosine`` (Loshchilov & Hutter 2017) and ``linear`` decay from the end of the warmup.
    A decay longer than what follows the warmup is cut to it: update ``warmup_steps`` has the peak in every case.
    """

    shape: Shape
    peak_lr: Annotated[float, Field(gt=0)]
    steps: Annotated[int, Field(ge=1)]  # length of the run, in updates
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay_steps: Annotated[int, Field(ge=0)] = 0  # wsd only
    cooldown: Cooldown = "linear"  # shape of the decay of wsd
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0  # of the peak, at the end of the decay

    @model_validator(mode="after")
    def _consistent(self) -> Schedule:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be less than steps {self.steps}")
        if self.shape == "wsd" and self.decay_steps == 0:
            raise ValueError("shape 'wsd' needs decay_steps of at least 1")
        if self.shape != "wsd" and self.decay_steps:
            raise ValueError(f"decay_steps belongs to shape 'wsd', not to '{self.shape}'")
        return self


def decay_start(s: Schedule) -> int:
    """First step of the decay; ``steps`` where there is none."""
    if s.shape == "constant":
        return s.steps
    peak = s.warmup_steps + 1  # updates done when the peak has been used once
    return max(peak, s.steps - s.decay_steps) if s.shape == "wsd" else peak


def lr_at(s: Schedule, step: int) -> float:
    """Learning rate of update number ``step`` (0-based). The last update, ``steps - 1``, is the lowest.

    The warmup reaches the peak with update ``warmup_steps``; a decay to zero ends *after* the last update, so that no
    update is wasted on a rate of zero.
    """
    if step < s.warmup_steps:
        return s.peak_lr * (step + 1) / (s.warmup_steps + 1)
    begin = decay_start(s)
    if step < begin or begin >= s.steps:
        return s.peak_lr
    done = min(1.0, (step - begin + 1) / (s.steps - begin + 1))  # in (0, 1); 1 only past the end
    kind = s.cooldown if s.shape == "wsd" else s.shape
    if kind == "linear":
        left = 1.0 - done
    elif kind == "1-sqrt":  # Hägele et al. 2024, eq. 1
        left = 1.0 - math.sqrt(done)
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    return s.peak_lr * (s.final_fraction + (1.0 - s.final_fraction) * max(0.0, left))


def phase_at(s: Schedule, step: int) -> Phase:
    """Phase of a checkpoint taken after ``step`` updates."""
    if step <= s.warmup_steps and s.warmup_steps:
        return "warmup"
    return "decay" if step > decay_start(s) else "stable"
