"""One buffer, any order: a few orders, each solved exactly."""

from collections.abc import Iterator, Sequence
from itertools import permutations

from ragged.planner.bounds import one_buffer_bound
from ragged.planner.fill import Kind, kinds_of, next_start
from ragged.planner.one_buffer import Leaf, minimum_shard

__all__ = ["best_order"]

FEW = 5  # leaves of which all orders are tried: 120


def best_order(
    leaves: Sequence[Leaf], indices: Sequence[int], ranks: int, labels: Sequence[int], below: int | None = None
) -> tuple[int, list[int]] | None:
    """The smallest shard size over a few orders of the leaves at ``indices``, and that order.

    Leaves of one label (``labels[i]`` is that of leaf i) stay together, labels ascending.

    Finding the best of all orders is NP-hard (Partition: two ranks, whole leaves). The orders as given, by
    descending and by ascending block come close on real models; a fourth closes holes (`_threaded`). Of up to
    five leaves all orders are tried. Stops at the certificate for one buffer. Ties go to the order given.

    Returns:
        None if no order has a shard size smaller than ``below``.
    """
    bound = one_buffer_bound([leaves[i] for i in indices], ranks)
    best = None
    for order in _orders(leaves, indices, bound):
        if below is not None and below <= bound:
            break
        order.sort(key=labels.__getitem__)
        found = minimum_shard([leaves[i] for i in order], ranks, below)
        if found is not None:
            best, below = (found, order), found
    return best


def _orders(leaves: Sequence[Leaf], indices: Sequence[int], bound: int) -> Iterator[list[int]]:
    yield list(indices)
    falling = sorted(indices, key=lambda i: (-leaves[i][1], -leaves[i][0]))
    yield falling
    yield sorted(indices, key=lambda i: (leaves[i][1], -leaves[i][0]))
    yield _threaded(kinds_of(leaves, falling), bound)
    if len(indices) <= FEW:
        yield from map(list, permutations(indices))


def _threaded(kinds: Sequence[Kind], shard: int) -> list[int]:
    """An order by descending block that, at this shard size, leaves few holes in front of boundaries.

    Where the next leaf would leave a hole, smaller leaves go first: the largest that fits; then an
    element-wise one, which may lie across the boundary, if what follows loses less that way.
    """
    left = [(kind, list(reversed(kind.members))) for kind in kinds]
    order: list[int] = []
    cursor = 0
    while left:
        pick = 0
        kind = left[0][0]
        start, _ = next_start(kind, shard, cursor)
        if start > cursor:
            hole = min(start - cursor, shard - cursor % shard)
            sizes = [k.size if k.size <= hole else 0 for k, _ in left]
            pick = max(range(len(left)), key=sizes.__getitem__)
            if not sizes[pick]:
                loose = [i for i, (k, _) in enumerate(left) if k.block == 1]
                pick = next((i for i in loose if _hole(kind, shard, cursor + left[i][0].size) < start - cursor), 0)
            start = cursor if pick else start
        kind, members = left[pick]
        order.append(members.pop())
        cursor = start + kind.size
        if not members:
            del left[pick]
    return order


def _hole(kind: Kind, shard: int, cursor: int) -> int:
    return next_start(kind, shard, cursor)[0] - cursor
