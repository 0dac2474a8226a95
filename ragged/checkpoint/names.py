"""What trees are called in a checkpoint: `<tree>.<leaf path>[.<field>]`, however transformations were nested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
from torch import Tensor

from ragged.paths import Shaped
from ragged.tree import ShardedTree

__all__ = ["Entry", "Named", "named"]

_WRAPPERS = {"inner_state", "inner_states"}  # optax's fields for the states of other transformations


class Entry(NamedTuple):
    """One tensor or value of some trees.

    Attributes:
      name: its name in the checkpoint.
      at: index of the pytree leaf that holds it; `path`: inside it, if that is a sharded tree.
      shape: global, with the dtype held; None for a Python value and for a counter in a state.
    """

    name: str
    at: int
    path: str | None
    shape: Shaped | None


class Named(NamedTuple):
    """Trees taken apart: pytree leaves (sharded trees, tensors, values), how they belong together, and names."""

    leaves: list[Any]
    structure: optree.PyTreeSpec
    entries: list[Entry]


def named(trees: Any) -> Named:
    """Name everything that trees hold.

    A field of an optimizer's state is named behind the leaf that it belongs to: `opt.layers.0.wq.mu`. Where
    several transformations keep a field of one name for a leaf, the second is `mu#1`, and so on. A field that
    belongs to no leaf (a count) is named behind its state's type.

    Args:
      trees: pytrees by name.

    Raises:
      ValueError: not a mapping from names, leaves of equal names, or something that is neither a tensor nor a number,
        text, truth value or None; by name.
    """
    if not isinstance(trees, Mapping) or not all(isinstance(key, str) and key for key in trees):
        raise ValueError(f'expected trees by name, such as {{"params": params, "step": 7}}, got {trees!r:.80}')
    flatten: Any = optree.tree_flatten_with_accessor
    accessors, leaves, structure = flatten(dict(trees), is_leaf=lambda x: isinstance(x, ShardedTree))
    entries: list[Entry] = []
    seen: dict[str, int] = {}
    for index, (accessor, leaf) in enumerate(zip(accessors, leaves, strict=True)):
        place = _Place.of(accessor)
        for path, shape in _parts(leaf):
            name, is_field = place.name(path or "")
            count = seen[name] = seen.get(name, -1) + 1
            if count and not is_field:
                raise ValueError(f"two leaves are called {name!r}; rename one of them")
            if shape is None and path is None and not isinstance(leaf, Tensor):
                _check_value(name, leaf)
            known = None if path is None and _counts(place, shape) else shape
            entries.append(Entry(f"{name}#{count}" if count else name, index, path, known))
    return Named(leaves, structure, entries)


class _Place(NamedTuple):
    """Where a pytree leaf is: its tree's name, the state and fields it is in, and its path below them."""

    tree: str
    state: str
    fields: tuple[str, ...]
    path: tuple[str, ...]

    @staticmethod
    def of(accessor: Sequence[Any]) -> _Place:
        tree, *rest = accessor
        state, fields, path = "", list[str](), list[str]()
        for entry in rest:
            if not isinstance(entry, optree.NamedTupleEntry) or entry.field in _WRAPPERS:
                path.append(str(entry.entry))
                if isinstance(entry, optree.NamedTupleEntry):
                    state, fields, path = "", [], []
                continue
            if path or not fields:  # what lies above a state is how it is nested
                state, fields, path = entry.type.__name__, [], []
            fields.append(entry.field)
        return _Place(str(tree.entry), state, tuple(fields), tuple(path))

    def name(self, inner: str) -> tuple[str, bool]:
        """The name of something at a path inside the leaf, and whether it is a field of a state."""
        where = [*self.path, *([inner] if inner else [])]
        owner = where if where or not self.fields else [self.state]
        return ".".join([self.tree, *owner, *self.fields]), bool(self.fields)


def _parts(leaf: Any) -> Iterable[tuple[str | None, Shaped | None]]:
    if isinstance(leaf, ShardedTree):
        home, tensors = leaf.selection.home, leaf.tensors
        return [(p, Shaped(leaf.plan.leaves[p].shape, tensors[home[p]].dtype)) for p in leaf.paths]
    return [(None, Shaped(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None)]


def _counts(place: _Place, shape: Shaped | None) -> bool:
    return shape is not None and shape.shape == () and bool(place.fields) and not place.path


def _check_value(name: str, value: Any) -> None:
    if not isinstance(value, (bool, int, float, str, type(None))):
        raise ValueError(
            f"{name!r} is a {type(value).__name__}: a checkpoint holds tensors, sharded trees, numbers, text and "
            "truth values"
        )
