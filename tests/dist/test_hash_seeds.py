"""Processes that hash text in different ways make one plan."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from ragged import P, plan, rules


def planned() -> tuple[int, str, str, list[str]]:
    """A hash of this process, and what must not depend on it, nor on the order in which leaves are named."""
    rng = random.Random(dist.get_rank())
    names = ["layer.2", "layer.10", "layer.1", "norm", "embed"]
    rng.shuffle(names)
    tree = {name: dict.fromkeys(set("abc"), ((7, 5), torch.float32)) for name in names}
    p = plan(tree, {"fsdp": 4}, P(ragged="fsdp"), units=["layer.*"])
    sizes = [("a", 96), ("b", 128), ("c", 128)]
    rng.shuffle(sizes)
    pair = {"u": {name: {"w": ((n, 64), torch.float32)} for name, n in sizes}}
    blocks = rules({"u.a.*": P(ragged="fsdp", block=(3, None)), "u.**": P(ragged="fsdp", block=(4, None))})
    several = plan(pair, {"fsdp": 32}, blocks, price=0)
    assert len(several.buckets) == 2
    return hash("text"), several.fingerprint, p.fingerprint, [unit.name for unit in p.units]


def test_hash_seeds_and_insertion_orders_give_one_plan(run: Any) -> None:
    """PL-06, deepspeedai/DeepSpeed#5283 and pytorch/pytorch#64629."""
    hashes, several, p, units = zip(*run(4, planned), strict=True)
    assert len({*hashes}) == 4
    assert len({*several}) == len({*p}) == 1
    assert list(units) == [["embed", "layer.1", "layer.2", "layer.10", "norm"]] * 4
