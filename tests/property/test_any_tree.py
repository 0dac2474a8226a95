"""Any tree, any spec, any mesh: what goes in comes out, bit by bit, and every rank holds what its plan says.

Examples are drawn here, checked in batches on the workers, and told the shortest first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged import (
    ELEMENT,
    ROW,
    TENSOR,
    P,
    Plan,
    ShardedTree,
    combine,
    from_local,
    map_leaves,
    partition,
    plan,
    reduce_scatter,
    shard,
    tree_map,
    unshard,
)
from ragged.spec import block_elements

DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool, torch.complex64]
MESHES: dict[int, list[dict[str, int]]] = {
    1: [{"a": 1}, {"a": 1, "b": 1}],
    2: [{"a": 2}, {"a": 1, "b": 2}],
    3: [{"a": 3}],
    4: [{"a": 4}, {"a": 2, "b": 2}],
    8: [{"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}],
}


@dataclass(frozen=True)
class Leaf:
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P | None


@dataclass(frozen=True)
class Case:
    """One example; plain data that travels to the workers."""

    tree: Any
    axes: dict[str, int] = field(hash=False)
    order: tuple[int, ...]
    units: tuple[str, ...]
    align: int
    seed: int


def axes_of(draw: st.DrawFn, axes: dict[str, int], shape: tuple[int, ...]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Every axis cuts a dim that it divides, or is ragged, or holds replicas."""
    dims: list[tuple[str, ...]] = [() for _ in shape]
    ragged: list[str] = []
    left = list(shape)
    for name in draw(st.permutations(list(axes))):
        use = draw(st.sampled_from(["ragged", "ragged", "even", "none"]))
        able = [i for i, n in enumerate(left) if n % axes[name] == 0]
        if use == "even" and able:
            i = draw(st.sampled_from(able))
            dims[i] += (name,)
            left[i] //= axes[name]
        elif use == "ragged":
            ragged.append(name)
    return dims, ragged


@st.composite
def leaves(draw: st.DrawFn, axes: dict[str, int]) -> Leaf:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 4, 5, 8]), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.integers(0, 9)) == 0:
        return Leaf(shape, dtype, None)
    dims, ragged = axes_of(draw, axes, shape)
    tiles = st.lists(st.none() | st.integers(1, 4), min_size=1, max_size=max(len(shape), 1)).map(tuple)
    block = draw(st.one_of(st.sampled_from([ELEMENT, ROW, TENSOR]), st.integers(1, 20), *([tiles] if shape else [])))
    shares = None
    if ragged and draw(st.integers(0, 4)) == 0:
        local = [n // math.prod(axes[a] for a in names) for n, names in zip(shape, dims, strict=True)]
        count = -(-math.prod(local) // block_elements(block, local))
        total = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0] or [2]))
        ranks = math.prod(axes[a] for a in ragged)
        cuts = [0, *sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1))), total]
        shares = tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))
    return Leaf(shape, dtype, P(*dims, ragged=tuple(ragged), block=block, shares=shares))


@st.composite
def cases(draw: st.DrawFn, n: int) -> Case:
    axes = draw(st.sampled_from(MESHES[n]))
    leaf = leaves(axes)
    keys = st.sampled_from(["w", "b", "layers", "2", "10"])
    grow: Any = lambda c: st.one_of(st.dictionaries(keys, c, max_size=4), st.lists(c, max_size=4))  # noqa: E731
    tree = draw(st.recursive(st.one_of(leaf, leaf, leaf, st.none()), grow, min_leaves=3, max_leaves=8))
    order = draw(st.sampled_from([tuple(range(n)), *([(1, 0, *range(2, n))] if n > 1 else [])]))
    units = draw(st.sampled_from([(), ("**",)])) if optree.tree_leaves(tree) else ()
    return Case(tree, axes, order, units, draw(st.sampled_from([1, 4, 64])), draw(st.integers(0, 99)))


def drawn(n: int, count: int) -> list[Case]:
    found: list[Case] = []

    @settings(
        max_examples=count, phases=[Phase.generate], derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases(n))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return sorted(found, key=lambda case: len(repr(case)))


def raw(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> None:
    assert optree.tree_structure(a) == optree.tree_structure(b)
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        assert (x.shape, x.dtype, raw(x)) == (y.shape, y.dtype, raw(y))


def values(case: Case) -> Any:
    """Random bits; at times not row-major."""
    generator = torch.Generator().manual_seed(case.seed)

    def make(leaf: Leaf) -> Tensor:
        size = math.prod(leaf.shape)
        bits = torch.randint(0, 256, (size * leaf.dtype.itemsize,), generator=generator, dtype=torch.uint8)
        x = bits > 127 if leaf.dtype == torch.bool else bits.view(leaf.dtype)
        if case.seed % 3:
            return x.view(leaf.shape)
        return x.view(leaf.shape[::-1]).permute(*reversed(range(len(leaf.shape))))

    return optree.tree_map(make, case.tree)


@cache
def mesh_of(world: Any, axes: tuple[tuple[str, int], ...], order: tuple[int, ...]) -> DeviceMesh:
    ranks = torch.tensor(order).view([n for _, n in axes])
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(name for name, _ in axes))


def local_part(x: Tensor, spec: P | None, axes: dict[str, int], at: dict[str, int]) -> Tensor:
    """What the even dims leave of a leaf, one axis after the other."""
    for dim, names in enumerate(() if spec is None else spec.dims):
        for name in names:
            x = x.tensor_split(axes[name], dim)[at[name]]
    return x


