"""The protocol of an optimizer: pure functions over sharded (or plain) trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ragged import ShardedTree

__all__ = ["Blocks", "EmptyState", "GradientTransformation", "first_tensor", "identity", "refuse"]

Blocks = Callable[[str, tuple[int, ...], torch.dtype], "tuple[Any, int] | None"]


class GradientTransformation(NamedTuple):
    """optax's pair of pure functions, and what sharding adds to it.

    Attributes:
      init: `init(params) -> state`.
      update: `update(grads, state, params) -> (updates, state)`; its inputs stay as they are.
      step: `step(params, grads, state) -> (params, state)`, an optional fused path that may
        overwrite all three. Use `make_step`, which falls back on `update`.
      blocks: `blocks(path, shape, dtype) -> (block, start alignment) | None`: what must not be cut
        between ranks, from global shapes. Pass the transformation to `plan(optimizer=)`.

    Trees may be sharded, plain, or mixed pytrees of both: a sharded tree is a pytree of a few
    flat buffers, so the same code serves all.

    Source: optax's GradientTransformation.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    step: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
    blocks: Blocks | None = None


class EmptyState(NamedTuple):
    """The state of a transformation that remembers nothing."""


def identity() -> GradientTransformation:
    """Leaves updates as they are.

    Example:
      >>> import torch
      >>> identity().update(torch.ones(2), EmptyState(), None)[0].tolist()
      [1.0, 1.0]
    """

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return updates, state

    return GradientTransformation(lambda params: EmptyState(), update_fn)


def first_tensor(tree: Any) -> Tensor | None:
    """Some tensor of a tree, to know the device by."""
    return next((x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)), None)


def refuse(params: Any, what: str, complex_too: bool = True) -> None:
    """Raise for leaves that an optimizer can't train.

    Raises:
      ValueError: naming the first integer, bool (or complex) leaf.
    """
    paths, leaves, _ = optree.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, ShardedTree))
    for path, leaf in zip(paths, leaves, strict=True):
        named = _tensors(".".join(map(str, path)), leaf)
        for name, x in named:
            if not x.is_floating_point() and (complex_too or not x.is_complex()):
                raise ValueError(
                    f"{what} can't train leaf {name!r} of {x.dtype}; keep such leaves in a tree of their own "
                    "(ragged.partition)"
                )


def _tensors(path: str, leaf: Any) -> list[tuple[str, Tensor]]:
    if isinstance(leaf, ShardedTree):
        return [(p, leaf.tensors[i]) for p, i in leaf.selection.home.items()]
    return [(path, leaf)] if isinstance(leaf, Tensor) else []
