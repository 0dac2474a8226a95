"""Several buffers for one unit: where leaves with unlike blocks are better off apart.

In one buffer S is a multiple of the lcm of the blocks of all long leaves, which for matrices in blocks of
many rows is soon a multiple of the fair share. Apart, each buffer has the size that suits it. That costs a
collective more, so an extra buffer has a price.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ragged.planner.bounds import counting_bound
from ragged.planner.fill import fill, kinds_of
from ragged.planner.items import Item, check_arguments, scale
from ragged.planner.one_buffer import Leaf, first_fit, minimum_shard
from ragged.planner.orders import best_order
from ragged.planner.shard_sizes import Shards, SizeSearch

__all__ = ["PRICE", "Buffer", "UnitPacking", "pack"]

PRICE = 2_000_000  # gathered elements that one collective less is worth: 8 MB in fp32
FIRST_TRIES = 8
STEPS = 3_000  # of filling per unit, about two microseconds each


@dataclass(frozen=True)
class Buffer:
    """One flat buffer of a unit.

    Attributes:
        shard: S, elements per rank.
        members: indices of the items in it, in the order of their starts.
        starts: the element where each member starts in the global buffer of ``ranks * shard``.
    """

    shard: int
    members: tuple[int, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class UnitPacking:
    """The buffers of one unit, which are gathered and reduced together.

    Attributes:
        buffers: every item is a member of exactly one. None if there are no items.
        ranks: m, the number of equal shards of each buffer.
        elements: of all items together.
    """

    buffers: tuple[Buffer, ...]
    ranks: int
    elements: int

    @property
    def shard(self) -> int:
        """Elements per rank, over all buffers."""
        return sum(buffer.shard for buffer in self.buffers)

    @property
    def padding(self) -> float:
        """Gathered elements over those of the items, less one: 0.02 is two per cent."""
        return self.ranks * self.shard / self.elements - 1 if self.elements else 0.0


def pack(
    items: Sequence[Item],
    ranks: int,
    *,
    align: int = 64,
    max_buffers: int = 3,
    price: int = PRICE,
    labels: Sequence[Hashable] | None = None,
) -> UnitPacking:
    """Lay the items of one unit out in one or more buffers, so that it gathers few elements.

    What is made small is ``ranks * (sum of shard sizes) + price * (buffers - 1)``; the order is free. Not
    exact (that is NP-hard), but each buffer has the exact minimum for its own order, and the whole is never
    worse than one buffer in the order given (grouped by label). Deterministic; and the answer is kept, as the
    layers of a model are equal units.

    Args:
        items: sizes and blocks, in elements.
        ranks: number of equal shards, at least 1. The cost doesn't depend on it.
        align: starts and shard sizes are multiples of so many elements.
        max_buffers: at most so many; 1 searches orders only.
        price: elements of padding over all ranks that one buffer less is worth. The default is 8 MB in
            fp32, what a collective moves in about the time it takes to start.
        labels: one per item. Items of one label are neighbours in their buffer, the labels in the order of
            their first item; so a label is one interval of every buffer.

    Raises:
        ValueError: ``ranks``, ``align`` or ``max_buffers`` below 1, a negative price, or another number of
            labels than of items.

    Two leaves in blocks of 3 and of 4 on 32 ranks. In one buffer S is a multiple of 12; two need 3 + 4:

    >>> pair = [Item(96, 3), Item(128, 4)]
    >>> [(b.shard, b.members, b.starts) for b in pack(pair, 32, align=1, price=0).buffers]
    [(4, (1,), (0,)), (3, (0,), (0,))]
    >>> pack(pair, 32, align=1).shard  # 5 elements per rank aren't worth a collective
    12
    """
    check_arguments(ranks, align)
    if max_buffers < 1:
        raise ValueError(f"a unit has at least one buffer, got max_buffers={max_buffers}")
    if price < 0:
        raise ValueError(f"a price is a number of elements, zero or more, got price={price}")
    if labels is None:
        labels = [0] * len(items)
    if len(labels) != len(items):
        raise ValueError(f"one label per item, got {len(labels)} labels for {len(items)} items")
    numbers: dict[Hashable, int] = {}
    groups = tuple(numbers.setdefault(label, len(numbers)) for label in labels)
    return _pack(tuple(items), ranks, align, max_buffers, price, groups)


@lru_cache(maxsize=256)
def _pack(
    items: tuple[Item, ...], ranks: int, align: int, max_buffers: int, price: int, labels: tuple[int, ...]
) -> UnitPacking:
    if not items:
        return UnitPacking((), ranks, 0)
    leaves = scale(items, align)
    filled = [i for i, item in enumerate(items) if item.size]
    empty = [i for i, item in enumerate(items) if not item.size]
    plan = [(0, list[int]())]
    if filled:
        plan = _Search(leaves, filled, ranks, -(-price // align), labels).plan(max_buffers)
    # An empty leaf is legal anywhere.
    plan[0] = (plan[0][0], sorted([*empty, *plan[0][1]], key=labels.__getitem__))
    buffers = []
    for shard, order in plan:
        members = [leaves[i] for i in order]
        starts = first_fit(members, ranks, shard, shard)
        assert starts is not None, "a layout with this shard size is known"
        buffers.append(Buffer(shard * align, tuple(order), tuple(start * align for start in starts)))
    return UnitPacking(tuple(buffers), ranks, sum(item.size for item in items))


class _Search:
    """The best plan so far, as (shard size, order) per buffer, and its cost; and the attempts to better it."""

    def __init__(
        self, leaves: Sequence[Leaf], indices: list[int], ranks: int, price: int, labels: tuple[int, ...]
    ) -> None:
        self.leaves, self.indices, self.ranks, self.price, self.labels = leaves, indices, ranks, price, labels
        self.kinds = kinds_of(leaves, indices)
        self.steps = STEPS
        one = best_order(leaves, indices, ranks, labels)
        assert one is not None, "without a limit there is always a shard size"
        self.best, self.cost = [one], ranks * one[0]

    def plan(self, most: int) -> list[tuple[int, list[int]]]:
        """First what is quick: buffers of natural size and one for the rest. Then sizes in ascending cost."""
        lo = counting_bound([self.leaves[i] for i in self.indices], self.ranks)
        if self.cost > self.ranks * lo:
            sizes = SizeSearch(self.kinds, self.ranks, lo, self.price)
            for cost, shards in sizes.natural(self.cost, most)[:FIRST_TRIES]:
                if cost < self.cost:
                    self.attempt(shards, rest=True)
            for cost, shards in sizes.exact(self.cost, most):
                if cost >= self.cost or self.steps < 0:
                    break
                self.attempt(shards, rest=False)
        return self.best

    def attempt(self, shards: Shards, rest: bool) -> None:
        """Fill buffers of these sizes; with ``rest``, what finds no place gets a buffer of its own."""
        for descending in (True, False):
            result = fill(self.kinds, shards, self.ranks, descending=descending, rest=rest)
            self.steps -= result.steps + 20
            if rest or not result.left:
                break
        else:
            return
        plan = []
        for S, order in zip(shards, result.orders, strict=True):
            if order:
                order.sort(key=self.labels.__getitem__)
                # What was filled is legal at S, unless grouping by label has torn it apart.
                below = S if len(set(self.labels)) == 1 else None
                exact = minimum_shard([self.leaves[i] for i in order], self.ranks, below)
                plan.append((S if exact is None else exact, order))
        if result.left:
            spent = self.ranks * sum(S for S, _ in plan) + self.price * len(plan)
            below = -(-(self.cost - spent) // self.ranks)
            last = best_order(self.leaves, result.left, self.ranks, self.labels, below)
            if last is None:
                return
            plan.append(last)
        cost = self.ranks * sum(S for S, _ in plan) + self.price * (len(plan) - 1)
        if cost < self.cost:
            self.best, self.cost = plan, cost