def check_runs(case: Case, p: Plan, full: Any, sharded: ShardedTree) -> None:
    """The rank's runs, by the plainest reading of the spec."""
    at, used = sharded.rank, {path: 0 for path in p.leaves}
    specs = [leaf.spec for leaf in optree.tree_leaves(case.tree)]
    for path, x, spec in zip(p.leaves, optree.tree_leaves(full), specs, strict=True):
        rank = 0
        for name in () if spec is None else spec.ragged:
            rank = rank * case.axes[name] + at[name]
        start, stop = p.leaves[path].span(rank)
        want = local_part(x, spec, case.axes, at).reshape(-1)[start:stop]
        got = sharded.leaf(path)
        assert raw(got) == raw(want)
        used[path] = got.numel()
    for buffer in sharded.buffers:
        held = sum(used[leaf.path] for leaf in buffer.bucket.leaves)
        gaps = list(buffer.bucket.local_gaps(buffer.rank))
        assert buffer.tensor.numel() == held + sum(b - a for a, b in gaps)
        assert not any(any(raw(buffer.tensor[a:b])) for a, b in gaps)


def check_parts(case: Case, full: Any, sharded: ShardedTree) -> None:
    """Any two parts share storage with the whole, and are the whole together."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    chosen = {path for path in sharded.paths if torch.rand(1, generator=generator) < 0.5}
    one, two = partition(sharded, lambda path, _: path in chosen)
    assert set(one.paths) == chosen
    joined = combine(one, two)
    assert [x.data_ptr() for x in joined.tensors] == [x.data_ptr() for x in sharded.tensors]
    paths = dict(zip(sharded.paths, optree.tree_leaves(full), strict=True))
    for part in (one, two):
        assert unshard(part, dst=case.order[0]) is None or dist.get_rank() == case.order[0]
        same(optree.tree_leaves(unshard(part)), [paths[path] for path in part.paths])
        for path in part.paths:
            assert part.leaf(path).data_ptr() == sharded.leaf(path).data_ptr()
    for mixed in (combine(map_leaves(torch.clone, two), one), combine(one, tree_map(torch.clone, two))):
        same(unshard(mixed), full)


def check_sum(case: Case, p: Plan, sharded: ShardedTree) -> None:
    """Small integers, so that every order of the sum gives the same bits."""
    at, generator = sharded.rank, torch.Generator().manual_seed(case.seed + 2)
    names = list(case.axes)
    place = {r: divmod_all(i, list(case.axes.values())) for i, r in enumerate(case.order)}
    whole, mine, want = [], [], []
    for leaf in optree.tree_leaves(case.tree):
        everyones = torch.randint(-9, 9, (len(case.order), *leaf.shape), generator=generator).float()
        even = [] if leaf.spec is None else [a for names in leaf.spec.dims for a in names]
        peers = [r for r in case.order if all(place[r][names.index(a)] == at[a] for a in even)]
        mine.append(local_part(everyones[dist.get_rank()], leaf.spec, case.axes, at))
        want.append(local_part(everyones[peers].sum(0), leaf.spec, case.axes, at))
        whole.append(len(peers))
    tree = optree.tree_unflatten(p.structure, mine)
    for op in ("sum", "mean"):
        got = reduce_scatter(tree, p, op)
        for path, x, peers in zip(p.leaves, want, whole, strict=True):
            rank = p.bound().rank(p.buckets[p.leaves[path].bucket].ragged)
            start, stop = p.leaves[path].span(rank)
            run = x.reshape(-1)[start:stop]
            assert torch.equal(got.leaf(path), run if op == "sum" else run / mean_of(case, p, path, peers))


def mean_of(case: Case, p: Plan, path: str, peers: int) -> int:
    """A bucket's leaves share their even axes, so a mean divides by the ranks off them."""
    even = p.buckets[p.leaves[path].bucket].even
    assert peers == len(case.order) // math.prod(case.axes[a] for a in even)
    return peers


def divmod_all(index: int, sizes: list[int]) -> list[int]:
    out = []
    for size in reversed(sizes):
        index, digit = divmod(index, size)
        out.append(digit)
    return out[::-1]


def check(case: Case) -> None:
    mesh = mesh_of(dist.group.WORLD, tuple(case.axes.items()), case.order)
    full, specs = values(case), optree.tree_map(lambda leaf: leaf.spec, case.tree)
    p = plan(full, mesh, specs, units=case.units, align=case.align)
    sharded = shard(full, p)
    same(unshard(sharded), full)
    check_runs(case, p, full, sharded)
    again = from_local({path: sharded.leaf(path) for path in p.leaves}, p)
    here = case.seed % len(case.order)
    given = full if dist.get_rank() == here else optree.tree_map(lambda x: x.to("meta"), full)
    sent = shard(given, p, src=here)
    for x, y, z in zip(sharded.tensors, again.tensors, sent.tensors, strict=True):
        assert raw(x) == raw(y) == raw(z)
    there = unshard(sharded, dst=here)
    if dist.get_rank() == here:
        same(there, full)
    else:
        assert there is None
    check_parts(case, full, sharded)
    check_sum(case, p, sharded)


def check_all(cases: list[Case]) -> int:
    for case in cases:
        try:
            check(case)
        except Exception as error:
            error.add_note(f"Falsifying example: {case!r}")
            raise
    return len(cases)


@pytest.mark.parametrize(("n", "count"), [(1, 100), (2, 60), (3, 60), (4, 60), (8, 40)])
def test_any_tree(run: Any, n: int, count: int) -> None:
    batch = drawn(n, count)
    assert len(batch) > count / 2
    assert run(n, check_all, batch) == [len(batch)] * n
