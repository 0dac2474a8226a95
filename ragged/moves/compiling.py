"""From two layouts to copies: what this rank sends where, what it keeps, and where what it receives belongs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ragged.layout import axis_size
from ragged.moves.boxes import intersect
from ragged.moves.holdings import Grid, Holding, Part
from ragged.places import coordinates

__all__ = ["Exchange", "Move", "Window", "compile_move"]


class Window(NamedTuple):
    """A strided part of a local 1-D tensor: which tensor, first element, shape, strides."""

    tensor: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """One collective: windows by position in the group. The two ends of a message list them in one order.

    Attributes:
      axes: the group's axes in mesh order, or None for all ranks.
    """

    axes: tuple[str, ...] | None
    send: tuple[tuple[Window, ...], ...]
    receive: tuple[tuple[Window, ...], ...]


@dataclass(frozen=True)
class Move:
    """What one rank does: copies from its source to its target tensors, and exchanges."""

    copies: tuple[tuple[Window, Window], ...]
    exchanges: tuple[Exchange, ...]


def compile_move(source: Sequence[Holding], target: Sequence[Holding], grids: tuple[Grid, Grid], me: int) -> Move:
    """The move of leaves from one layout to another, as global rank `me` does it.

    Every element that a rank shall hold and doesn't is sent to it once: from the rank that holds it and has the
    receiver's coordinates on all axes that don't cut the leaf. So messages stay within the axes that cut the
    source, less those that cut both sides alike, and the bytes on the wire are the least possible.

    Args:
      source, target: the same leaves in the same order.
      grids: of either side; the same ranks, maybe at other coordinates.
    """
    before, after = grids
    copies: list[tuple[Window, Window]] = []
    wires: dict[tuple[str, ...] | None, tuple[dict[int, list[Window]], dict[int, list[Window]]]] = {}
    for old, new in zip(source, target, strict=True):
        if 0 in old.shape:
            continue
        key = _moving_axes(old, new, before) if before.same_as(after) else None
        leaf = _Leaf(old, new, before, after)
        sends, receipts = wires.setdefault(key, (defaultdict(list), defaultdict(list)))
        for origin, there, here in leaf.receipts(me):
            if origin == me:
                copies.append((there, here))
            else:
                receipts[origin].append(here)
        for partner, here in leaf.sends(me):
            sends[partner].append(here)
    exchanges = []
    for key in sorted(wires, key=lambda k: (k is None, k or ())):
        sends, receipts = wires[key]
        members = _members(key, before, me)
        if len(members) > 1:
            windows = [tuple(tuple(_joined(side[k])) for k in members) for side in (sends, receipts)]
            exchanges.append(Exchange(key, *windows))
    return Move(tuple(copies), tuple(exchanges))


def _members(axes: tuple[str, ...] | None, grid: Grid, me: int) -> list[int]:
    """Ranks that differ from this one on these axes only, in coordinate order."""
    if axes is None:
        return list(grid.ranks)
    here = grid.coordinate[me]
    return [k for k in grid.ranks if all(n == here[a] for a, n in grid.coordinate[k].items() if a not in axes)]


def _moving_axes(old: Holding, new: Holding, grid: Grid) -> tuple[str, ...]:
    """Axes along which elements may change place: those that cut the source, but for what the target cuts alike."""
    same: set[str] = set()
    for a, b in zip(old.dims, new.dims, strict=False):
        for x, y in zip(a, b, strict=False):
            if x != y:
                break
            same.add(x)
    ranks = range(axis_size(grid.axes, old.ragged))
    if (old.dims, old.ragged) == (new.dims, new.ragged) and all(old.span(k) == new.span(k) for k in ranks):
        same |= set(old.ragged)
    return tuple(a for a in old.cut_axes(grid.axes) if a not in same)


class _Leaf:
    """The two sides of one leaf, folded alike."""

    def __init__(self, old: Holding, new: Holding, before: Grid, after: Grid) -> None:
        self.old, self.new, self.before, self.after = old, new, before, after
        self.cut = old.cut_dims(before.axes) | new.cut_dims(after.axes)
        self.axes = old.cut_axes(before.axes)

    def receipts(self, rank: int) -> Iterator[tuple[int, Window, Window]]:
        """(origin, window there, window here) for all that a rank shall hold."""
        wanted = self._wanted(rank)
        own = self.before.coordinate[rank]
        for cell in coordinates(self.before.axes, self.axes) if wanted else ():
            parts = list(self.old.parts(self.before.axes, cell, self.cut))
            for there, here in self._common(parts, wanted):
                yield self.before.rank_at({**own, **cell}), there, here

    def sends(self, rank: int) -> Iterator[tuple[int, Window]]:
        """(partner, window here) for all that others shall have from a rank, in the order of their receipts."""
        own = self.before.coordinate[rank]
        parts = list(self.old.parts(self.before.axes, own, self.cut))
        rest = [a for a in self.before.axes if a not in self.axes]
        for partner in self.before.ranks if parts else ():
            there = self.before.coordinate[partner]
            if partner != rank and all(there[a] == own[a] for a in rest):
                for here, _ in self._common(parts, self._wanted(partner)):
                    yield partner, here

    def _wanted(self, rank: int) -> list[Part]:
        return list(self.new.parts(self.after.axes, self.after.coordinate[rank], self.cut))

    def _common(self, held: Sequence[Part], wanted: Sequence[Part]) -> Iterator[tuple[Window, Window]]:
        """Windows of the source and of the target for what two ranks' parts have in common."""
        for old in held:
            for new in wanted:
                box = intersect(old.box, new.box)
                if box is not None:
                    shape = tuple(hi - lo for lo, hi in box)
                    here = Window(self.old.tensor, self.old.begin + old.offset(box), shape, old.strides)
                    yield here, Window(self.new.tensor, self.new.begin + new.offset(box), shape, new.strides)


def _joined(windows: Sequence[Window]) -> Iterator[Window]:
    """Contiguous windows that follow one another in a tensor as one: the message's bytes stay the same."""
    last: Window | None = None
    for window in windows:
        flat = _flat(window)
        if last and flat and (last.tensor, last.offset + last.shape[0]) == (flat.tensor, flat.offset):
            last = last._replace(shape=(last.shape[0] + flat.shape[0],))
            continue
        if last:
            yield last
        last = flat
        if not flat:
            yield window
    if last:
        yield last


def _flat(window: Window) -> Window | None:
    """The window as 1-D, if its elements are neighbours."""
    step = 1
    for size, stride in zip(reversed(window.shape), reversed(window.strides), strict=True):
        if size > 1 and stride != step:
            return None
        step *= size
    return Window(window.tensor, window.offset, (step,), (1,))
