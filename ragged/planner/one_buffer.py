"""One buffer, one order: the smallest shard size, exactly.

Everything here is in units of the alignment (`ragged.planner.items.scale`): a leaf has ``e`` units in
blocks of ``g``, S is any integer.

The problem is harder than it looks because feasibility is not monotone in S: a leaf that is cut by two
boundaries or more *spans* (owns a whole shard), which needs ``g | S``; at S + 1 it may be impossible again.
The way out is to fix which blocks must divide S. Along the multiples of one number feasibility *is*
monotone (`_smallest_multiple`), and only few numbers can matter (`minimum_shard`). The paper's planner
(arXiv 2602.22437) tries only the lcms of the largest leaves' blocks, which is exact on most real models but
not always.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import lcm

from ragged.planner.items import Item, Packing, check_arguments, scale

__all__ = ["Leaf", "first_fit", "minimum_shard", "pack_in_order", "spans_below"]

Leaf = tuple[int, int]  # (size, block)


def pack_in_order(items: Sequence[Item], ranks: int, align: int = 64) -> Packing:
    """Lay the items out in the order given, with the smallest shard size there is.

    Every start and the shard size S are multiples of ``align``; items are contiguous, disjoint and in order
    within ``ranks * S`` elements; every rank boundary strictly inside an item is a whole number of its
    blocks from its start. Exact: no layout of these items in this order has a smaller S.

    Args:
        items: sizes and blocks, in elements. Size zero is legal; no items at all give S = 0.
        ranks: number of equal shards, at least 1. The cost doesn't depend on it.
        align: elements. The default serves 128 bytes in bf16 and 64 in an 8-bit buffer of the same layout.

    Raises:
        ValueError: ``ranks`` or ``align`` below 1.

    A 100x8 leaf in blocks of 32 rows on four ranks, the last block short:

    >>> pack_in_order([Item(800, 256)], ranks=4)
    Packing(shard=256, starts=(0,))
    >>> pack_in_order([Item(96, 32), Item(40, 1)], ranks=2, align=8)
    Packing(shard=72, starts=(8, 104))
    """
    check_arguments(ranks, align)
    leaves = scale(items, align)
    shard = minimum_shard(leaves, ranks)
    assert shard is not None, "without a limit there is always a shard size"
    starts = first_fit(leaves, ranks, shard, shard)
    assert starts is not None, "the minimum shard size is feasible"
    return Packing(shard * align, tuple(start * align for start in starts))


def first_fit(leaves: Sequence[Leaf], ranks: int, shard: int, lattice: int) -> list[int] | None:
    """Starts of the leaves in their order at this shard size, or None if there are none. O(leaves).

    Only leaves whose block divides ``lattice`` (itself a divisor of ``shard``) may span, i.e. be cut twice
    or more.

    Whether a start is legal depends on the start alone, so the earliest legal one at or after the cursor is
    never later for an earlier cursor: taking it for every leaf minimises every end, and the layout exists
    exactly if the last end is within ``ranks * shard``. With ``room`` units before the next boundary, a
    leaf that fits stays. Else its first piece must be whole blocks, at most ``room - room % g``; the
    largest such piece starts earliest and leaves the smallest rest. A rest of more than one shard is legal
    only for a leaf that may span (boundaries are then all multiples of g away, since g | shard); any other
    leaf must give the current shard up, and then gets at most ``shard - shard % g`` of one shard and all of
    the next: no start does better.
    """
    if shard == 0:
        return None if any(e for e, _ in leaves) else [0] * len(leaves)
    starts: list[int] = []
    cursor = 0
    for e, g in leaves:
        room = shard - cursor % shard
        if e > room:
            skip = room % g
            if e - room + skip > shard and lattice % g:
                cursor += room
                skip = shard % g
                if e + skip > 2 * shard:
                    return None
            cursor += skip
        starts.append(cursor)
        cursor += e
    return starts if cursor <= ranks * shard else None


def minimum_shard(leaves: Sequence[Leaf], ranks: int, below: int | None = None) -> int | None:
    """The smallest feasible shard size for this order; None if it isn't smaller than ``below``.

    Let S be the optimum, C the leaves that span in an optimal layout, and L the lcm of their blocks. Two
    boundaries inside a leaf are multiples of g from its start, so g | S, so L | S; and the layout is one
    where only blocks that divide L span. Hence the optimum is the minimum over all lcms L of
    `_smallest_multiple`. Which L can matter?

    - A leaf that spans has a block before and something behind a whole shard: ``e > S + g >= lo + g``.
    - With best being what has been found so far, a leaf that must span at best - 1 must span at every
      smaller S (`spans_below`): L is a multiple of its block.
    - A multiple of L must lie in ``[lo, best)``; what is true of no multiple of L is true of no multiple of
      lcm(L, g), so the search stops there.
    - Feasibility is monotone over multiples of L: if the last one below best fails, so do all the others.
      One probe refutes an L.

    Best starts from the prefixes of the leaves by size, which are nearly always optimal already.
    """
    total = sum(e for e, _ in leaves)
    # No shard is smaller than the mean, nor than the largest block, which lies in one shard.
    lo = max(-(-total // ranks), max((min(leaf) for leaf in leaves), default=0))
    best = total + 1 if below is None else below
    if lo == 0:
        return 0 if best > 0 else None
    largest: dict[int, int] = {}  # block -> the largest leaf that has it, if that may span
    for e, g in sorted(set(leaves), reverse=True):
        if e > lo + g and g > 1:
            largest.setdefault(g, e)
    answer = None
    stack, seen = [1, *_prefix_lcms(largest, best)], set[int]()
    forced = _forced(largest, best)
    while stack:
        lattice = lcm(stack.pop(), forced)
        first = -(-lo // lattice) * lattice
        if first >= best or lattice in seen:
            continue
        seen.add(lattice)
        found = _smallest_multiple(leaves, ranks, lattice, first, best)
        if found is not None:
            best = answer = found
            forced = _forced(largest, best)
        for g, e in largest.items():
            wider = lcm(lattice, g)
            if wider not in seen and e > -(-lo // wider) * wider + g:
                stack.append(wider)
    return answer


def spans_below(e: int, g: int) -> int:
    """The smallest S at which a leaf need not span; at every smaller one it must, so ``g | S`` there.

    A leaf that is cut at most once has whole blocks in one shard and the rest in the next, at most
    ``2 S - S % g = S + g * (S // g)``, which grows with S. So this is the smallest S with
    ``e <= S + g * (S // g)``.

    >>> [spans_below(e, 4) for e in (3, 4, 8, 9, 10, 13)]
    [3, 4, 4, 5, 6, 8]
    """
    q = max(0, -(-(e + 1 - g) // (2 * g)))  # S // g: the smallest for which S = q g + g - 1 suffices
    return max(q * g, e - q * g)


def _forced(largest: Mapping[int, int], best: int) -> int:
    """A divisor of every feasible S below best: the blocks of the leaves that must span there; at most best."""
    value = 1
    for g, e in largest.items():
        if spans_below(e, g) >= best:
            value = lcm(value, g)
            if value >= best:
                return best
    return value


def _prefix_lcms(blocks: Iterable[int], limit: int) -> list[int]:
    """lcms of the first 1, 2, ... blocks (largest leaf first): the paper's candidates, below the limit."""
    found, value = [], 1
    for g in blocks:
        value = lcm(value, g)
        if value >= limit:
            break
        found.append(value)
    return found


def _smallest_multiple(leaves: Sequence[Leaf], ranks: int, lattice: int, first: int, best: int) -> int | None:
    """The smallest feasible multiple of ``lattice`` in ``[first, best)``, ``first`` being one, or None.

    Feasibility is monotone here: take a layout for S and give every shard L more units. A shard that holds
    a border between leaves, or a gap, gets them as a gap there: what lies before keeps its distance from
    the shard's start, what lies behind its distance from the end, and a leaf that is cut once keeps both
    pieces. A shard inside a spanning leaf takes L more of that leaf (g | L, so its cuts stay legal); the
    leaf ends L earlier or more, and what follows it keeps its place in its own shard. So try the last
    multiple, then gallop up from the first.
    """

    def feasible(multiple: int) -> bool:
        return first_fit(leaves, ranks, multiple * lattice, lattice) is not None

    low, high = first // lattice, (best - 1) // lattice
    if not feasible(high):
        return None
    step = 1
    while low + step <= high and not feasible(low + step - 1):
        low, step = low + step, 8 * step
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle + 1, high)
    return high * lattice
