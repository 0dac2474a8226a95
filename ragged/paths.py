"""Trees of tensors as dotted paths: flatten, order, describe."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import optree
import torch

__all__ = ["Shaped", "flatten", "is_shaped", "natural_key", "shaped"]


class Shaped(NamedTuple):
    """Shape and dtype of a leaf: all that a plan needs to know about it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)


def is_shaped(x: Any) -> bool:
    """Whether `x` is a `(shape, dtype)` pair, which stands for a tensor in a tree to plan."""
    return type(x) in (tuple, Shaped) and len(x) == 2 and isinstance(x[1], torch.dtype)


def shaped(path: str, leaf: Any) -> Shaped:
    """Shape and dtype of a tensor, meta tensor or `(shape, dtype)` pair.

    Raises:
      ValueError: something else, or a shape that is no sequence of sizes >= 0.
    """
    if is_shaped(leaf):
        try:
            shape = tuple(operator.index(n) for n in leaf[0])
        except TypeError:
            shape = (-1,)
        if any(n < 0 for n in shape):
            raise ValueError(f"leaf {path!r} has the shape {leaf[0]!r}; expected a tuple of sizes >= 0")
        return Shaped(shape, leaf[1])
    if isinstance(leaf, torch.Tensor):
        return Shaped(tuple(leaf.shape), leaf.dtype)
    raise ValueError(f"leaf {path!r} is a {type(leaf).__name__}; expected a tensor, a meta tensor or (shape, dtype)")


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = is_shaped, none_is_leaf: bool = False
) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """Dotted paths, leaves and structure of a tree; `None` is structure, never a leaf.

    Raises:
      ValueError: two leaves with the same dotted path, as in `{"a.b": x, "a": {"b": y}}`.

    Example:
      >>> flatten({"layers": [{"wq": 1}, {"wq": 2}]}, None)[0]
      ['layers.0.wq', 'layers.1.wq']
    """
    accessors, leaves, spec = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf, none_is_leaf=none_is_leaf)
    paths = [".".join(_component(entry) for entry in accessor) for accessor in accessors]
    if len(set(paths)) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise ValueError(f"two leaves of the tree have the path {twice!r}; rename one of the keys")
    return paths, leaves, spec


def _component(entry: Any) -> str:
    """A key, an index, or the field of a named tuple."""
    return str(entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.entry)


_DIGITS = re.compile(r"(\d+)")


def natural_key(path: str) -> tuple[tuple[tuple[int, int, str], ...], ...]:
    """Sort key under which `layers.2` comes before `layers.10`; distinct for distinct paths, as `01` and `1`."""
    return tuple(map(_component_key, path.split(".")))


@functools.lru_cache(maxsize=4096)  # a model has many leaves, but few names
def _component_key(part: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, int(s), s) if s.isdecimal() else (1, 0, s) for s in _DIGITS.split(part) if s)


def first_difference(a: Iterable[str], b: Iterable[str]) -> str | None:
    """The first path, in natural order, that is in one of two collections only."""
    differing: Sequence[str] = sorted(set(a) ^ set(b), key=natural_key)
    return differing[0] if differing else None
