"""`redistribute`: the same values in another layout."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from ragged.agree import same
from ragged.mesh import Comm
from ragged.moves import Grid, Move, compile_move, holdings_of, start_move
from ragged.paths import Shaped
from ragged.planning import replan
from ragged.plans import Plan
from ragged.resolver import brief, resolve
from ragged.selection import Selection, select
from ragged.spec import P
from ragged.tree import ShardedTree, refuse_traced

__all__ = ["redistribute"]


def redistribute(tree: ShardedTree, to: Any) -> ShardedTree:
    """Move a tree into another layout on the same ranks, bit by bit.

    Only elements that change owner travel, once, in one packed exchange per group of mesh axes; the rest is copied
    locally. The move is compiled once per pair of layouts and kept with the tree's plan. A sum that is still to be
    reduced is no layout: `reduce_scatter` leads from contributions to shards.

    Args:
      tree: any selection, of any dtype.
      to: a plan with the same paths and shapes (and maybe more), with other units, blocks or order, or on another
        mesh of the same ranks; or a spec as for `plan`: then units, alignment and what an optimizer
        asked for stay as they are. Paths are full ones, for a subtree too.

    Returns:
      A tree with the structure and dtypes of `tree`, independent of its storage; padding is zero.

    Raises:
      ValueError: on all ranks: a path or shape that `to` doesn't have, a mesh of other ranks, a spec that doesn't
        fit, or ranks that want different moves. Inside a differentiated function: a move has no gradient.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, redistribute, shard
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> tree = shard({"w": torch.arange(6.0)}, mesh, P(ragged="fsdp"))
      >>> redistribute(tree, P()).leaf("w").tolist()
      [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    Source: the redistribution of arXiv 2602.22437, section 4, for any two layouts.
    """
    if not isinstance(tree, ShardedTree):
        raise ValueError(
            f"redistribute moves a ShardedTree, got a {type(tree).__name__}; full tensors become one by shard, "
            "per-rank contributions to a sum by reduce_scatter"
        )
    comm, error, made, move = tree.plan.bound(), None, None, None
    facts = {"layout": tree.plan.fingerprint, "leaves": str(tree.paths)}
    try:
        refuse_traced(tree, "redistribute")
        facts["dtypes"] = str([str(x.dtype) for x in tree.tensors])
        made = _target(tree, to, comm)
        facts["new layout"] = made.fingerprint
        facts["new mesh"] = str(made.bound().ranks)  # the axes are in the layout; mesh.mesh is slow to ask
        selection = _selected(made, tree.selection)
        move, dtypes = _compiled(tree, made, selection, comm)
    except Exception as caught:
        error = caught
    same("redistribute", repr(facts), lambda: facts, comm.everyone, error)
    assert made is not None
    assert move is not None
    there = made.bound()
    target: list[Tensor] = []
    for piece, dtype in zip(selection.pieces, dtypes, strict=True):
        rank = there.rank(piece.bucket.ragged)
        start, stop = piece.local(rank)
        out = torch.empty(stop - start, dtype=dtype, device=there.device)
        for a, b in piece.bucket.local_gaps(rank, piece.start, piece.stop):
            out[a:b] = 0
        target.append(out)
    start_move(move, [x.detach() for x in tree.tensors], target, comm).wait()
    return ShardedTree(made, selection, target)


def _target(tree: ShardedTree, to: Any, comm: Comm) -> Plan:
    """The plan that `to` stands for, on the tree's ranks."""
    if isinstance(to, Plan):
        made = to if to.mesh is not None else to.bind(comm.mesh)
        if sorted(made.bound().ranks) != sorted(comm.ranks):
            raise ValueError(
                f"redistribute: the new layout is for ranks {sorted(made.bound().ranks)}, the tree lies on "
                f"{sorted(comm.ranks)}; moves stay within one set of ranks"
            )
        for path in tree.paths:
            if path not in made.leaves or made.leaves[path].shape != tree.plan.leaves[path].shape:
                has = f"has shape {made.leaves[path].shape}" if path in made.leaves else "is not in it"
                raise ValueError(
                    f"redistribute: leaf {path!r} of shape {tree.plan.leaves[path].shape} {has} in the new layout"
                )
        return made
    leaves = [Shaped(tree.plan.leaves[p].shape, tree.plan.leaves[p].dtype) for p in tree.paths]
    skeleton = optree.tree_unflatten(tree.selection.structure, leaves)
    where = (list(tree.paths), leaves)
    specs = tuple(resolve(to, skeleton, what="spec", is_value=_is_spec, paths_leaves=where))
    for path, value in zip(tree.paths, specs, strict=True):
        if not _is_spec(value):
            raise ValueError(f"spec for leaf {path!r} is {brief(value)}, expected P(...) or None")
    memo = tree.plan.memo.setdefault("respecced", {})
    if (tree.selection, specs) not in memo:
        memo[tree.selection, specs] = replan(tree.plan, dict(zip(tree.paths, specs, strict=True)))
    found: Plan = memo[tree.selection, specs]
    return found


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, P)


def _selected(made: Plan, like: Selection) -> Selection:
    """The leaves of a selection in another plan: in that very one, since equal plans may differ in what is frozen."""
    memo = made.memo.setdefault("selections", {})
    if like not in memo:
        memo[like] = select(made, like.structure, like.paths)
    found: Selection = memo[like]
    return found


def _compiled(tree: ShardedTree, made: Plan, selection: Selection, comm: Comm) -> tuple[Move, list[torch.dtype]]:
    """This rank's move, and the dtypes of the new tensors; kept with the tree's plan."""
    memo = tree.plan.memo.setdefault("moves", {})
    kinds = tuple(x.dtype for x in tree.tensors)
    token = tree.selection, made, made.bound().mesh, kinds
    if token not in memo:
        found: dict[int, torch.dtype] = {}
        for path in tree.paths:
            dtype = kinds[tree.selection.home[path]]
            if found.setdefault(selection.home[path], dtype) != dtype:
                other = next(p for p in tree.paths if selection.home[p] == selection.home[path])
                raise ValueError(
                    f"redistribute: leaves {other!r} and {path!r} share a buffer in the new layout, but have "
                    f"{found[selection.home[path]]} and {dtype} here"
                )
        there = made.bound()
        old = holdings_of(tree.selection, tree.plan.leaves, comm)
        new = holdings_of(selection, made.leaves, there)
        move = compile_move(old, new, (Grid.of(comm), Grid.of(there)), comm.me)
        memo[token] = move, [found[i] for i in range(len(selection.pieces))]
    out: tuple[Move, list[torch.dtype]] = memo[token]
    return out
