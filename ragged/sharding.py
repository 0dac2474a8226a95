"""Make sharded trees from full tensors or from local runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged.agree import agree
from ragged.drafts import HasBlocks
from ragged.mesh import Comm
from ragged.moves import Grid, compile_move, holdings_of, one_rank, start_move
from ragged.paths import first_difference, flatten, is_shaped, shaped
from ragged.places import fill_shard
from ragged.planning import plan
from ragged.plans import Plan
from ragged.resolver import brief
from ragged.selection import Selection, whole
from ragged.tree import ShardedTree

__all__ = ["from_local", "mesh_facts", "new_shard", "shard"]


def shard(
    tree: Any,
    where: DeviceMesh | Plan | None = None,
    spec: Any = None,
    *,
    mesh: DeviceMesh | None = None,
    units: Any = (),
    optimizer: HasBlocks | None = None,
    src: int | None = None,
    offload: bool = False,
) -> ShardedTree:
    """Cut a tree of full tensors into this rank's buffers.

    `shard(tree, mesh, spec)` plans and shards; `shard(tree, plan)` or `shard(tree, plan, mesh)`
    uses a plan.

    Every rank passes the same tree with the same values; plan and values are compared through
    digests first. With `src=r` global rank r's values win, and other ranks may pass meta
    tensors. The input is copied, never aliased or changed; leaves become row-major.

    Args:
      tree: pytree of tensors.
      where: a mesh, or a plan.
      spec: specs as in `ragged.plan`; after a plan, the mesh to bind it to, if it isn't bound.
      mesh: the same mesh by name.
      units, optimizer: as in `ragged.plan`.
      src: global rank whose values are taken.
      offload: keep the shards, and so the gradients and optimizer states that follow them, in the CPU's memory
        where the mesh is of accelerators. Gathers copy them to the device, gradients come back from it.

    Raises:
      ValueError: on all ranks, naming path and values, if any rank's tree, spec or values
        differ or can't be planned; or a tensor can't be laid out as its spec says.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, shard, unshard
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> unshard(shard({"w": torch.arange(6)}, mesh, P(ragged="fsdp")))["w"].tolist()
      [0, 1, 2, 3, 4, 5]
    """
    if where is None:
        where, mesh = mesh, None
    if isinstance(where, Plan):
        target = spec if mesh is None else mesh
        if target is not None and not isinstance(target, DeviceMesh):
            raise ValueError("shard(tree, plan) takes a mesh as third argument; the plan has the specs")
        comm = where.bound() if target is None else Comm(target)
    elif isinstance(where, DeviceMesh):
        comm = Comm(where)
    else:
        raise ValueError(f"shard needs a DeviceMesh or a Plan, got {type(where).__name__}; see ragged.make_mesh")
    facts, error, tensors = mesh_facts(comm), None, {}
    try:
        if isinstance(where, Plan):
            made = where.bind(comm.mesh)
        else:
            made = plan(tree, where, spec, units=units, optimizer=optimizer)
        facts |= made.describe()
        tensors = _full_tensors(tree, made)
        facts |= _value_facts(tensors, comm, src)
    except Exception as caught:
        error = caught
    agree("sharding a tree", facts, comm.everyone, error)
    selection = whole(made)
    out = []
    for piece in selection.pieces:
        bucket = piece.bucket
        size = bucket.bounds.size(comm.rank(bucket.ragged))
        buffer = new_shard(size, bucket.dtype, comm, offload)
        if src is None:
            fill_shard(buffer, bucket, tensors, comm.axes, comm.coordinate)
        out.append(buffer)
    if src is not None:
        _receive(out, selection, made, tensors, comm, src)
    return ShardedTree(made, selection, out)


def new_shard(size: int, dtype: torch.dtype, comm: Comm, offload: bool) -> Tensor:
    """Zeros for a shard: on the mesh's device, or in memory that it copies from without waiting."""
    if not offload or comm.device.type == "cpu":
        return torch.zeros(size, dtype=dtype, device=comm.device)
    return torch.zeros(size, dtype=dtype, device="cpu", pin_memory=True)


def mesh_facts(comm: Comm) -> dict[str, str]:
    """What ranks compare about their mesh before they use it."""
    return {"mesh": f"{comm.axes} over ranks {comm.mesh.mesh.tolist()}"}


def _full_tensors(tree: Any, made: Plan) -> dict[str, Tensor]:
    paths, leaves, _ = flatten(tree, is_shaped)
    if path := first_difference(paths, made.leaves):
        where = "the plan has no such leaf" if path in paths else "the tree lacks it"
        raise ValueError(f"tree and plan differ at {path!r}: {where}")
    out: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise ValueError(f"leaf {path!r} is a {type(leaf).__name__}; shard needs tensors (init makes them)")
        info = made.leaves[path]
        if shaped(path, leaf) != (info.shape, info.dtype):
            raise ValueError(
                f"leaf {path!r} is {tuple(leaf.shape)} {leaf.dtype}, the plan has {info.shape} {info.dtype}"
            )
        if id(leaf) in seen:
            raise ValueError(
                f"leaves {seen[id(leaf)]!r} and {path!r} are the same tensor; keep it once and use it twice"
            )
        seen[id(leaf)] = path
        out[path] = leaf
    return out


