"""Norms of sharded trees: every element of the global tree counted once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from ragged import ShardedTree
from ragged.collectives import all_reduce
from ragged.mesh import Comm
from ragged.tree import sharded_trees

__all__ = ["all_finite", "global_norm"]


@torch.no_grad()
def global_norm(tree: Any, ord: float = 2) -> Tensor:
    """The norm of all elements of a tree taken as one vector, the same on every rank.

    One all-reduce for the whole tree, summed in fp32 at least. Non-finite elements show in the
    result, on every rank.

    Args:
      ord: p of the p-norm, 1 or more; `math.inf` for the largest absolute value.

    Returns:
      0-d tensor, fp32 (fp64 for fp64 trees).

    Example:
      >>> import torch
      >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}).item()
      5.0
    """
    if not ord >= 1:
        raise ValueError(f"ord={ord}: expected a number of at least 1, or math.inf")
    if ord == math.inf:
        return _total(tree, lambda x: x.abs().max() if x.numel() else x.new_zeros(()), "max")
    if ord == 2:
        # squares of the norm: torch's norm kernel reads each buffer once, without a temporary
        return _total(tree, lambda x: torch.linalg.vector_norm(x, dtype=_wide(x)).square(), "sum").sqrt()
    power = int(ord) if ord == int(ord) else ord
    total = _total(tree, lambda x: x.to(_wide(x)).abs().pow(power).sum(), "sum")
    return total if power == 1 else total.pow(1 / power)


def _wide(x: Tensor) -> torch.dtype:
    if x.is_complex():
        return torch.complex128 if x.dtype == torch.complex128 else torch.complex64
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _total(tree: Any, part: Callable[[Tensor], Tensor], op: str) -> Tensor:
    """Reduce `part` of every tensor: this rank's share first, then over the mesh in one message."""
    comm: Comm | None = None
    shares: list[Tensor] = []
    replicated: list[Tensor] = []
    for x, comm_of, counts in _tensors(tree):
        comm = comm or comm_of
        value = part(x)
        value = value.double() if value.dtype == torch.float64 else value.float()
        (replicated if comm_of is None else shares).append(value if counts else torch.zeros_like(value))
    join = _sum if op == "sum" else _max
    if comm is not None:
        own = join(shares)
        if op == "sum":
            all_reduce(own, comm.everyone).wait()
        else:
            # a maximum that is NaN on one rank must be NaN on all, which the backend's max doesn't promise
            message = torch.stack((own.nan_to_num(posinf=math.inf), own.isnan().to(own.dtype)))
            all_reduce(message, comm.everyone, "max").wait()
            own = torch.where(message[1] > 0, math.nan, message[0])
        replicated.append(own)
    return join(replicated)


def _sum(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum() if values else torch.zeros(())


def _max(values: list[Tensor]) -> Tensor:
    return torch.stack(values).max() if values else torch.zeros(())


def _tensors(tree: Any) -> Iterator[tuple[Tensor, Comm | None, bool]]:
    """Local tensors, their mesh, and whether this rank is the one of its replicas that counts."""
    leaves = optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, ShardedTree))
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield leaf, None, True
    for leaf in sharded_trees(tree):
        comm = leaf.plan.bound()
        for piece, tensor in zip(leaf.selection.pieces, leaf.tensors, strict=True):
            replicas = [a for a in comm.axes if a not in piece.bucket.ragged and a not in piece.bucket.even]
            yield tensor.detach(), comm, all(comm.coordinate[a] == 0 for a in replicas)


def all_finite(tree: Any) -> Tensor:
    """Whether no element of a tree is infinite or NaN on any rank: 0-d bool, equal on all ranks.

    Example:
      >>> import torch
      >>> all_finite(torch.tensor([1.0, float("nan")])).item()
      False
    """
    # One read per buffer: x - x is zero exactly where x is finite, and sums keep a NaN.
    return _total(tree, lambda x: (x - x).abs().float().sum(), "sum") == 0
