"""What holds of every plan, checked element by element against the plainest reading of the words."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragged import ELEMENT, ROW, TENSOR, Bucket, LeafInfo, P, Plan, plan
from ragged.paths import natural_key
from ragged.planner import Item, lower_bound, pack_in_order
from ragged.planner.reference import scan_shard
from ragged.selection import select
from ragged.spec import block_elements

examples = settings(
    max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@dataclass(frozen=True)
class Leaf:
    """A leaf to plan, as one value, so that a tree of them gives the tree, the specs and the mask."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    block: Any
    frozen: bool
    shares: tuple[int, ...] | None = None

    @property
    def spec(self) -> P:
        return P(ragged="fsdp", block=self.block, shares=self.shares)


@dataclass(frozen=True)
class Case:
    """A whole planning problem."""

    tree: Any
    ranks: int
    align: int
    units: tuple[str, ...]
    price: int

    def map(self, f: Callable[[Leaf], Any]) -> Any:
        return optree.tree_map(f, self.tree)

    @property
    def shapes(self) -> Any:
        return self.map(lambda leaf: (leaf.shape, leaf.dtype))

    @property
    def leaves(self) -> list[Leaf]:
        found: list[Leaf] = optree.tree_leaves(self.tree)
        return found

    def plan(self) -> Plan:
        specs, frozen = self.map(lambda leaf: leaf.spec), self.map(lambda leaf: leaf.frozen)
        how = {"units": self.units, "frozen": frozen, "align": self.align, "price": self.price}
        return plan(self.shapes, {"fsdp": self.ranks}, specs, **how)


# The last three are hard to order: equal as numbers, and a digit that is no decimal.
keys = st.sampled_from(["w", "b", "layers", "2", "10", "01", "1", "²"])
shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 6, 7]), max_size=3).map(tuple)


@st.composite
def leaves(draw: st.DrawFn, ranks: int) -> Leaf:
    shape = draw(shapes)
    tiles = st.lists(st.one_of(st.none(), st.integers(1, 5)), min_size=1, max_size=len(shape)).map(tuple)
    blocks = [st.sampled_from([ELEMENT, ROW, TENSOR]), st.integers(1, 40), *([tiles] if shape else [])]
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
    leaf = Leaf(shape, dtype, draw(st.one_of(blocks)), draw(st.integers(0, 5)) == 0)
    if draw(st.integers(0, 5)):
        return leaf
    count = -(-math.prod(shape) // block_elements(leaf.block, shape))
    total = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0] or [3]))
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    return replace(leaf, shares=tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 8))
    leaf = leaves(ranks)
    grow: Any = lambda c: st.one_of(st.dictionaries(keys, c, max_size=4), st.lists(c, max_size=4))  # noqa: E731
    tree = draw(st.recursive(st.one_of(leaf, leaf, leaf, st.none()), grow, max_leaves=8))
    units = draw(st.sampled_from([(), ("**",)])) if optree.tree_leaves(tree) else ()
    return Case(tree, ranks, draw(st.sampled_from([1, 8, 64])), units, draw(st.sampled_from([0, 1 << 23])))


def owners(bucket: Bucket) -> list[int]:
    """The rank of every element of the global buffer, from the borders alone."""
    return [k for k in range(bucket.ranks) for _ in range(bucket.bounds(k), bucket.bounds(k + 1))]


def check_leaf(leaf: LeafInfo, bucket: Bucket, owner: list[int]) -> None:
    assert leaf.bucket == bucket.index
    assert leaf.unit == bucket.unit
    assert leaf.dtype == bucket.dtype
    assert leaf.size == math.prod(leaf.shape)
    assert 0 <= leaf.offset <= leaf.stop <= bucket.length
    mine = owner[leaf.offset : leaf.stop]
    assert len(leaf.runs) == bucket.ranks
    for rank, run in enumerate(leaf.runs):
        assert run == leaf.span(rank)
        assert 0 <= run[0] <= run[1] <= leaf.size
        assert [i for i, k in enumerate(mine) if k == rank] == list(range(*run))
    assert sum(b - a for a, b in leaf.runs) == leaf.size
    for rank in range(bucket.ranks + 1):
        inside = bucket.bounds(rank) - leaf.offset
        assert not 0 < inside < leaf.size or inside % leaf.block == 0


def check_bucket(bucket: Bucket, align: int) -> None:
    assert bucket.leaves
    owner = owners(bucket)
    assert len(owner) == bucket.length
    used = [0] * bucket.length
    for leaf in bucket.leaves:
        check_leaf(leaf, bucket, owner)
        for i in range(leaf.offset, leaf.stop):
            used[i] += 1
    assert max(used, default=0) <= 1, "two leaves share an element"
    assert sum(used) == bucket.elements == sum(leaf.size for leaf in bucket.leaves)
    if bucket.leaves[0].spec.shares is None:
        assert bucket.length == bucket.ranks * bucket.shard
        assert bucket.shard % align == 0
        assert all(leaf.offset % align == 0 for leaf in bucket.leaves)
    else:
        assert len(bucket.leaves) == 1
        assert bucket.length == bucket.elements
        assert bucket.shard == max(owner.count(k) for k in range(bucket.ranks))
    assert all(a < b for a, b in bucket.gaps)
    assert [i for a, b in bucket.gaps for i in range(a, b)] == [i for i, n in enumerate(used) if n == 0]
    cells = bucket.cells()
    assert len(cells) == len(bucket.leaves) + 1
    assert cells[0] == 0
    assert cells[-1] == bucket.length
    assert list(cells[1:-1]) == [leaf.offset for leaf in bucket.leaves[1:]]
    for leaf, a, b in zip(bucket.leaves, cells[:-1], cells[1:], strict=True):
        assert a <= leaf.offset <= leaf.stop <= b


