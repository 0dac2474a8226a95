"""The two ends of a differentiated step: trees that know it, and gradients in their form."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fsdp.schedule import Schedule
from fsdp.step import Step, is_sharded
from ragged.agree import same
from ragged.layout import Bucket
from ragged.mesh import Comm
from ragged.tree import ShardedTree, sharded_trees

__all__ = [
    "Found",
    "collected",
    "detached",
    "explained",
    "frozen_pieces",
    "leaf",
    "same_start",
    "trace",
]


def trace(
    args: tuple[Any, ...], kwargs: dict[str, Any], argnums: tuple[int, ...], step: Step
) -> tuple[list[Any], dict[str, Any], list[Tensor]]:
    """The arguments with trees that know the step, and the tensors to differentiate."""
    leaves: list[Tensor] = []
    count = 0

    def enter(tree: Any, learns: bool) -> Any:
        nonlocal count
        if not isinstance(tree, ShardedTree):
            return tree
        tensors = [
            _traced(tensor, piece.bucket, learns)
            for tensor, piece in zip(tree.tensors, tree.selection.pieces, strict=True)
        ]
        traced = ShardedTree(tree.plan, tree.selection, tensors, scope=step, lives=tree._lives)
        step.buckets.register(traced, "" if count == 0 else f"tree {count}: ", learns)
        leaves.extend(t for t in tensors if t.requires_grad)
        count += 1
        return traced

    out: list[Any] = [
        optree.tree_map(functools.partial(enter, learns=i in argnums), arg, is_leaf=is_sharded)
        for i, arg in enumerate(args)
    ]
    given: Any = kwargs
    named: Any = optree.tree_map(functools.partial(enter, learns=False), given, is_leaf=is_sharded)
    return out, named, leaves


def frozen_pieces(tree: ShardedTree) -> tuple[bool, ...]:
    return tuple(piece.bucket.frozen for piece in tree.selection.pieces)


def same_start(
    trees: Sequence[ShardedTree],
    learns: tuple[bool, ...],
    schedule: Schedule | None,
    token: object,
    comm: Comm,
    error: Exception | None,
) -> None:
    """Begin the step on all ranks together: same trees, same knowledge of the order, or an error everywhere.

    Args:
      token: what else tells one step from another, as text equal on all ranks.
    """
    known = schedule is not None and schedule.events is not None
    dtypes = [[str(x.dtype) for x in tree._tensors] for tree in trees]

    def facts() -> dict[str, str]:
        out = {"order of collectives": "known" if known else "to be learnt", "differentiated": str(learns)}
        out["micro-batch"] = str(token)
        for i, tree in enumerate(trees):
            out[f"leaves of tree {i}"] = str(tree.paths)
            out[f"dtypes of tree {i}"] = str(dtypes[i])
            out[f"plan of tree {i}"] = tree.plan.fingerprint
        return out

    text = repr((known, learns, token, dtypes, [(tree.plan.fingerprint, tree.selection.digest) for tree in trees]))
    same("the start of a step", text, facts, comm.everyone, error)


def explained(error: Exception) -> Exception:
    """torch says only that a storage is too small where something reads freed parameters."""
    if isinstance(error, RuntimeError) and "storage of size 0" in str(error):
        better = ValueError(
            "backward needs full parameters that were freed after forward: a tensor left a gathered function other "
            "than by being returned; return it, or use gathered(reshard_after_forward=False)"
        )
        better.__cause__ = error
        return better
    return error


def leaf(x: Tensor) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"can't differentiate with respect to {x.dtype}; pass such leaves as another argument")
    return x.detach().requires_grad_()


def detached(x: Any) -> Any:
    if isinstance(x, ShardedTree):
        return x.with_tensors([t.detach() for t in x.tensors])
    return x.detach() if isinstance(x, Tensor) else x


def _traced(tensor: Tensor, bucket: Bucket, learns: bool) -> Tensor:
    if learns and not bucket.frozen and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"can't differentiate with respect to leaf {bucket.leaves[0].path!r} of {tensor.dtype}; partition such "
            "leaves into a tree of their own, or plan with frozen="
        )
    return tensor.detach().requires_grad_(learns and not bucket.frozen)


class Found(NamedTuple):
    """What backward found for one local tensor of the differentiated trees.

    Attributes:
      key: the bucket's name in the step, "" if it has none; `grad`: None stands for zeros.
    """

    key: str
    grad: Tensor | None


def collected(wanted: Sequence[Any], step: Step, direct: dict[int, Tensor | None]) -> list[Found]:
    """The gradients of the differentiated arguments' local tensors, in order."""
    found: list[Found] = []
    for tree in sharded_trees(wanted):
        for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
            key = step.buckets.key_of(tensor)
            grad = step.reducer.grads.get(key)
            extra = step.reducer.direct(tensor, piece.bucket, direct.get(id(tensor)), step.buckets.derived)
            if extra is not None:
                grad = extra if grad is None else grad + extra
            found.append(Found(key, grad))
    return found
