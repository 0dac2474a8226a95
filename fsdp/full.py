"""The full parameters of one bucket during one step: a storage that fills and empties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ragged.buffer import full_views, gather_into
from ragged.collectives import Pending
from ragged.layout import Bucket
from ragged.mesh import Comm

__all__ = ["Full"]


class Full:
    """A bucket's global buffer, and the leaves that are views of it.

    The storage is filled by the collective, emptied with `resize_(0)` after forward and refilled
    in place before backward: what autograd saved are tensors on the same storage, so nothing
    is recomputed or saved twice. Those tensors are not views in autograd's sense, so a refill
    does not count as an in-place change of them.

    Attributes:
      key: the bucket's name in the step's schedule, equal on all ranks; `unit`: that of its unit.
      shard: this rank's shard, as it came in with the tree (it may require grad).
      trainable: gradients are reduced for it.
      uses: calls of gathered functions that hold it right now.
      keep: it stays filled after forward.
      reduced: its gradient is on the way, nothing will read the full parameters again.
    """

    def __init__(self, key: str, unit: str, shard: Tensor, bucket: Bucket, comm: Comm, trainable: bool) -> None:
        self.key, self.unit, self.shard, self.bucket, self.comm, self.trainable = (
            key,
            unit,
            shard,
            bucket,
            comm,
            trainable,
        )
        self.uses = 0
        self.keep = False
        self.reduced = False
        self.filled = False
        self.pending: Pending | None = None
        self.local = shard.detach()
        self._outputs: dict[str, Tensor] | None = None
        # A single rank holds everything already: its shard is the global buffer.
        self.alone = bucket.ranks == 1
        if self.alone:
            self.buffer, self.filled = self.local, True
        else:
            self.buffer = self.local.new_empty(bucket.length)
        self._raw = {leaf.path: self._alias(leaf.offset, leaf.local_shape) for leaf in bucket.leaves}
        self.empty()

    def _alias(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor on the buffer's storage with a version counter of its own."""
        out = self.buffer.new_empty(0)
        strides, step = [], 1
        for n in reversed(shape):
            strides.append(step)
            step *= max(n, 1)
        with torch.no_grad():
            return out.set_(self.buffer.untyped_storage(), self.buffer.storage_offset() + offset, shape, strides[::-1])

    def fill(self) -> None:
        """Start the gather."""
        assert not self.filled
        self.refit()
        self.pending = gather_into(self.buffer, self.local, self.bucket, self.comm)

    def refit(self) -> None:
        """Give the storage its memory back, with undefined contents."""
        self.buffer.untyped_storage().resize_(self.bucket.length * self.buffer.itemsize)

    def wait(self) -> None:
        """Finish the gather: the full parameters may be read."""
        if self.pending is not None:
            self.pending.wait()
            self.pending, self.filled = None, True

    def empty(self) -> None:
        """Free the memory; the tensors on it stay, without contents."""
        if not self.alone:
            self.buffer.untyped_storage().resize_(0)
            self.filled = False

    def owns(self, x: Tensor) -> bool:
        """Whether a tensor lies on the full storage."""
        mine = self.buffer.untyped_storage().data_ptr()
        return mine != 0 and any(y.untyped_storage().data_ptr() == mine for y in _inner(x))

    def views(self, reduce: Callable[[Full, tuple[Tensor | None, ...]], Tensor | None]) -> dict[str, Tensor]:
        """Full leaves by path; under grad mode the outputs of the step's one Gather node."""
        if not (torch.is_grad_enabled() and self.shard.requires_grad):
            return self._raw
        if self._outputs is None:
            outputs = _Gather.apply(self, reduce, self.shard)  # type: ignore[no-untyped-call]
            self._outputs = dict(zip(self._raw, outputs, strict=True))
        return self._outputs

    def contributions(self, grads: tuple[Tensor | None, ...] | None) -> Tensor:
        """Gradients of the full leaves as one buffer, on the storage that held the parameters.

        Its padding is zero, as the gathered padding was.
        """
        if grads is None:
            if self.alone:
                return torch.zeros_like(self.buffer)
            self.refit()
            return self.buffer.zero_()
        if self.alone:
            buffer = torch.empty_like(self.buffer)
            for start, stop in self.bucket.gaps:
                buffer[start:stop] = 0
        else:
            assert self.filled
            buffer = self.buffer
        for view, grad in zip(full_views(buffer, self.bucket).values(), grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)
        return buffer

    def clear(self) -> None:
        """Let go of the autograd graph, which holds this object in turn."""
        self._outputs = None
        self._raw = {}


def _inner(x: Any) -> Iterator[Tensor]:
    """The tensors that hold a tensor's values: for DTensors and the like those inside, else itself."""
    if hasattr(x, "__tensor_flatten__"):
        for part in (getattr(x, name) for name in x.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):
                yield from _inner(part)
    else:
        yield x


class _Gather(torch.autograd.Function):
    """Full leaves from a shard; backward hands their gradients to the step, all at once."""

    @staticmethod
    def forward(ctx: Any, full: Full, reduce: Any, shard: Tensor) -> tuple[Tensor, ...]:
        ctx.full, ctx.reduce = full, reduce
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in full._raw.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, Tensor | None]:
        full, reduce = ctx.full, ctx.reduce
        del ctx.full, ctx.reduce
        return None, None, reduce(full, grads)
