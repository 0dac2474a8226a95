"""Functions over sharded trees: per buffer, fused, or per leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from ragged.tree import ShardedTree

__all__ = ["map_leaves", "tree_map", "zero_padding"]


def tree_map(f: Callable[..., Any], *trees: Any) -> Any:
    """Apply `f` to the local buffers of sharded trees (and to other leaves of a pytree).

    One call per buffer, not per parameter. Unlike `optree.tree_map`, which works too, it keeps
    padding zero whatever `f` does to zeros.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, shard, tree_map, unshard
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> tree = shard({"w": torch.zeros(3)}, mesh, P(ragged="fsdp"))
      >>> unshard(tree_map(lambda x: x + 1, tree))["w"].tolist()
      [1.0, 1.0, 1.0]
    """
    out = optree.tree_map(f, *trees)
    return optree.tree_map(
        lambda x: zero_padding(x) if isinstance(x, ShardedTree) else x,
        out,
        is_leaf=lambda x: isinstance(x, ShardedTree),
    )


def zero_padding(tree: ShardedTree) -> ShardedTree:
    """The tree with its padding set to zero: in place, or differentiably where autograd watches."""
    comm = tree.plan.bound()
    out = list(tree.tensors)
    padded = False
    for i, (piece, tensor) in enumerate(zip(tree.selection.pieces, tree.tensors, strict=True)):
        rank = comm.rank(piece.bucket.ragged)
        start, stop = piece.local(rank)
        if not isinstance(tensor, Tensor) or tensor.shape != (stop - start,):
            continue  # f reduced the buffer to something else: there is no padding in it
        gaps = list(piece.bucket.local_gaps(rank, piece.start, piece.stop))
        if gaps and not (tensor.is_leaf and tensor.is_contiguous()):
            tensor, padded = tensor.clone(memory_format=torch.contiguous_format), True
        with torch.set_grad_enabled(torch.is_grad_enabled() and not tensor.is_leaf):
            for a, b in gaps:
                tensor[a:b] = 0
        out[i] = tensor
    return tree.with_tensors(out, scope=tree.scope) if padded else tree


def map_leaves(f: Callable[..., Tensor], *trees: ShardedTree, with_info: bool = False) -> ShardedTree:
    """Apply `f` to this rank's run of every leaf.

    Args:
      f: takes one local 1-D view per tree (and the `LeafInfo`, with `with_info`); returns a
        tensor of as many elements. Called for empty runs too, so that ranks stay in step.
      trees: equal plans and selections.

    Raises:
      ValueError: trees that don't match, another number of elements, or results of different
        dtypes within a bucket.
    """
    first = trees[0]
    for other in trees[1:]:
        if other.plan != first.plan or other.selection != first.selection:
            raise ValueError("map_leaves: the trees differ in plan or leaves")
    comm = first.plan.bound()
    out: list[Tensor] = []
    for index, piece in enumerate(first.selection.pieces):
        rank = comm.rank(piece.bucket.ragged)
        base, end = piece.local(rank)
        result: Tensor | None = None
        for info in piece.bucket.leaves:
            if first.selection.home.get(info.path) != index:
                continue
            views = [tree.leaf(info.path) for tree in trees]
            got = f(*views, info) if with_info else f(*views)
            if got.numel() != views[0].numel():
                raise ValueError(
                    f"map_leaves: f returned {got.numel()} elements for the {views[0].numel()} of {info.path!r}"
                )
            if result is None:
                result = torch.zeros(end - base, dtype=got.dtype, device=got.device)
            if got.dtype != result.dtype:
                raise ValueError(
                    f"map_leaves: f returned {got.dtype} for {info.path!r} and {result.dtype} for a leaf of "
                    f"the same bucket {piece.bucket.name!r}"
                )
            start, stop = info.span(rank)
            if stop > start:
                begin = info.offset + start - base
                result[begin : begin + stop - start].copy_(got.reshape(-1))
        assert result is not None
        out.append(result)
    return ShardedTree(first.plan, first.selection, out, scope=first.scope)
