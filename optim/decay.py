"""Decoupled weight decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from optim.base import EmptyState, GradientTransformation, global_leaves, is_partial, is_sharded, resolve_leaves
from ragged import ShardedTree, partition

__all__ = ["add_decayed_weights", "resolve_mask", "split_tensors"]


def add_decayed_weights(weight_decay: float, mask: Any = None) -> GradientTransformation:
    """Add `weight_decay * params` to the updates.

    Args:
      mask: which leaves decay: a prefix pytree of bools, a callable `(path, leaf)`, or
        `ragged.rules`; all by default. Shapes it sees are global. Inside a pytree, leaves of a
        sharded tree have its place there before their own path.

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
        if mask is None:
            # alpha, not a product: bf16 parameters enter fp32 updates unrounded
            decayed = optree.tree_map(lambda u, p: torch.add(u, p, alpha=weight_decay).to(u.dtype), updates, params)
            return decayed, state
        out = optree.tree_map(torch.clone, updates)
        for decays, (u, p) in split_tensors(mask, params, out, params):
            if decays:
                u.add_(p, alpha=weight_decay)
        return out, state

    return GradientTransformation(lambda params: EmptyState(), update_fn)


def split_tensors(mask: Any, params: Any, *trees: Any) -> Iterator[tuple[bool, tuple[Tensor, ...]]]:
    """The tensors of trees like `params`, side by side, and what a mask of leaves says of them.

    Tensors of a sharded tree are the intervals of its buffers that the mask covers, as views: so
    leaves cost no more than the buffers they share.
    """
    if mask is None:
        for tensors in zip(*(optree.tree_leaves(t) for t in trees), strict=True):
            yield True, tensors
        return
    flags = iter(resolve_mask(mask, params))
    tops, structure = optree.tree_flatten(params, is_leaf=is_sharded)
    for top, *others in zip(tops, *(structure.flatten_up_to(t) for t in trees), strict=True):
        if not isinstance(top, ShardedTree):
            yield next(flags), tuple(others)
            continue
        table = {path: next(flags) for path in top.paths}
        for part, decays in zip(partition(top, lambda path, leaf, t=table: t[path]), (True, False), strict=True):
            pieces = (other.view(part.selection).tensors for other in others)
            for tensors in zip(*pieces, strict=True):
                yield decays, tensors


def resolve_mask(mask: Any, params: Any) -> list[bool]:
    """What a mask says of the leaves of parameters, in their order."""
    names, leaves = global_leaves(params)
    return resolve_leaves(mask, names, leaves, is_partial(params), what="mask", is_value=lambda x: isinstance(x, bool))
