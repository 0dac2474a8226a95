"""Full parameters as DTensors over the axes that cut them evenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optree
from torch.distributed.device_mesh import DeviceMesh

from fsdp.step import is_sharded
from ragged.placements import as_dtensor, check_ascending, placements_of
from ragged.plans import Plan
from ragged.tree import ShardedTree

if TYPE_CHECKING:  # see ragged.placements
    from torch.distributed.tensor import Placement

__all__ = ["of_dtensors"]


def of_dtensors(fn: Callable[..., Any], first: Any) -> Callable[..., Any]:
    """`fn` for a first argument with full local tensors in the places of `first`'s sharded trees.

    Raises:
      ValueError: a layout that torch's placements can't say, or a mesh whose order it mixes up.
    """
    layouts = {
        tree.plan: _layout(tree.plan) for tree in optree.tree_leaves(first, is_leaf=is_sharded) if is_sharded(tree)
    }

    def convert(tree: Any, full: Any) -> Any:
        if not isinstance(tree, ShardedTree):
            return full
        mesh, placements = layouts[tree.plan]
        if mesh is None:
            return full
        structure = tree.selection.structure
        leaves: list[Any] = structure.flatten_up_to(full)
        parts = zip(tree.paths, leaves, strict=True)
        out = [as_dtensor(x, tree.plan.leaves[path], mesh, placements[path]) for path, x in parts]
        return optree.tree_unflatten(structure, out)

    def call(full: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(optree.tree_map(convert, first, full, is_leaf=is_sharded), *args, **kwargs)

    return call


def _layout(plan: Plan) -> tuple[DeviceMesh | None, dict[str, tuple[Placement, ...]]]:
    """The mesh's axes that cut some leaf evenly, None if there are none, and placements on them by path."""
    memo = plan.memo
    if "dtensors" not in memo:
        comm = plan.bound()
        even = {a for leaf in plan.leaves.values() for names in leaf.spec.dims for a in names}
        axes = tuple(a for a in comm.axes if a in even)
        check_ascending(comm.mesh, [list(comm.axes).index(a) for a in axes])
        found = {path: placements_of(leaf, axes, comm.axes) for path, leaf in plan.leaves.items()}
        memo["dtensors"] = (comm.mesh if len(axes) == len(comm.axes) else comm.mesh[axes]) if axes else None, found
    out: tuple[DeviceMesh | None, dict[str, tuple[Placement, ...]]] = memo["dtensors"]
    return out
