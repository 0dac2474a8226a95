"""Dropout that depends on which element of the global batch it is for, not on who computes it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ragged.random.counter import uniform01

__all__ = ["dropout"]


def dropout(x: Tensor, rate: float, seed: int, path: str, *, start: int = 0) -> Tensor:
    """Zero elements with probability `rate`, and scale the others by `1 / (1 - rate)`.

    The elements are numbered through the global batch, so any number of ranks that share it out get the masks that
    one process gets, and recomputing a checkpoint gets them again without any generator's state.

    Args:
      x: floating point; dim 0 counts the examples of this rank.
      rate: in [0, 1].
      seed, path: as in `bits`: name the place and the step, as in `f"layers.{i}.mlp/{step}"`. What is drawn twice
        for one path and seed is the same twice.
      start: the number of this rank's first example in the global batch.

    Raises:
      ValueError: a rate outside [0, 1], a negative start, or an `x` without dims.

    Example:
      >>> x = torch.ones(4, 3)
      >>> whole = dropout(x, 0.5, 0, "mlp/7")
      >>> half = dropout(x[2:], 0.5, 0, "mlp/7", start=2)
      >>> torch.equal(whole[2:], half)
      True
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout rate {rate!r}: expected a number between 0 and 1")
    if start < 0 or x.ndim == 0:
        raise ValueError(f"dropout of shape {tuple(x.shape)} from example {start}: needs a dim of examples, start >= 0")
    if rate == 0:
        return x
    first = start * math.prod(x.shape[1:])
    index = torch.arange(first, first + x.numel(), device=x.device).view(x.shape)
    keep = uniform01(seed, path, index) >= rate
    return torch.where(keep, x / (1 - rate) if rate < 1 else x, torch.zeros((), dtype=x.dtype, device=x.device))
