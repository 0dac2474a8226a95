"""What a plan consists of: leaves, buckets, units. Frozen facts, no process group."""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import torch

from ragged.spec import P

__all__ = ["LARGE", "Bounds", "Bucket", "Chunk", "LeafInfo", "Request", "Unit", "axis_size", "contiguous_strides"]

LARGE = 1 << 20  # bytes of a leaf whose gradient is worth a message of its own


class Request(NamedTuple):
    """Somebody's wish: `block` contiguous elements never cut, the leaf's start a multiple of `align`."""

    who: str
    block: int
    align: int = 1


@dataclass(frozen=True)
class LeafInfo:
    """Where one leaf lies. Elements throughout; `rank` is a coordinate on the ragged axes.

    Attributes:
      path: dotted path in the tree.
      shape: global shape.
      local_shape: shape after the even dims are cut.
      dtype: dtype the plan was made for.
      spec: the leaf's spec (`P()` where the spec tree has `None`).
      block: contiguous elements that no rank boundary cuts.
      unit: name of the unit; `bucket`: index of the bucket in `plan.buckets`.
      offset: start in the bucket's global buffer.
      bounds: the rank boundaries of the bucket, `bounds(k)` in O(1).
      requests: who asked for which block, e.g. `Request("optimizer", block=256, align=256)`.
      label: the optimizer's, as text: leaves of one label are neighbours in their bucket.
    """

    path: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
    block: int
    unit: str
    bucket: int
    offset: int
    bounds: Bounds = field(repr=False)
    requests: tuple[Request, ...] = field(default=(), repr=False)
    label: str = field(default="", repr=False)

    @property
    def size(self) -> int:
        """Elements of the leaf after the even dims, which is what the ragged axes share."""
        return math.prod(self.local_shape)

    @property
    def stop(self) -> int:
        """End in the bucket's global buffer."""
        return self.offset + self.size

    def span(self, rank: int) -> tuple[int, int]:
        """The run `[start, stop)` of the leaf's flat elements that a rank owns; empty as `(s, s)`."""
        start = min(max(self.bounds(rank) - self.offset, 0), self.size)
        stop = min(max(self.bounds(rank + 1) - self.offset, 0), self.size)
        return start, stop

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """`span(rank)` of all ranks."""
        return tuple(self.span(k) for k in range(self.bounds.ranks))


@dataclass(frozen=True)
class Bounds:
    """Rank boundaries of a bucket: multiples of S, or given one by one where `shares` asked."""

    ranks: int
    shard: int
    explicit: tuple[int, ...] | None = None

    def __call__(self, rank: int) -> int:
        return self.shard * rank if self.explicit is None else self.explicit[rank]

    @property
    def total(self) -> int:
        return self(self.ranks)

    @property
    def sizes(self) -> list[int]:
        return [self(k + 1) - self(k) for k in range(self.ranks)]

    def size(self, rank: int) -> int:
        return self(rank + 1) - self(rank)


