"""Checksums that add up, and segments that tile a tensor, for any cuts."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged.checkpoint.checksums import MODULUS, checksum
from ragged.checkpoint.segments import replicas, segments, shared
from ragged.moves import Grid, Holding


def plainly(raw: bytes) -> int:
    padded = raw + bytes(-len(raw) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    return sum((2 * k + 1) * x for k, x in enumerate(words)) % MODULUS


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5), st.integers(0, 7))
@settings(deadline=None)
def test_checksums_add_up(raw: bytes, cuts: list[int], shift: int) -> None:
    x = (
        torch.frombuffer(bytearray(bytes(shift) + raw), dtype=torch.uint8)[shift:]
        if raw
        else torch.zeros(0, dtype=torch.uint8)
    )
    ends = sorted({0, len(raw), *(min(c, len(raw)) for c in cuts)})
    parts = sum(checksum(x[a:b], a) for a, b in pairwise(ends))
    assert parts % MODULUS == checksum(x) == plainly(raw)


@given(st.integers(0, 3_000_000), st.integers(0, 7))
@settings(max_examples=20, deadline=None)
def test_every_bit_counts(at: int, bit: int) -> None:
    x = torch.arange(3_000_001, dtype=torch.int64).to(torch.uint8)
    before = checksum(x)
    x[at] ^= 1 << bit
    assert checksum(x) != before
    assert checksum(x[:1_000_003]) + checksum(x[1_000_003:], 1_000_003) - checksum(x) in (0, MODULUS)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Holding, Grid]:
    """Even cuts of some dims, a ragged cut of the rest, replicas on what is left."""
    axes = {name: draw(st.integers(1, 3)) for name in "abc"}
    grid = Grid(axes, tuple(range(math.prod(axes.values()))))
    ndim = draw(st.integers(0, 3))
    use = {name: draw(st.integers(-2, ndim - 1)) for name in axes}  # -2: replicas, -1: ragged, else a dim
    dims = tuple(tuple(a for a in axes if use[a] == d) for d in range(ndim))
    shape = tuple(draw(st.integers(0, 4)) * math.prod(axes[a] for a in dims[d]) for d in range(ndim))
    ragged = tuple(a for a in axes if use[a] == -1)
    local = math.prod(n // math.prod(axes[a] for a in dims[d]) for d, n in enumerate(shape))
    ranks = math.prod(axes[a] for a in ragged)
    inner = sorted(draw(st.lists(st.integers(0, local), min_size=ranks - 1, max_size=ranks - 1)))
    ends = [0, *inner, local]
    return Holding(shape, dims, ragged, lambda k: (ends[k], ends[k + 1]), 0, draw(st.integers(0, 5))), grid


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_segments_tile_the_tensor_once_per_replica(case: tuple[Holding, Grid]) -> None:
    held, grid = case
    size = math.prod(held.shape)
    all_of, written = [0] * size, [0] * size
    for rank in grid.ranks:
        found = segments(held, grid, rank)
        here = sorted((s.here, s.here + s.size) for s in found)
        assert all(a[1] == b[0] for a, b in pairwise(here))  # dense, from the holding's begin
        assert not here or here[0][0] == held.begin
        index, count = replicas(held, grid, rank)
        for cell, parts in ((all_of, found), (written, shared(found, index, count))):
            for s in parts:
                for k in range(s.there, s.there + s.size):
                    cell[k] += 1
        assert count * len({r for r in grid.ranks if replicas(held, grid, r)[0] == index}) == len(grid.ranks)
    assert set(written) <= {1}
    assert set(all_of) <= {replicas(held, grid, 0)[1]}
