"""All ways to take a bucket apart and to put it together, empty leaves between others included."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ragged import P, ShardedTree, combine, make_mesh, map_leaves, partition, plan, shard, tree_map

SIZES = {"a": 4, "b": 0, "c": 0, "d": 0, "e": 5, "f": 0}


def same_leaves(a: ShardedTree, b: ShardedTree) -> None:
    """Same leaves, in pieces of the planned sizes."""
    for path in a.paths:
        assert torch.equal(a.leaf(path), b.leaf(path))
    for piece, tensor in zip(a.selection.pieces, a.tensors, strict=True):
        start, stop = piece.local(a.plan.bound().rank(piece.bucket.ragged))
        assert tensor.shape == (stop - start,)


def every_partition(align: int) -> None:
    tree = {"u": {name: torch.randn(n, generator=torch.Generator().manual_seed(n)) for name, n in SIZES.items()}}
    p = plan(tree, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), align=align)
    whole = shard(tree, p)
    for labels in itertools.product(range(3), repeat=len(SIZES)):
        label = dict(zip(whole.paths, labels, strict=True))
        one, rest = partition(whole, lambda path, _, of=label: of[path] == 0)
        two, three = partition(rest, lambda path, _, of=label: of[path] == 1)
        for part in (one, two, three):
            same_leaves(map_leaves(torch.clone, part), whole)
        joined = combine(combine(one, two), three)  # in any order: the same parts come up under all labels
        assert joined.paths == whole.paths
        assert [x.data_ptr() for x in joined.tensors] == [x.data_ptr() for x in whole.tensors]
        same_leaves(combine(combine(map_leaves(torch.clone, one), tree_map(torch.clone, two)), three), whole)


@pytest.mark.parametrize("align", [1, 4])
def test_every_partition_of_a_bucket(run: Any, align: int) -> None:
    run(2, every_partition, align)
