"""From shards back to full tensors, and from full contributions to reduced shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged.agree import agree, same
from ragged.buffer import full_views
from ragged.collectives import all_gather
from ragged.layout import Bucket, LeafInfo, axis_size
from ragged.mesh import Comm
from ragged.moves import Grid, compile_move, holdings_of, one_rank, start_move
from ragged.paths import first_difference, flatten
from ragged.places import coordinates, even_slices
from ragged.plans import Plan
from ragged.reduction import reduce_buffer, reduction
from ragged.resolver import brief
from ragged.selection import whole
from ragged.sharding import mesh_facts
from ragged.tree import ShardedTree, refuse_traced

__all__ = ["full_leaf", "reduce_scatter", "unshard"]


def unshard(tree: ShardedTree, *, dst: int | None = None) -> Any:
    """Full tensors in the tree's own structure, independent of the tree's storage.

    Args:
      tree: any selection.
      dst: global rank that gets them, None for every rank. Other ranks get None; they hold their
        shards, and one copy of them while it is sent.

    Raises:
      ValueError: on all ranks: `dst` is not a rank of the tree's mesh, or the tree is inside a differentiated
        function.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, shard, unshard
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> unshard(shard([torch.eye(2)], mesh, P(ragged="fsdp")))[0].tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    comm, error = tree.plan.bound(), None
    facts = {"dst": str(dst), "plan": tree.plan.fingerprint, "leaves": str(tree.paths)}
    try:
        if dst is not None and dst not in comm.everyone.ranks:
            raise ValueError(f"dst={dst} is not a rank of the mesh {comm.mesh.mesh.tolist()}")
        refuse_traced(tree, "unshard")
        facts["dtypes"] = str([str(x.dtype) for x in tree.tensors])
    except Exception as caught:
        error = caught
    agree("unshard", facts, comm.everyone, error)
    if dst is not None:
        return _to_one(tree, dst, comm)
    full: dict[str, Tensor] = {}
    wanted = set(tree.paths)
    pieces: dict[int, list[tuple[Any, Tensor]]] = {}
    for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
        pieces.setdefault(piece.bucket.index, []).append((piece, tensor.detach()))
    for parts in pieces.values():
        bucket = parts[0][0].bucket
        shard = _whole_shard(parts, bucket, comm)
        axes = tuple(a for a in comm.axes if a in bucket.even) + bucket.ragged
        for coordinate, part in _coordinates(_gather(shard, bucket, axes, comm), bucket, comm):
            for path, view in full_views(part, bucket).items():
                if path in wanted:
                    leaf = tree.plan.leaves[path]
                    if path not in full:
                        full[path] = torch.empty(leaf.shape, dtype=view.dtype, device=view.device)
                    full[path][even_slices(leaf, comm.axes, coordinate)].copy_(view)
    return optree.tree_unflatten(tree.selection.structure, [full[p] for p in tree.paths])


