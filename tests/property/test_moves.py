"""Compiled moves of random layouts, carried out for all ranks in one process and compared element by element."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragged import ELEMENT, P
from ragged.moves import Grid, Holding, Move, Window, compile_move, holdings_of, one_rank
from ragged.selection import Selection, select
from tests.random_layouts import Layout, Mesh, other_mesh, places, random_layout, random_mesh, random_shapes

FLAT = optree.tree_structure([0])
Locals = dict[int, list[np.ndarray]]  # by global rank: its tensors, each as (elements, itemsize) of bytes


@dataclass(frozen=True)
class Here:
    """What `holdings_of` asks of a rank."""

    mesh: Mesh
    at: int

    def rank(self, names: Sequence[str]) -> int:
        return self.mesh.index(self.mesh.coordinates()[self.at], names)


@dataclass(frozen=True)
class Side:
    """One end of a move: what the library says of it, and where every element lies as told by plain loops.

    Attributes:
      holdings: by global rank; `sizes`: elements of the rank's tensors; `widths`: their bytes per element.
      where: per leaf and element (tensor, {global rank: place in that tensor}).
    """

    mesh: Mesh
    holdings: Mapping[int, list[Holding]]
    sizes: Mapping[int, list[int]]
    widths: list[int]
    where: list[list[tuple[int, dict[int, int]]]]

    @property
    def grid(self) -> Grid:
        return Grid(dict(self.mesh.axes), self.mesh.ranks)

    def filled(self, values: Sequence[np.ndarray]) -> Locals:
        """All ranks' tensors, padding zero."""
        out = {
            rank: [np.zeros((n, w), np.uint8) for n, w in zip(sizes, self.widths, strict=True)]
            for rank, sizes in self.sizes.items()
        }
        for value, elements in zip(values, self.where, strict=True):
            for bits, (tensor, spots) in zip(value, elements, strict=True):
                for rank, place in spots.items():
                    out[rank][tensor][place] = bits
        return out


def side_of(layout: Layout, shapes: Any, keep: Any) -> Side:
    """A layout, or a part of its leaves."""
    p = layout.plan(shapes)
    selection = select(p, FLAT, [path for path in p.leaves if path in keep])
    mesh = layout.mesh
    holdings, sizes = {}, {}
    for rank in mesh.ranks:
        here = Here(mesh, rank)
        holdings[rank] = holdings_of(selection, p.leaves, here)  # type: ignore[arg-type]
        spans = [piece.local(here.rank(piece.bucket.ragged)) for piece in selection.pieces]
        sizes[rank] = [b - a for a, b in spans]
    where = [located(path, selection, p.leaves, mesh) for path in selection.paths]
    return Side(mesh, holdings, sizes, [piece.bucket.dtype.itemsize for piece in selection.pieces], where)


def located(path: str, selection: Selection, leaves: Any, mesh: Mesh) -> list[tuple[int, dict[int, int]]]:
    index = selection.home[path]
    piece = selection.pieces[index]
    firsts = {rank: piece.local(Here(mesh, rank).rank(piece.bucket.ragged))[0] for rank in mesh.ranks}
    found = places(leaves[path], piece.bucket, mesh)
    return [(index, {rank: place - firsts[rank] for rank in ranks}) for place, ranks in found]


def whole_on(rank: int, mesh: Mesh, shapes: Sequence[tuple[int, ...]], widths: list[int]) -> Side:
    grid = Grid(dict(mesh.axes), mesh.ranks)
    sizes = {r: [math.prod(s) if r == rank else 0 for s in shapes] for r in mesh.ranks}
    where = [[(i, {rank: k}) for k in range(math.prod(shape))] for i, shape in enumerate(shapes)]
    return Side(mesh, {r: one_rank(shapes, grid, rank) for r in mesh.ranks}, sizes, widths, where)


def indices(window: Window) -> list[int]:
    assert all(n > 0 for n in window.shape)
    cells = itertools.product(*map(range, window.shape))
    return [window.offset + sum(i * step for i, step in zip(c, window.strides, strict=True)) for c in cells]


def read(windows: Sequence[Window], tensors: Sequence[np.ndarray]) -> bytes:
    out = b""
    for window in windows:
        at = indices(window)
        assert 0 <= min(at) <= max(at) < len(tensors[window.tensor])
        out += tensors[window.tensor][at].tobytes()
    return out


def write(windows: Sequence[Window], message: bytes, tensors: Sequence[np.ndarray], written: Counter[Any]) -> None:
    start = 0
    for window in windows:
        at, width = indices(window), tensors[window.tensor].shape[1]
        assert 0 <= min(at) <= max(at) < len(tensors[window.tensor])
        bits = np.frombuffer(message[start : start + len(at) * width], np.uint8)
        tensors[window.tensor][at] = bits.reshape(len(at), width)
        written.update((window.tensor, i) for i in at)
        start += len(at) * width
    assert start == len(message), "the two ends of a message differ in size"


def members(axes: tuple[str, ...] | None, mesh: Mesh, me: int) -> list[int]:
    at = mesh.coordinates()
    return [r for r in mesh.ranks if axes is None or all(at[r][a] == at[me][a] for a in mesh.axes if a not in axes)]


