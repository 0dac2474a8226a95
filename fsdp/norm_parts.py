"""Norms of sharded leaves: every rank's share until somebody looks, then one message for all of them."""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor

from ragged.collectives import all_reduce
from ragged.mesh import Comm

__all__ = ["NormPart"]


class NormPart(torch.Tensor):
    """The norm of one sharded leaf, or several stacked, of which this rank knows its share.

    `torch.stack` of such norms and the norm of the stack stay shares until the last, which sends one message: so
    `torch.nn.utils.clip_grad_norm_` takes one for all parameters. Anything else first adds up what it is given.
    """

    share: Tensor
    order: float
    comm: Comm

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, share: Tensor, order: float, comm: Comm) -> NormPart:
        out: NormPart = torch.Tensor._make_wrapper_subclass(cls, share.shape, dtype=share.dtype, device=share.device)
        out.share, out.order, out.comm = share, order, comm
        return out

    @staticmethod
    def of(run: Tensor, where: Any, order: Any, dtype: torch.dtype | None = None) -> NormPart:
        """The norm of a leaf of which this rank has a run.

        Raises:
          ValueError: an order that isn't above 0.
        """
        order = float(order)
        if not order > 0:
            raise ValueError(f"norm of order {order} of {where.path!r}: expected a number above 0, or math.inf")
        if run.numel():
            share = torch.linalg.vector_norm(run.detach(), order, dtype=dtype)
        else:
            share = torch.zeros((), dtype=dtype or run.dtype.to_real(), device=run.device)
        if not where.counts:  # a copy that isn't finite has its say: all ranks must learn of it
            share = torch.where(share.isfinite(), torch.zeros_like(share), share)
        return NormPart(share, order, where.comm)

    def total(self) -> Tensor:
        """The norms, equal on all ranks."""
        return _reduced(self.share, self.order, self.comm)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given: Any = (args, kwargs)
        parts: list[NormPart] = [x for x in optree.tree_leaves(given) if isinstance(x, NormPart)]
        first = parts[0]
        alone = all(isinstance(x, NormPart) for x in optree.tree_leaves(args) if isinstance(x, Tensor))
        alike = alone and all(x.order == first.order and x.comm.mesh == first.comm.mesh for x in parts)
        if name in ("stack", "_to_copy", "detach", "alias") and alike:
            shares: Any = optree.tree_map(lambda x: x.share if isinstance(x, NormPart) else x, given)
            return NormPart(func(*shares[0], **shares[1]), first.order, first.comm)
        if name == "linalg_vector_norm" and alike and len(args) <= 2:
            order = float(args[1]) if len(args) == 2 else 2.0
            if order == first.order:
                return _reduced(torch.linalg.vector_norm(first.share, order), order, first.comm)
        full: Any = optree.tree_map(lambda x: x.total() if isinstance(x, NormPart) else x, given)
        return func(*full[0], **full[1])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"NormPart({self.share}, a share of norms of order {self.order})"


def _reduced(share: Tensor, order: float, comm: Comm) -> Tensor:
    """Shares of all ranks as one norm."""
    if order == math.inf:
        # a maximum that is NaN on one rank must be NaN on all, which the backend's max doesn't promise
        message = torch.stack((share.nan_to_num(posinf=math.inf), share.isnan().to(share.dtype)))
        message = all_reduce(message.double(), comm.everyone, "max").wait()
        out = torch.where(message[1] > 0, math.nan, message[0])
    else:
        out = all_reduce(share.double().pow(order), comm.everyone).wait().pow(1 / order)
    return out.to(share.dtype)
