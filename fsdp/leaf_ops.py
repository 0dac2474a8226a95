"""What operations do on `ShardedLeaf`: elements one by one on the runs, norms over all ranks, the rest not at all."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from fsdp.leaves import ShardedLeaf, Whereabouts
from fsdp.norm_parts import NormPart
from ragged.collectives import all_reduce

__all__ = ["dispatch"]

# Beside what torch tags as pointwise: copies, fills, and the fused and foreach forms of element-wise operations.
_ELEMENTWISE = {
    "clone",
    "copy_",
    "empty_like",
    "fill_",
    "full_like",
    "lift_fresh",
    "masked_fill",
    "masked_fill_",
    "ones_like",
    "zero_",
    "zeros_like",
    "_to_copy",
}
_FUSED = {"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"}
_RANDOM = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation of torch with sharded leaves among its arguments.

    Raises:
      ValueError: it looks beyond single elements, or at tensors that are cut in other ways.
    """
    name = func.overloadpacket.__name__
    leaves = list(_leaves((args, kwargs)))
    where = leaves[0].home
    if name in ("linalg_vector_norm", "norm") and isinstance(args[0], ShardedLeaf):
        return _norm(func, args, kwargs)
    if name == "_foreach_norm":
        return [NormPart.of(x.local, x.home, args[1] if len(args) > 1 else 2) for x in args[0]]
    if name in _RANDOM:
        return _random(func, args, kwargs)
    if name in ("alias", "detach"):
        return ShardedLeaf(leaves[0].local, where)  # the same run, and the same count of its changes
    if name == "equal":
        return _equal(*args)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(func, *args)
    masked = name == "index_put_" and all(isinstance(x, ShardedLeaf) and x.dtype == torch.bool for x in args[1])
    if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE or _listwise(name) or masked:
        _check(name, args, kwargs, leaves)
        return _on_runs(func, name, args, kwargs, where)
    raise ValueError(
        f"{name} on {where.path!r}: this rank holds {where.span[1] - where.span[0]} flat elements of its shape "
        f"{tuple(where.info.shape)}, and {name} isn't one of the element-wise operations that can work on them. In a "
        "forward pass: call it through the sharded module. Optimizers that work on matrices: optim.muon with "
        "fsdp.as_torch_optimizer. The whole tensor: x.full_tensor(); the run: x.to_local()"
    )


def _listwise(name: str) -> bool:
    """Whether it does something element-wise to each tensor of lists."""
    return name in _FUSED or (name.startswith("_foreach_") and name not in ("_foreach_max", "_foreach_norm"))


def _unscale(func: Any, grads: Any, found_inf: Tensor, scale: Tensor) -> None:
    """`GradScaler`'s: what one rank finds concerns all."""
    func([x.local if isinstance(x, ShardedLeaf) else x for x in grads], found_inf, scale)
    all_reduce(found_inf, next(_leaves(list(grads))).home.comm.everyone, "max").wait()


def _leaves(tree: Any) -> Iterator[ShardedLeaf]:
    for x in optree.tree_leaves(tree):
        if isinstance(x, ShardedLeaf):
            yield x


def _check(name: str, args: Any, kwargs: Any, leaves: list[ShardedLeaf]) -> None:
    """Operands must be cut alike: all of them, or in lists those at the same place."""
    if _listwise(name):
        lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)) and list(_leaves(list(x)))]
        groups = [list(_leaves(list(row))) for row in zip(*lists, strict=False)]
        if any(0 < len(group) < len(lists) for group in groups):
            raise ValueError(f"{name} of sharded and plain tensors; use x.full_tensor(), or sharded ones alone")
    else:
        groups = [leaves]
        whole = None if name == "copy_" else leaves[0].home
        given: Any = (args, kwargs)
        for x in optree.tree_leaves(given):
            if whole is not None and isinstance(x, Tensor) and not isinstance(x, ShardedLeaf) and x.ndim:
                raise ValueError(
                    f"{name} of {whole.path!r}, which is sharded, and a plain tensor of shape {tuple(x.shape)}; "
                    "use x.full_tensor(), or two sharded tensors"
                )
    for group in groups:
        for other in group[1:]:
            if not _alike(group[0].home, other.home):
                raise ValueError(f"{name} of {group[0]!r} and {other!r}, which are cut in different ways")


def _alike(a: Whereabouts, b: Whereabouts) -> bool:
    cuts = [(x.span, x.info.shape, x.info.local_shape, x.info.spec.dims, x.bucket.ragged) for x in (a, b)]
    return a is b or (cuts[0] == cuts[1] and a.comm.mesh == b.comm.mesh)


def _on_runs(func: Any, name: str, args: Any, kwargs: Any, where: Whereabouts) -> Any:
    if name == "copy_" and not isinstance(args[1], ShardedLeaf) and args[1].ndim:
        args = (args[0], where.cut(args[1].expand(where.info.shape)), *args[2:])
    # layouts are those of the global shape; a run has one
    kwargs = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout")}
    given: Any = (args, kwargs)
    runs: Any = optree.tree_map(lambda x: x.local if isinstance(x, ShardedLeaf) else x, given)
    out = func(*runs[0], **runs[1])
    wrapper = {id(x.local): x for x in _leaves(given)}  # of what in-place operations return
    if name.endswith("_") or "out" in kwargs:
        for x in _leaves(kwargs["out"] if "out" in kwargs else args if name in _FUSED else args[:1]):
            x.home.written(x.local)
    count = where.span[1] - where.span[0]

    def wrapped(x: Any, like: Whereabouts) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in wrapper:
            return wrapper[id(x)]
        assert x.numel() == count or like is not where
        return ShardedLeaf(x, like)

    if isinstance(out, (list, tuple)) and _listwise(name):
        places = [x.home for x in _leaves(args[0])]
        return type(out)(wrapped(x, place) for x, place in zip(out, places, strict=True))
    return optree.tree_map(functools.partial(wrapped, like=where), out)


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, rest = args[0], list(args[1:])
    order = rest.pop(0) if rest else kwargs.get("ord", kwargs.get("p", 2))
    dims = rest.pop(0) if rest else kwargs.get("dim")
    if dims or rest or kwargs.get("keepdim"):
        raise ValueError(f"a norm of {x!r} over some of its dims: take x.full_tensor() first")
    return NormPart.of(x.local, x.home, 2 if order is None else order, kwargs.get("dtype"))


def _random(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw what one process would draw for the whole tensor, and keep the run."""
    x = args[0]
    full = torch.empty(x.home.info.shape, dtype=x.dtype, device=x.local.device)
    func(full, *args[1:], **kwargs)
    x.local.copy_(x.home.cut(full))
    x.home.written(x.local)
    return x


def _equal(a: Tensor, b: Tensor) -> bool:
    """Of the whole tensors; every rank has to ask."""
    full = [x.full_tensor() if isinstance(x, ShardedLeaf) else x for x in (a, b)]
    return torch.equal(*full)
