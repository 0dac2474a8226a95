"""Learning rates as functions of the step count, with optax's names.

A schedule takes the number of steps done so far, as an int or a 0-d tensor, and returns a float or a
0-d tensor. On tensors it computes with tensors, so that no step waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Schedule",
    "constant_schedule",
    "cosine_decay_schedule",
    "join_schedules",
    "linear_schedule",
    "warmup_cosine_decay_schedule",
]

Schedule: TypeAlias = Callable[[Any], Any]


def constant_schedule(value: float) -> Schedule:
    """Always `value`.

    Example:
      >>> constant_schedule(0.1)(1000)
      0.1
    """
    return lambda count: value


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """From `init_value` to `end_value` over `transition_steps`, constant before and after.

    Example:
      >>> linear_schedule(0.0, 1.0, 4)(1)
      0.25
    """
    _positive(transition_steps, "transition_steps")

    def schedule(count: Any) -> Any:
        done = _clip((count - transition_begin) / transition_steps)
        return init_value + (end_value - init_value) * done

    return schedule


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0) -> Schedule:
    """Half a cosine from `init_value` to `alpha * init_value`, constant afterwards.

    Example:
      >>> cosine_decay_schedule(1.0, 10)(5)
      0.5
    """
    _positive(decay_steps, "decay_steps")

    def schedule(count: Any) -> Any:
        done = _clip(count / decay_steps)
        cosine = torch.cos(math.pi * done) if isinstance(done, Tensor) else math.cos(math.pi * done)
        return init_value * ((1 - alpha) * 0.5 * (1 + cosine) + alpha)

    return schedule


def join_schedules(schedules: list[Schedule], boundaries: list[int]) -> Schedule:
    """One schedule after the other; each counts from its own boundary.

    Raises:
      ValueError: not one boundary less than schedules.
    """
    if len(boundaries) != len(schedules) - 1:
        raise ValueError(f"{len(schedules)} schedules need {len(schedules) - 1} boundaries, got {len(boundaries)}")

    def schedule(count: Any) -> Any:
        value = schedules[0](count)
        for begin, following in zip(boundaries, schedules[1:], strict=True):
            later = following(count - begin)
            if isinstance(count, Tensor):
                value = torch.where(count < begin, value, later)
            elif count >= begin:
                value = later
        return value

    return schedule


def warmup_cosine_decay_schedule(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0
) -> Schedule:
    """Linear warm-up to `peak_value`, then half a cosine down to `end_value`.

    Args:
      warmup_steps: steps of the warm-up.
      decay_steps: steps of the whole schedule, warm-up included.

    Example:
      >>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, 10, 110)
      >>> schedule(5), schedule(10), schedule(60), schedule(110)
      (0.5, 1.0, 0.5, 0.0)
    """
    if decay_steps <= warmup_steps:
        raise ValueError(f"decay_steps={decay_steps} includes the warm-up, so it must exceed {warmup_steps}")
    alpha = end_value / peak_value if peak_value else 0.0
    cosine = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha)
    if warmup_steps == 0:
        return cosine
    return join_schedules([linear_schedule(init_value, peak_value, warmup_steps), cosine], [warmup_steps])


def _clip(x: Any) -> Any:
    return x.clamp(0, 1) if isinstance(x, Tensor) else min(max(x, 0.0), 1.0)


def _positive(steps: int, name: str) -> None:
    if steps < 1:
        raise ValueError(f"{name}={steps}: expected at least one step")
