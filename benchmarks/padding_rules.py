"""Rules by which other systems lay out a unit, as plain functions from sizes to the shard size S.

They are here to be compared with `ragged.planner`, on the same blocks: where a system knows rows only, a block of
several rows takes the place of the row. All are in elements per rank; none is ever below `ragged.planner.lower_bound`
at `align=1`, since what each of them describes is a legal layout in one or in several buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from ragged.planner import Item
from ragged.planner.items import check_arguments, scale
from ragged.planner.one_buffer import first_fit

__all__ = ["lcm_shard", "prefix_shard", "row_shard"]


def prefix_shard(items: Sequence[Item], ranks: int, align: int = 64) -> int:
    """The heuristic of veScale-FSDP (arXiv 2602.22437): one buffer, the order given, S from prefixes of blocks.

    With the leaves sorted by size (equal ones as given), S is sought among the multiples of the lcm of the first
    0, 1, 2, ... blocks: from the trivial bound up in doubling steps until the leaves fit in their order, then by
    bisection. Whether they fit at one S is decided exactly there and here, so `first_fit` serves. Fitting isn't
    monotone in S, so this is a heuristic; on the layers of `tests/data/planner` it finds the optimum of the order.

    Args:
        items: sizes and blocks, in elements.
        ranks: number of equal shards.
        align: starts and S are multiples of so many elements.

    Raises:
        ValueError: `ranks` or `align` below 1.

    >>> prefix_shard([Item(96, 32), Item(40, 1)], ranks=2, align=8)
    72
    """
    check_arguments(ranks, align)
    leaves = scale(items, align)
    total = sum(e for e, _ in leaves)
    if total == 0:
        return 0
    lo = max(-(-total // ranks), max(min(leaf) for leaf in leaves))
    best = total  # one shard that holds everything is always legal
    lattice = 1
    for g in dict.fromkeys([1, *(g for _, g in sorted(leaves, key=lambda leaf: -leaf[0]))]):
        lattice = lcm(lattice, g)
        low = high = -(-lo // lattice)
        step = 1
        while high * lattice < best and first_fit(leaves, ranks, high * lattice, high * lattice) is None:
            low, high, step = high + 1, high + step, 2 * step
        while low < high:
            middle = (low + high) // 2
            if first_fit(leaves, ranks, middle * lattice, middle * lattice) is None:
                low = middle + 1
            else:
                high = middle
        best = min(best, high * lattice)
    return best * align


def row_shard(shapes: Sequence[Sequence[int]], items: Sequence[Item], ranks: int) -> int:
    """FSDP2's `Shard(0)`: every tensor is cut along dim 0 by itself and padded to equal pieces.

    A piece is `ceil(pieces / ranks)` times what may not be cut: one index of dim 0, or as many as make up whole
    blocks. Blocks of one row are what torch does; it has no larger ones, so with those this is what padding each
    tensor to `ranks * block` rows comes to. S is the sum over the tensors.

    Args:
        shapes: of the tensors.
        items: their sizes and blocks, in elements.
        ranks: number of pieces of every tensor.

    Ten rows on four ranks are three rows each; in blocks of two rows, four each:

    >>> row_shard([(10, 8)], [Item(80, 8)], ranks=4), row_shard([(10, 8)], [Item(80, 16)], ranks=4)
    (24, 32)
    """
    total = 0
    for shape, item in zip(shapes, items, strict=True):
        if item.size:
            rows = shape[0] if shape else 1
            piece = lcm(item.size // rows, item.block)
            total += min(item.size, piece * -(-item.size // (piece * ranks)))
    return total


def lcm_shard(items: Sequence[Item], ranks: int) -> int:
    """Megatron-FSDP's rule: one buffer on a grid of cells of L elements, the lcm of all blocks; S is whole cells.

    A leaf of at least L starts or ends at a cell's border. What sticks out into a last cell may share it with what
    sticks out of one other leaf and with leaves smaller than L, which lie within one cell. With blocks of one row
    this is how Megatron-FSDP keeps rows whole (there the row is `shape[1:]`); larger blocks take the row's place.

    Args:
        items: sizes and blocks, in elements.
        ranks: number of equal shards.

    Cells of 12: the first leaf fills one and has 3 left over, the second one and 8 left over; those fit together,
    and so does a leaf of one element:

    >>> lcm_shard([Item(15, 3), Item(20, 4), Item(1, 1)], ranks=3)
    12
    """
    cell = lcm(*(item.block for item in items))
    cells = sum(item.size // cell for item in items)
    # Long leaves first, what sticks out furthest first; then the small ones likewise.
    rests = sorted(items, key=lambda item: (item.size < cell, -(item.size % cell)))
    room: list[int] = []
    ends: list[list[bool]] = []  # of long leaves per shared cell: whether that leaf may lie to the right of it
    for item in rests:
        rest, long = item.size % cell, item.size >= cell
        if not rest:
            continue
        # One long leaf may end in the cell and one begin there; not one with a short block, which must come last.
        begins = item.size % item.block == 0
        homes = (c for c, free in enumerate(room) if free >= rest)
        if long:
            homes = (c for c in homes if not ends[c] or (len(ends[c]) == 1 and (begins or ends[c][0])))
        home = next(homes, None)
        if home is None:
            home = len(room)
            room.append(cell)
            ends.append([])
        room[home] -= rest
        if long:
            ends[home].append(begins)
    return cell * -(-(cells + len(room)) // ranks)
