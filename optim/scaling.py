"""Transformations that multiply: by a number, by a learning rate."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from optim.base import EmptyState, GradientTransformation, first_tensor
from optim.schedules import Schedule
from ragged.tree import sharded_trees

__all__ = ["ScaleByScheduleState", "new_count", "scale", "scale_by_learning_rate", "scale_by_schedule"]


def new_count(params: Any) -> Tensor:
    """A step counter at zero, beside the parameters: int32, 0-d."""
    like, trees = first_tensor(params), sharded_trees(params)
    place = like.device if like is not None else trees[0].plan.bound().device if trees else None
    return torch.zeros((), dtype=torch.int32, device=place)


def scale(factor: float) -> GradientTransformation:
    """Multiply updates by a number.

    Example:
      >>> import torch
      >>> scale(3.0).update(torch.ones(1), EmptyState(), None)[0].item()
      3.0
    """

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optree.tree_map(lambda u: u * factor, updates), state

    return GradientTransformation(lambda params: EmptyState(), update_fn)


class ScaleByScheduleState(NamedTuple):
    """count: steps done, int32."""

    count: Tensor  # type: ignore[assignment]  # optax's name; it hides tuple.count


def scale_by_schedule(schedule: Schedule) -> GradientTransformation:
    """Multiply updates by `schedule(count)`, the count before this step."""

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = schedule(state.count)
        return optree.tree_map(lambda u: (u * factor).to(u.dtype), updates), ScaleByScheduleState(state.count + 1)

    return GradientTransformation(lambda params: ScaleByScheduleState(new_count(params)), update_fn)


def scale_by_learning_rate(learning_rate: float | Schedule) -> GradientTransformation:
    """Multiply by minus the learning rate, a number or a schedule, so that updates descend."""
    if callable(learning_rate):
        return scale_by_schedule(lambda count: -1 * learning_rate(count))
    return scale(-learning_rate)
