"""Certificates: what no layout can beat, whatever the order and however many buffers.

Apart from `lower_bound`, all in units of the alignment (`ragged.planner.items.scale`). The report of a plan
says "padding X %, unavoidable at least Y %"; Y comes from here, and no solver's result is ever below it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import gcd, lcm

from ragged.planner.items import Item, check_arguments, scale
from ragged.planner.one_buffer import Leaf, spans_below

__all__ = [
    "any_buffers_bound",
    "counting_bound",
    "least_sum",
    "lower_bound",
    "one_buffer_bound",
]

MOST_BLOCKS = 4  # told apart in the certificate for any number of buffers: at most 15 lattices
MOST_STEPS = 64  # of one lattice in `least_sum`


def lower_bound(items: Sequence[Item], ranks: int, *, align: int = 64, buffers: int | None = None) -> int:
    """Elements per rank that every layout of the items needs at least, in any order.

    Args:
        items: sizes and blocks, in elements.
        ranks: number of equal shards.
        align: starts and shard sizes are multiples of so many elements.
        buffers: 1 for layouts in one buffer, None for any number of buffers (the sum of their shard sizes).

    Raises:
        ValueError: ``ranks`` or ``align`` below 1, ``buffers`` neither 1 nor None.

    Two leaves in blocks of 3 and of 4 on 32 ranks. In one buffer S is a multiple of 12; two need 3 + 4:

    >>> pair = [Item(96, 3), Item(128, 4)]
    >>> lower_bound(pair, 32, align=1, buffers=1), lower_bound(pair, 32, align=1)
    (12, 7)
    """
    check_arguments(ranks, align)
    if buffers not in (1, None):
        raise ValueError(f"there are certificates for buffers=1 and for buffers=None (any number), got {buffers}")
    bound = any_buffers_bound if buffers is None else one_buffer_bound
    return bound(scale(items, align), ranks) * align


def counting_bound(leaves: Sequence[Leaf], ranks: int) -> int:
    """The bound from counting blocks, with no regard to where they lie: for any order, any number of buffers.

    A rank that holds blocks ``x`` in S units satisfies ``sum(x // u) <= S // u`` for every ``u``. Summed
    over the ranks, ``S >= u * ceil(sum over all blocks of (x // u) / ranks)``. ``u = 1`` says that S is at
    least the mean, and ``u`` the largest block that S is at least that; other blocks count how many fit per
    rank.

    >>> counting_bound([(20, 4)], ranks=3)
    8
    """
    kinds = Counter(leaves)
    best = -(-sum(e for e, _ in leaves) // ranks)
    for unit in {g for _, g in kinds}:
        count = sum(n * ((e // g) * (g // unit) + (e % g) // unit) for (e, g), n in kinds.items())
        best = max(best, unit * -(-count // ranks))
    return best


def one_buffer_bound(leaves: Sequence[Leaf], ranks: int) -> int:
    """The smallest S that isn't refuted by counting or by the blocks of the leaves that must span at S."""
    for start, stop, spanning in _intervals(leaves, counting_bound(leaves, ranks)):
        lattice = lcm(*spanning)
        value = -(-start // lattice) * lattice
        if stop is None or value < stop:
            return value
    raise AssertionError("no leaf must span at large S")


def any_buffers_bound(leaves: Sequence[Leaf], ranks: int) -> int:
    """The smallest sum T of shard sizes that isn't refuted, for any number of buffers.

    No buffer is larger than T, so a leaf that must span at T must span wherever it lives (`_least_family`).
    """
    for start, stop, spanning in _intervals(leaves, counting_bound(leaves, ranks)):
        value = max(start, _least_family(spanning, ranks, start))
        if stop is None or value < stop:
            return value
    raise AssertionError("no leaf must span at large T")


def least_sum(lattices: Sequence[int], base: int, lo: int) -> int:
    """The smallest ``base + n_1 L_1 + n_2 L_2 + ...`` that reaches ``lo``, or a lower bound of it.

    Args:
        lattices: in descending order.
        base: what is there already, itself a sum of multiples.
        lo: units to be reached.

    It is a lower bound only for more than three lattices or many multiples: the next number on the grid of
    their gcd.

    >>> least_sum([7, 5], base=12, lo=20)
    22
    """
    if base >= lo:
        return base
    grid = gcd(*lattices)
    ideal = base - (base - lo) // grid * grid
    first, rest = lattices[0], lattices[1:]
    steps = -(-(lo - base) // first)
    if not rest or len(rest) > 2 or steps > MOST_STEPS:
        return ideal
    best = base + steps * first
    for n in range(steps - 1, -1, -1):
        best = min(best, least_sum(rest, base + n * first, lo))
        if best == ideal:
            break
    return best


def _intervals(leaves: Sequence[Leaf], lo: int) -> Iterator[tuple[int, int | None, dict[int, int]]]:
    """``(start, stop, {block: units of leaves that must span})``: constant in every ``[start, stop)``, from lo up."""
    later = [(spans_below(e, g), g, n * e) for (e, g), n in Counter(leaves).items() if g > 1]
    start = lo
    for stop in [*sorted({threshold for threshold, _, _ in later if threshold > lo}), None]:
        spanning: dict[int, int] = {}
        for threshold, g, load in later:
            if threshold > start:
                spanning[g] = spanning.get(g, 0) + load
        yield start, stop, spanning
        start = start if stop is None else stop


def _least_family(spanning: dict[int, int], ranks: int, enough: int) -> int:
    """Units per rank that leaves which must span need, in any number of buffers; or anything below ``enough``.

    Of the blocks the largest few suffice for a bound. Each buffer with such leaves has a size divisible by
    the lcm of their blocks; those with equal lcm L together count as one of size ``n L``. The lcms that
    occur are a *family*, in which every block divides some L. A family needs at least the sum of its
    members, and for every set of blocks the members that any of them divides must hold their leaves (Hall's
    condition). The smallest over all families is the bound.
    """
    kept = dict(sorted(spanning.items(), reverse=True)[:MOST_BLOCKS])
    if not kept:
        return 0
    needs = [
        (chosen, -(-sum(kept[g] for g in chosen) // ranks))
        for n in range(1, len(kept) + 1)
        for chosen in combinations(kept, n)
    ]
    values = {1}
    for g in kept:
        values |= {lcm(value, g) for value in values}
    lattices = sorted(values - {1}, reverse=True)
    best = _family_bound((lattices[0],), needs)
    stack: list[tuple[tuple[int, ...], int]] = [((), 0)]
    while stack and best > enough:
        family, index = stack.pop()
        if all(any(L % g == 0 for L in family) for g in kept):
            best = min(best, _family_bound(family, needs))
        total = sum(family)
        stack += [((*family, L), i + 1) for i, L in enumerate(lattices) if i >= index and total + L < best]
    return best


def _family_bound(family: tuple[int, ...], needs: Sequence[tuple[tuple[int, ...], int]]) -> int:
    homes = [(tuple(L for L in family if any(L % g == 0 for g in chosen)), need) for chosen, need in needs]
    least = {L: L for L in family}
    for members, need in homes:
        if len(members) == 1:
            (L,) = members
            least[L] = max(least[L], -(-need // L) * L)
    total = sum(least.values())
    bound = total
    for members, need in homes:
        base = sum(least[L] for L in members)
        if need > base:
            bound = max(bound, total - base + least_sum(members, base, need))
    return bound
