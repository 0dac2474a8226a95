"""The planner again, by trying everything: slow, and simple enough to be obviously right.

Nothing here shares code or an argument with the fast solvers; properties compare the two.
"""

from collections.abc import Sequence
from functools import cache
from itertools import count, permutations

from ragged.planner.items import Item

__all__ = ["exhaustive_any_order", "exhaustive_shard", "is_legal", "problems", "scan_shard"]


def is_legal(item: Item, start: int, shard: int) -> bool:
    """Whether every rank boundary strictly inside the item is a whole number of blocks from its start."""
    boundaries = range(shard * (start // shard + 1), start + item.size, shard)
    return all((boundary - start) % item.block == 0 for boundary in boundaries)


def scan_shard(items: Sequence[Item], ranks: int, align: int = 1) -> int:
    """The smallest S: try every multiple of ``align``; for each leaf, try every start from the cursor on."""
    if not any(item.size for item in items):
        return 0
    for shard in count(align, align):
        cursor = 0
        for item in items:
            while cursor + item.size <= ranks * shard and not is_legal(item, cursor, shard):
                cursor += align
            cursor = -(-(cursor + item.size) // align) * align
        if cursor <= ranks * shard:
            return shard
    raise AssertionError("one shard that holds all the leaves is always legal")


def exhaustive_shard(items: Sequence[Item], ranks: int, align: int = 1) -> int:
    """The smallest S with no argument at all, not even that early starts are good: try every layout."""
    if not any(item.size for item in items):
        return 0
    for shard in count(align, align):

        @cache
        def possible(index: int, cursor: int, shard: int = shard) -> bool:
            if index == len(items):
                return True
            item = items[index]
            first = -(-cursor // align) * align
            return any(
                is_legal(item, start, shard) and possible(index + 1, start + item.size)
                for start in range(first, ranks * shard - item.size + 1, align)
            )

        if possible(0, 0):
            return shard
    raise AssertionError("one shard that holds all the leaves is always legal")


def exhaustive_any_order(items: Sequence[Item], ranks: int, align: int = 1) -> int:
    """The smallest S over all orders of the items."""
    return min(scan_shard(order, ranks, align) for order in permutations(items))


def problems(items: Sequence[Item], starts: Sequence[int], shard: int, ranks: int, align: int = 1) -> list[str]:
    """What is wrong with a layout, in words; empty if nothing is. Items may be in any order in the buffer."""
    found = [] if shard % align == 0 else [f"S = {shard} is no multiple of {align}"]
    if len(starts) != len(items):
        return [*found, f"{len(starts)} starts for {len(items)} items"]
    end = 0
    for start, item in sorted(zip(starts, items, strict=True), key=lambda pair: (pair[0], pair[1].size)):
        if start % align:
            found.append(f"start {start} of {item} is no multiple of {align}")
        if start < end:
            found.append(f"{item} at {start} begins inside its predecessor, which ends at {end}")
        if start + item.size > ranks * shard:
            found.append(f"{item} at {start} ends outside of {ranks} x {shard}")
        if item.size and not is_legal(item, start, shard):
            found.append(f"{item} at {start} has a block cut by a rank boundary at S = {shard}")
        end = max(end, start + item.size)
    return found
