"""Specs as values, and the block that each of them asks for."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged import ELEMENT, ROW, TENSOR, P
from ragged.spec import block_elements

Tiles = tuple[int | None, ...]


def legal_cuts(tiles: Tiles, shape: tuple[int, ...]) -> list[bool]:
    """For each flat index, whether a cut before it parts no tile: by looking at every element."""
    edges = [n if i >= len(tiles) else tiles[i] or n for i, n in enumerate(shape)]
    first: dict[tuple[int, ...], int] = {}
    last: dict[tuple[int, ...], int] = {}
    for flat, index in enumerate(itertools.product(*map(range, shape))):
        tile = tuple(i // edge for i, edge in zip(index, edges, strict=True))
        first.setdefault(tile, flat)
        last[tile] = flat
    legal = [True] * math.prod(shape)
    for tile, start in first.items():
        for flat in range(start + 1, last[tile] + 1):
            legal[flat] = False
    return legal


def smallest_run(tiles: Tiles, shape: tuple[int, ...]) -> int:
    legal = legal_cuts(tiles, shape)
    return next(run for run in range(1, len(legal) + 1) if all(legal[::run]))


def test_tiles_of_one_and_two_dims_close_to_the_smallest_run() -> None:
    for shape in [*((a,) for a in range(1, 9)), *itertools.product(range(1, 8), repeat=2)]:
        for tiles in itertools.product([None, 1, 2, 3, 4, 5, 7, 9], repeat=len(shape)):
            assert block_elements(tiles, shape) == smallest_run(tiles, shape), (tiles, shape)


@st.composite
def tiled(draw: Any) -> tuple[Tiles, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    tiles = draw(st.lists(st.none() | st.integers(1, 6), min_size=1, max_size=len(shape)))
    return tuple(tiles), shape


@settings(max_examples=300, deadline=None)
@given(tiled())
def test_no_multiple_of_a_block_parts_a_tile(case: tuple[Tiles, tuple[int, ...]]) -> None:
    tiles, shape = case
    assert all(legal_cuts(tiles, shape)[:: block_elements(tiles, shape)])


@settings(max_examples=200, deadline=None)
@given(tiled())
def test_no_smaller_run_will_do_for_any_number_of_rows(case: tuple[Tiles, tuple[int, ...]]) -> None:
    """A block depends on the tiles of a row, not on where the last row happens to end."""
    tiles, shape = case
    if shape[0] > 1 and tiles[0] == 1:
        shape = (math.prod(shape[1:]) + 1, *shape[1:])
        if math.prod(shape) > 4000:
            return
        assert block_elements(tiles, shape) == smallest_run(tiles, shape)
    else:
        inner = block_elements(tiles[1:] or (None,), shape[1:]) if len(shape) > 1 else 1
        height = min(tiles[0] or shape[0], shape[0])
        assert block_elements(tiles, shape) == (inner if shape[0] == 1 else height * math.prod(shape[1:]))


@pytest.mark.parametrize(
    ("block", "shape", "want"),
    [
        (ROW, (8, 3, 2), 6),
        (ROW, (7,), 1),
        (ROW, (), 1),
        (ROW, (1, 17), 17),
        (ELEMENT, (8, 3), 1),
        (TENSOR, (8, 3), 24),
        (TENSOR, (), 1),
        (5, (8, 3), 5),
        (100, (8, 3), 24),
        ((32, 32), (4096, 1024), 32 * 1024),
        ((1, None, None), (16, 64, 32), 64 * 32),
        ((1, 128, None), (32, 2880, 8), 2880 * 8),  # 128 does not divide 2880: a whole expert
        ((1, 128, None), (32, 2816, 8), 128 * 8),
        ((1, 1, None), (6, 4, 8), 8),
        ((1, 32), (1, 100), 32),
        ((None, 32), (1, 100), 32),
        ((64,), (10, 4), 40),
        (ROW, (0, 8), 1),
        (TENSOR, (3, 0), 1),
        ((2, 2), (0, 4), 1),
    ],
)
def test_examples(block: Any, shape: tuple[int, ...], want: int) -> None:
    assert block_elements(block, shape) == want


def test_more_tiles_than_dims() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\) has 2 entries for a leaf of shape \(4,\)"):
        block_elements((2, 2), (4,))


SPECS = [
    P(),
    P("tp"),
    P(None, "tp"),
    P(("a", "b"), ragged="c"),
    P(ragged=("a", "b")),
    P(ragged="a", block=ELEMENT),
    P(ragged="a", block=TENSOR),
    P(ragged="a", block=7),
    P(ragged="a", block=(1, None)),
    P(ragged="a", shares=(1, 0, 2)),
]


def test_specs_are_values() -> None:
    assert len(set(SPECS)) == len(SPECS)
    for spec in SPECS:
        assert eval(repr(spec)) == spec
        for twin in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
            assert twin == spec
            assert hash(twin) == hash(spec)
            assert block_elements(twin.block, (4, 4)) == block_elements(spec.block, (4, 4))
    assert P("tp", None, None) == P("tp")
    assert P(["a", "b"], ragged="c", shares=[1, 2]) == P(("a", "b"), ragged="c", shares=(1, 2))  # type: ignore[arg-type]
    assert P() != "P()"
    with pytest.raises(AttributeError, match="immutable"):
        P().ragged = ("a",)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: P("a", ragged="a"), ["'a' twice"]),
        (lambda: P("a", "a"), ["'a' twice"]),
        (lambda: P(("a", "a")), ["'a' twice"]),
        (lambda: P(5), ["dim 0", "5"]),
        (lambda: P(None, [1]), ["dim 1", "1"]),
        (lambda: P(ragged=2), ["ragged", "2"]),
        (lambda: P(""), ["dim 0", "''"]),
        (lambda: P(ragged="a", block=0), ["block=0"]),
        (lambda: P(ragged="a", block=-3), ["block=-3"]),
        (lambda: P(ragged="a", block=2.5), ["block=2.5"]),
        (lambda: P(ragged="a", block=True), ["block=True"]),
        (lambda: P(ragged="a", block=None), ["block=None"]),
        (lambda: P(ragged="a", block=()), ["block=()"]),
        (lambda: P(ragged="a", block=(0, 2)), ["block=(0, 2)"]),
        (lambda: P(ragged="a", block="row"), ["block='row'", "ROW"]),
        (lambda: P(shares=(1, 2)), ["needs ragged="]),
        (lambda: P(ragged="a", shares=(0, 0)), ["(0, 0)"]),
        (lambda: P(ragged="a", shares=(-1, 3)), ["(-1, 3)"]),
        (lambda: P(ragged="a", shares=(0.5, 1)), ["(0.5, 1)"]),
        (lambda: P(ragged="a", shares=()), ["()"]),
        (lambda: P(ragged="a", shares=3), ["shares", "3"]),
    ],
)
def test_mistakes(make: Any, words: list[str]) -> None:
    """pytorch/pytorch#191472: refused where it is written, with the value in the text."""
    with pytest.raises(ValueError, match=r".") as caught:
        make()
    for word in words:
        assert word in str(caught.value)
