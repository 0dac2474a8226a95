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
    result, on every rank, whichever rank holds them. Plain tensors count once, as replicas: they
    should be equal on all ranks.

    Args:
      ord: p of the p-norm, 1 or more; `math.inf` for the largest absolute value.

    Returns:
      0-d tensor, fp32 (fp64 for fp64 trees).

    Raises:
      ValueError: an order below 1, or sharded trees on meshes of different ranks.

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
        return _total(tree, _sum_of_squares, "sum").sqrt()
    power = int(ord) if ord == int(ord) else ord
    total = _total(tree, lambda x: x.to(_wide(x)).abs().pow(power).sum(), "sum")
    return total if power == 1 else total.pow(1 / power)


_ROW = 4096


def _sum_of_squares(x: Tensor) -> Tensor:
    # torch's norm kernel reads a buffer once and needs no temporary, but on CPU it sums long vectors
    # naively (1e-3 off at 3e7 elements in fp32): so give it rows, views of the buffer, and sum those in fp64.
    flat = x.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=_wide(x))
    rest = torch.linalg.vector_norm(flat[whole:], dtype=_wide(x))
    total = rows.double().square().sum() + rest.double().square()
    out: Tensor = total.to(rest.dtype)
    return out


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
        if comm is not None and comm_of is not None and set(comm.everyone.ranks) != set(comm_of.everyone.ranks):
            raise ValueError(
                f"the trees lie on meshes of different ranks, {comm.everyone.ranks} and {comm_of.everyone.ranks}; "
                "take their norms one by one"
            )
        comm = comm or comm_of
        value = part(x)
        value = value.double() if value.dtype == torch.float64 else value.float()
        if comm_of is None:
            replicated.append(value)
        # A copy that doesn't count still has its say if it isn't finite: all ranks must learn of it.
        shares.append(value if counts else torch.where(value.isfinite(), torch.zeros_like(value), value))
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
            yield leaf, None, False
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