def _value_facts(tensors: Mapping[str, Tensor], comm: Comm, src: int | None) -> dict[str, str]:
    """A cheap fingerprint per leaf. With `src` only that rank's values count."""
    if src is not None and src not in comm.everyone.ranks:
        raise ValueError(f"src={src} is not a rank of the mesh {comm.mesh.mesh.tolist()}")
    reads = src is None or dist.get_rank() == src
    for path, tensor in tensors.items():
        if reads and tensor.is_meta:
            raise ValueError(f"leaf {path!r} is a meta tensor without values; use init, or src= another rank")
    if src is not None:
        return {"src": str(src)}
    return {f"values of leaf {path!r}": _digest(tensor) for path, tensor in tensors.items()}


def _digest(tensor: Tensor) -> str:
    """Sum of the raw words, and a sample in order: one pass over the memory, no copy of it."""
    flat = _row_major(tensor)
    if flat.numel() == 0:
        return "empty"
    flat = flat.as_strided(flat.shape, (1,))  # a single element may have any stride
    raw = flat.view(torch.uint8)
    words = raw.view(torch.int32) if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0 else raw
    sample = flat[:: max(flat.numel() // 61, 1)].contiguous().view(torch.uint8)
    text = f"{int(words.sum(dtype=torch.int64))} {sample.tolist()}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _row_major(tensor: Tensor) -> Tensor:
    """The values as they are meant, flat and contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def _receive(
    out: Sequence[Tensor], selection: Selection, made: Plan, tensors: Mapping[str, Tensor], comm: Comm, src: int
) -> None:
    """Move the leaves from `src`, which holds them whole, to everybody's shards."""
    me, grid = comm.me, Grid.of(comm)
    source = one_rank([made.leaves[p].shape for p in selection.paths], grid, src)
    move = compile_move(source, holdings_of(selection, made.leaves, comm), (grid, grid), me)
    # Only the source's values are read; others may have meta tensors.
    given = [_row_major(tensors[p]).to(out[0].device) if me == src else out[0] for p in selection.paths]
    start_move(move, given, out, comm).wait()


def from_local(runs: Mapping[str, Tensor], plan: Plan, mesh: DeviceMesh | None = None) -> ShardedTree:
    """A sharded tree from this rank's flat runs, e.g. read from files or made in place.

    Args:
      runs: this rank's run of every leaf by path, 1-D (or any shape with as many elements).
      plan: the layout that says which run that is.

    Raises:
      ValueError: on all ranks, if a run is missing or not of the planned size or dtype on any,
        naming path, rank, planned and actual size.
    """
    comm, error = plan.bound() if mesh is None else Comm(mesh), None
    try:
        plan = plan.bind(comm.mesh)
        _check_runs(runs, plan, comm)
    except Exception as caught:
        error = caught
    agree("from_local", mesh_facts(comm) | plan.describe(), comm.everyone, error)
    selection = whole(plan)
    out = []
    for piece in selection.pieces:
        bucket, rank = piece.bucket, comm.rank(piece.bucket.ragged)
        buffer = torch.zeros(bucket.bounds.size(rank), dtype=bucket.dtype, device=comm.device)
        for leaf in bucket.leaves:
            start, stop = leaf.span(rank)
            if stop > start:
                begin = leaf.offset + start - bucket.bounds(rank)
                buffer[begin : begin + stop - start].copy_(runs[leaf.path].detach().reshape(-1))
        out.append(buffer)
    return ShardedTree(plan, selection, out)


def _check_runs(runs: Mapping[str, Tensor], plan: Plan, comm: Comm) -> None:
    if path := first_difference(runs, plan.leaves):
        where = "the plan has no such leaf" if path in runs else "no run was given"
        raise ValueError(f"runs and plan differ at {path!r}: {where}")
    for path, leaf in plan.leaves.items():
        rank = comm.rank(plan.buckets[leaf.bucket].ragged)
        start, stop = leaf.span(rank)
        run = runs[path]
        if not isinstance(run, Tensor) or run.is_meta:
            raise ValueError(f"the run of leaf {path!r} is no tensor with values, but {brief(run)}")
        if run.numel() != stop - start or run.dtype != leaf.dtype:
            raise ValueError(
                f"leaf {path!r} of shape {leaf.shape}, spec {leaf.spec!r}: the plan gives rank {rank} "
                f"{stop - start} elements of {leaf.dtype}, the run has {run.numel()} of {run.dtype}"
            )
