"""The protocol of an optimizer: pure functions over sharded (or plain) trees."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ragged import ShardedTree
from ragged.paths import Shaped, first_difference, shaped
from ragged.resolver import one_by_one, resolve

__all__ = [
    "Blocks",
    "EmptyState",
    "GradientTransformation",
    "Labels",
    "first_tensor",
    "global_leaves",
    "identity",
    "is_partial",
    "is_sharded",
    "refuse",
    "require_like",
    "resolve_leaves",
]

Blocks = Callable[[str, tuple[int, ...], torch.dtype], "tuple[Any, int] | None"]
Labels = Callable[[str, tuple[int, ...], torch.dtype], Hashable]


class GradientTransformation(NamedTuple):
    """optax's pair of pure functions, and what sharding adds to it.

    Attributes:
      init: `init(params) -> state`.
      update: `update(grads, state, params) -> (updates, state)`; its inputs stay as they are.
      step: `step(params, grads, state) -> (params, state)`, an optional fused path that may
        overwrite all three. Use `make_step`, which falls back on `update`.
      blocks: `blocks(path, shape, dtype) -> (block, start alignment) | None`: what must not be cut
        between ranks, from global shapes. Pass the transformation to `plan(optimizer=)`.
      labels: `labels(path, shape, dtype)`: leaves with equal ones are updated together, so the plan makes them
        neighbours in their buckets, and each of `partition`'s selections is one interval of a buffer.

    Trees may be sharded, plain, or mixed pytrees of both: a sharded tree is a pytree of a few
    flat buffers, so the same code serves all.

    Source: optax's GradientTransformation.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    step: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
    blocks: Blocks | None = None
    labels: Labels | None = None


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
    for name, leaf in zip(*global_leaves(params), strict=True):
        dtype = leaf.dtype
        if not dtype.is_floating_point and (complex_too or not dtype.is_complex):
            raise ValueError(
                f"{what} can't train leaf {name!r} of {dtype}; keep such leaves in a tree of their own "
                "(ragged.partition)"
            )


def is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedTree)


def global_leaves(tree: Any) -> tuple[list[str], list[Shaped]]:
    """Paths, and global shapes with the dtypes held, of all leaves: those inside sharded trees too."""
    names: list[str] = []
    leaves: list[Shaped] = []
    for entries, x in zip(*optree.tree_flatten_with_path(tree, is_leaf=is_sharded)[:2], strict=True):
        prefix = ".".join(map(str, entries))
        if isinstance(x, ShardedTree):
            home, tensors = x.selection.home, x.tensors
            names += [".".join(filter(None, (prefix, p))) for p in x.paths]
            leaves += [Shaped(x.plan.leaves[p].shape, tensors[home[p]].dtype) for p in x.paths]
        else:
            names.append(prefix)
            leaves.append(shaped(prefix, x))
    return names, leaves


def is_partial(tree: Any) -> bool:
    """Whether some leaves were taken out of a tree."""
    leaves = optree.tree_leaves(tree, is_leaf=is_sharded, none_is_leaf=True)
    return any(x is None or (isinstance(x, ShardedTree) and len(x.paths) < len(x.plan.leaves)) for x in leaves)


def resolve_leaves(
    value: Any,
    names: list[str],
    leaves: list[Shaped],
    partial: bool,
    *,
    what: str,
    is_value: Callable[[Any], bool],
) -> list[Any]:
    """`ragged.resolver.resolve`. What is said of leaves that aren't there is an error, but not in a part of a tree.

    Raises:
      ValueError: a leaf without a value; in a whole tree also a value without a leaf.
    """
    if not partial:
        return resolve(value, None, what=what, is_value=is_value, paths_leaves=(names, leaves))
    value_of = one_by_one(value, what=what, is_value=is_value)
    return [value_of(name, leaf) for name, leaf in zip(names, leaves, strict=True)]


def require_like(params: Any, tree: Any, what: str) -> None:
    """Raise unless a tree has the leaves of the parameters, in the same places.

    In-place kernels pair tensors by position: a tree of other leaves would train the wrong
    ones, a shorter tensor would be read past its end.

    Raises:
      ValueError: naming the first leaf that differs.
    """
    if optree.tree_structure(tree) != optree.tree_structure(params):
        lone = first_difference(global_leaves(params)[0], global_leaves(tree)[0])
        how = "in the plans or the types of containers" if lone is None else f"at leaf {lone!r}, which only one has"
        raise ValueError(f"{what} and parameters differ {how}; pass {what} of the same tree, with the same plan")
    paths, ours, _ = optree.tree_flatten_with_path(params)
    for path, p, x in zip(paths, ours, optree.tree_leaves(tree), strict=True):
        if p.shape != x.shape:
            name = ".".join(map(str, path))
            raise ValueError(f"{what} of leaf {name!r} have shape {tuple(x.shape)}, its parameter has {tuple(p.shape)}")
