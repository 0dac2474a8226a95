"""Make parameters in place: every rank computes only its own runs, and all meshes agree on every bit."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch.distributed.device_mesh import DeviceMesh

from ragged.agree import agree
from ragged.mesh import Comm
from ragged.paths import Shaped
from ragged.places import global_index
from ragged.plans import Plan
from ragged.resolver import resolve
from ragged.selection import whole
from ragged.sharding import mesh_facts, new_shard
from ragged.tree import ShardedTree

__all__ = ["init"]

_CHUNK = 1 << 16  # elements per call of an initializer: its fp64 temporaries stay in the cache


def init(
    plan: Plan, initializers: Any, *, seed: int, mesh: DeviceMesh | None = None, offload: bool = False
) -> ShardedTree:
    """A sharded tree with fresh values, bitwise the same on every mesh and for every block.

    Args:
      plan: the layout.
      initializers: per leaf an initializer of `ragged.random`, such as `normal(0.02)`: one
        value, a prefix pytree, or `rules({...})`. It sees the global shape, so that a fan-in
        never depends on the mesh.
      seed: any int, the same on all ranks.
      offload: as in `shard`.

    Raises:
      ValueError: on all ranks: a leaf without an initializer, another plan or seed on some
        rank, or an initializer that returns the wrong number of values.

    Example:
      >>> import torch
      >>> from ragged import P, init, make_mesh, plan
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> p = plan({"w": ((8, 4), torch.float32)}, mesh, P(ragged="fsdp"))
    """
    comm = plan.bound() if mesh is None else Comm(mesh)
    error, made = None, {}
    try:
        plan = plan.bind(comm.mesh)
        made = _resolved(plan, initializers)
    except Exception as caught:
        error = caught
    facts = mesh_facts(comm) | {"seed": str(seed)} | plan.describe()
    facts |= {f"initializer of leaf {path!r}": _name(how) for path, how in made.items()}
    agree("init", facts, comm.everyone, error)
    selection = whole(plan)
    out = []
    for piece in selection.pieces:
        bucket, rank = piece.bucket, comm.rank(piece.bucket.ragged)
        base = bucket.bounds(rank)
        buffer = new_shard(bucket.bounds.size(rank), bucket.dtype, comm, offload)
        for leaf in bucket.leaves:
            start, stop = leaf.span(rank)
            for a in range(start, stop, _CHUNK):
                b = min(a + _CHUNK, stop)
                index = global_index(leaf, comm.axes, comm.coordinate, a, b, comm.device)
                values = made[leaf.path](seed, leaf.path, leaf.shape, index)
                begin = leaf.offset - base
                buffer[begin + a : begin + b].copy_(values)
        out.append(buffer)
    return ShardedTree(plan, selection, out)


def _name(how: Any) -> str:
    """Functions by name: their repr holds an address, which differs between processes."""
    return getattr(how, "__qualname__", None) or repr(how)


def _resolved(plan: Plan, initializers: Any) -> dict[str, Any]:
    paths = list(plan.leaves)
    leaves = [Shaped(f.shape, f.dtype) for f in plan.leaves.values()]
    values = resolve(initializers, None, what="initializer", is_value=_is_initializer, paths_leaves=(paths, leaves))
    made = dict(zip(paths, values, strict=True))
    for path, how in made.items():
        if how is None:
            raise ValueError(f"no initializer for leaf {path!r}: it would hold no values")
    # One element of every leaf, before any rank goes on: an initializer that fails does so everywhere.
    one = torch.zeros(1, dtype=torch.int64)
    for path, leaf in plan.leaves.items():
        if leaf.size:
            values = made[path](0, path, leaf.shape, one)
            if values.shape != (1,):
                raise ValueError(
                    f"the initializer of leaf {path!r} returned shape {tuple(values.shape)} for 1 index; "
                    "return one value per index"
                )
    return made


def _is_initializer(x: Any) -> bool:
    return callable(x) and optree.tree_is_leaf(x, none_is_leaf=False)
