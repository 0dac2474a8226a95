"""Assign leaves to buffers whose sizes are given.

Choosing the sizes first turns several buffers into a question with a quick answer: a leaf may live in a
buffer of shard size S if its block divides S (then anywhere), or if it is so short that it need not span
(``e <= 2 S - S % g``, see `ragged.planner.one_buffer.spans_below`). What remains is to place each leaf in one
of its homes. That is a packing problem, so it is solved by first fit only: the leaves with the fewest homes
first, element-wise ones last, and whatever is small enough into the holes that others left behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Filled", "Kind", "fill", "kinds_of", "next_start"]

MOST_HOLES = 4  # remembered at a time; more make filling quadratic, and hardly any leaf finds a fifth


@dataclass(frozen=True)
class Kind:
    """Equal leaves: ``size`` and ``block`` of one, in units of the alignment, and the indices of all."""

    size: int
    block: int
    members: tuple[int, ...]

    @property
    def load(self) -> int:
        """Units of all of them together."""
        return self.size * len(self.members)


class Filled(NamedTuple):
    """Leaf indices per buffer in their order there, those without a place, and the work it took."""

    orders: list[list[int]]
    left: list[int]
    steps: int


class _Hole(NamedTuple):
    length: int
    buffer: int
    start: int


def kinds_of(leaves: Sequence[tuple[int, int]], indices: Sequence[int]) -> tuple[Kind, ...]:
    """Equal leaves among the ``indices`` together, in order of first appearance.

    >>> kinds_of([(8, 2), (3, 1), (8, 2)], range(3))
    (Kind(size=8, block=2, members=(0, 2)), Kind(size=3, block=1, members=(1,)))
    """
    found: dict[tuple[int, int], list[int]] = {}
    for index in indices:
        found.setdefault(leaves[index], []).append(index)
    return tuple(Kind(e, g, tuple(members)) for (e, g), members in found.items())


def fill(kinds: Sequence[Kind], shards: Sequence[int], ranks: int, *, descending: bool, rest: bool) -> Filled:
    """Place the leaves into buffers of these shard sizes, as far as first fit can.

    Args:
        kinds: the leaves.
        shards: S of each buffer, in units.
        ranks: number of equal shards.
        descending: large blocks first among leaves with equally many homes; else small ones.
        rest: another buffer will take what finds no place. Element-wise leaves then all go there: a few
            thousand stray elements must not overflow an exact fit. Without it, filling stops at the first
            leaf without a place, and as soon as more is lost to holes than the buffers have to spare.
    """
    whole = [[b for b, S in enumerate(shards) if S % kind.block == 0] for kind in kinds]
    demand = [sum(k.load for k, w in zip(kinds, whole, strict=True) if b in w) for b in range(len(shards))]
    contested = sorted(range(len(shards)), key=lambda b: demand[b])
    jobs = []
    for kind, exact in zip(kinds, whole, strict=True):
        e, g = kind.size, kind.block
        cut = [b for b, S in enumerate(shards) if S % g and e <= 2 * S - S % g]
        jobs.append((kind, [] if rest and g == 1 else [b for b in contested if b in exact] + cut))
    sign = -1 if descending else 1
    jobs.sort(key=lambda job: (job[0].block == 1, len(job[1]), sign * job[0].block, -job[0].size))
    if rest:
        return _first_fit(jobs, shards, ranks, None)
    widest = max((kind.block for kind in kinds), default=0)  # no hole is as long
    spare = ranks * sum(shards) - sum(kind.load for kind in kinds if kind.size >= widest)
    return _first_fit(jobs, shards, ranks, spare)


def _first_fit(jobs: Sequence[tuple[Kind, list[int]]], shards: Sequence[int], ranks: int, spare: int | None) -> Filled:
    cursors = [0] * len(shards)
    placed: list[list[tuple[int, int]]] = [[] for _ in shards]  # (start, leaf)
    holes: list[_Hole] = []  # the longest first
    left: list[int] = []
    steps = waste = 0
    for kind, homes in jobs:
        e, members = kind.size, kind.members
        done = 0
        while done < len(members):
            steps += 1
            todo = len(members) - done
            if homes and holes and holes[0].length >= e:
                length, b, start = holes.pop(0)
                many = min(length // e, todo)
                _remember(holes, _Hole(length - many * e, b, start + many * e))
            else:
                for b in homes:
                    start, many = next_start(kind, shards[b], cursors[b])
                    many = min(many, todo, (ranks * shards[b] - start) // e)
                    if many > 0:
                        break
                else:
                    left += members[done:]
                    if spare is not None:
                        return Filled([], left, steps)
                    break
                if start > cursors[b]:
                    waste += start - cursors[b]
                    if spare is not None and waste > spare:
                        return Filled([], list(members[done:]), steps)
                    edge = min(start, cursors[b] + shards[b] - cursors[b] % shards[b])  # a hole lies in one shard
                    _remember(holes, _Hole(edge - cursors[b], b, cursors[b]))
                    _remember(holes, _Hole(start - edge, b, edge))
                cursors[b] = start + many * e
            placed[b] += [(start + j * e, members[done + j]) for j in range(many)]
            done += many
    return Filled([[index for _, index in sorted(leaves)] for leaves in placed], left, steps)


def next_start(kind: Kind, shard: int, cursor: int) -> tuple[int, int]:
    """Earliest legal start of a leaf that may live here, and how many equal ones can follow gapless."""
    e, g = kind.size, kind.block
    room = shard - cursor % shard
    if e <= room:
        start = cursor
        many = room // e
    else:
        skip = room % g
        if e - room + skip > shard and shard % g:
            skip = room + shard % g
        start = cursor + skip
        many = 1
    if shard % g == 0 and e % g == 0 and start % g == 0:
        many = len(kind.members)  # every boundary stays whole blocks away from every start
    return start, many


def _remember(holes: list[_Hole], hole: _Hole) -> None:
    if hole.length and (len(holes) < MOST_HOLES or hole > holes[-1]):
        holes.append(hole)
        holes.sort(reverse=True)
        del holes[MOST_HOLES:]
