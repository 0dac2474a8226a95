"""Fresh parameters: the same bits on every mesh."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch

from ragged import ELEMENT, TENSOR, P, init, make_mesh, plan, random, rules, unshard

SHAPES = {
    "a": ((13, 6), torch.float32),
    "b": ((64, 32), torch.float32),
    "c": {"bias": ((7,), torch.bfloat16), "s": ((), torch.float64)},
}
HOW = {"a": random.fan_in(), "b": random.fan_in(), "**.bias": random.normal(0.1), "**": random.ones}


def made(names: tuple[str, ...], sizes: tuple[int, ...], spec: Any) -> Any:
    mesh = make_mesh(sizes, names, device_type="cpu")
    tree = init(plan(SHAPES, mesh, spec), rules(HOW), seed=0)
    for buffer in tree.buffers:
        for start, stop in buffer.bucket.local_gaps(buffer.rank):
            assert not buffer.tensor[start:stop].any()
    full = unshard(tree)
    return optree.tree_map(lambda x: (x.double().tolist(), str(x.dtype)), full), tree.leaf("b").tolist()


def test_bitwise_the_same_for_all_ranks_blocks_and_meshes(run: Any) -> None:
    """NVIDIA-NeMo Automodel#2939, torchtitan#1777: not dependent on ranks, bounds from the global fan-in."""
    want, _ = run(1, made, ("fsdp",), (1,), P(ragged="fsdp"))[0]
    a = torch.tensor(want["a"][0])
    assert a.abs().max() <= 1 / math.sqrt(6)
    assert a.abs().max() > 0.9 / math.sqrt(6)
    cases: list[tuple[Any, Any, Any]] = [
        (("fsdp",), (n,), P(ragged="fsdp", block=block))
        for n, block in ((2, ELEMENT), (3, TENSOR), (4, 5), (8, ELEMENT))
    ]
    cases += [
        (("fsdp",), (8,), {"a": P(ragged="fsdp", block=(2, 3)), "b": P(ragged="fsdp"), "c": None}),
        (("tp", "fsdp"), (2, 2), {"a": P(None, "tp", ragged="fsdp"), "b": P("tp", ragged="fsdp"), "c": None}),
        (("tp", "fsdp"), (2, 2), {"a": P(None, "tp"), "b": P("fsdp", "tp"), "c": P(ragged=("fsdp", "tp"))}),
    ]
    for names, sizes, spec in cases:
        got = run(math.prod(sizes), made, names, sizes, spec)
        for full, _ in got:
            assert full == want
    shards = [x for _, x in run(4, made, ("fsdp",), (4,), P(ragged="fsdp"))]
    assert len({tuple(x) for x in shards}) == 4


def refused(how: Any) -> str:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    with pytest.raises(ValueError, match=r".") as caught:
        init(plan(SHAPES, mesh, P(ragged="fsdp")), how, seed=0)
    return str(caught.value)


def test_a_leaf_without_initializer_is_refused_on_all_ranks(run: Any) -> None:
    """NVIDIA/Megatron-LM#6799: neither random memory nor silent zeros."""
    for text in run(2, refused, rules({"a": random.ones, "b": random.ones, "c.bias": random.zeros})):
        assert "'c.s'" in text
    for text in run(2, refused, {"a": random.ones, "b": random.ones, "c": None}):
        assert "no initializer for leaf 'c.bias'" in text


def other_seed() -> str:
    import torch.distributed as dist

    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    with pytest.raises(ValueError, match="seed") as caught:
        init(plan(SHAPES, mesh, P(ragged="fsdp")), random.ones, seed=dist.get_rank() // 2)
    return str(caught.value)


def test_another_seed_on_some_rank(run: Any) -> None:
    for text in run(3, other_seed):
        assert "rank 0 has 0" in text
        assert "rank 2 has 1" in text
