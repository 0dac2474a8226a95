"""What holds of every plan, checked element by element against the plainest reading of the words."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
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


MOST = 8  # ranks

# Strategies are made once, and what depends on what is worked out from their values afterwards: strategies made
# anew for every case would take most of the time.
# The last three keys are hard to order: equal as numbers, and a digit that is no decimal.
keys = st.sampled_from(["w", "b", "layers", "2", "10", "01", "1", "²"])
shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 6, 7]), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16])
tiles = st.lists(st.one_of(st.none(), st.integers(1, 5)), min_size=1, max_size=3).map(tuple)
blocks = st.one_of(st.sampled_from([ELEMENT, ROW, TENSOR]), st.integers(1, 40), tiles)
one_in_six = st.integers(0, 5).map(lambda n: n == 0)
cuts = st.lists(st.integers(0, 399), min_size=MOST, max_size=MOST)
drafts = st.tuples(shapes, dtypes, blocks, one_in_six, st.one_of(*[st.none()] * 5, cuts))
trees = st.recursive(
    st.one_of(drafts, drafts, drafts, st.none()),
    lambda c: st.one_of(st.dictionaries(keys, c, max_size=4), st.lists(c, max_size=4)),
    max_leaves=8,
)


def made_leaf(draft: Any, ranks: int) -> Leaf:
    """A leaf whose tile has no more dims than it has, and whose shares (of the sums that are legal) fit the ranks."""
    shape, dtype, block, frozen, chosen = draft
    if isinstance(block, tuple):
        block = block[: len(shape)] or ROW
    if chosen is None:
        return Leaf(shape, dtype, block, frozen)
    count = -(-math.prod(shape) // block_elements(block, shape))
    totals = [d for d in range(1, count + 1) if count % d == 0] or [3]
    total = totals[chosen[0] % len(totals)]
    borders = sorted(n % (total + 1) for n in chosen[1:ranks])
    shares = tuple(b - a for a, b in zip([0, *borders], [*borders, total], strict=True))
    return Leaf(shape, dtype, block, frozen, shares)


def made_case(ranks: int, tree: Any, align: int, units: tuple[str, ...], price: int) -> Case:
    made = optree.tree_map(lambda draft: made_leaf(draft, ranks), tree, is_leaf=lambda x: isinstance(x, tuple))
    return Case(made, ranks, align, units if optree.tree_leaves(made) else (), price)


cases = st.builds(
    made_case,
    st.integers(1, MOST),
    trees,
    st.sampled_from([1, 8, 64]),
    st.sampled_from([(), ("**",)]),
    st.sampled_from([0, 1 << 23]),
)


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


def every_element_has_one_place_and_one_owner(case: Case, p: Plan) -> None:
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


def no_smaller_shard_is_legal(case: Case, p: Plan) -> None:
    for bucket in p.buckets:
        if bucket.bounds.explicit is None:
            items = [Item(math.prod(f.shape), block_elements(f.spec.block, f.shape)) for f in bucket.leaves]
            assert bucket.shard == scan_shard(items, case.ranks, case.align)


def no_worse_than_the_natural_order_no_better_than_the_bound(case: Case, p: Plan) -> None:
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


def local_gaps_are_the_zeros_that_a_rank_holds(p: Plan, start: int, length: int) -> None:
    for bucket in p.buckets:
        padding = {i for a, b in bucket.gaps for i in range(a, b)}
        for rank in range(bucket.ranks):
            for lo, hi in ((0, bucket.length), (start, min(start + length, bucket.length))):
                held = range(max(bucket.bounds(rank), lo), min(bucket.bounds(rank + 1), hi))
                expected = [i for i, position in enumerate(held) if position in padding]
                stop = None if (lo, hi) == (0, bucket.length) else hi
                assert [i for a, b in bucket.local_gaps(rank, lo, stop) for i in range(a, b)] == expected


def a_selection_and_its_complement_tile_the_buffers(p: Plan, rng: Random) -> None:
    paths = list(p.leaves)
    chosen = [path for path in paths if rng.random() < 0.5]
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


def json_round_trip(case: Case, p: Plan) -> None:
    again = Plan.from_json(p.to_json(), like=case.shapes)
    assert again == p
    assert hash(again) == hash(p)
    assert (again.leaves, again.units, again.align) == (p.leaves, p.units, p.align)
    assert dict(again.axes) == dict(p.axes)
    assert again.structure == p.structure
    assert again.to_json() == p.to_json()


def reinserted(tree: Any, rng: Random, make: type) -> Any:
    """The same mapping entries in another insertion order."""
    if isinstance(tree, list):
        return [reinserted(child, rng, make) for child in tree]
    if not isinstance(tree, dict):
        return tree
    entries = [(key, reinserted(child, rng, make)) for key, child in tree.items()]
    rng.shuffle(entries)
    return make(entries)


def insertion_order_does_not_matter(case: Case, p: Plan, rng: Random, make: type) -> None:
    other = replace(case, tree=reinserted(case.tree, rng, make)).plan()
    assert other.fingerprint == p.fingerprint
    assert other == p
    assert other.to_json() == p.to_json()
    assert dict(other.leaves) == dict(p.leaves)


@settings(
    max_examples=600, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(cases, st.integers(0, 400), st.integers(0, 400), st.integers(0, 1 << 32), st.sampled_from([dict, OrderedDict]))
def test_what_holds_of_every_plan(case: Case, start: int, length: int, seed: int, make: type) -> None:
    """All properties of each drawn case: drawing it takes longer than to check it."""
    p, rng = case.plan(), Random(seed)
    every_element_has_one_place_and_one_owner(case, p)
    no_smaller_shard_is_legal(case, p)
    no_worse_than_the_natural_order_no_better_than_the_bound(case, p)
    local_gaps_are_the_zeros_that_a_rank_holds(p, start, length)
    a_selection_and_its_complement_tile_the_buffers(p, rng)
    json_round_trip(case, p)
    insertion_order_does_not_matter(case, p, rng, make)