@examples
@given(cases())
def test_every_element_has_one_place_and_one_owner(case: Case) -> None:
    p = case.plan()
    assert list(p.leaves) == [".".join(map(str, path)) for path in optree.tree_paths(case.tree)]
    for info, leaf in zip(p.leaves.values(), case.leaves, strict=True):
        assert (info.shape, info.dtype, info.spec) == (leaf.shape, leaf.dtype, leaf.spec)
        assert p.buckets[info.bucket].frozen == leaf.frozen
    assert [b.index for b in p.buckets] == list(range(len(p.buckets)))
    for bucket in p.buckets:
        check_bucket(bucket, case.align)
    assert sorted(leaf.path for b in p.buckets for leaf in b.leaves) == sorted(p.leaves)
    assert p.bytes_per_rank() == sum(p.shard_size(b) * b.dtype.itemsize for b in p.buckets)
    elements = sum(math.prod(leaf.shape) for leaf in case.leaves)
    assert p.padding == (sum(b.length for b in p.buckets) / elements - 1 if elements else 0)


@examples
@given(cases())
def test_no_smaller_shard_is_legal(case: Case) -> None:
    for bucket in case.plan().buckets:
        if bucket.bounds.explicit is None:
            items = [Item(math.prod(f.shape), block_elements(f.spec.block, f.shape)) for f in bucket.leaves]
            assert bucket.shard == scan_shard(items, case.ranks, case.align)


@examples
@given(cases())
def test_no_worse_than_the_natural_order_no_better_than_the_bound(case: Case) -> None:
    p = case.plan()
    for unit in p.units:
        groups: dict[Any, list[Bucket]] = defaultdict(list)
        for b in unit.buckets:
            if b.bounds.explicit is None:
                groups[b.dtype, b.frozen].append(b)
        for group in groups.values():
            mine = sorted((f for b in group for f in b.leaves), key=lambda f: natural_key(f.path))
            items = [Item(f.size, f.block) for f in mine]
            shard = sum(b.shard for b in group)
            assert shard >= lower_bound(items, case.ranks, align=case.align)
            assert shard <= pack_in_order(items, case.ranks, case.align).shard
            assert len(group) == 1 or case.price == 0


@examples
@given(cases(), st.integers(0, 400), st.integers(0, 400))
def test_local_gaps_are_the_zeros_that_a_rank_holds(case: Case, start: int, length: int) -> None:
    for bucket in case.plan().buckets:
        padding = {i for a, b in bucket.gaps for i in range(a, b)}
        for rank in range(bucket.ranks):
            for lo, hi in ((0, bucket.length), (start, min(start + length, bucket.length))):
                held = range(max(bucket.bounds(rank), lo), min(bucket.bounds(rank + 1), hi))
                expected = [i for i, position in enumerate(held) if position in padding]
                stop = None if (lo, hi) == (0, bucket.length) else hi
                assert [i for a, b in bucket.local_gaps(rank, lo, stop) for i in range(a, b)] == expected


@examples
@given(cases(), st.randoms(use_true_random=False))
def test_a_selection_and_its_complement_tile_the_buffers(case: Case, random: Any) -> None:
    p = case.plan()
    paths = list(p.leaves)
    chosen = [path for path in paths if random.random() < 0.5]
    rest = [path for path in paths if path not in chosen]
    flat = optree.tree_structure([0])
    parts = [select(p, flat, chosen), select(p, flat, rest)]
    for part, held in zip(parts, (chosen, rest), strict=True):
        assert part.paths == tuple(held)
        assert sorted(part.home) == sorted(held)
        assert all(part.pieces[i].bucket.index == p.leaves[path].bucket for path, i in part.home.items())
    for bucket in p.buckets:
        mine = sorted((x.start, x.stop) for part in parts for x in part.pieces if x.bucket is bucket)
        assert [i for a, b in mine for i in range(a, b)] == list(range(bucket.length))
        for piece in (x for part in parts for x in part.pieces if x.bucket is bucket):
            assert piece.whole == (len(mine) == 1 or piece.stop - piece.start == bucket.length)
            held_by = [piece.local(rank) for rank in range(bucket.ranks)]
            assert [i for a, b in held_by for i in range(a, b)] == list(range(piece.start, piece.stop))


@examples
@given(cases())
def test_json_round_trip(case: Case) -> None:
    p = case.plan()
    again = Plan.from_json(p.to_json(), like=case.shapes)
    assert again == p
    assert hash(again) == hash(p)
    assert (again.leaves, again.units, again.align) == (p.leaves, p.units, p.align)
    assert dict(again.axes) == dict(p.axes)
    assert again.structure == p.structure
    assert again.to_json() == p.to_json()


def reinserted(tree: Any, random: Any, make: type) -> Any:
    """The same mapping entries in another insertion order."""
    if isinstance(tree, list):
        return [reinserted(child, random, make) for child in tree]
    if not isinstance(tree, dict):
        return tree
    entries = [(key, reinserted(child, random, make)) for key, child in tree.items()]
    random.shuffle(entries)
    return make(entries)


@examples
@given(cases(), st.randoms(use_true_random=False), st.sampled_from([dict, OrderedDict]))
def test_insertion_order_does_not_matter(case: Case, random: Any, make: type) -> None:
    p = case.plan()
    other = replace(case, tree=reinserted(case.tree, random, make)).plan()
    assert other.fingerprint == p.fingerprint
    assert other == p
    assert other.to_json() == p.to_json()
    assert dict(other.leaves) == dict(p.leaves)
