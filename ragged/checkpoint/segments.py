"""Which bytes of a tensor's file a rank holds: one side of a move whose other side is the file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ragged.layout import axis_size
from ragged.moves import Grid, Holding
from ragged.moves.boxes import fold, strides
from ragged.places import flat_rank

__all__ = ["Segment", "replicas", "segments", "shared"]

_EVEN = 64  # replicas share at multiples of so many elements


class Segment(NamedTuple):
    """Neighbours both in the whole tensor and in a rank's tensor, in elements: first there, first here, how many."""

    there: int
    here: int
    size: int


def segments(held: Holding, grid: Grid, rank: int) -> list[Segment]:
    """All that a rank holds of a leaf; `here` counts from the first element of the rank's tensor."""
    cut = held.cut_dims(grid.axes)
    steps = strides(fold(held.shape, cut))
    found: list[Segment] = []
    for part in held.parts(grid.axes, grid.coordinate[rank], cut):
        shape = tuple(hi - lo for lo, hi in part.box)
        first = sum(lo * step for (lo, _), step in zip(part.box, steps, strict=True))
        for there, here, size in _rows(shape, steps, part.strides):
            new = Segment(first + there, held.begin + part.corner + here, size)
            last = found[-1] if found else None
            if last and (last.there + last.size, last.here + last.size) == new[:2]:
                found[-1] = last._replace(size=last.size + size)
            elif size:
                found.append(new)
    return found


def _rows(shape: Sequence[int], there: Sequence[int], here: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The contiguous pieces of a box: the dims that lie dense on both sides in one."""
    dims, size = len(shape), 1
    while dims and (shape[dims - 1] == 1 or there[dims - 1] == here[dims - 1] == size):
        size *= shape[dims - 1]
        dims -= 1
    for index in itertools.product(*map(range, shape[:dims])):
        yield _dot(index, there), _dot(index, here), size


def _dot(index: Sequence[int], steps: Sequence[int]) -> int:
    return sum(i * step for i, step in zip(index, steps, strict=False))


def replicas(held: Holding, grid: Grid, rank: int) -> tuple[int, int]:
    """(which of the ranks that hold the same of a leaf this one is, how many they are)."""
    cut = held.cut_axes(grid.axes)
    rest = tuple(a for a in grid.axes if a not in cut)
    return flat_rank(grid.axes, grid.coordinate[rank], rest), axis_size(grid.axes, rest)


def shared(found: Sequence[Segment], index: int, count: int) -> list[Segment]:
    """The part of some segments that is replica `index`'s to write, of `count`: each element is some replica's.

    >>> shared([Segment(0, 0, 100), Segment(200, 100, 100)], 1, 2)
    [Segment(there=64, here=64, size=36), Segment(there=200, here=100, size=100)]
    """
    if count == 1:
        return list(found)
    total = sum(s.size for s in found)
    ends = [min(total * k // count // _EVEN * _EVEN, total) if k < count else total for k in (index, index + 1)]
    out, at = [], 0
    for there, here, size in found:
        a, b = max(ends[0] - at, 0), min(ends[1] - at, size)
        if a < b:
            out.append(Segment(there + a, here + a, b - a))
        at += size
    return out
