"""The full parameters of one bucket during one step: a storage that fills and empties."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fsdp.precision import Cast
from fsdp.rooms import Room, empty_room, room_on, room_over
from ragged.buffer import fill_leaves, full_views, gather_into
from ragged.chunks import in_chunks
from ragged.collectives import Pending
from ragged.layout import Bucket
from ragged.mesh import Comm

__all__ = ["Full", "Kept"]


class Collects(Protocol):
    """The step, to which gradients go."""

    def collect(self, full: Full, grads: tuple[Tensor | None, ...]) -> Tensor | None:
        """The gradients of a bucket's leaves are complete."""


class Kept(NamedTuple):
    """Full parameters that stay for the next micro-batch, and the shard that they were gathered from."""

    local: Tensor
    version: int
    cast: Cast
    room: Room


class Full:
    """A bucket's global buffer, and the leaves that are views of it.

    The storage is filled by the collective, emptied with `resize_(0)` after forward and refilled
    in place before backward: what autograd saved are tensors on the same storage, so nothing
    is recomputed or saved twice.

    A shard of another dtype (mixed precision) or on another device (offload) is copied into its own place in the
    buffer, and gathered from there: one cast, no buffer in between.

    Attributes:
      key: the bucket's name in the step's schedule, equal on all ranks; `unit`: that of its unit.
      shard: this rank's shard, as it came in with the tree (it may require grad).
      trainable: gradients are reduced for it; `derived`: they go on through autograd, as the shard was computed.
      cast: dtypes of the buffer and of the gradients, once a call said so.
      uses: calls of gathered functions that hold it right now; `called`: whether there was one.
      budget: bytes up to which it stays filled after forward, beside what was used later.
      alone: this rank's shard is the full buffer, nothing is gathered.
      sole: nothing is reduced either; its gradients are collected, and that is all.
      lasting: it stays filled after its gradients, for the next micro-batch.
      reduced: its gradient is on the way, nothing will read the full parameters again.
      spare: it stays after forward, though backward can't read it (an embedding); `unread`: and so it was freed.
      revisited: it was needed out of turn, to compute something again or for a gradient inside the loss.
    """

    def __init__(
        self,
        key: str,
        unit: str,
        shard: Tensor,
        bucket: Bucket,
        comm: Comm,
        trainable: bool,
        derived: bool = False,
    ) -> None:
        self.key, self.unit, self.shard, self.bucket, self.comm = key, unit, shard, bucket, comm
        self.trainable, self.derived = trainable, derived
        self.cast: Cast | None = None
        self.uses, self.called, self.revisited = 0, False, False
        self.budget = 0.0
        self.version: int | None = None  # of the shard, when it was gathered first
        self.lasting = self.reduced = self.spare = self.unread = self.filled = False
        self.alone = self.sole = False
        self.pending: Pending | None = None
        self.local = shard.detach()
        self.room: Room | None = None
        self._outputs: tuple[Tensor, ...] | None = None

    def prepare(self, cast: Cast, kept: Kept | None = None) -> None:
        """Have a buffer for parameters in this dtype, filled if they were kept.

        Raises:
          ValueError: a call of this step had them in another dtype.
        """
        if self.cast == cast:
            return
        if self.called:
            raise ValueError(
                f"unit {self.unit!r} is gathered in {self.gathers} and again in {cast.gather} (reduced in "
                f"{cast.reduce}) in one step; give the gathered functions that use it one precision"
            )
        if self.room is not None:  # it was started ahead, for another dtype
            self.wait()
            self.empty()
        self.cast = cast
        # A single rank holds everything already: its shard is the global buffer.
        self.alone = self.bucket.ranks == 1 and self._fits(cast)
        if self.alone:
            self.filled = True
        elif self.keeps(kept):
            assert kept is not None
            self.room, self.filled = kept.room, True
        else:
            self.room, self.filled = empty_room(self.bucket, cast.gather, self.comm.device), False

    @property
    def buffer(self) -> Tensor:
        """The full parameters, 1-D."""
        if self.alone:
            return self.local
        assert self.room is not None
        return self.room.buffer

    @property
    def gathers(self) -> torch.dtype:
        """The dtype of the full parameters."""
        assert self.cast is not None
        return self.cast.gather

    @property
    def reduces(self) -> torch.dtype:
        """The dtype of gradients on the wire."""
        assert self.cast is not None
        return self.cast.reduce

    @property
    def nbytes(self) -> int:
        """Of the full parameters."""
        return self.bucket.length * self.gathers.itemsize

    def _fits(self, cast: Cast) -> bool:
        return cast.gather == self.local.dtype and self.local.device == self.comm.device

    def keeps(self, kept: Kept | None) -> bool:
        """Whether what was kept are this shard's full parameters, unchanged since."""
        return (
            kept is not None
            and kept.cast == self.cast
            and kept.version == self.local._version
            and kept.local.shape == self.local.shape
            and kept.local.data_ptr() == self.local.data_ptr()
        )

    def keep(self) -> Kept:
        """Hand the filled buffer on."""
        assert self.filled
        assert self.cast is not None
        assert self.room is not None
        return Kept(self.local, self.local._version, self.cast, self.room)

    def fill(self) -> None:
        """Start the gather."""
        assert not self.filled
        assert self.cast is not None
        if self.version not in (None, self.local._version):
            raise ValueError(
                f"parameters of unit {self.unit!r} were changed between forward and backward, which needs them as they "
                "were; step the optimizer after all backward passes"
            )
        self.version = self.local._version
        self.unread = False
        if self.room is None:
            self.room = empty_room(self.bucket, self.gathers, self.comm.device)
        self.refit()
        shard = self.local
        if not self._fits(self.cast):
            rank = self.comm.rank(self.bucket.ragged)
            shard = self.buffer[self.bucket.bounds(rank) : self.bucket.bounds(rank + 1)]
            shard.copy_(self.local, non_blocking=True)
        self.pending = gather_into(self.buffer, shard, self.bucket, self.comm)

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
        if self.room is not None and not self.alone:
            self.room.buffer.untyped_storage().resize_(0)
            self.filled = False

    def held(self) -> bool:
        """Whether anything but this object refers to the full parameters: otherwise backward can't read them.

        To find out, the leaves are given up, and the contents too, if nothing holds them. A storage's Python object
        lives as long as the storage, whoever holds that: autograd, a closure, a garbage cycle.
        """
        assert self.room is not None
        storage = weakref.ref(self.room.buffer.untyped_storage())
        self.room = self._outputs = None
        found = storage()
        if found is not None:
            self.room = room_over(found, self.bucket, self.gathers)
        return found is not None

    def let_go(self) -> None:
        """Free full parameters that stay after forward, if backward can't read them."""
        if self.filled and not (self.alone or self.lasting or self.derived) and not self.held():
            self.unread, self.filled = True, False

    def find_spare(self) -> None:
        """See whether the next step can let go of what stays after forward in this one."""
        self.spare = self.unread
        if self.filled and self.budget and not (self.alone or self.lasting or self.derived):
            copy = self.buffer.clone()
            self.spare = not self.held()
            if self.spare:
                self.room = room_over(copy.untyped_storage(), self.bucket, self.gathers)

    def anchor(self) -> Tensor | None:
        """The smallest of the full leaves that the step's Gather node handed out."""
        return min(self._outputs or (), key=Tensor.numel, default=None)

    @property
    def address(self) -> int:
        """Of the full storage; 0 while it is empty."""
        return 0 if self.room is None and not self.alone else self.buffer.untyped_storage().data_ptr()

    def leaves(self, step: Collects) -> tuple[Tensor, ...]:
        """Full leaves in the bucket's order; under grad mode the outputs of the step's one Gather node."""
        if not (torch.is_grad_enabled() and self.shard.requires_grad):
            return self._plain()
        if self._outputs is None:
            self._outputs = _Gather.apply(self, step, self.shard)  # type: ignore[no-untyped-call]
        assert self._outputs is not None
        return self._outputs

    def _plain(self) -> tuple[Tensor, ...]:
        """Full leaves without a history."""
        if self.room is None:
            assert self.alone
            self.room = room_on(self.local, self.bucket)
        return self.room.leaves

    def contributions(
        self, grads: tuple[Tensor | None, ...] | None, onto: Tensor | None = None, apart: bool = False
    ) -> Tensor:
        """Gradients of the full leaves as one buffer, in the dtype in which they are reduced. Its padding is zero.

        It lies on the storage that held the parameters, which nothing reads any more, where that fits.

        Args:
          grads: None stands for zeros.
          onto: contributions of earlier micro-batches, which these are added to.
          apart: on storage of its own in any case.
        """
        if onto is not None:
            for view, grad in zip(full_views(onto, self.bucket).values(), grads or (), strict=grads is not None):
                if grad is not None:
                    view.add_(grad)
            self._done(onto)
            return onto
        if self.unread or self.alone or self.lasting or apart or self.reduces != self.gathers:
            buffer = torch.empty(self.bucket.length, dtype=self.reduces, device=self.comm.device)
        else:
            assert self.filled or grads is None
            if grads is None:
                self.refit()
            buffer = self.buffer
        if grads is None:
            return buffer.zero_()
        fill_leaves(buffer, self.bucket, grads)
        self._done(buffer)
        return buffer

    def in_place(self, grads: Sequence[Tensor | None]) -> list[Tensor] | None:
        """Contributions in parts, large gradients where they are; None where that can't be.

        Device tensors travel as a whole, and fp16 is divided in place before it is summed.
        """
        if self.bucket.ranks == 1 or self.comm.device.type != "cpu" or self.reduces == torch.float16:
            return None
        parts = in_chunks(grads, self.bucket, self.reduces)
        if parts is not None and not self.lasting:
            self.empty()
        return parts

    def _done(self, contributions: Tensor) -> None:
        """The gradients are complete: the parameters aren't needed, unless they stay."""
        if not self.lasting and (self.unread or contributions is not self.buffer):
            self.empty()

    def clear(self) -> None:
        """Let go of the autograd graph, which holds this object in turn."""
        self._outputs = None


class _Gather(torch.autograd.Function):
    """Full leaves from a shard; backward hands their gradients to the step, all at once."""

    @staticmethod
    def forward(ctx: Any, full: Full, step: Collects, shard: Tensor) -> tuple[Tensor, ...]:
        # Weak: what the node holds strongly no collector would find, as it leads through C++ back to the node.
        ctx.full, ctx.step = weakref.ref(full), weakref.ref(step)
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in full._plain())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, Tensor | None]:
        full, step = ctx.full(), ctx.step()
        if full is None or step is None:
            raise ValueError(
                "backward came to parameters whose step is over: the graph outlived it (create_graph=True?); use what "
                "is to be differentiated in the loss itself"
            )
        return None, None, step.collect(full, grads)
