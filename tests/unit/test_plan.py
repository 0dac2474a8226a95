"""Plans of known problems: what is where, by hand."""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch

from ragged import ELEMENT, ROW, TENSOR, P, Plan, plan, rules
from ragged.planner import Item
from ragged.planner.reference import is_legal, scan_shard

F32, BF16 = torch.float32, torch.bfloat16


def one(shape: tuple[int, ...], ranks: int, block: Any = ROW, align: int = 1, **spec: Any) -> Plan:
    return plan({"w": (shape, F32)}, {"fsdp": ranks}, P(ragged="fsdp", block=block, **spec), align=align)


def assert_tiles(runs: tuple[tuple[int, int], ...], size: int) -> None:
    """Every run starts where the ranks before it end, and the last ends with the leaf."""
    sizes = [b - a for a, b in runs]
    assert min(sizes) >= 0
    assert [a for a, _ in runs] == [sum(sizes[:k]) for k in range(len(runs))]
    assert sum(sizes) == size


# --- shard sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "shard"), [(1, 768), (2, 512), (3, 256), (4, 256)])
def test_a_boundary_never_falls_into_a_block(ranks: int, shard: int) -> None:
    """PL-01, NVIDIA/Megatron-LM#5615. On two ranks the even cut, 384, is inside a block."""
    p = one((96, 8), ranks, (32, None), align=64)
    assert p.shard_size(0) == shard
    assert_tiles(p.leaves["w"].runs, 768)
    assert all(start % 256 == 0 for start, _ in p.leaves["w"].runs)


@pytest.mark.parametrize(("ranks", "shard"), [(2, 512), (3, 512), (4, 256), (8, 256)])
def test_the_short_last_block_is_whole(ranks: int, shard: int) -> None:
    """PL-02, pytorch/torchtitan#4371."""
    p = one((100, 8), ranks, (32, None), align=64)
    assert p.shard_size(0) == shard
    runs = p.leaves["w"].runs
    assert_tiles(runs, 800)
    (tail,) = [run for run in runs if run[0] < run[1] == 800]
    assert tail[0] <= 768
    assert sum(a == b for a, b in runs) == {2: 0, 3: 1, 4: 0, 8: 4}[ranks]


ATTENTION = {
    "q": ((64, 64), (32, None)),
    "k": ((16, 64), TENSOR),
    "v": ((16, 64), TENSOR),
    "o": ((64, 64), (32, None)),
    "norm": ((64,), ELEMENT),
}


@pytest.mark.parametrize(("ranks", "best"), [(1, 10304), (2, 5152), (3, 4096), (4, 3072), (8, 2048)])
def test_fused_attention_with_blocks_of_different_sizes(ranks: int, best: int) -> None:
    """PL-05, pytorch/torchtitan#4799: the best of all orders; 5152 is no multiple of 64, so starts are of 32."""
    tree = {name: (shape, F32) for name, (shape, _) in ATTENTION.items()}
    spec = {k: P(ragged="fsdp", block=b) for k, (_, b) in ATTENTION.items()}
    p = plan({"attn": tree}, {"fsdp": ranks}, {"attn": spec}, align=32)
    (bucket,) = p.buckets
    assert sorted(f.path for f in bucket.leaves) == sorted(f"attn.{k}" for k in tree)
    items = [Item(f.size, {"q": 2048, "k": 1024, "v": 1024, "o": 2048, "norm": 1}[f.path[5:]]) for f in bucket.leaves]
    for leaf, item in zip(bucket.leaves, items, strict=True):
        assert leaf.offset % 32 == 0
        assert is_legal(item, leaf.offset, bucket.shard)
        assert_tiles(leaf.runs, leaf.size)
    assert bucket.shard == scan_shard(items, ranks, 32) == best


@pytest.mark.parametrize(
    ("shape", "ranks", "block", "sizes"),
    [
        ((7, 64), 3, ROW, [192, 192, 64]),
        ((3, 64), 7, ROW, [64, 64, 64, 0, 0, 0, 0]),
        ((4096, 64), 6, (18, None), [38 * 18 * 64] * 5 + [(4096 - 5 * 38 * 18) * 64]),
    ],
)
def test_offsets_and_sizes_agree(shape: tuple[int, ...], ranks: int, block: Any, sizes: list[int]) -> None:
    """RS-11, pytorch/pytorch#188947: offsets were floored, sizes were ceiled, pieces overlapped."""
    runs = one(shape, ranks, block).leaves["w"].runs
    assert [b - a for a, b in runs] == sizes
    assert_tiles(runs, math.prod(shape))


def test_very_large_leaves_have_exact_offsets() -> None:
    """PL-10, bitsandbytes-foundation/bitsandbytes#1784: offsets beyond 32 bits."""
    tree = {"m": {"a": ((65536, 65536), F32), "b": ((3, 2**31 - 1), F32)}}
    spec = rules({"m.a": P(ragged="fsdp", block=(128, None)), "m.b": P(ragged="fsdp", block=ELEMENT)})
    start = time.perf_counter()
    p = plan(tree, {"fsdp": 8}, spec)
    assert time.perf_counter() - start < 1
    a, b = p.leaves["m.a"], p.leaves["m.b"]
    assert (a.size, b.size) == (2**32, 3 * (2**31 - 1))
    for leaf in (a, b):
        assert type(leaf.offset) is int
        assert_tiles(leaf.runs, leaf.size)
    assert all(start % (128 * 65536) == 0 for start, _ in a.runs)
    (bucket,) = p.buckets
    assert bucket.elements <= bucket.length <= bucket.elements * 1.01


