"""Decoupled weight decay."""

from __future__ import annotations

from typing import Any

import optree
from torch import Tensor

from optim.base import EmptyState, GradientTransformation
from ragged import ShardedTree, partition
from ragged.paths import flatten
from ragged.resolver import resolve

__all__ = ["add_decayed_weights", "decay_map"]


def add_decayed_weights(weight_decay: float, mask: Any = None) -> GradientTransformation:
    """Add `weight_decay * params` to the updates.

    Args:
      mask: which leaves decay: a prefix pytree of bools, a callable `(path, leaf)`, or
        `ragged.rules`; all by default. Shapes it sees are global.

    Example:
      >>> import torch
      >>> tx = add_decayed_weights(0.1, mask=lambda path, leaf: len(leaf.shape) >= 2)
      >>> params = {"w": torch.ones(1, 1), "b": torch.ones(1)}
      >>> tx.update({"w": torch.zeros(1, 1), "b": torch.zeros(1)}, tx.init(params), params)[0]
      {'w': tensor([[0.1000]]), 'b': tensor([0.])}
    """

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("add_decayed_weights needs the parameters: call update(updates, state, params)")
        return decay_map(lambda u, p: (u + weight_decay * p).to(u.dtype), updates, params, mask), state

    return GradientTransformation(lambda params: EmptyState(), update_fn)


def decay_map(f: Any, updates: Any, params: Any, mask: Any) -> Any:
    """`f(update, param)` on the leaves of the mask; others keep their update."""
    if mask is None:
        return optree.tree_map(f, updates, params)
    if not isinstance(params, ShardedTree):
        return _plain(f, updates, params, mask)
    chosen, _ = partition(params, mask)
    # Pieces of a selection are intervals of the buffers: compute on those, copy the buffers once.
    out: Any = optree.tree_map(lambda u: u.clone(), updates)
    target = out.view(chosen.selection)
    source = updates.view(chosen.selection)
    for t, u, p in zip(target.tensors, source.tensors, chosen.tensors, strict=True):
        t.copy_(f(u, p))
    return out


def _plain(f: Any, updates: Any, params: Any, mask: Any) -> Any:
    paths, leaves, structure = flatten(params)
    given = optree.tree_leaves(updates)
    flags = resolve(mask, params, what="mask", is_value=lambda x: isinstance(x, bool), paths_leaves=(paths, leaves))
    out: list[Tensor] = [f(u, p) if m else u for u, p, m in zip(given, leaves, flags, strict=True)]
    return optree.tree_unflatten(structure, out)