class Chunk(NamedTuple):
    """A part of a global buffer, `[start, stop)`: one large leaf, by index, or what lies between two of them (None)."""

    start: int
    stop: int
    leaf: int | None
    inside: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """One flat buffer: leaves of a unit with equal dtype and axes.

    Attributes:
      index: position in `plan.buckets`; `name`: the unit's, with `#n` for its further buckets.
      ragged: mesh axes the buffer is cut over, first outermost; empty for replicated leaves.
      even: mesh axes that cut some dim of the leaves evenly.
      ranks: m, ranks on the ragged axes.
      shard: S, the largest shard in elements; equal on all ranks unless `shares` was given.
      leaves: in order of their offsets.
      frozen: gathered but never reduced.
    """

    index: int
    name: str
    unit: str
    dtype: torch.dtype
    ragged: tuple[str, ...]
    even: tuple[str, ...]
    bounds: Bounds
    leaves: tuple[LeafInfo, ...]
    frozen: bool = False

    @property
    def ranks(self) -> int:
        return self.bounds.ranks

    @property
    def shard(self) -> int:
        return max(self.bounds.sizes) if self.bounds.explicit else self.bounds.shard

    @cached_property
    def length(self) -> int:
        """Elements of the global buffer: m * S, or the sum of the shares."""
        return self.bounds.total

    @cached_property
    def elements(self) -> int:
        return sum(leaf.size for leaf in self.leaves)

    @property
    def trains(self) -> bool:
        """Whether its leaves have gradients and optimizer state."""
        return not self.frozen and (self.dtype.is_floating_point or self.dtype.is_complex)

    @cached_property
    def digest(self) -> str:
        """Of the whole layout: equal on all ranks for messages that match."""
        leaves = [(f.path, f.shape, f.local_shape, f.offset) for f in self.leaves]
        facts = (self.name, str(self.dtype), self.ragged, self.even, self.bounds, leaves)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Intervals of the global buffer that hold padding, which is always zero."""
        out, end = [], 0
        for leaf in self.leaves:
            if leaf.offset > end:
                out.append((end, leaf.offset))
            end = max(end, leaf.stop)
        if self.length > end:
            out.append((end, self.length))
        return tuple(out)

    @cached_property
    def sections(self) -> list[int]:
        """Sizes of the parts of the global buffer: leaves, and padding before or after them."""
        return self._parted[0]

    @cached_property
    def places(self) -> list[int]:
        """The index of each leaf among the sections."""
        return self._parted[1]

    @cached_property
    def _parted(self) -> tuple[list[int], list[int]]:
        sizes: list[int] = []
        places: list[int] = []
        end = 0
        for leaf in self.leaves:
            if leaf.offset > end:
                sizes.append(leaf.offset - end)
            places.append(len(sizes))
            sizes.append(leaf.size)
            end = max(end, leaf.stop)
        return [*sizes, self.length - end], places

    @cached_property
    def stretches(self) -> tuple[tuple[int, int, int, int], ...]:
        """Runs of leaves without padding between them: (start, stop) in the global buffer, (first, last + 1) leaf."""
        out: list[tuple[int, int, int, int]] = []
        for i, leaf in enumerate(self.leaves):
            if out and out[-1][1] == leaf.offset:
                out[-1] = out[-1][0], leaf.stop, out[-1][2], i + 1
            else:
                out.append((leaf.offset, leaf.stop, i, i + 1))
        return tuple(out)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The global buffer in the parts that travel on their own in a reduction: one without large leaves."""
        out: list[Chunk] = []
        end, inside = 0, []
        for i, leaf in enumerate(self.leaves):
            if leaf.size * self.dtype.itemsize < LARGE:
                inside.append(i)
                continue
            if leaf.offset > end:
                out.append(Chunk(end, leaf.offset, None, tuple(inside)))
            out.append(Chunk(leaf.offset, leaf.stop, i, (i,)))
            end, inside = leaf.stop, []
        if self.length > end or not out:
            out.append(Chunk(end, self.length, None, tuple(inside)))
        return tuple(out)

    @cached_property
    def parted(self) -> bool:
        """Whether there are large leaves."""
        return self.chunks[0].leaf is not None or len(self.chunks) > 1

    def local_gaps(self, rank: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """The gaps inside `[start, stop)` that a rank holds, counted from the piece's first element."""
        lo = max(self.bounds(rank), start)
        hi = min(self.bounds(rank + 1), self.length if stop is None else stop)
        first = max(bisect_right(self.gaps, (lo, lo)) - 1, 0)
        for a, b in self.gaps[first:]:
            if a >= hi:
                break
            if max(a, lo) < min(b, hi):
                yield max(a, lo) - lo, min(b, hi) - lo

    def cells(self) -> tuple[int, ...]:
        """Borders that part the whole buffer among the leaves; a gap goes with the leaf before it."""
        return (0, *(leaf.offset for leaf in self.leaves[1:]), self.length)


@dataclass(frozen=True)
class Unit:
    """The leaves that are gathered together: a name and one or more buckets."""

    name: str
    buckets: tuple[Bucket, ...]

    @property
    def leaves(self) -> tuple[LeafInfo, ...]:
        return tuple(leaf for b in self.buckets for leaf in b.leaves)

    @cached_property
    def kind(self) -> object:
        """Equal for units that differ in numbers of their names only, such as the layers of a model."""
        buckets = []
        for b in self.buckets:
            leaves = [
                (f.path.removeprefix(b.unit), f.shape, f.local_shape, f.block, f.requests, f.offset) for f in b.leaves
            ]
            buckets.append((b.dtype, b.ragged, b.even, b.bounds, b.frozen, tuple(leaves)))
        return re.sub(r"\d+", "*", self.name), tuple(buckets)


@cache
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor without gaps, in elements.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def axis_size(axes: Mapping[str, int], names: tuple[str, ...]) -> int:
    """Ranks on the flattened axes; an axis that the mesh lacks counts as size 1."""
    return math.prod(axes.get(name, 1) for name in names)
