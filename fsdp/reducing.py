"""The order of a step's reductions: a bucket's gradients leave when they are complete, and in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.full import Full, Kept
from fsdp.schedule import Event, Recorder
from ragged.ahead import AHEAD
from ragged.collectives import Pending, all_reduce
from ragged.layout import Bucket
from ragged.mesh import Comm
from ragged.reduction import Reduction, reduce_buffer

__all__ = ["Carry", "Held", "Reducer", "flush"]


class Held(NamedTuple):
    """This rank's contributions to a bucket, not reduced yet.

    Attributes:
      buffer: as long as the global buffer; None stands for zeros.
      dtype: what they are reduced in; `into`: the shard that the result is for.
    """

    bucket: Bucket
    buffer: Tensor | None
    dtype: torch.dtype
    into: Tensor


class _Ready(NamedTuple):
    """Complete contributions: one buffer, or gradients where they are, and the versions of those."""

    parts: list[Tensor]
    versions: list[int] = []  # noqa: RUF012  # never written to


@dataclass
class Carry:
    """What one micro-batch hands on to the next.

    Attributes:
      sync: whether gradients are reduced in this one, with all that is held.
      last: whether none follows, so that nothing has to stay filled.
      held: contributions that were not reduced, by bucket key.
      kept: full parameters that stayed.
    """

    sync: bool = True
    last: bool = True
    held: MutableMapping[str, Held] = field(default_factory=dict)
    kept: dict[str, Kept] = field(default_factory=dict)


def flush(
    carry: Carry,
    how: Callable[[Bucket], Reduction],
    comm: Comm,
    announce: Callable[[Event], None] = lambda event: None,
) -> dict[str, Tensor]:
    """Reduce all contributions that are still held, in one order on all ranks: shards by bucket key."""
    out = {}
    for key in sorted(carry.held):
        bucket, buffer, dtype, into = carry.held.pop(key)
        if buffer is None:
            buffer = torch.zeros(bucket.length, dtype=dtype, device=comm.device)
        announce(Event("reduce", key, bucket, dtype))
        out[key] = reduce_buffer(buffer, bucket, comm, how(bucket), into.dtype).wait().to(into.device)
    return out


class Reducer:
    """Reduces buckets from the one first used last to the one first used first, on every rank.

    Attributes:
      grads: reduced gradients by bucket key, in the dtype of the shards.
      how: which axes a bucket is summed over.
    """

    def __init__(
        self, comm: Comm, recorder: Recorder | None, how: Callable[[Bucket], Reduction] | None, carry: Carry
    ) -> None:
        self.comm, self.recorder, self.how, self.carry = comm, recorder, how, carry
        self.grads: dict[str, Tensor] = {}
        self._uses: list[tuple[int, Full]] = []  # trainable buckets by the tick of their first use
        self._order: list[tuple[int, Full]] = []  # those that are still to be reduced
        self._known: set[str] = set()
        self._ready: dict[str, _Ready] = {}
        self._flying: deque[tuple[Full, Pending, _Ready]] = deque()  # reduces of one unit, or of several small ones
        self._afloat = 0  # bytes of the buffers that they are sent from
        self._halves = 0  # of them that go on over replicas once they have landed

    def used(self, full: Full, tick: int) -> None:
        """A call uses a bucket; its first one counts."""
        if full.trainable and full.key not in self._known:
            self._known.add(full.key)
            self._uses.append((tick, full))

    def start(self) -> None:
        """Backward begins, not necessarily for the first time."""
        self.grads = {}
        self._order = list(self._uses)
        self._ready.clear()
        for _, full in self._uses:
            full.reduced = False

    def collect(self, full: Full, grads: tuple[Tensor | None, ...], lent: bool = False) -> Tensor | None:
        """Gradients of a bucket are complete.

        Args:
          lent: some of them lie where parameters do, and have to leave before these are freed.
        """
        if full.derived:
            return self._collect_now(full, grads, lent)
        self._ready[full.key] = self._contributions(full, grads, lent)
        self._reduce_ready()
        return None

    def take(self, full: Full, grads: tuple[Tensor | None, ...]) -> None:
        """Gradients of a bucket for which nothing is sent are complete."""
        assert self.how is not None
        buffer, divisor = full.contributions(grads), self.how(full.bucket).divisor
        self.grads[full.key] = buffer.div_(divisor) if divisor > 1 else buffer

    def _contributions(self, full: Full, grads: tuple[Tensor | None, ...] | None, lent: bool = False) -> _Ready:
        held = self.carry.held.pop(full.key, None)
        onto = None if held is None else held.buffer
        if grads is not None and onto is None and self.carry.sync and not lent:
            parts = full.in_place(grads)
            if parts is not None:
                return _Ready(parts, [x._version for x in parts])
        return _Ready([full.contributions(grads, onto, apart=lent or not self.carry.sync)])

    def _collect_now(self, full: Full, grads: tuple[Tensor | None, ...], lent: bool) -> Tensor:
        """The gradient of a computed shard goes on through autograd, so it can't wait.

        It is a sum over the ragged axes. The sum over replicas and the division come at the end (`direct`), once
        for all that reaches a leaf this way.
        """
        while self._order[-1][1] is not full:
            self._reduce_last()
        self._order.pop()
        buffer = full.contributions(grads, apart=lent)
        self._announce(full)
        pending = reduce_buffer(buffer, full.bucket, full.comm, Reduction((), 1), full.local.dtype)
        out = pending.wait().to(full.local.device)
        full.empty()
        return out

    def above(self, tick: int) -> None:
        """Reduce buckets first used after a tick that are still open: they get no gradient any more."""
        while self._order and self._order[-1][0] > tick:
            self._reduce_last()

    def _reduce_last(self) -> None:
        full = self._order[-1][1]
        if full.key not in self._ready:
            full.wait()
            full.reduced = True
            held = self.carry.held.get(full.key)
            if not self.carry.sync and (held is None or held.buffer is None):
                self._hold(full, None)
                return
            self._ready[full.key] = self._contributions(full, None)
        self._reduce_ready()

    def _hold(self, full: Full, buffer: Tensor | None) -> None:
        self._order.pop()
        self.carry.held[full.key] = Held(full.bucket, buffer, full.reduces, full.local)
        if not full.lasting:
            full.empty()

    def _reduce_ready(self) -> None:
        """Launch what is complete, as long as it is next in order; one unit stays in flight, or several small ones."""
        assert self.how is not None
        while self._order and self._order[-1][1].key in self._ready:
            full = self._order[-1][1]
            ready = self._ready.pop(full.key)
            if not self.carry.sync:
                self._hold(full, ready.parts[0])
                continue
            self._order.pop()
            self._announce(full)
            how = self.how(full.bucket)
            parts = ready.parts if ready.versions else ready.parts[0]
            pending = reduce_buffer(parts, full.bucket, full.comm, how, full.local.dtype)
            self._flying.append((full, pending, ready))
            self._afloat += full.nbytes
            self._halves += self._goes_on(full)

    def _goes_on(self, full: Full) -> bool:
        assert self.how is not None
        return self.comm.group(self.how(full.bucket).across).size > 1

    def spares(self, full: Full) -> bool:
        """Whether gradients of a bucket that one rank holds are whole there: nobody has a replica of it."""
        return self.how is not None and not self._goes_on(full)

    def _announce(self, full: Full) -> None:
        # The second half of a reduction starts when it lands. A rank that fails takes part in one collective after
        # the other, and would wait for it while this rank waits for a later gather: so such units fly alone.
        while self._flying and self._flying[0][0].unit != full.unit:
            if self._afloat + full.nbytes <= AHEAD and not self._halves:
                break
            self._land_first()
        if self.recorder is not None:
            kind = "scatter" if full.derived else "reduce"
            self.recorder.issue(Event(kind, full.key, full.bucket, full.reduces))

    def land(self) -> None:
        """Wait for the reductions in flight."""
        while self._flying:
            self._land_first()

    def _land_first(self) -> None:
        full, pending, ready = self._flying[0]
        self.grads[full.key] = pending.wait().to(full.local.device)
        if ready.versions and ready.versions != [x._version for x in ready.parts]:
            raise ValueError(
                f"a gradient of unit {full.unit!r} was changed in place after backward returned it, on its way to "
                "other ranks; return a tensor that nothing writes to any more, such as its clone()"
            )
        self._flying.popleft()
        self._afloat -= full.nbytes
        self._halves -= self._goes_on(full)
        if not full.lasting:
            full.empty()

    def direct(self, tensor: Tensor, bucket: Bucket, grad: Tensor | None, derived: bool) -> Tensor | None:
        """The gradient that reached a local tensor itself, not through its own gather: mean or sum it.

        Args:
          derived: some gathered tree was computed in the loss.

        Raises:
          ValueError: replicas would have to be summed, and ranks can't know whether they all got here.
        """
        assert self.how is not None
        how = self.how(bucket)
        group = self.comm.group(how.across)
        if group.size > 1 and derived and tensor.requires_grad:
            if self.recorder is not None:
                self.recorder.issue(Event("sum", bucket.name, bucket, tensor.dtype))
            grad = all_reduce(torch.zeros_like(tensor) if grad is None else grad.clone(), group).wait()
        elif group.size > 1 and grad is not None:
            raise ValueError(
                f"the loss uses local tensors of unit {bucket.unit!r} directly, and {how.across} holds replicas of "
                "it; use it in a gathered function (for weight decay: in the optimizer)"
            )
        return None if grad is None else grad / how.divisor

    def unfinished(self) -> list[Pending]:
        """Reductions that nobody waited for yet."""
        return [pending for _, pending, _ in self._flying]

    def sending(self) -> list[Full]:
        """Buckets whose memory messages may still be read from."""
        return [full for full, pending, _ in self._flying if not pending.done]

    def clear(self) -> None:
        """Let go of everything but the results."""
        self._uses.clear()
        self._order.clear()
        self._ready.clear()
