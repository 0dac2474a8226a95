"""Which leaves are gathered together: units by pattern, in natural order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ragged.paths import natural_key
from ragged.resolver import Rules, match_prefix

__all__ = ["LayerUnit", "group_units"]


@dataclass(frozen=True)
class LayerUnit:
    """Leaves gathered together.

    Attributes:
      name: the path that they share.
      pattern: index of the pattern that matched, or None.
      paths: of its leaves, in natural order.
    """

    name: str
    pattern: int | None
    paths: tuple[str, ...]


def group_units(paths: Iterable[str], patterns: Sequence[Any]) -> list[LayerUnit]:
    """Units and their leaves in natural order: by the first pattern that matches, else by the first component.

    Raises:
      ValueError: patterns that are no sequence of globs and compiled regexes, or one that matches no leaf.

    Example:
      >>> [unit.name for unit in group_units(["layers.0.w", "layers.1.w", "head"], ["layers.*"])]
      ['head', 'layers.0', 'layers.1']
    """
    if not isinstance(patterns, Sequence) or isinstance(patterns, (str, Rules)):
        raise ValueError(f'units={patterns!r}: expected a sequence of patterns, e.g. units=["layers.*"]')
    for pattern in patterns:
        if not isinstance(pattern, (str, re.Pattern)):
            raise ValueError(f"units pattern {pattern!r} is neither a glob string nor a compiled regex")
    found: dict[str, tuple[int | None, list[str]]] = {}
    hit: set[int] = set()
    for path in sorted(paths, key=natural_key):
        matched = [(i, name) for i, p in enumerate(patterns) if (name := match_prefix(p, path)) is not None]
        hit |= {i for i, _ in matched}
        first, name = matched[0] if matched else (None, path.split(".", 1)[0])
        found.setdefault(name, (first, []))[1].append(path)
    for i, pattern in enumerate(patterns):
        if i not in hit:
            raise ValueError(f"units pattern {pattern!r} matches no leaf; correct or remove it")
    return [LayerUnit(name, found[name][0], tuple(found[name][1])) for name in sorted(found, key=natural_key)]
