"""Different transformations for different leaves, each on a selection of the trees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch

from optim.base import (
    Blocks,
    EmptyState,
    GradientTransformation,
    Labels,
    global_leaves,
    identity,
    is_partial,
    is_sharded,
    resolve_leaves,
)
from ragged import ShardedTree, combine
from ragged.paths import Shaped
from ragged.resolver import brief, one_by_one
from ragged.structure import partition as parted

__all__ = ["PartitionState", "freeze", "masked", "partition", "set_to_zero"]


class PartitionState(NamedTuple):
    """inner_states: the state of each label's transformation, over the leaves of that label."""

    inner_states: dict[Any, Any]


def partition(transformations: Mapping[Any, GradientTransformation], labels: Any) -> GradientTransformation:
    """Run one transformation per label, each on the leaves that have it.

    A label's leaves are a selection of the sharded trees, which shares their storage, so labels cost no memory
    and no collective.

    Args:
      transformations: by label.
      labels: a label for every leaf, for the resolver: a prefix pytree, a callable `(path, leaf)` (shapes are
        global), or `ragged.rules`.

    Raises:
      ValueError: a leaf without a label, or with one that has no transformation, by path.

    Example:
      >>> import torch
      >>> from optim import partition, sgd
      >>> tx = partition({"fast": sgd(1.0), "slow": sgd(0.1)}, {"w": "fast", "b": "slow"})
      >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> updates["w"].item(), round(updates["b"].item(), 4)
      (-1.0, -0.1)

    Source: optax.transforms.partition.
    """
    known = dict(transformations)

    tables: dict[Any, dict[str, Any]] = {}  # by names and shapes: labels are resolved once

    def labelled(params: Any) -> dict[str, Any]:
        names, leaves = global_leaves(params)
        partial = is_partial(params)
        key = partial, tuple((name, *leaf) for name, leaf in zip(names, leaves, strict=True))
        if key not in tables:
            tables[key] = resolved(names, leaves, partial)
        return tables[key]

    def resolved(names: list[str], leaves: list[Shaped], partial: bool) -> dict[str, Any]:
        found = resolve_leaves(labels, names, leaves, partial, what="label", is_value=_is_label(known))
        for name, label in zip(names, found, strict=True):
            _check(name, label, known)
        return dict(zip(names, found, strict=True))

    def init_fn(params: Any) -> PartitionState:
        table = labelled(params)
        return PartitionState({label: tx.init(_part(params, table, label)) for label, tx in known.items()})

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("partition needs the parameters: call update(updates, state, params)")
        table = labelled(params)
        parts, states = [], {}
        for label, tx in known.items():
            mine, inner = _part(params, table, label), state.inner_states[label]
            new, states[label] = tx.update(_part(updates, table, label), inner, mine)
            parts.append(new)
        return _joined(parts), PartitionState(states)

    def step_fn(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        table = labelled(params)
        parts, states = [], {}
        for label, tx in known.items():
            mine, theirs, inner = _part(params, table, label), _part(grads, table, label), state.inner_states[label]
            if tx.step is not None:
                new, states[label] = tx.step(mine, theirs, inner)
            else:
                updates, states[label] = tx.update(theirs, inner, mine)
                new = optree.tree_map(lambda p, u: p.add_(u), mine, updates)
            parts.append(new)
        # new tree objects on the same storage: the ones passed in are dead now
        return optree.tree_map(lambda x: x, _joined(parts)), PartitionState(states)

    return GradientTransformation(init_fn, update_fn, step_fn, *_requests(known, labels))


def _is_label(known: Mapping[Any, Any]) -> Callable[[Any], bool]:
    """What tells a label from a tree of labels: its type, so that an unknown one is named, not searched."""
    kinds: Any = (str, int, *{type(label) for label in known})
    return lambda x: isinstance(x, kinds)


def _check(path: str, label: Any, known: Mapping[Any, Any]) -> None:
    if label not in known:
        raise ValueError(f"leaf {path!r} has label {brief(label)}; the labels are {brief(list(known))}")


def _requests(known: Mapping[Any, GradientTransformation], labels: Any) -> tuple[Blocks | None, Labels]:
    """What a plan is asked for: the blocks of the transformation that each leaf has, and its label."""
    find: list[Callable[[str, Any], Any]] = []  # made at the first question: wrong labels raise where they are used

    def label_of(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        if not find:
            find.append(one_by_one(labels, what="label", is_value=_is_label(known)))
        label = find[0](path, Shaped(shape, dtype))
        _check(path, label, known)
        return label

    def blocks(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, int] | None:
        asks = known[label_of(path, shape, dtype)].blocks
        return None if asks is None else asks(path, shape, dtype)

    def nested(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        label = label_of(path, shape, dtype)
        inner = known[label].labels
        return label if inner is None else (label, inner(path, shape, dtype))

    return (None if all(tx.blocks is None for tx in known.values()) else blocks), nested


def _part(tree: Any, table: Mapping[str, Any], label: Any) -> Any:
    """The leaves of one label, None in place of the others."""
    paths, leaves, structure = optree.tree_flatten_with_path(tree, is_leaf=is_sharded)
    out: list[Any] = []
    for entries, x in zip(paths, leaves, strict=True):
        place = ".".join(map(str, entries))
        if isinstance(x, ShardedTree):
            mine = {p: table[".".join(filter(None, (place, p)))] == label for p in x.paths}
            out.append(parted(x, lambda path, leaf, t=mine: t[path])[0])
        else:
            out.append(x if table[place] == label else None)
    return optree.tree_unflatten(structure, out)


def _joined(parts: Sequence[Any]) -> Any:
    """The parts of all labels as one tree."""

    def join(a: Any, b: Any) -> Any:
        if isinstance(a, ShardedTree):
            return combine(a, b)
        return b if a is None else a

    return functools.reduce(lambda a, b: optree.tree_map(join, a, b, is_leaf=is_sharded, none_is_leaf=True), parts)


def masked(inner: GradientTransformation, mask: Any) -> GradientTransformation:
    """Run a transformation on the leaves of a mask; the updates of the others pass through.

    Args:
      mask: True or False for every leaf, for the resolver.

    Source: optax.masked.
    """
    return partition({True: inner, False: identity()}, mask)


def set_to_zero() -> GradientTransformation:
    """Updates of zero: parameters stay as they are."""

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optree.tree_map(torch.zeros_like, updates), state

    return GradientTransformation(lambda params: EmptyState(), update_fn, lambda params, grads, state: (params, state))


def freeze(mask: Any) -> GradientTransformation:
    """Zero the updates of the leaves of a mask.

    For leaves that never get gradients, plan with `frozen=` and keep them in a tree of their own.

    Example:
      >>> import torch
      >>> from optim import chain, freeze, sgd
      >>> tx, params = chain(sgd(1.0), freeze({"w": True, "b": False})), {"w": torch.ones(1), "b": torch.ones(1)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> updates["w"].item(), updates["b"].item()
      (0.0, -1.0)

    Source: optax.transforms.freeze.
    """
    return partition({True: set_to_zero(), False: identity()}, mask)
