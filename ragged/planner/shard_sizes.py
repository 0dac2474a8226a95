"""Which sizes could several buffers have? Candidates, the cheapest first.

A leaf that is long wherever it lives must span, so its block divides the S of its buffer: the sizes of a
good plan are multiples ``S_b = n_b L_b`` of lcms L_b of some blocks. So take a *family* of lattices, bound
the sum of its sizes from below by what has to fit (Hall's condition: what can live only in some of the
buffers must fit into those), and unfold a family into sizes only when its bound is the smallest of all.

A cost is ``ranks * (sum of S) + price * (buffers - 1)``, in units of the alignment.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from math import lcm

from ragged.planner.bounds import least_sum
from ragged.planner.fill import Kind
from ragged.planner.one_buffer import spans_below

__all__ = ["Shards", "SizeSearch"]

MOST_BLOCKS = 5  # told apart in lattices, those of the longest leaves first
MOST_LATTICES = 14  # the smallest ones
MOST_MULTIPLES = 6  # of one lattice in a family, half from either end
MOST_UNFOLDED = 300  # sizes looked at per unit

Shards = tuple[int, ...]


class SizeSearch:
    """Sizes for the buffers of one unit.

    Sets of leaves are bit masks here, as the same few questions (who may live at this S, how much do these
    weigh) are asked thousands of times; the answers are kept for the life of the object.

    Args:
        kinds: the leaves, in units of the alignment.
        ranks: number of equal shards.
        lo: no plan has a smaller sum of shard sizes.
        price: of every buffer but the first, in units.
    """

    def __init__(self, kinds: Sequence[Kind], ranks: int, lo: int, price: int) -> None:
        self._ranks, self._lo, self._price = ranks, lo, price
        # Longest first. Element-wise leaves may live anywhere, so they only count in `lo`.
        self._long = sorted(
            ((spans_below(k.size, k.block), k.block, k.load, k.size) for k in kinds if k.block > 1), reverse=True
        )
        self._everyone = (1 << len(self._long)) - 1
        self._living: dict[int, int] = {}
        self._dividing: dict[int, int] = {}
        self._shares: dict[int, int] = {0: 0}

    def natural(self, limit: int, most: int) -> list[tuple[int, Shards]]:
        """(at least this cost, sizes) of up to ``most - 1`` buffers, while one more takes what is left over.

        Each is about as large as the leaves whose block divides its lattice. Quick, and good enough to tell
        the exact search what it has to beat.
        """
        found = []
        for family in self._families(limit, most - 1, extra=1):
            options = []
            for L in family:
                need = self._share(self._divides(L))
                options.append(sorted({max(1, need // L) * L, max(1, -(-need // L)) * L}))
            for shards in product(*options):
                homeless = self._everyone
                for S in shards:
                    homeless &= ~self._lives(S)
                widest = max((x[1] for i, x in enumerate(self._long) if homeless >> i & 1), default=1)
                total = max(self._lo, sum(shards) + max(widest, self._share(homeless)))
                cost = self._cost(total, len(shards) + 1)
                if cost < limit:
                    found.append((cost, shards))
        return sorted(found, key=lambda x: (x[0], len(x[1]), -sum(x[1])))

    def exact(self, limit: int, most: int) -> Iterator[tuple[int, Shards]]:
        """(cost, sizes) of 1 to ``most`` buffers for all leaves, none of them refuted by Hall's condition.

        In ascending order of cost, where what differs by less than a grain counts as equal, fewer buffers
        first. The bounds hold for plans cheaper than the limit, so a tight one saves work.
        """
        grain = max(self._price // 32, self._lo * self._ranks // 4000, 1)
        floor = self._cost(self._lo, 1)
        heap: list[tuple[int, int, bool, Shards, int]] = []
        for family in self._families(limit, most, extra=0):
            least = self._least(family, limit)
            if least is not None:
                cost = self._cost(least, len(family))
                if cost < limit:
                    heap.append(((cost - floor) // grain, len(family), False, family, cost))
        heapify(heap)
        seen = set[Shards]()
        while heap:
            _, k, sized, shards, cost = heappop(heap)
            if sized:
                yield cost, shards
            elif len(seen) < MOST_UNFOLDED:
                for sizes in self._unfold(shards, limit):
                    key = tuple(sorted(sizes))
                    if key not in seen and not self._refuted(sizes):
                        cost = self._cost(sum(sizes), k)
                        heappush(heap, ((cost - floor) // grain, k, True, sizes, cost))
                    seen.add(key)

    def _cost(self, total: int, buffers: int) -> int:
        return self._ranks * total + self._price * (buffers - 1)

    def _below(self, limit: int, buffers: int) -> int:
        """A plan is cheaper than the limit exactly if its sum of shard sizes is smaller than this."""
        return -(-(limit - self._price * (buffers - 1)) // self._ranks)

    def _families(self, limit: int, most: int, extra: int) -> Iterator[Shards]:
        blocks = list(dict.fromkeys(g for _, g, _, e in self._long if g < e))[:MOST_BLOCKS]
        values = {1}
        for g in blocks:
            values |= {v for v in (lcm(value, g) for value in values) if v * self._ranks < limit}
        lattices = sorted(sorted(values - {1})[:MOST_LATTICES], reverse=True)
        for k in range(1, most + 1):
            roof = self._below(limit, k + extra)
            yield from (family for family in combinations(lattices, k) if sum(family) < roof)

    def _forced(self, family: Shards, limit: int) -> tuple[list[int], Shards] | None:
        """What every set of buffers (a bit mask) needs together, and the least size of each buffer.

        None if a leaf that must span in every buffer of this family below the limit has none.
        """
        # All buffers are smaller than this, since each of the others has at least its L.
        roof = self._below(limit, len(family)) - sum(family) + max(family)
        forced = sum(1 << i for i, (threshold, *_) in enumerate(self._long) if threshold >= roof)
        needs = []
        for subset in range(1 << len(family)):
            inside = forced
            for b, L in enumerate(family):
                if not subset >> b & 1:
                    inside &= ~self._divides(L)
            needs.append(self._share(inside))
        if needs[0]:
            return None
        return needs, tuple(max(1, -(-needs[1 << b] // L)) * L for b, L in enumerate(family))

    def _least(self, family: Shards, limit: int) -> int | None:
        """A lower bound of the sum of sizes of this family, for plans below the limit."""
        found = self._forced(family, limit)
        if found is None:
            return None
        needs, least = found
        needs[-1] = max(needs[-1], self._lo)
        total = bound = sum(least)
        for subset, need in enumerate(needs):
            homes = [b for b in range(len(family)) if subset >> b & 1]
            base = sum(least[b] for b in homes)
            if need > base:
                bound = max(bound, total - base + least_sum([family[b] for b in homes], base, need))
        return bound

    def _unfold(self, family: Shards, limit: int) -> Iterator[Shards]:
        """Sizes of this family: several multiples of all but the last lattice, which takes what is missing."""
        found = self._forced(family, limit)
        if found is None:
            return
        needs, least = found
        needs[-1] = max(needs[-1], self._lo)
        roof = self._below(limit, len(family))
        *firsts, last = family
        options = []
        for b, L in enumerate(firsts):
            count = max(0, (roof - 1 - sum(least)) // L + 1)
            half = MOST_MULTIPLES // 2
            some = range(count) if count <= 2 * half else [*range(half), *range(count - half, count)]
            options.append([least[b] + n * L for n in some])
        mine = 1 << len(firsts)
        for shards in product(*options):
            S = least[-1]
            for subset in range(mine, 2 * mine):
                have = sum(size for b, size in enumerate(shards) if subset >> b & 1)
                S = max(S, -(-(needs[subset] - have) // last) * last)
            for size in (S, S + last):  # one more step, as filling isn't perfect
                if sum(shards) + size < roof:
                    yield (*shards, size)

    def _refuted(self, shards: Shards) -> bool:
        """Whether leaves that may live only in some buffers of these sizes don't fit into those."""
        homes = [self._lives(S) for S in shards]
        for subset in range((1 << len(shards)) - 1):
            inside, room = self._everyone, 0
            for b, S in enumerate(shards):
                if subset >> b & 1:
                    room += S
                else:
                    inside &= ~homes[b]
            if self._share(inside) > room:
                return True
        return False

    def _lives(self, shard: int) -> int:
        """Who may live in a buffer of this shard size."""
        if shard not in self._living:
            able = (1 << i for i, x in enumerate(self._long) if x[0] <= shard or shard % x[1] == 0)
            self._living[shard] = sum(able)
        return self._living[shard]

    def _divides(self, lattice: int) -> int:
        """Whose block divides the lattice."""
        if lattice not in self._dividing:
            self._dividing[lattice] = sum(1 << i for i, x in enumerate(self._long) if lattice % x[1] == 0)
        return self._dividing[lattice]

    def _share(self, mask: int) -> int:
        """Units per rank of these leaves."""
        if mask not in self._shares:
            load = sum(x[2] for i, x in enumerate(self._long) if mask >> i & 1)
            self._shares[mask] = -(-load // self._ranks)
        return self._shares[mask]
