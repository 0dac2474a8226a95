"""The bridge to torch's DTensor: sharded trees from trees of DTensors, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged.agree import same
from ragged.mesh import Comm
from ragged.moves import Grid, Holding, Move, compile_move, holdings_of, start_move
from ragged.paths import flatten
from ragged.placements import Cut, Where, as_dtensor, check_ascending, cut_of, placements_of, where_of
from ragged.plans import Plan
from ragged.resolver import brief
from ragged.selection import Selection, select, whole
from ragged.tree import ShardedTree

if TYPE_CHECKING:  # see ragged.placements
    from torch.distributed.tensor import Placement

__all__ = ["from_dtensor", "to_dtensor"]


def to_dtensor(tree: ShardedTree) -> Any:
    """The tree's leaves as `DTensor`s on its mesh, in the tree's own structure.

    Dims that are cut evenly become `Shard(dim)`. A ragged run is nothing that placements can say, so along ragged
    axes leaves are gathered, and they are `Replicate` there as on all other axes.

    Args:
      tree: any selection.

    Returns:
      A pytree of DTensors, independent of the tree's storage.

    Raises:
      ValueError: on all ranks: a spec whose tuple of axes is not in the order of the mesh, which is the only one
        that torch knows; or an even axis along which the mesh's ranks don't ascend, whose order torch mixes up.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, shard, to_dtensor
      >>> mesh = make_mesh((1, -1), ("fsdp", "tp"), device_type="cpu")
      >>> tree = shard({"w": torch.ones(4, 2)}, mesh, P(None, "tp", ragged="fsdp"))
      >>> to_dtensor(tree)["w"].placements
      (Replicate(), Shard(dim=1))
    """
    comm, error, move, facts = tree.plan.bound(), None, None, {}
    found: list[tuple[Placement, ...]] = []
    try:
        facts = {"layout": tree.plan.fingerprint, "leaves": str(tree.paths)}
        facts["dtypes"] = str([str(x.dtype) for x in tree.tensors])
        leaves = [tree.plan.leaves[path] for path in tree.paths]
        found = [placements_of(leaf, list(comm.axes), comm.axes) for leaf in leaves]
        check_ascending(
            comm.mesh, [i for i, of in enumerate(zip(*found, strict=True)) if any(p.is_shard() for p in of)]
        )
        move = _gathering(tree, comm)
    except Exception as caught:
        error = caught
    same("to_dtensor", repr(facts), lambda: facts, comm.everyone, error)
    assert move is not None
    source, home = [x.detach() for x in tree.tensors], tree.selection.home
    target = [torch.empty(f.size, dtype=source[home[f.path]].dtype, device=comm.device) for f in leaves]
    start_move(move, source, target, comm).wait()
    parts = zip(leaves, target, found, strict=True)
    out = [as_dtensor(x.view(leaf.local_shape), leaf, comm.mesh, where) for leaf, x, where in parts]
    return optree.tree_unflatten(tree.selection.structure, out)


def _gathering(tree: ShardedTree, comm: Comm) -> Move:
    """Every leaf into a tensor of its own, whole but for the even dims; kept with the plan."""
    memo: dict[Selection, Move] = tree.plan.memo.setdefault("to_dtensor", {})
    if tree.selection not in memo:
        new = []
        for i, path in enumerate(tree.paths):
            leaf = tree.plan.leaves[path]
            new.append(Holding(leaf.shape, leaf.spec.dims, (), functools.partial(_all, leaf.size), i, 0))
        grid = Grid.of(comm)
        old = holdings_of(tree.selection, tree.plan.leaves, comm)
        memo[tree.selection] = compile_move(old, new, (grid, grid), comm.me)
    return memo[tree.selection]


def _all(size: int, _: int) -> tuple[int, int]:
    return 0, size


def from_dtensor(tree: Any, plan: Plan, mesh: DeviceMesh | None = None) -> ShardedTree:
    """A sharded tree from DTensors, in a plan's layout and bit by bit.

    As in `redistribute` only elements that change owner travel, whatever the placements: uneven chunks, several axes on
    one dim, strided ones of FSDP2 over tensor parallelism (those are gathered by torch first).

    Args:
      tree: pytree of DTensors and plain tensors with the plan's paths, or with some of them. A plain tensor stands
        for equal values on all ranks. A DTensor lies on the plan's mesh, on a part of it along whole axes such as
        `mesh["tp"]` (then it is equal along the others), or on another mesh of the same ranks.
      plan: the layout. The leaves of a buffer share a dtype, which need not be the one planned for.
      mesh: to bind the plan to, if it isn't bound.

    Returns:
      A tree of the plan's own structure, or of `tree`'s if that has fewer leaves. Padding is zero, nothing is aliased.

    Raises:
      ValueError: on all ranks: a path or shape that the plan doesn't have, a sum that is still to be reduced
        (`Partial`), a mesh of other ranks or with ranks that don't ascend along a cutting axis, or ranks that pass
        different things.

    Example:
      >>> import torch
      >>> from torch.distributed.tensor import Shard, distribute_tensor
      >>> from ragged import P, from_dtensor, make_mesh, plan
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> rows = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
      >>> layout = plan({"w": rows}, mesh, P(ragged="fsdp", block=4))
      >>> from_dtensor({"w": rows}, layout).leaf("w").tolist()
      [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    comm, error, facts = plan.bound() if mesh is None else Comm(mesh), None, {}
    try:
        plan = plan.bind(comm.mesh)
        paths, leaves, structure = flatten(tree, None)
        facts = {"layout": plan.fingerprint, "mesh": str(comm.mesh.mesh.tolist()), "leaves": str(sorted(paths))}
        selection = _selection(plan, paths, structure)
        given = dict(zip(paths, leaves, strict=True))
        loads = {path: _load(path, given[path], plan, comm) for path in selection.paths}
        facts |= {f"leaf {path!r}": load.text for path, load in loads.items()}
        dtypes = _dtypes(selection, loads)
        moves = _moves(selection, loads, plan, comm)
    except Exception as caught:
        error = caught
    same("from_dtensor", repr(sorted(facts.items())), lambda: facts, comm.everyone, error)
    target: list[Tensor] = []
    for piece, dtype in zip(selection.pieces, dtypes, strict=True):
        rank = comm.rank(piece.bucket.ragged)
        start, stop = piece.local(rank)
        target.append(torch.empty(stop - start, dtype=dtype, device=comm.device))
        for a, b in piece.bucket.local_gaps(rank, piece.start, piece.stop):
            target[-1][a:b] = 0
    source = [load.local(comm.device) for load in loads.values()]
    for moving in [start_move(move, source, target, comm) for move in moves]:
        moving.wait()
    return ShardedTree(plan, selection, target)


class _Load(NamedTuple):
    """What one leaf brings along.

    Attributes:
      cut: how the tensor lies, once torch has gathered it if `strided`; None for a plain tensor.
      text: what ranks compare.
    """

    tensor: Any
    cut: Cut | None
    strided: bool
    text: str

    def local(self, device: torch.device) -> Tensor:
        """This rank's part, flat."""
        x = self.tensor.detach()
        if self.strided:
            from torch.distributed.tensor import Replicate

            x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
        if self.cut is not None:
            x = x.to_local()
        if type(x) is not Tensor:  # the result of a collective that is still under way
            x = x.clone()
        out: Tensor = x.to(device).resolve_conj().resolve_neg().contiguous().view(-1)
        return out


def _selection(plan: Plan, paths: Sequence[str], structure: optree.PyTreeSpec) -> Selection:
    """All leaves in the plan's structure, or some in their own."""
    for path in paths:
        if path not in plan.leaves:
            raise ValueError(f"from_dtensor: the plan has no leaf {path!r}; its leaves are {list(plan.leaves)[:20]}")
    return whole(plan) if len(paths) == len(plan.leaves) else select(plan, structure, paths)


def _load(path: str, x: Any, plan: Plan, comm: Comm) -> _Load:
    from torch.distributed.tensor import DTensor

    leaf = plan.leaves[path]
    if not isinstance(x, Tensor) or x.is_meta:
        raise ValueError(f"from_dtensor: leaf {path!r} is no tensor with values, but {brief(x)}")
    if tuple(x.shape) != leaf.shape:
        raise ValueError(f"from_dtensor: leaf {path!r} has shape {tuple(x.shape)}, in the plan {leaf.shape}")
    if not isinstance(x, DTensor):
        return _Load(x, None, False, f"{x.dtype}, no DTensor")
    try:
        cut = cut_of(x.placements, x.device_mesh, x.ndim)
        found = cut or Cut(x.device_mesh, ((),) * x.ndim)
        where = _where(found.mesh, plan, comm)
    except ValueError as error:
        raise ValueError(f"from_dtensor: leaf {path!r} of shape {leaf.shape}: {error}") from None
    if cut is not None:
        here = where.grid.coordinate[comm.me]
        want = tuple(stop - start for start, stop in where.pieces(cut, leaf.shape).box(where.grid.axes, here))
        detached: Any = x.detach()
        has = detached.to_local()
        if has.numel() != math.prod(want):
            raise ValueError(
                f"from_dtensor: leaf {path!r} of shape {leaf.shape} has a local part of shape {tuple(has.shape)}, "
                f"where its placements {x.placements} mean {want}; make it with distribute_tensor"
            )
    return _Load(x, found, cut is None, f"{x.dtype}, {x.placements} on {where.text}")


def _where(mesh: DeviceMesh, plan: Plan, comm: Comm) -> Where:
    memo: dict[DeviceMesh, Where] = plan.memo.setdefault("meshes of DTensors", {})
    if mesh not in memo:
        memo[mesh] = where_of(mesh, comm)
    return memo[mesh]


def _dtypes(selection: Selection, loads: Mapping[str, _Load]) -> list[torch.dtype]:
    """Of the new buffers."""
    first: dict[int, str] = {}
    for path, load in loads.items():
        other = first.setdefault(selection.home[path], path)
        if loads[other].tensor.dtype != load.tensor.dtype:
            raise ValueError(
                f"from_dtensor: leaves {other!r} and {path!r} share a buffer in the plan, but have "
                f"{loads[other].tensor.dtype} and {load.tensor.dtype} here; plan with these dtypes, or cast"
            )
    return [loads[first[i]].tensor.dtype for i in range(len(selection.pieces))]


def _moves(selection: Selection, loads: Mapping[str, _Load], plan: Plan, comm: Comm) -> list[Move]:
    """One move per mesh that leaves come from; kept with the plan."""
    cuts = tuple(load.cut for load in loads.values())
    memo: dict[Any, list[Move]] = plan.memo.setdefault("from_dtensor", {})
    if (selection, cuts) not in memo:
        sides: dict[str, tuple[Grid, list[Holding], list[Holding]]] = {}
        for i, (cut, new) in enumerate(zip(cuts, holdings_of(selection, plan.leaves, comm), strict=True)):
            cut = cut or Cut(comm.mesh, ((),) * len(new.shape))
            where = _where(cut.mesh, plan, comm)
            _, before, after = sides.setdefault(where.text if where.foreign else "", (where.grid, [], []))
            before.append(replace(where.pieces(cut, new.shape), tensor=i))
            after.append(new)
        me, there = comm.me, Grid.of(comm)
        memo[selection, cuts] = [compile_move(old, new, (grid, there), me) for grid, old, new in sides.values()]
    return memo[selection, cuts]