def carry_out(moves: Mapping[int, Move], source: Locals, old: Side, new: Side) -> Locals:
    """All ranks' copies and messages, and checks of each."""
    keys = [tuple(each.axes for each in move.exchanges) for move in moves.values()]
    assert len(set(keys)) == 1, "ranks would wait for each other"
    assert len(set(keys[0])) == len(keys[0]), "one exchange per group of axes"
    target = {
        rank: [np.zeros((n, w), np.uint8) for n, w in zip(sizes, new.widths, strict=True)]
        for rank, sizes in new.sizes.items()
    }
    written: dict[int, Counter[Any]] = {rank: Counter() for rank in moves}
    arrived = dict.fromkeys(moves, 0)
    for rank, move in moves.items():
        for here, there in move.copies:
            write([there], read([here], source[rank]), target[rank], written[rank])
    for i, axes in enumerate(keys[0]):
        for rank, move in moves.items():
            group = members(axes, old.mesh, rank)
            assert len(move.exchanges[i].send) == len(move.exchanges[i].receive) == len(group)
            for k, origin in enumerate(group):
                message = read(moves[origin].exchanges[i].send[group.index(rank)], source[origin])
                assert not (message and origin == rank), "sent to itself"
                write(move.exchanges[i].receive[k], message, target[rank], written[rank])
                arrived[rank] += len(message)
    for rank in moves:
        wanted: Counter[Any] = Counter()
        least = 0
        for before, after in zip(old.where, new.where, strict=True):
            for (_, held), (tensor, spots) in zip(before, after, strict=True):
                if rank in spots:
                    wanted[tensor, spots[rank]] += 1
                    least += 0 if rank in held else new.widths[tensor]
        assert written[rank] == wanted, "every element that a rank shall hold is put in place once, padding never"
        assert arrived[rank] == least, "only what a rank doesn't hold travels"
    return target


def move_all(old: Side, new: Side, state: Locals) -> Locals:
    grids = old.grid, new.grid
    moves = {r: compile_move(old.holdings[r], new.holdings[r], grids, r) for r in old.mesh.ranks}
    return carry_out(moves, state, old, new)


def check_chain(rng: random.Random) -> None:
    n = rng.choice([1, 2, 3, 4, 4, 4, 6, 8, 8])
    world = sorted(rng.sample(range(9), n)) if rng.randrange(4) == 0 else list(range(n))
    shapes = random_shapes(rng, leaves=4, elements=96)
    first = random_mesh(rng, world)
    paths = [".".join(map(str, path)) for path in optree.tree_paths(shapes, is_leaf=lambda x: isinstance(x, tuple))]
    leaves = dict(zip(paths, optree.tree_leaves(shapes, is_leaf=lambda x: isinstance(x, tuple)), strict=True))
    keep = paths if rng.randrange(3) else [p for p in paths if rng.randrange(2)] or paths[:1]
    layout, sides = random_layout(rng, shapes, first), []
    for _ in range(rng.choice([2, 2, 3, 4])):
        sides.append(side_of(layout, shapes, keep))
        mesh = layout.mesh if rng.randrange(3) else other_mesh(rng, layout.mesh)
        layout = random_layout(rng, shapes, mesh, layout if rng.randrange(2) else None)
    chosen = [leaves[path] for path in leaves if path in keep]
    if rng.randrange(4) == 0:
        widths = [dtype.itemsize for _, dtype in chosen]
        sides.append(whole_on(rng.choice(world), sides[-1].mesh, [shape for shape, _ in chosen], widths))
    bits = np.random.default_rng(0)
    values = [bits.integers(0, 256, (math.prod(shape), dtype.itemsize), np.uint8) for shape, dtype in chosen]
    state = sides[0].filled(values)
    for old, new in itertools.pairwise([*sides, sides[0]]):
        state = move_all(old, new, state)
        for rank, want in new.filled(values).items():
            assert all(np.array_equal(a, b) for a, b in zip(state[rank], want, strict=True))


@settings(
    max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.randoms(use_true_random=False))
def test_chains_of_moves(rng: random.Random) -> None:
    check_chain(rng)


@pytest.mark.parametrize("seed", range(4))
def test_many_chains_of_moves(seed: int) -> None:
    """Plain random cases beside the drawn ones: those are small by preference."""
    for k in range(50):
        check_chain(random.Random(1000 * seed + k))


def test_every_pair_of_cuts_of_a_vector() -> None:
    """All ways to cut 8 elements by two axes of 2, and one that the mesh lacks: evenly, raggedly, or not at all."""
    mesh, shapes = Mesh({"x": 2, "y": 2}, (2, 0, 3, 1)), {"u": {"v": ((8,), torch.int16)}}
    sides = []
    for names in (order for k in range(4) for order in itertools.permutations(["x", "y", "none"], k)):
        for k in range(len(names) + 1):
            spec = P(names[:k], ragged=names[k:], block=ELEMENT)
            sides.append(side_of(Layout(mesh, {"u": {"v": spec}}, {"align": 1}), shapes, ["u.v"]))
    assert len(sides) == 49
    value = [np.arange(16, dtype=np.uint8).reshape(8, 2)]
    filled = [side.filled(value) for side in sides]
    for (old, before), (new, after) in itertools.product(zip(sides, filled, strict=True), repeat=2):
        moved = move_all(old, new, before)
        assert all(np.array_equal(moved[rank][0], after[rank][0]) for rank in mesh.ranks)
