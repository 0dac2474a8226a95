"""What the planner is given and what it answers: plain integers in frozen dataclasses, all in elements."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

__all__ = ["Item", "Packing", "check_arguments", "scale"]


@dataclass(frozen=True)
class Item:
    """One leaf as the planner sees it: ``size`` elements, of which no rank boundary may cut a ``block``.

    Blocks are counted from the leaf's start; the last one may be short. A block of at least the size means
    that the leaf stays whole on one rank.

    >>> Item(size=800, block=256)
    Item(size=800, block=256)

    Raises:
        ValueError: a negative size, or a block below one.
    """

    size: int
    block: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"a leaf has zero or more elements, got size={self.size}")
        if self.block < 1:
            raise ValueError(f"a block has at least one element, got block={self.block} (size={self.size})")


@dataclass(frozen=True)
class Packing:
    """A layout of one buffer: rank ``k`` owns elements ``[k * shard, (k + 1) * shard)``.

    Attributes:
        shard: S, elements per rank.
        starts: the element where each item starts in the global buffer, in the order of the items given.
    """

    shard: int
    starts: tuple[int, ...]


def scale(items: Sequence[Item], align: int) -> list[tuple[int, int]]:
    """(size, block) in units of the alignment, exactly: ``ceil(e / align)``, ``lcm(align, g) / align``.

    Starts and S are multiples of ``align``, hence so is the distance ``d`` from a start to a boundary, and
    ``d`` is a multiple of the block ``g`` exactly if it is one of ``lcm(align, g)``. Between ``e`` and its
    round-up lies no multiple of ``align``, so a boundary inside the rounded leaf is inside the leaf. A
    block of at least the size is written as the size: both say "whole", and the smaller number bounds
    better.

    >>> scale([Item(100, 48), Item(64, 10**9)], align=32)
    [(4, 3), (2, 2)]
    """
    scaled = []
    for item in items:
        e = -(-item.size // align)
        scaled.append((e, min(item.block // gcd(align, item.block), max(e, 1))))
    return scaled


def check_arguments(ranks: int, align: int) -> None:
    """Raise ValueError unless there is a rank and an alignment of at least one element."""
    if ranks < 1:
        raise ValueError(f"a buffer is cut over at least one rank, got ranks={ranks}")
    if align < 1:
        raise ValueError(f"the start alignment is a positive number of elements, got align={align}")
