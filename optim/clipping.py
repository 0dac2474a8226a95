"""Clip gradients by their global norm."""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor

from optim.base import EmptyState, GradientTransformation
from optim.norms import global_norm

__all__ = ["clip_by_global_norm"]


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Scale gradients so that their norm over the whole tree and mesh is at most `max_norm`.

    A norm within the limit leaves them bitwise as they are; zero stays zero. A norm that isn't
    finite makes all of them NaN on every rank, rather than a step of zeros (see `apply_if_finite`).

    Raises:
      ValueError: a negative limit.

    Example:
      >>> import torch
      >>> tx = clip_by_global_norm(1.0)
      >>> tx.update(torch.tensor([0.0, 2.0]), tx.init(None), None)[0].tolist()
      [0.0, 1.0]
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}: expected a number >= 0")

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(updates)
        # 1 keeps every bit; where the norm is 0, so is everything else
        factor = torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))
        factor = torch.where(norm.isfinite(), factor, math.nan)

        def clip(u: Tensor) -> Tensor:
            return (u * factor).to(u.dtype)

        return optree.tree_map(clip, updates), state

    return GradientTransformation(lambda params: EmptyState(), update_fn)
