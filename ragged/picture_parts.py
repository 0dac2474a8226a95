"""What pictures show, before any drawing: kinds of units, columns of ranks, pieces, families, colours."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragged.layout import Bucket, LeafInfo, Unit

__all__ = ["OTHERS", "Family", "Panel", "Piece", "columns", "families", "ink", "panels", "pieces", "starred"]

# Seven hues that stay apart under the common kinds of colour blindness (the set of Okabe and Ito without black).
_HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
OTHERS = "(others)"


@dataclass(frozen=True)
class Panel:
    """Units of equal layout, drawn once: the buckets of the first, and a title for each."""

    units: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    titles: tuple[str, ...]

    @property
    def leaves(self) -> tuple[LeafInfo, ...]:
        return tuple(leaf for b in self.buckets for leaf in b.leaves)


@dataclass(frozen=True)
class Piece:
    """An interval `[start, stop)` of a bucket's global buffer: part of one leaf, or padding (None)."""

    leaf: LeafInfo | None
    start: int
    stop: int


@dataclass(frozen=True)
class Family:
    """Leaves that share a colour: one, or all whose paths differ in numbers only."""

    label: str
    color: str
    leaves: tuple[LeafInfo, ...]


def panels(buckets: Sequence[Bucket]) -> tuple[Panel, ...]:
    """Units in the order of their buckets; those that differ by a number in their name only are one panel."""
    units: dict[str, list[Bucket]] = {}
    for b in buckets:
        units.setdefault(b.unit, []).append(b)
    kinds: dict[object, list[tuple[str, list[Bucket]]]] = {}
    for name, own in units.items():
        kinds.setdefault(Unit(name, tuple(own)).kind, []).append((name, own))
    return tuple(_panel(same) for same in kinds.values())


def _panel(same: Sequence[tuple[str, list[Bucket]]]) -> Panel:
    first, last = same[0][1], same[-1][1]
    titles = (
        a.name if len(same) == 1 else f"{a.name} .. {b.name} ({len(same)}x)" for a, b in zip(first, last, strict=True)
    )
    return Panel(tuple(name for name, _ in same), tuple(first), tuple(titles))


def columns(ranks: int, most: int) -> list[tuple[int, int]]:
    """Groups `[a, b)` of consecutive ranks, at most so many, equal but for the last."""
    group = -(-ranks // most)
    return [(k, min(k + group, ranks)) for k in range(0, ranks, group)]


def pieces(bucket: Bucket, groups: Sequence[tuple[int, int]]) -> list[list[Piece]]:
    """What each group of ranks holds, in the buffer's order: every element once, padding as pieces without a leaf."""
    leaves = [leaf for leaf in bucket.leaves if leaf.size]
    starts = [leaf.offset for leaf in leaves]
    return [_between(leaves, starts, bucket.bounds(a), bucket.bounds(b)) for a, b in groups]


def _between(leaves: Sequence[LeafInfo], starts: Sequence[int], at: int, end: int) -> list[Piece]:
    found = []
    i = bisect_right(starts, at) - 1
    while at < end:
        leaf = leaves[i] if i >= 0 else None
        if leaf is not None and at < leaf.stop:
            stop = min(leaf.stop, end)
        else:  # a gap, up to the next leaf
            leaf, stop = None, min(starts[i + 1], end) if i + 1 < len(starts) else end
        found.append(Piece(leaf, at, stop))
        at = stop
        if i + 1 < len(starts) and at >= starts[i + 1]:
            i += 1
    return found


def families(leaves: Sequence[LeafInfo], most: int) -> tuple[Family, ...]:
    """Each leaf for itself if there are few; else paths with their numbers starred, coarser until there are few.

    Args:
      leaves: of one panel.
      most: families at most; what remains beyond it, smallest first, is the family `(others)`.

    Returns:
      Families in the order of their first leaf. The largest get the first colours.
    """
    ways: tuple[Callable[[str], str], ...] = (str, starred, _numbered, _digits)
    groups: dict[str, list[LeafInfo]] = {}
    for way in ways:
        groups = {}
        for leaf in leaves:
            groups.setdefault(way(leaf.path), []).append(leaf)
        if len(groups) <= most:
            break
    size = {label: sum(leaf.size for leaf in own) for label, own in groups.items()}
    ranked = sorted(groups, key=lambda label: -size[label])  # stable: ties in order of appearance
    if len(ranked) > most:
        kept = set(ranked[: most - 1])
        rest = [leaf for label, own in groups.items() if label not in kept for leaf in own]
        groups = {label: own for label, own in groups.items() if label in kept} | {OTHERS: rest}
    color = {label: _color(i) for i, label in enumerate(ranked)} | {OTHERS: "#999999"}
    return tuple(Family(label, color[label], tuple(own)) for label, own in groups.items())


def starred(path: str) -> str:
    """`experts.12.w1` as `experts.*.w1`."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _numbered(path: str) -> str:
    """Also numbers that end a component before the last: `e12.w1` as `e*.w1`."""
    *heads, tail = starred(path).split(".")
    return ".".join([*(re.sub(r"\d+$", "*", part) for part in heads), tail])


def _digits(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _color(i: int) -> str:
    """The hues, then light tints of them, then dark shades, then from the start."""
    base, lap = _HUES[i % len(_HUES)], i // len(_HUES) % 3
    toward, weight = ((0, 0.0), (255, 0.55), (0, 0.45))[lap]
    return "#" + "".join(f"{round(c + (toward - c) * weight):02x}" for c in _rgb(base))


def ink(color: str) -> str:
    """Black or white, whichever reads better on a colour."""
    r, g, b = _rgb(color)
    return "#000000" if 0.299 * r + 0.587 * g + 0.114 * b > 130 else "#ffffff"


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
