"""Small trees for the tests of checkpoints in adversity."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from ragged import P, checkpoint, make_mesh, plan, shard

RANKS = 3


def full(k: int = 0) -> dict[str, Any]:
    """Some 100 KB, of which every rank has a third."""
    w = torch.arange(256 * 64, dtype=torch.float32).view(256, 64) + k
    return {"w": w, "v": [(w[:37, :5] + 1).bfloat16(), torch.full((), 7.0)], "i": torch.arange(300) + k}


def trees_of(k: int = 0, note: str = "") -> dict[str, Any]:
    tree = full(k)
    sharded = shard(tree, plan(tree, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp")))
    return {"params": sharded, "opt": [sharded["v"], torch.arange(5)], "step": k, "rate": 0.1, "note": note}


def same(a: Any, b: Any) -> bool:
    equal = optree.tree_map(lambda x, y: torch.equal(x, y) if isinstance(x, Tensor) else x == y, a, b)
    return bool(optree.tree_all(equal))


def intact(folder: str, k: int) -> None:
    """The checkpoint of step k is the last one, whole, and nothing else is in its directory."""
    assert checkpoint.latest(folder) == Path(folder) / f"step-{k}"
    assert same(checkpoint.load(f"{folder}/step-{k}", trees_of(-1)), trees_of(k))
    assert os.listdir(folder) == [f"step-{k}"]


def on_one(change: Callable[[], Any]) -> None:
    """Rank 0 does something to files while the others wait."""
    if dist.get_rank() == 0:
        change()
    dist.barrier()
