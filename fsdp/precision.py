"""Mixed precision: which dtype parameters are computed in, and which one gradients travel in."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ragged.tree import ShardedTree

__all__ = ["Cast", "MixedPrecision", "as_precision", "cast_floats"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Cast(NamedTuple):
    """What a bucket is gathered in, and what its gradients are reduced in."""

    gather: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class MixedPrecision:
    """Master parameters in one dtype, computation in another.

    Shards stay what they are (say fp32). They are cast once, on their way into the gather buffer, so functions see
    full parameters in `param_dtype` and nothing is cast inside them. Gradients travel in `reduce_dtype` and arrive in
    the dtype of the shards. Leaves that are not real floating point numbers are left alone.

    Attributes:
      param_dtype: of the full parameters; None leaves them as they are.
      reduce_dtype: of gradients on the wire and in their sums; None means `param_dtype`. Sums of 16-bit gradients
        over ragged axes are taken in fp32 on the CPU and rounded once.
      output_dtype: what floating point outputs of gathered functions are cast to; None leaves them.
      cast_forward_inputs: whether floating point tensors among the arguments are cast to `param_dtype`.

    Raises:
      ValueError: a dtype that is no real floating point type of at least 16 bits.

    Example:
      >>> import torch
      >>> from fsdp import MixedPrecision, gathered
      >>> from ragged import P, make_mesh, shard
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> params = shard({"w": torch.ones(2, 2)}, mesh, P(ragged="fsdp"))
      >>> policy = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
      >>> gathered(lambda p, x: x @ p["w"], precision=policy)(params, torch.ones(2)).dtype
      torch.bfloat16

    Source: the fields of FSDP2's `MixedPrecisionPolicy`, which is accepted in its place.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in _FLOATS:
                raise ValueError(f"MixedPrecision({name}={dtype!r}): expected one of {[*map(str, _FLOATS)]}, or None")

    def cast(self, dtype: torch.dtype) -> Cast:
        """How a bucket of some dtype is gathered and reduced."""
        if dtype not in _FLOATS:
            return Cast(dtype, dtype)
        gather = self.param_dtype or dtype
        return Cast(gather, self.reduce_dtype or gather)

    def inputs(self, x: Any) -> Any:
        """Arguments of a function, cast as the policy says."""
        return cast_floats(x, self.param_dtype) if self.cast_forward_inputs else x

    def outputs(self, x: Any) -> Any:
        """Results of a function, cast as the policy says."""
        return cast_floats(x, self.output_dtype)


def as_precision(policy: Any) -> MixedPrecision:
    """A policy of ours from ours, None (nothing is cast), or an object with FSDP2's fields.

    Raises:
      ValueError: something else.
    """
    if policy is None:
        return MixedPrecision()
    if isinstance(policy, MixedPrecision):
        return policy
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in fields):
        raise ValueError(f"precision={policy!r}: expected a MixedPrecision, e.g. MixedPrecision(torch.bfloat16)")
    return MixedPrecision(*(getattr(policy, name) for name in fields))


def cast_floats(x: Any, dtype: torch.dtype | None) -> Any:
    """A pytree with its real floating point tensors in another dtype; sharded trees in it stay as they are."""
    if dtype is None:
        return x

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.dtype in _FLOATS else leaf
        if isinstance(leaf, Mapping) and isinstance(leaf, MutableMapping):  # such as Hugging Face's outputs
            out = copy.copy(leaf)
            for key in leaf:
                out[key] = cast_floats(leaf[key], dtype)
            return out
        return leaf

    return optree.tree_map(cast, x, is_leaf=lambda leaf: isinstance(leaf, ShardedTree))
