"""Boxes: how a flat run of a tensor looks once other ranks cut the tensor along other dims.

Two layouts of a leaf are compared in one coordinate system, the leaf's global shape, with dims joined that neither
of them cuts (`fold`). A run of a local tensor is a few boxes there, and what two ranks have in common of it is the
intersections of their boxes. Without even cuts all dims join into one, and boxes are plain intervals.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

__all__ = ["Box", "fold", "intersect", "run_boxes", "strides"]

Box = tuple[tuple[int, int], ...]  # per dim: start, stop


def fold(shape: Sequence[int], cut: Collection[int]) -> tuple[int, ...]:
    """The shape with every dim joined to the one before it, unless it is cut.

    >>> fold((6, 4, 2, 3), cut={2}), fold((6, 4), cut={0}), fold((), cut=())
    ((24, 6), (24,), (1,))
    """
    out = [1]
    for dim, size in enumerate(shape):
        if dim in cut and dim > 0:
            out.append(size)
        else:
            out[-1] *= size
    return tuple(out)


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements.

    >>> strides((4, 3, 2))
    (6, 2, 1)
    """
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def run_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The flat elements `[start, stop)` of a row-major tensor as boxes, in order: at most 2 dims - 1 of them.

    >>> list(run_boxes((4, 10), 7, 34))
    [((0, 1), (7, 10)), ((1, 3), (0, 10)), ((3, 4), (0, 4))]
    """
    if stop <= start:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows that the run has whole
    if first > last:  # within one row
        for box in run_boxes(shape[1:], start - last * row, stop - last * row):
            yield ((last, last + 1), *box)
        return
    if start < first * row:
        for box in run_boxes(shape[1:], start - (first - 1) * row, row):
            yield ((first - 1, first), *box)
    if first < last:
        yield ((first, last), *((0, n) for n in shape[1:]))
    if stop > last * row:
        for box in run_boxes(shape[1:], 0, stop - last * row):
            yield ((last, last + 1), *box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part, or None if there is none.

    >>> intersect(((0, 4), (2, 5)), ((3, 9), (0, 3)))
    ((3, 4), (2, 3))
    """
    out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return out if all(lo < hi for lo, hi in out) else None
