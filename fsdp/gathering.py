"""`gathered`: a function of full parameters becomes a function of sharded trees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import optree
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp.dtensors import of_dtensors
from fsdp.precision import MixedPrecision, as_precision, cast_floats
from fsdp.step import Policy, Step
from ragged.memory import as_budget
from ragged.tree import ShardedTree, sharded_trees

__all__ = ["call_gathered", "gathered", "policy_of", "rematerialized"]

T = TypeVar("T")
Args = ParamSpec("Args")


@overload
def gathered(
    fn: Callable[Args, T],
    *,
    reshard_after_forward: bool | int = True,
    remat: bool = False,
    precision: Any = None,
    as_dtensor: bool = False,
) -> Callable[Args, T]: ...
@overload
def gathered(
    fn: None = None,
    *,
    reshard_after_forward: bool | int = True,
    remat: bool = False,
    precision: Any = None,
    as_dtensor: bool = False,
) -> Callable[[Callable[Args, T]], Callable[Args, T]]: ...
def gathered(
    fn: Any = None,
    *,
    reshard_after_forward: bool | int = True,
    remat: bool = False,
    precision: Any = None,
    as_dtensor: bool = False,
) -> Any:
    """Let `fn(params, *args)` take sharded trees: gathered before it, freed after it.

    Sharded trees anywhere in the first argument must be whole units. `fn` gets their full
    tensors, views of the gathered buffers: nothing is copied. Inside `value_and_grad` they are
    refilled before the backward of `fn`, which is not run again, and their gradients are
    reduce-scattered. A plain tree passes through, so `fn` also runs unsharded.

    Args:
      reshard_after_forward: False keeps the full parameters until backward: more memory, one
        gather less. A number of bytes keeps those of the last units that fit into it, which backward needs first.
        The unit that was used last always stays. What stays is freed all the same, from the second step on, if
        nothing refers to it after forward: an embedding, kept, costs one gather and no memory.
      remat: recompute the activations of `fn` in backward instead of keeping them (`torch.utils.checkpoint`). The
        parameters are gathered for backward anyway, so this takes no further gather.
      precision: a `MixedPrecision`: dtypes of full parameters, of gradients on the wire, and of the result. None
        takes that of `value_and_grad`, which concerns sharded trees only. Given here, it casts plain trees too.
      as_dtensor: hand `fn` the parameters as `DTensor`s on the same memory, over the axes that cut some leaf of
        the plan evenly (`mesh["tp"]`): `Shard(dim)` where they cut a leaf, `Replicate` where not. Then torch's
        operators and `parallelize_module` plans do the communication of tensor parallelism, and gradients come
        back reduced over these axes (`sum_axes` doesn't name them). Such an axis that is ragged for other
        leaves is a data axis by default: give `data_axes` without it. With no such axis they stay plain tensors.

    Raises:
      ValueError: a negative number of bytes; a tree that covers a part of a unit (naming the missing leaf, and the
        units= to plan with); an output that is a view of a parameter; a result that requires grad outside
        `value_and_grad`; with `as_dtensor` what `to_dtensor` refuses too.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, shard
      >>> from fsdp import gathered
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> params = shard({"w": torch.eye(2), "b": torch.ones(2)}, mesh, P(ragged="fsdp"))
      >>> linear = gathered(lambda p, x: x @ p["w"] + p["b"])
      >>> linear(params, torch.ones(1, 2)).tolist()
      [[2.0, 2.0]]

      Tensor parallelism by torch's own operators:

      >>> from torch.distributed.tensor import DTensor, Replicate
      >>> mesh = make_mesh((1, -1), ("fsdp", "tp"), device_type="cpu")
      >>> params = shard({"w": torch.eye(2)}, mesh, P(None, "tp", ragged="fsdp"))
      >>> @gathered(as_dtensor=True)
      ... def columns(p, x):
      ...     x = DTensor.from_local(x, p["w"].device_mesh, [Replicate()])
      ...     return (x @ p["w"]).full_tensor()
      >>> columns(params, torch.ones(1, 2)).tolist()
      [[1.0, 1.0]]

    Source: arXiv 2602.22437, section 3; FSDP2's schedule of gathers.
    """
    policy = policy_of(reshard_after_forward, precision)
    if fn is None:
        return functools.partial(
            gathered,
            reshard_after_forward=reshard_after_forward,
            remat=remat,
            precision=policy.precision,
            as_dtensor=as_dtensor,
        )
    inner = rematerialized(fn) if remat else fn

    @functools.wraps(fn)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        return call_gathered(of_dtensors(inner, first) if as_dtensor else inner, first, args, kwargs, policy)

    return call


def policy_of(reshard_after_forward: bool | int, precision: Any) -> Policy:
    """What `gathered` makes of its options.

    Raises:
      ValueError: as `gathered`.
    """
    return Policy(as_budget(reshard_after_forward), None if precision is None else as_precision(precision))


def rematerialized(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose activations are computed again in backward."""
    return functools.partial(checkpoint, fn, use_reentrant=False)


def call_gathered(fn: Callable[..., Any], first: Any, args: Any, kwargs: Any, policy: Policy) -> Any:
    """One call of a gathered function."""
    trees = [first] if isinstance(first, ShardedTree) else sharded_trees(first)
    if not trees:
        return _plain(fn, first, args, kwargs, policy.precision)
    scopes = [tree.scope for tree in trees if tree.scope is not None]
    if scopes:
        if any(tree.scope is not scopes[0] for tree in trees):
            raise ValueError(
                "a gathered function got a sharded tree that did not come in through the arguments of "
                "value_and_grad beside one that did; pass it as an argument too"
            )
        return scopes[0].call(fn, first, trees, args, kwargs, policy)
    _refuse_grad((first, args, kwargs))
    step = Step(trees[0].plan.bound())
    try:
        out = step.call(fn, first, trees, args, kwargs, policy)
    finally:
        step.settle()
        step.close()
    _refuse_grad(out)
    return out


def _plain(fn: Any, first: Any, args: Any, kwargs: Any, precision: MixedPrecision | None) -> Any:
    """Without sharded trees there is nothing to gather, but dtypes are the same."""
    if precision is None:
        return fn(first, *args, **kwargs)
    args, kwargs = precision.inputs((args, kwargs))
    return precision.outputs(fn(cast_floats(first, precision.param_dtype), *args, **kwargs))


def _refuse_grad(tree: Any) -> None:
    """Without a step nobody would refill the parameters for backward."""
    if not torch.is_grad_enabled():
        return
    leaves = optree.tree_leaves(tree)  # a sharded tree's leaves are its buffers
    if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        raise ValueError(
            "a gathered function can only be differentiated inside value_and_grad (or fully_shard): call it "
            "there, passing the sharded tree as an argument, or under torch.no_grad()"
        )
