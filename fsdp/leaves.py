"""`ShardedLeaf`: a parameter of a sharded module, a tensor of the global shape that holds this rank's run of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ragged.layout import Bucket, LeafInfo, contiguous_strides
from ragged.mesh import Comm
from ragged.places import even_slices
from ragged.unsharding import full_leaf

__all__ = ["ShardedLeaf", "Whereabouts"]


class Whereabouts:
    """Where a leaf lies, shared by its parameter, gradient and optimizer states.

    Attributes:
      path: in the sharded module; `info`, `bucket`, `comm`: of its plan.
      storage: address of the parameter's buffer.
      ready: whether it has values (a module made on the meta device has none at first).
    """

    __slots__ = ("bucket", "comm", "counts", "info", "path", "ready", "span", "storage")

    def __init__(self, path: str, info: LeafInfo, bucket: Bucket, comm: Comm, run: Tensor, ready: bool) -> None:
        self.path, self.info, self.bucket, self.comm, self.ready = path, info, bucket, comm, ready
        self.storage = run.untyped_storage().data_ptr()
        self.span = info.span(comm.rank(bucket.ragged))
        replicas = [a for a in comm.axes if a not in bucket.ragged and a not in bucket.even]
        # of equal copies one counts in sums over all ranks
        self.counts = all(comm.coordinate[a] == 0 for a in replicas)

    def of(self, shard: Tensor) -> Tensor:
        """The run in its bucket's shard, a view."""
        start, stop = self.span
        begin = self.info.offset + start - self.bucket.bounds(self.comm.rank(self.bucket.ragged)) if stop > start else 0
        return shard[begin : begin + stop - start]

    def written(self, run: Tensor) -> None:
        """Something was written to a tensor of this place: the parameter itself has values from now on."""
        self.ready = self.ready or (not run.is_meta and run.untyped_storage().data_ptr() == self.storage)
        torch.autograd.graph.increment_version(run)  # below autograd nobody counts

    def cut(self, full: Tensor) -> Tensor:
        """This rank's run of a tensor of the global shape."""
        start, stop = self.span
        return full[even_slices(self.info, self.comm.axes, self.comm.coordinate)].reshape(-1)[start:stop]


class ShardedLeaf(torch.Tensor):
    """A tensor that says the global shape and holds a run: 1-D, possibly empty.

    `module.parameters()` of a module sharded by `fully_shard` are such tensors, and so are their gradients and what
    torch's optimizers keep for them. Operations that treat elements one by one work on the runs: torch's
    element-wise optimizers, `zero_grad`, `nn.init`'s random fills (which draw the whole tensor and keep the run, so
    that ranks with equal seeds get what one process gets). Norms are those of the whole tensor, and
    `torch.nn.utils.clip_grad_norm_` takes one message for all of them. What else looks beyond single elements, such
    as a matrix product, raises a `ValueError`: a run is no matrix.

    Attributes:
      local: the run, a view of the buffer that is gathered.
      home: the place in the plan.

    Example:
      >>> import torch
      >>> from fsdp import fully_shard
      >>> module = fully_shard(torch.nn.Linear(4, 2))
      >>> module.weight.shape, module.weight.to_local().shape
      (torch.Size([2, 4]), torch.Size([8]))
    """

    local: Tensor
    home: Whereabouts

    # as torch's notes on wrapper subclasses have it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: Tensor, where: Whereabouts, requires_grad: bool = False) -> ShardedLeaf:
        shape = where.info.shape
        out: ShardedLeaf = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=contiguous_strides(shape),
            dtype=local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        out.local, out.home = local, where
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from fsdp.leaf_ops import dispatch  # the operations know this class

        return dispatch(func, args, kwargs or {})

    @property
    def data(self) -> ShardedLeaf:
        """The same run without autograd."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ValueError(
            f"{self.home.path!r} is a view of the buffer that is gathered, and can't be put elsewhere by setting "
            ".data; copy into it under torch.no_grad()"
        )

    def to_local(self) -> Tensor:
        """This rank's run, 1-D."""
        return self.local

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank; every rank has to call it."""
        where = self.home
        return full_leaf(self.local.detach(), where.info, where.bucket, where.comm)

    def __repr__(self) -> str:  # type: ignore[override]
        dtype = str(self.dtype).removeprefix("torch.")
        return f"ShardedLeaf({self.home.path!r}, {tuple(self.shape)}, {dtype}, {self.local.numel()} elements here)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            f"{self.home.path!r} is one rank's part of a sharded tensor; save module.state_dict(), which has full "
            "tensors, or use ragged.checkpoint for trees and states"
        )

    def __deepcopy__(self, memo: Any) -> ShardedLeaf:
        """A copy of the run, at the same place."""
        out = ShardedLeaf(self.local.detach().clone(), self.home, self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            out._is_param = True
        memo[id(self)] = out
        return out
