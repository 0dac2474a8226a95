"""Even cuts and replicas against torch's DTensor, which can express those."""

from __future__ import annotations

import itertools
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ragged import P, ShardedTree, make_mesh, redistribute, shard

AXES = ("a", "b")
FULL = {"w": torch.arange(64.0).view(8, 8), "x": torch.arange(64).view(4, 4, 4), "v": torch.arange(8.0)}


def spec(placements: tuple[Placement, ...]) -> P:
    """The same cuts as a spec; of two axes on one dim the mesh's first is outermost."""
    dims: dict[int, list[str]] = {}
    for axis, placement in zip(AXES, placements, strict=False):
        if isinstance(placement, Shard):
            dims.setdefault(placement.dim, []).append(axis)
    return P(*(tuple(dims.get(d, ())) for d in range(max(dims, default=-1) + 1)))


def options(ndim: int, axes: int) -> list[tuple[Placement, ...]]:
    one: list[Placement] = [Replicate(), *(Shard(d) for d in range(ndim))]
    return list(itertools.product(one, repeat=axes))


def same(tree: ShardedTree, theirs: dict[str, DTensor]) -> None:
    for name, x in theirs.items():
        local: Tensor = x.to_local()
        assert tree.plan.leaves[name].local_shape == tuple(local.shape)
        assert torch.equal(tree.leaf(name), local.reshape(-1)), (name, x.placements)


def against(sizes: tuple[int, ...], pairs: int) -> int:
    mesh = make_mesh(sizes, AXES[: len(sizes)], device_type="cpu")
    rng, count = random.Random(len(sizes)), 0
    for _ in range(pairs):
        before, after = ({k: rng.choice(options(v.ndim, len(sizes))) for k, v in FULL.items()} for _ in range(2))
        tree = shard(FULL, mesh, {k: spec(p) for k, p in before.items()})
        theirs = {k: distributed(v, mesh, before[k]) for k, v in FULL.items()}
        same(tree, theirs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about moves it makes in several steps
            moved = {k: x.redistribute(placements=after[k]) for k, x in theirs.items()}
        same(redistribute(tree, {k: spec(p) for k, p in after.items()}), moved)
        count += len(FULL)
    return count


def distributed(x: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize(("sizes", "pairs"), [((4,), 12), ((2, 2), 24), ((1, 4), 8)])
def test_moves_equal_those_of_dtensor(run: Any, sizes: tuple[int, ...], pairs: int) -> None:
    assert run(4, against, sizes, pairs) == [3 * pairs] * 4
