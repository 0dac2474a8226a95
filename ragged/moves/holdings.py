"""Where leaves lie in a layout, as a move sees it: on every rank of a grid, and in this rank's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ragged.layout import LeafInfo, axis_size
from ragged.mesh import Comm
from ragged.moves.boxes import Box, fold, run_boxes
from ragged.places import coordinates, flat_rank
from ragged.selection import Selection

__all__ = ["Grid", "Holding", "Part", "holdings_of", "one_rank"]


@dataclass(frozen=True, eq=False)
class Grid:
    """Global ranks by mesh coordinate.

    Attributes:
      axes: sizes by name, in mesh order; `ranks`: global ranks in row-major order of coordinates.
    """

    axes: Mapping[str, int]
    ranks: tuple[int, ...]

    @staticmethod
    def of(comm: Comm) -> Grid:
        return Grid(dict(comm.axes), comm.ranks)

    def same_as(self, other: Grid) -> bool:
        """Whether ranks have equal coordinates; the order of axes counts."""
        return self.ranks == other.ranks and list(self.axes.items()) == list(other.axes.items())

    @cached_property
    def coordinate(self) -> Mapping[int, Mapping[str, int]]:
        """Coordinates by global rank."""
        return dict(zip(self.ranks, coordinates(self.axes, list(self.axes)), strict=True))

    def rank_at(self, coordinate: Mapping[str, int]) -> int:
        return self.ranks[flat_rank(self.axes, coordinate, list(self.axes))]


@dataclass(frozen=True)
class Part:
    """A box of a leaf that some rank holds, and how it lies in that rank's tensor.

    Attributes:
      box: in the leaf's folded global shape; `corner`: local element of the box's first element,
        counted from the first element that the rank holds; `strides`: of the local tensor.
    """

    box: Box
    corner: int
    strides: tuple[int, ...]

    def offset(self, box: Box) -> int:
        """Local element of a smaller box's first element."""
        inner = zip(box, self.box, self.strides, strict=True)
        return self.corner + sum((a - b) * step for (a, _), (b, _), step in inner)


@dataclass(frozen=True)
class Holding:
    """One leaf in one layout. A rank's coordinates on the cut axes say what it holds; other axes hold replicas.

    Attributes:
      shape: global; `dims`: mesh axes that cut each tensor dim evenly, as in `P.dims`.
      ragged: mesh axes over which the rest is cut into runs; `span(k)`: the run of flat coordinate k.
      tensor, begin: index of this rank's tensor that holds the leaf, and where in it the run begins.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    ragged: tuple[str, ...]
    span: Callable[[int], tuple[int, int]] = field(compare=False)
    tensor: int
    begin: int

    def cut_dims(self, axes: Mapping[str, int]) -> set[int]:
        return {d for d, names in enumerate(self.dims) if axis_size(axes, names) > 1}

    def cut_axes(self, axes: Mapping[str, int]) -> tuple[str, ...]:
        """Axes on which a rank's coordinate decides what it holds."""
        named = {a for names in self.dims for a in names} | set(self.ragged)
        return tuple(a for a, n in axes.items() if a in named and n > 1)

    def parts(self, axes: Mapping[str, int], coordinate: Mapping[str, int], cut: set[int]) -> Iterator[Part]:
        """What a rank at a coordinate holds, with the dims folded that aren't cut."""
        local, corner = list(self.shape), [0] * len(self.shape)
        for dim, names in enumerate(self.dims):
            local[dim] //= axis_size(axes, names)
            corner[dim] = flat_rank(axes, coordinate, names) * local[dim]
        shape = fold(local, cut)
        # A folded dim begins with the dim that is cut, so its offset is that dim's times what was joined to it.
        heads = [0, *sorted(d for d in cut if d > 0)]
        rest = [math.prod(local[d + 1 : e]) for d, e in zip(heads, [*heads[1:], len(local)], strict=True)]
        shift = [corner[d] * n for d, n in zip(heads, rest, strict=True)] if local else [0]
        steps = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        start, stop = self.span(flat_rank(axes, coordinate, self.ragged))
        for box in run_boxes(shape, start, stop):
            first = sum(lo * step for (lo, _), step in zip(box, steps, strict=True))
            place = tuple((lo + s, hi + s) for (lo, hi), s in zip(box, shift, strict=True))
            yield Part(place, first - start, steps)


def holdings_of(selection: Selection, leaves: Mapping[str, LeafInfo], comm: Comm) -> list[Holding]:
    """The leaves of a selection as they lie in its tensors, in the order of its paths."""
    out = []
    for path in selection.paths:
        leaf, index = leaves[path], selection.home[path]
        piece = selection.pieces[index]
        rank = comm.rank(piece.bucket.ragged)
        begin = leaf.offset + leaf.span(rank)[0] - piece.local(rank)[0]
        out.append(Holding(leaf.shape, leaf.spec.dims, piece.bucket.ragged, leaf.span, index, begin))
    return out


def one_rank(shapes: Sequence[tuple[int, ...]], grid: Grid, rank: int) -> list[Holding]:
    """Every leaf whole on one global rank, in a tensor of its own, and nowhere else."""
    at = grid.ranks.index(rank)

    def spans(size: int) -> Callable[[int], tuple[int, int]]:
        return lambda k: (0, size if k == at else 0)

    axes = tuple(grid.axes)
    return [Holding(shape, (), axes, spans(math.prod(shape)), i, 0) for i, shape in enumerate(shapes)]
