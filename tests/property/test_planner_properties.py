"""The fast solvers against trying everything, and what holds of every plan."""

import random
from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from ragged.planner import Item, lower_bound, pack, pack_in_order
from ragged.planner.reference import exhaustive_any_order, exhaustive_shard, problems, scan_shard

sizes = st.integers(0, 60)
blocks = st.one_of(st.integers(1, 12), st.integers(1, 70))
items_of = st.lists(st.builds(Item, sizes, blocks), max_size=7)
ranks_of = st.integers(1, 9)
aligns = st.sampled_from([1, 1, 2, 3, 4, 8])
large = st.builds(
    lambda rows, row, n: Item(rows * row, n * row),
    st.integers(0, 5000),
    st.integers(1, 5000),
    st.sampled_from([1, 32, 128]),
)


def random_case(rng: random.Random) -> tuple[list[Item], int, int]:
    """Few leaves, blocks and ranks of the sizes at which cuts, spans and holes meet."""
    largest = rng.choice([8, 20, 40])
    block = rng.choice([lambda: rng.randint(1, 6), lambda: rng.randint(1, 12), lambda: rng.randint(1, largest)])
    items = [Item(rng.randint(0, largest), block()) for _ in range(rng.randint(1, 6))]
    return items, rng.randint(1, 9), rng.choice([1, 1, 1, 2, 4])


def test_one_buffer_is_exact_on_20000_random_cases() -> None:
    rng = random.Random(20260222)
    for _ in range(20_000):
        items, ranks, align = random_case(rng)
        packing = pack_in_order(items, ranks, align)
        assert packing.shard == scan_shard(items, ranks, align), (items, ranks, align)
        assert problems(items, packing.starts, packing.shard, ranks, align) == []
        assert list(packing.starts) == sorted(packing.starts)


@settings(max_examples=300, deadline=None)
@given(items_of, ranks_of, aligns)
def test_one_buffer_is_exact(items: list[Item], ranks: int, align: int) -> None:
    packing = pack_in_order(items, ranks, align)
    assert packing.shard == scan_shard(items, ranks, align)
    assert problems(items, packing.starts, packing.shard, ranks, align) == []
    assert lower_bound(items, ranks, align=align, buffers=1) <= packing.shard


@settings(max_examples=100, deadline=None)
@given(st.lists(st.builds(Item, st.integers(0, 16), st.integers(1, 9)), max_size=4), st.integers(1, 5), aligns)
def test_early_starts_lose_nothing(items: list[Item], ranks: int, align: int) -> None:
    """The scan places every leaf as early as it can; trying every layout gives the same S."""
    assert scan_shard(items, ranks, align) == exhaustive_shard(items, ranks, align)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.builds(Item, st.integers(1, 24), st.integers(1, 12)), max_size=5), st.integers(1, 5))
def test_any_order_is_exact_for_few_leaves(items: list[Item], ranks: int) -> None:
    found = pack(items, ranks, align=1, max_buffers=1).shard
    assert found == exhaustive_any_order(items, ranks)
    assert lower_bound(items, ranks, align=1, buffers=1) <= found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.builds(Item, sizes, blocks), large), max_size=12),
    st.sampled_from([1, 2, 3, 8, 64, 1024, 10240]),
    st.sampled_from([1, 8, 64]),
    st.integers(1, 3),
    st.sampled_from([0, 1000, 2_000_000]),
)
def test_every_plan_is_sound(items: list[Item], ranks: int, align: int, most: int, price: int) -> None:
    plan = pack(items, ranks, align=align, max_buffers=most, price=price)
    assert sorted(i for b in plan.buffers for i in b.members) == list(range(len(items)))
    assert len(plan.buffers) <= most
    for b in plan.buffers:
        members = [items[i] for i in b.members]
        assert problems(members, b.starts, b.shard, ranks, align) == []
        assert pack_in_order(members, ranks, align).shard == b.shard, "each buffer is the minimum for its order"
    bound = lower_bound(items, ranks, align=align)
    one = lower_bound(items, ranks, align=align, buffers=1)
    in_order = pack_in_order(items, ranks, align).shard
    assert bound <= one <= in_order
    assert bound <= plan.shard
    assert ranks * plan.shard + price * (len(plan.buffers) - 1) <= ranks * in_order
    assert pack(items, ranks, align=align, max_buffers=1).shard >= one


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.one_of(st.builds(Item, sizes, blocks), large), st.integers(0, 3)), max_size=10),
    st.sampled_from([1, 2, 3, 8, 64, 1024]),
    st.integers(1, 3),
)
def test_labels_stay_together(labelled: list[tuple[Item, int]], ranks: int, most: int) -> None:
    items, labels = [item for item, _ in labelled], [label for _, label in labelled]
    plan = pack(items, ranks, align=1, max_buffers=most, price=0, labels=labels)
    assert sorted(i for b in plan.buffers for i in b.members) == list(range(len(items)))
    for b in plan.buffers:
        assert problems([items[i] for i in b.members], b.starts, b.shard, ranks, 1) == []
        groups = [label for label, _ in groupby(labels[i] for i in b.members)]
        assert len(groups) == len(set(groups))
    order = sorted(range(len(items)), key=lambda i: labels.index(labels[i]))
    assert plan.shard <= pack_in_order([items[i] for i in order], ranks, align=1).shard


@settings(max_examples=60, deadline=None)
@given(st.lists(st.builds(Item, st.integers(1, 16), st.integers(1, 8)), min_size=1, max_size=4), st.integers(1, 4))
def test_certificate_for_any_number_of_buffers(items: list[Item], ranks: int) -> None:
    """Against the best of all partitions of the leaves into buffers, each in its best order."""

    def partitions(rest: list[Item]) -> list[list[list[Item]]]:
        if not rest:
            return [[]]
        first, *others = rest
        found = []
        for groups in partitions(others):
            found.append([[first], *groups])
            found += [[*groups[:i], [first, *g], *groups[i + 1 :]] for i, g in enumerate(groups)]
        return found

    best = min(sum(exhaustive_any_order(g, ranks) for g in groups) for groups in partitions(items))
    assert lower_bound(items, ranks, align=1) <= best
    assert pack(items, ranks, align=1, max_buffers=4, price=0).shard >= best
