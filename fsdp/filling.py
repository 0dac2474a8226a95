"""Which buckets of a step are full, and which come next."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp.buckets import Buckets
from fsdp.full import Full
from fsdp.precision import MixedPrecision
from fsdp.reducing import Carry
from fsdp.schedule import Event, Recorder, Schedule
from ragged.ahead import Ahead
from ragged.buffer import compare
from ragged.mesh import Comm
from ragged.tree import ShardedTree

__all__ = ["Filling"]


class Filling:
    """Gathers a step's buckets: those that are needed now, those of the next call, and no other.

    Attributes:
      depth: how many calls ahead forward gathers run whatever their size (`Ahead`); 0 for none at all.
      hints: trees that the next calls will use, while no schedule is known.
      recorder: order of collectives, None without gradients.
    """

    def __init__(
        self, comm: Comm, buckets: Buckets, schedule: Schedule | None, recorder: Recorder | None, carry: Carry
    ) -> None:
        self.depth = 1
        self.hints: list[ShardedTree] = []
        self._comm, self._buckets, self._schedule, self.recorder = comm, buckets, schedule, recorder
        self._carry = carry
        self._last_call = {} if schedule is None else schedule.last_call
        self._spare: frozenset[str] = frozenset() if schedule is None else schedule.spare
        alone = comm.everyone.size == 1 and comm.device.type == "cpu"  # nothing is on its way for any time
        self._ahead = Ahead(() if schedule is None or alone else schedule.sizes)
        self._warm: dict[str, Full] = {}  # filled in forward, those used last come last

    def enter(self, fulls: Sequence[Full], index: int, precision: MixedPrecision) -> None:
        """A call begins in forward: free what is idle, fill its buckets, and start those of the next."""
        self._free_idle(fulls, index)
        self.ensure(fulls, self._next(index, precision))
        for full in fulls:
            if not full.alone:  # which has no memory of its own
                self._warm.pop(full.key, None)
                self._warm[full.key] = full

    def ensure(self, fulls: Sequence[Full], ahead: Sequence[Full] = ()) -> None:
        """Have buckets filled, and more on their way: all are launched before any is waited for."""
        self.start([*fulls, *ahead])
        for full in fulls:
            full.wait()

    def start(self, fulls: Sequence[Full]) -> None:
        """Launch the gathers of buckets that are neither full nor on their way.

        Raises:
          ValueError: one whose gradient is complete; and on all ranks, if they differ in what they gather.
        """
        new = [full for full in dict.fromkeys(fulls) if not full.filled and full.pending is None]
        if not new:
            return
        for full in new:
            if full.reduced:
                raise ValueError(f"unit {full.key!r} is used again in backward after its gradient was complete")
        if self.recorder is None:  # without a schedule ranks compare what they are about to gather
            for ragged in dict.fromkeys(full.bucket.ragged for full in new):
                buckets = [(full.bucket, full.gathers) for full in new if full.bucket.ragged == ragged]
                compare("gather", buckets, self._comm.group(ragged))
        for full in new:
            if self.recorder is not None:
                self.recorder.issue(Event("gather", full.key, full.bucket, full.gathers))
            full.fill()

    def stay(self, fulls: Sequence[Full]) -> None:
        """Buckets that were filled for a gradient inside forward are full like any other there."""
        self._warm |= {full.key: full for full in fulls}

    def find_spare(self) -> None:
        """After forward: which buckets stay though backward can't read them."""
        for full in self._warm.values():
            full.find_spare()

    def _free_idle(self, fulls: Sequence[Full], index: int) -> None:
        """Empty buckets that no call uses now, but for those that come again, or that a budget keeps."""
        kept = 0
        for other in reversed(self._warm.copy().values()):  # what backward needs first comes first
            if other.uses or other in fulls or self._last_call.get(other.key, -1) >= index:
                continue
            kept += other.nbytes
            if kept > other.budget:
                other.empty()
                del self._warm[other.key]
                kept -= other.nbytes
            elif other.key in self._spare:
                other.let_go()

    def _next(self, index: int, precision: MixedPrecision) -> list[Full]:
        """The buckets of the calls that follow, ready to be filled in the dtypes in which those will want them."""
        if self._schedule is not None:
            calls = self._schedule.calls

            def ready(turn: int) -> bool:  # a derived tree doesn't exist yet
                return all(key in self._buckets for key in calls[turn])

            due = self._ahead.due(index, self.depth, ready)
            ahead = [self._buckets[key] for turn in due for key in calls[turn]]
        else:
            ahead = [full for tree in self.hints[: self.depth] for full in self._buckets.of(tree)]
        for full in ahead:
            known = None if self._schedule is None else self._schedule.casts.get(full.key)
            if full.cast is None:
                full.prepare(known or precision.cast(full.local.dtype), self._carry.kept.get(full.key))
        return ahead

    def clear(self) -> None:
        """Forget them."""
        self._warm.clear()
        self.hints = []
