"""`fold`: apply one function layer after layer, with the next layer's gather in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fsdp.step import Step
from ragged.tree import ShardedTree

__all__ = ["fold"]


def fold(fn: Callable[[Any, Any], Any], layers: Iterable[Any], x: Any, *, prefetch: int = 1) -> Any:
    """`x = fn(layer, x)` for each layer, the next layers' parameters already on their way.

    Args:
      fn: a gathered function of one layer's parameters and the running value.
      layers: a list of trees: sharded (`params["layers"]`) or plain.
      x: any pytree.
      prefetch: how many layers ahead gathers run; 0 for none.

    Raises:
      ValueError: a negative `prefetch`.

    Example:
      >>> import torch
      >>> from fsdp import fold, gathered
      >>> layers = [{"w": torch.full((2,), 2.0)}, {"w": torch.full((2,), 3.0)}]
      >>> fold(gathered(lambda p, x: p["w"] * x), layers, torch.ones(2)).tolist()
      [6.0, 6.0]
    """
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch}: expected a number of layers >= 0")
    if isinstance(layers, (dict, ShardedTree)) and any(isinstance(x, (str, int)) for x in layers):
        raise ValueError("fold got a mapping of layers; pass list(layers.values()), in the order to run them")
    items = list(layers)
    if not any(isinstance(layer, ShardedTree) for layer in items):
        for layer in items:
            x = fn(layer, x)
        return x
    first = next(layer for layer in items if isinstance(layer, ShardedTree))
    step, own = first.scope, None
    if step is None and not torch.is_grad_enabled():
        step = own = Step(first.plan.bound())
        items = [_scoped(layer, own) for layer in items]
    if step is None:  # grad mode: each call says by itself what is wrong, if anything is
        for layer in items:
            x = fn(layer, x)
        return x
    filling = step.filling
    before, filling.depth = filling.depth, prefetch
    try:
        for i, layer in enumerate(items):
            filling.hints = [tree for tree in items[i + 1 : i + 1 + prefetch] if isinstance(tree, ShardedTree)]
            x = fn(layer, x)
    finally:
        filling.depth, filling.hints = before, []
        if own is not None:
            own.settle()
            own.close()
    return x


def _scoped(layer: Any, scope: Step) -> Any:
    if not isinstance(layer, ShardedTree):
        return layer
    return ShardedTree(layer.plan, layer.selection, layer.tensors, scope=scope, lives=layer._lives)
