"""The parts of sharded trees that blockwise state treats alike: quantized leaves, and small ones beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from optim.blockwise import Blocking, Grid, grid, scale_selection
from ragged import Plan, ShardedTree, partition
from ragged.selection import Selection

__all__ = ["Layout", "Segment", "layout", "segments"]


@dataclass(frozen=True)
class Layout:
    """How the state of a selection of a plan is laid out.

    Attributes:
      large: leaves with codes; `small`: the others.
      scale_plan, scales: where the scales of the large ones lie.
    """

    large: Selection
    small: Selection
    scale_plan: Plan
    scales: Selection


class Segment(NamedTuple):
    """Elements of one local tensor that are treated alike.

    Attributes:
      piece: index of the tensor; `start`, `stop`: elements of it.
      decays: what the mask of weight decay says.
      grid: the blocks, or None for small leaves.
      scale_piece, scale_start, scale_stop: the scales of the blocks.
    """

    piece: int
    start: int
    stop: int
    decays: bool
    grid: Grid | None = None
    scale_piece: int = 0
    scale_start: int = 0
    scale_stop: int = 0


def layout(tree: ShardedTree, blocking: Blocking) -> Layout:
    """The layout of a tree's state, kept with its plan.

    Raises:
      ValueError: the plan cuts a block.
    """
    memo = tree.plan.memo.setdefault("blockwise", {})
    if (tree.selection, blocking) not in memo:
        large, small = partition(tree, lambda path, leaf: blocking.covers(leaf.shape))
        memo[tree.selection, blocking] = Layout(
            large.selection, small.selection, *scale_selection(tree.plan, large.selection, blocking)
        )
    found: Layout = memo[tree.selection, blocking]
    return found


def segments(tree: ShardedTree, blocking: Blocking, decays: dict[str, bool] | None) -> tuple[list[Segment], ...]:
    """What this rank holds of the (large, small) leaves of a tree, in few segments.

    Args:
      decays: by path; None if all do.
    """
    memo = tree.plan.memo.setdefault("blockwise segments", {})
    token = tree.selection, blocking, None if decays is None else tuple(decays[p] for p in tree.paths)
    if token not in memo:
        parts = layout(tree, blocking)
        memo[token] = (
            _merged(_large(tree, parts, blocking, decays)),
            _merged(_small(tree, parts, decays)),
        )
    found: tuple[list[Segment], ...] = memo[token]
    return found


def _large(tree: ShardedTree, parts: Layout, blocking: Blocking, decays: Any) -> Iterator[Segment]:
    comm = tree.plan.bound()
    for path, i in parts.large.home.items():
        leaf, piece = tree.plan.leaves[path], parts.large.pieces[i]
        rank = comm.rank(piece.bucket.ragged)
        start, stop = leaf.span(rank)
        if start == stop:
            continue
        begin = leaf.offset + start - piece.local(rank)[0]
        g = grid(blocking, path, leaf.shape, leaf.local_shape)
        scales, k = parts.scale_plan.leaves[path], parts.scales.home[path]
        first, last = scales.span(rank)
        at = scales.offset + first - parts.scales.pieces[k].local(rank)[0]
        flag = decays is None or decays[path]
        yield Segment(i, begin, begin + stop - start, flag, g, k, at, at + last - first)


def _small(tree: ShardedTree, parts: Layout, decays: Any) -> Iterator[Segment]:
    comm = tree.plan.bound()
    for path, i in parts.small.home.items():
        leaf, piece = tree.plan.leaves[path], parts.small.pieces[i]
        rank = comm.rank(piece.bucket.ragged)
        start, stop = leaf.span(rank)
        if start < stop:
            begin = leaf.offset + start - piece.local(rank)[0]
            yield Segment(i, begin, begin + stop - start, decays is None or decays[path])


def _merged(found: Iterator[Segment]) -> list[Segment]:
    """Neighbours as one segment, with the padding between them, which is zero and stays so."""
    out: list[Segment] = []
    for new in found:
        if out and (both := _joined(out[-1], new)) is not None:
            out[-1] = both
        else:
            out.append(new)
    return out


def _joined(a: Segment, b: Segment) -> Segment | None:
    if (a.piece, a.decays) != (b.piece, b.decays) or (a.grid is None) is not (b.grid is None):
        return None
    if a.grid is not None and b.grid is not None:
        flat = a.grid.flat
        follows = flat and flat == b.grid.flat and a.scale_piece == b.scale_piece and a.scale_stop == b.scale_start
        # the padding after a leaf completes its last block, and is less than one
        if not follows or a.start + (a.scale_stop - a.scale_start) * flat != b.start:
            return None
    return a._replace(stop=b.stop, scale_stop=b.scale_stop)
