"""`microbatch`: one batch in parts, with the gradients of the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fsdp.accumulating import Sums
from fsdp.grad import ValueAndGrad
from ragged.agree import agree
from ragged.tree import sharded_trees

__all__ = ["microbatch"]


def microbatch(
    f: ValueAndGrad, n: int, *, sync: str | Sequence[bool] = "each", batch_argnums: int | Sequence[int] = (1,)
) -> Callable[..., Any]:
    """`f` for batches that are too large for it: n equal parts after each other, gradients summed.

    The result is what `f` returns for the whole batch: the mean over the parts of loss and gradients, or the sum where
    `f` has `op="sum"`. With `has_aux` the auxiliary results come as a tuple of n.

    | sync | messages | memory between parts |
    |---|---|---|
    | "each" | every part reduces | shards of gradients |
    | "last" | one reduction | full gradients |

    Args:
      f: what `value_and_grad` returned.
      n: parts; dim 0 of the batch must be a multiple of it.
      sync: "each", "last", or a flag for each part: whether its gradients, with those that earlier parts
        kept, are reduced at once. What is left over is reduced at the end.
      batch_argnums: positional arguments that are cut along dim 0 of each of their tensors.

    Raises:
      ValueError: `f`, `n` or `sync` that don't fit; on all ranks: a tensor that can't be cut into n parts, naming it.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, shard, unshard
      >>> from fsdp import gathered, microbatch, value_and_grad
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> params = shard({"w": torch.ones(3)}, mesh, P(ragged="fsdp"))
      >>> f = value_and_grad(gathered(lambda p, x: (x @ p["w"]).mean()))
      >>> loss, grads = microbatch(f, 2)(params, torch.arange(12.0).view(4, 3))
      >>> loss.item(), unshard(grads)["w"].tolist()
      (16.5, [4.5, 5.5, 6.5])
    """
    if not isinstance(f, ValueAndGrad):
        raise ValueError(f"microbatch needs what value_and_grad returns, got {type(f).__name__}")
    if type(n) is not int or n < 1:
        raise ValueError(f"n={n!r}: expected a number of parts, at least 1")
    flags = _flags(sync, n)
    where = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        parts = _together(lambda: _cut(args, where, n), (args, kwargs))
        sums = Sums()
        found = [
            f.add(sums, tuple(part), kwargs, sync=flag, last=i == n - 1)
            for i, (part, flag) in enumerate(zip(parts, flags, strict=True))
        ]
        grads = f.total(sums)
        losses = [loss for loss, _ in found] if f.has_aux else found
        loss = sum(losses[1:], start=losses[0])
        if f.op == "mean":
            loss, grads = loss / n, optree.tree_map(lambda x: _divided(x, n), grads)
        return ((loss, tuple(aux for _, aux in found)), grads) if f.has_aux else (loss, grads)

    return call


def _divided(x: Tensor, n: int) -> Tensor:
    return x / n if x.is_floating_point() or x.is_complex() else x  # frozen leaves have zeros of any dtype


def _flags(sync: str | Sequence[bool], n: int) -> tuple[bool, ...]:
    if isinstance(sync, str):
        named = {"each": (True,) * n, "last": (False,) * (n - 1) + (True,)}
        if sync in named:
            return named[sync]
    elif len(flags := tuple(sync)) == n and all(isinstance(flag, bool) for flag in flags):
        return flags
    raise ValueError(f'sync={sync!r}: expected "each", "last", or {n} flags, one for each part')


def _together(make: Callable[[], Any], arguments: Any) -> Any:
    """What `make` returns, or an error on all ranks, where the others are at the start of a step."""
    try:
        return make()
    except ValueError as error:
        trees = sharded_trees(arguments)
        if trees:
            agree("the start of a step", {}, trees[0].plan.bound().everyone, error)
        raise


def _cut(args: tuple[Any, ...], where: tuple[int, ...], n: int) -> list[list[Any]]:
    """The arguments of each part."""
    if not where or any(not -len(args) <= i < len(args) for i in where):
        raise ValueError(f"batch_argnums={where} must be positions among {len(args)} positional arguments")
    parts = [list(args) for _ in range(n)]
    for i in where:
        if sharded_trees(args[i]):
            raise ValueError(f"argument {i} holds a sharded tree, which is no batch; see batch_argnums=")
        paths, leaves, structure = optree.tree_flatten_with_path(args[i])
        pieces = [
            _pieces(x, n, ".".join(map(str, (i, *path)))) if isinstance(x, Tensor) else [x] * n
            for path, x in zip(paths, leaves, strict=True)
        ]
        for k in range(n):
            parts[k][i] = optree.tree_unflatten(structure, [piece[k] for piece in pieces])
    return parts


def _pieces(x: Tensor, n: int, name: str) -> Sequence[Tensor]:
    if x.ndim == 0 or x.shape[0] % n:
        raise ValueError(f"argument {name} of shape {tuple(x.shape)} can't be cut into {n} equal parts along dim 0")
    return torch.split(x, x.shape[0] // n) if x.shape[0] else [x] * n