# --- shares ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "block", "shares", "runs"),
    [
        ((10, 4), ROW, (2, 3, 0, 5), ((0, 8), (8, 20), (20, 20), (20, 40))),
        ((20, 4), ROW, (2, 3, 0, 5), ((0, 16), (16, 40), (40, 40), (40, 80))),
        ((6, 4, 8), (1, 1, None), (1, 2), ((0, 64), (64, 192))),
        ((5, 10), ROW, (2, 2, 1, 0), ((0, 20), (20, 40), (40, 50), (50, 50))),
        ((7, 3), (2, None), (1, 3), ((0, 6), (6, 21))),
        ((8, 8), TENSOR, (0, 1, 0), ((0, 0), (0, 64), (64, 64))),
        ((0, 8), ROW, (1, 1), ((0, 0), (0, 0))),
    ],
)
def test_shares_say_who_owns_what(shape: Any, block: Any, shares: tuple[int, ...], runs: Any) -> None:
    """RS-07, mindspore-ai/hyper-parallel#594, and RS-01."""
    p = one(shape, len(shares), block, shares=shares)
    assert p.leaves["w"].runs == runs
    assert p.padding == 0
    assert p.shard_size(0) == max(b - a for a, b in runs)


def test_a_leaf_with_shares_is_a_bucket_of_its_own() -> None:
    leaf = ((6, 4), F32)
    equal = P(ragged="fsdp")
    p = plan(
        {"m": {"a": leaf, "b": leaf, "c": leaf}},
        {"fsdp": 2},
        {"m": {"a": equal, "b": P(ragged="fsdp", shares=(1, 2)), "c": equal}},
    )
    assert [[f.path for f in b.leaves] for b in p.buckets] == [["m.a", "m.c"], ["m.b"]]


# --- even dims, axes ------------------------------------------------------------------------


def test_even_dims_come_first_and_the_rest_is_ragged() -> None:
    """RS-05, pytorch/pytorch#163843: tp cuts dim 0, then fsdp the local piece in shares 2 and 1."""
    p = plan({"w": ((6,), F32)}, {"fsdp": 2, "tp": 2}, P("tp", ragged="fsdp", shares=(2, 1)))
    leaf = p.leaves["w"]
    assert (leaf.shape, leaf.local_shape, leaf.runs) == ((6,), (3,), ((0, 2), (2, 3)))
    assert (p.buckets[0].ragged, p.buckets[0].even) == (("fsdp",), ("tp",))


def test_blocks_are_of_what_the_even_dims_leave() -> None:
    p = plan({"w": ((8, 12), F32)}, {"fsdp": 2, "tp": 3}, P(None, "tp", ragged="fsdp"))
    assert (p.leaves["w"].local_shape, p.leaves["w"].block) == ((8, 4), 4)


def test_axes() -> None:
    leaf = {"w": ((12, 2), F32)}
    axes = {"replica": 2, "fsdp": 3}
    assert plan(leaf, axes, P(ragged="fsdp")).buckets[0].ranks == 3
    assert plan(leaf, axes, P(ragged=("replica", "fsdp"))).buckets[0].ranks == 6
    assert plan(leaf, axes, P(("fsdp", "replica"))).leaves["w"].local_shape == (2, 2)
    absent = plan(leaf, axes, P("tp", ragged="ep"))
    assert (absent.leaves["w"].local_shape, absent.leaves["w"].runs) == ((12, 2), ((0, 24),))


@pytest.mark.parametrize("spec", [None, P(), {"w": None}, rules({"**": None})], ids=repr)
def test_none_is_replicated(spec: Any) -> None:
    p = plan({"w": ((5, 2), F32)}, {"fsdp": 4}, spec)
    assert p.leaves["w"].spec == P()
    assert p.leaves["w"].runs == ((0, 10),)
    assert p.buckets[0].ragged == ()


# --- the same plan everywhere ---------------------------------------------------------------


def test_insertion_order_of_any_mapping() -> None:
    names = ["layer.2", "layer.10", "layer.1", "layer.01", "z", "a"]
    rng, found = random.Random(0), set()
    for make in (dict, OrderedDict) * 5:
        rng.shuffle(names)
        tree = make((name, {"w": ((len(name), 5), F32)}) for name in names)
        p = plan(tree, {"fsdp": 4}, P(ragged="fsdp"), units=["**"])
        found.add((p.fingerprint, p.to_json(), tuple(u.name for u in p.units)))
    assert len(found) == 1
    assert found.pop()[2] == ("a.w", "layer.01.w", "layer.1.w", "layer.2.w", "layer.10.w", "z.w")


def test_what_makes_plans_equal() -> None:
    tree = {"w": ((8, 4), F32), "x": {"y": ((3,), F32)}}
    axes, spec = {"fsdp": 2}, P(ragged="fsdp")
    p = plan(tree, axes, spec)
    half = {"w": torch.empty(8, 4, dtype=BF16, device="meta"), "x": {"y": torch.empty(3, dtype=BF16)}}
    same = plan(half, axes, spec)
    assert p == same
    assert len({p, same}) == 1
    assert p != "plan"
    others = [
        plan({**tree, "w": ((8, 5), F32)}, axes, spec),
        plan({"v": tree["w"], "x": tree["x"]}, axes, spec),
        plan(tree, {"fsdp": 3}, spec),
        plan(tree, {"dp": 2}, spec),
        plan(tree, axes, P(ragged="fsdp", block=ELEMENT)),
        plan(tree, axes, spec, align=32),
        plan(tree, axes, spec, units=["**"]),
        plan(tree, axes, {"w": P(ragged="fsdp", shares=(1, 1)), "x": spec}),
    ]
    assert len({p, *others}) == len(others) + 1
    a, b = (one((128,), 2, align=align) for align in (32, 64))  # equal layouts, but redistribute keeps align
    assert a.leaves == b.leaves
    assert a != b
