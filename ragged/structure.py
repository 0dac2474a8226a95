"""Take sharded trees apart and put them together again, as equinox's partition and combine do."""

from __future__ import annotations

from typing import Any, cast

import optree
import torch
from torch import Tensor

from ragged.paths import Shaped
from ragged.resolver import resolve
from ragged.selection import Piece, Selection, select
from ragged.tree import ShardedTree

__all__ = ["combine", "partition"]


def partition(tree: ShardedTree, where: Any) -> tuple[ShardedTree, ShardedTree]:
    """The leaves for which `where` is true, and the rest, each with None in place of the others.

    Both share storage with `tree`. Plan with `frozen=` where one part never gets gradients,
    so that it has buffers of its own and `combine` copies nothing.

    Args:
      where: bools per leaf: a prefix pytree, a callable `(path, leaf)` whose leaf has `.shape`
        and `.dtype`, or `rules({...})`.

    Example:
      >>> import torch
      >>> from ragged import P, combine, make_mesh, partition, shard
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> tree = shard({"w": torch.ones(2), "b": torch.ones(2)}, mesh, P(ragged="fsdp"))
      >>> a, b = partition(tree, lambda path, leaf: path == "w")
      >>> a.paths, b.paths, combine(a, b).paths
      (('w',), ('b',), ('b', 'w'))
    """
    leaves = [Shaped(tree.plan.leaves[p].shape, tree.plan.leaves[p].dtype) for p in tree.paths]
    mask = resolve(
        where,
        None,
        what="mask",
        is_value=lambda x: isinstance(x, bool),
        paths_leaves=(list(tree.paths), leaves),
    )
    for path, flag in zip(tree.paths, mask, strict=True):
        if not isinstance(flag, bool):
            raise ValueError(f"mask for leaf {path!r} is {flag!r}, expected True or False")
    return _masked(tree, mask, True), _masked(tree, mask, False)


def _masked(tree: ShardedTree, mask: list[bool], keep: bool) -> ShardedTree:
    token = ("mask", keep, tuple(mask))
    memo = tree.selection._memo
    if token not in memo:
        names = [p if m is keep else None for p, m in zip(tree.paths, mask, strict=True)]
        skeleton = optree.tree_unflatten(tree.selection.structure, names)
        paths, structure = optree.tree_flatten(skeleton)
        memo[token] = select(tree.plan, structure, cast(list[str], paths))
    return tree.view(memo[token])


def combine(a: ShardedTree, b: ShardedTree) -> ShardedTree:
    """The inverse of `partition`: one tree of the leaves of both.

    Nothing is copied where both are neighbours in one storage, or have buffers of their own.

    Raises:
      ValueError: other plans or structures, or a leaf that both have.
    """
    if a.plan != b.plan:
        raise ValueError(f"combine: the trees have different plans, {a.plan!r} and {b.plan!r}")
    if both := sorted(set(a.paths) & set(b.paths)):
        raise ValueError(f"combine: both trees have leaf {both[0]!r}")
    memo = a.selection._memo
    token = ("combine", b.selection)
    if token not in memo:
        memo[token] = _union(a, b)
    selection: Selection = memo[token]
    comm = a.plan.bound()
    parts: list[dict[tuple[bool, int], tuple[Piece, Tensor]]] = [{} for _ in selection.pieces]
    for path, i in selection.home.items():
        tree = a if path in a.selection.home else b
        k = tree.selection.home[path]
        parts[i][tree is a, k] = tree.selection.pieces[k], tree.tensors[k]
    out = []
    for piece, found in zip(selection.pieces, parts, strict=True):
        rank, held = comm.rank(piece.bucket.ragged), list(found.values())
        if len(held) == 1 and held[0][0] == piece:
            out.append(held[0][1])
            continue
        full = [t for p, t in held if p.local(rank)[1] > p.local(rank)[0]]
        out.append(_join(full) if full else held[0][1][:0])
    scope = a.scope if a.scope is not None else b.scope
    lives = tuple(dict.fromkeys((*a._lives, *b._lives)))
    return ShardedTree(a.plan, selection, out, scope=scope, lives=lives)


def _union(a: ShardedTree, b: ShardedTree) -> Selection:
    def skeleton(tree: ShardedTree) -> Any:
        return optree.tree_unflatten(tree.selection.structure, list(tree.paths))

    try:
        joined = optree.tree_map(lambda x, y: y if x is None else x, skeleton(a), skeleton(b), none_is_leaf=True)
    except ValueError as error:
        raise ValueError(f"combine: the trees differ in structure: {error}") from None
    paths, structure = optree.tree_flatten(joined)
    return select(a.plan, structure, paths)


def _join(parts: list[Tensor]) -> Tensor:
    """Neighbouring pieces as one tensor: a view where they lie side by side in one storage."""
    first = parts[0]
    end = first.storage_offset() + first.numel()
    side_by_side = not any(t.requires_grad for t in parts)
    for t in parts[1:]:
        same = t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        side_by_side = side_by_side and same and t.dtype == first.dtype and t.storage_offset() == end
        end += t.numel()
    if not side_by_side:
        return torch.cat(parts)
    return first.as_strided((end - first.storage_offset(),), (1,))
