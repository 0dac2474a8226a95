"""Which leaves are gathered together: layers, found by their number, and runs of several layers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ragged.units import LayerUnit

__all__ = ["join_layers", "layer_patterns"]


def layer_patterns(paths: Iterable[str]) -> list[str]:
    """Unit patterns for the layers of a model: what stands before the first number in a path, and the number.

    A list of one layer counts only if there is no longer one, so that numbered odds and ends stay together.

    Example:
      >>> layer_patterns(["embed", "layers.0.experts.0.w", "layers.0.experts.1.w", "layers.1.w", "head.0.w"])
      ['layers.*']
    """
    lists: dict[str, set[str]] = {}
    for path in paths:
        parts = path.split(".")
        first = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
        if first:
            lists.setdefault(".".join(parts[:first]), set()).add(parts[first])
    longer = [prefix for prefix, numbers in lists.items() if len(numbers) > 1]
    # The longest first: where one begins with another, the first pattern that matches names the unit.
    return [f"{prefix}.*" for prefix in sorted(longer or lists, key=lambda p: (-len(p), p))]


def join_layers(units: Iterable[LayerUnit], layers: int) -> list[tuple[str, ...]]:
    """The leaves of each unit, `layers` consecutive units of one pattern made one.

    Example:
      >>> from ragged.units import group_units
      >>> join_layers(group_units(["l.0.w", "l.1.w", "l.2.w", "head"], ["l.*"]), 2)
      [('head',), ('l.0.w', 'l.1.w'), ('l.2.w',)]
    """
    joined = []
    for pattern, run in groupby(sorted(units, key=lambda u: -1 if u.pattern is None else u.pattern), _pattern):
        members, step = list(run), 1 if pattern is None else layers
        for i in range(0, len(members), step):
            joined.append(tuple(path for unit in members[i : i + step] for path in unit.paths))
    return joined


def _pattern(unit: LayerUnit) -> int | None:
    return unit.pattern
