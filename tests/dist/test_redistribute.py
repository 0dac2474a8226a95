"""`redistribute`: the same values in any other layout, moving what has to move and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ragged import ELEMENT, TENSOR, P, ShardedTree, make_mesh, redistribute, shard, unshard

TREE = {
    "w": torch.arange(13 * 6.0).view(13, 6),
    "h": torch.arange(8 * 4 * 4).to(torch.int16).view(8, 4, 4),
    "b": torch.arange(5).to(torch.bfloat16),
    "s": torch.tensor(3.5),
    "e": torch.empty(0, 4),
}
RAGGED = P(ragged="fsdp")
SPECS: dict[str, Any] = {
    "rows": RAGGED,
    "elements": P(ragged="fsdp", block=ELEMENT),
    "whole": P(ragged="fsdp", block=TENSOR),
    "three rows": lambda path, leaf: P(ragged="fsdp", block=3 if leaf.ndim < 2 else (3, *[None] * (leaf.ndim - 1))),
    "replicated": None,
    "even": lambda path, leaf: P("fsdp") if path == "h" else None,
    "columns": lambda path, leaf: P(None, "fsdp") if path == "h" else P(ragged="fsdp"),
    "root": lambda path, leaf: P(ragged="fsdp", block=TENSOR, shares=(*[0] * (dist.get_world_size() - 1), 1)),
}


def same_values(tree: ShardedTree) -> None:
    full = unshard(tree)
    for name, want in TREE.items():
        assert full[name].dtype == want.dtype
        assert torch.equal(full[name], want), name
    for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
        rank = tree.plan.bound().rank(piece.bucket.ragged)
        for a, b in piece.bucket.local_gaps(rank):
            assert not tensor[a:b].any()


def all_pairs() -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    trees = {name: shard(TREE, mesh, spec) for name, spec in SPECS.items()}
    for tree in trees.values():
        for name, other in trees.items():
            before = [x.clone() for x in tree.tensors]
            for to in (other.plan, SPECS[name]):
                moved = redistribute(tree, to)
                assert moved.plan == other.plan
                assert moved.plan is other.plan or to is not other.plan
                same_values(moved)
                for a, b in zip(moved.tensors, other.tensors, strict=True):
                    assert torch.equal(a, b)
                assert all(torch.equal(a, b) for a, b in zip(tree.tensors, before, strict=True))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_pair_of_layouts(run: Any, n: int) -> None:
    run(n, all_pairs)