def full_leaf(run: Tensor, leaf: LeafInfo, bucket: Bucket, comm: Comm) -> Tensor:
    """A whole leaf from the runs of all ranks, on every rank; they all have to be at the same one."""
    axes = tuple(a for a in comm.axes if a in bucket.even) + bucket.ragged
    even = [a for a in comm.axes if a in bucket.even]
    runs = [stop - start for start, stop in leaf.runs]
    flat = run.new_empty(leaf.size * axis_size(comm.axes, tuple(even)))
    same("full_tensor", f"{leaf.path} {bucket.digest} {run.dtype}", lambda: {"leaf": leaf.path}, comm.group(axes))
    all_gather(flat, run, comm.group(axes), runs * (flat.numel() // leaf.size if leaf.size else 1)).wait()
    out = run.new_empty(leaf.shape)
    for index, coordinate in enumerate(coordinates(comm.axes, even)):
        part = flat[index * leaf.size : (index + 1) * leaf.size].view(leaf.local_shape)
        out[even_slices(leaf, comm.axes, coordinate)].copy_(part)
    return out


def _to_one(tree: ShardedTree, dst: int, comm: Comm) -> Any:
    """Every leaf whole on one rank: a move whose target is a tensor per leaf there, and nothing elsewhere."""
    leaves = [tree.plan.leaves[p] for p in tree.paths]
    me = comm.me
    memo = tree.plan.memo.setdefault("moves", {})
    if (tree.selection, dst) not in memo:
        grid = Grid.of(comm)
        source = holdings_of(tree.selection, tree.plan.leaves, comm)
        target = one_rank([leaf.shape for leaf in leaves], grid, dst)
        memo[tree.selection, dst] = compile_move(source, target, (grid, grid), me)
    tensors = [x.detach() for x in tree.tensors]
    kinds = [tensors[tree.selection.home[p]] for p in tree.paths]
    out = [x.new_empty(leaf.shape if me == dst else 0) for leaf, x in zip(leaves, kinds, strict=True)]
    start_move(memo[tree.selection, dst], tensors, [x.view(-1) for x in out], comm).wait()
    return optree.tree_unflatten(tree.selection.structure, out) if me == dst else None


def _whole_shard(parts: list[tuple[Any, Tensor]], bucket: Bucket, comm: Comm) -> Tensor:
    """The bucket's shard, with zeros where the tree has no leaves."""
    if parts[0][0].whole:
        return parts[0][1]
    rank = comm.rank(bucket.ragged)
    base = bucket.bounds(rank)
    out = parts[0][1].new_zeros(bucket.bounds.size(rank))
    for piece, tensor in parts:
        start, stop = piece.local(rank)
        out[start - base : stop - base].copy_(tensor)
    return out


def _shard_sizes(bucket: Bucket, axes: tuple[str, ...], comm: Comm) -> list[int]:
    even = axis_size(comm.axes, axes) // bucket.ranks
    return bucket.bounds.sizes * even


def _gather(shard: Tensor, bucket: Bucket, axes: tuple[str, ...], comm: Comm) -> Tensor:
    sizes = _shard_sizes(bucket, axes, comm)
    out = shard.new_empty(sum(sizes))
    equal = bucket.bounds.explicit is None
    return all_gather(out, shard, comm.group(axes), None if equal else sizes).wait()


def _coordinates(buffer: Tensor, bucket: Bucket, comm: Comm) -> Iterator[tuple[dict[str, int], Tensor]]:
    """The global buffer of every coordinate on the even axes; one, at {}, without even axes."""
    even = [a for a in comm.axes if a in bucket.even]
    for index, coordinate in enumerate(coordinates(comm.axes, even)):
        yield coordinate, buffer[index * bucket.length : (index + 1) * bucket.length]


def reduce_scatter(tree: Any, plan: Plan, op: str = "mean", mesh: DeviceMesh | None = None) -> ShardedTree:
    """Reduce every rank's full tensors to shards of their mean or sum.

    The only way from contributions to shards: a pending sum is no layout, so nothing unreduced
    can be moved or read by mistake. Ranks that differ on an even axis hold different parts
    of a leaf, so `tree` has each rank's own local shapes there.

    Args:
      tree: this rank's contribution, full tensors (after the even dims) with the plan's paths.
      op: "mean" or "sum" over all ranks that contribute to an element.

    Raises:
      ValueError: on all ranks: a path or shape that the plan doesn't have, or an unknown `op`.
    """
    comm = plan.bound() if mesh is None else Comm(mesh)
    error, given = None, {}
    try:
        plan = plan.bind(comm.mesh)
        given = _contributions(tree, plan, op)
    except Exception as caught:
        error = caught
    dtypes = {f"dtype of leaf {path!r}": str(x.dtype) for path, x in given.items()}
    agree("reduce_scatter", mesh_facts(comm) | {"op": op} | plan.describe() | dtypes, comm.everyone, error)
    selection = whole(plan)
    out = []
    for piece in selection.pieces:
        bucket = piece.bucket
        dtype = given[bucket.leaves[0].path].dtype
        full = torch.zeros(bucket.length, dtype=dtype, device=comm.device)
        for path, view in full_views(full, bucket).items():
            view.copy_(given[path].detach())
        data = tuple(a for a in comm.axes if a not in bucket.even)
        shard = reduce_buffer(full, bucket, comm, reduction(bucket, comm.axes, data, op=op)).wait()
        out.append(shard)
    return ShardedTree(plan, selection, out)


def _contributions(tree: Any, plan: Plan, op: str) -> dict[str, Tensor]:
    if op not in ("mean", "sum"):
        raise ValueError(f'op={op!r}: expected "mean" or "sum"')
    paths, leaves, _ = flatten(tree)
    if path := first_difference(paths, plan.leaves):
        raise ValueError(f"contributions and plan differ at {path!r}")
    given = dict(zip(paths, leaves, strict=True))
    for path, x in given.items():
        leaf = plan.leaves[path]
        if not isinstance(x, Tensor) or x.is_meta:
            raise ValueError(f"contribution {path!r} is no tensor with values, but {brief(x)}")
        if tuple(x.shape) != leaf.local_shape:
            raise ValueError(f"contribution {path!r} has shape {tuple(x.shape)}, expected {leaf.local_shape}")
        if x.dtype.is_floating_point and x.dtype.itemsize == 1:
            raise ValueError(f"contribution {path!r} is {x.dtype}, which can't be summed; cast it to a wider dtype")
        if op == "mean" and not (x.is_floating_point() or x.is_complex()):
            raise ValueError(f'contribution {path!r} is {x.dtype}: a mean needs floats; use op="sum"')
    for bucket in plan.buckets:
        kinds = {given[f.path].dtype for f in bucket.leaves}
        if len(kinds) > 1:
            raise ValueError(f"contributions of bucket {bucket.name!r} mix dtypes {sorted(map(str, kinds))}")
    return given
