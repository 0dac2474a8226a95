"""One run of a differentiated function: its calls, and the way of backward through them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fsdp.buckets import Buckets
from fsdp.filling import Filling
from fsdp.full import Full
from fsdp.outputs import check_outputs, nodes_of
from fsdp.precision import MixedPrecision
from fsdp.reducing import Carry, Reducer
from fsdp.schedule import Recorder, Schedule
from ragged.ahead import Ahead
from ragged.chunks import address_of, is_freed
from ragged.layout import Bucket
from ragged.mesh import Comm
from ragged.reduction import Reduction
from ragged.tree import ShardedTree

__all__ = ["Policy", "Step", "is_sharded"]


def is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedTree)


class Policy(NamedTuple):
    """How a gathered function treats its buckets.

    Attributes:
      budget: bytes of full parameters, up to which they stay filled after forward.
      precision: None takes the step's.
    """

    budget: float = 0.0
    precision: MixedPrecision | None = None


class _End(NamedTuple):
    """A gathered call that ended: when, its buckets, and whether backward may come to it."""

    tick: int
    keys: tuple[str, ...]
    needed: bool


class Step:
    """The scope that sharded trees carry inside `value_and_grad` (and inside `fold` without grad).

    Forward: a gathered call waits for its buckets, starts those of the next call, and frees
    idle ones of earlier calls. The last call's buckets stay filled for backward, which begins
    with them. Backward: before a call's nodes run its buckets are refilled, and those of the
    call before it are started; a bucket's gradients are reduced as soon as they are complete.

    Autograd runs nodes in the reverse of the order in which they were made, so backward visits calls
    from the last to the first, and a bucket is complete once a call before its first one begins.
    A rank whose loss doesn't reach some call visits it all the same, in its turn, so that
    collectives keep one order on all ranks.

    Attributes:
      comm: the mesh; `recorder`: order of collectives, None without gradients.
      precision: of calls that don't say their own.
      buckets: those that calls gather; `filling`: which are full; `reducer`: what becomes of gradients.
      at_close: called once when the step ends.
    """

    def __init__(
        self,
        comm: Comm,
        schedule: Schedule | None = None,
        recorder: Recorder | None = None,
        how: Callable[[Bucket], Reduction] | None = None,
        precision: MixedPrecision | None = None,
        carry: Carry | None = None,
    ) -> None:
        self.comm, self.recorder = comm, recorder
        self.precision = precision or MixedPrecision()
        self.carry = carry or Carry()
        self.reducer = Reducer(comm, recorder, how, self.carry)
        self.calls: list[tuple[str, ...]] = []
        self.at_close: list[Callable[[], None]] = []
        self.backward = False
        self.ended = False  # backward has been through all of it
        self.closed = False
        self.buckets = Buckets()
        self.filling = Filling(comm, self.buckets, schedule, recorder, self.carry)
        self._clock = 0  # ticks when a call begins and when it ends
        self._ends: list[_End] = []  # calls in the order in which they ended; backward visits them in reverse
        self._first_end: dict[str, int] = {}  # a bucket's first end
        self._visited = 0  # backward has come down to this many ends
        self._ahead = Ahead(())  # of backward
        self._route: list[int] = []  # the ends that backward needs, in the order in which it comes to them
        self._turns: dict[int, int] = {}  # the place of an end in it

    # Forward

    def call(
        self,
        fn: Callable[..., Any],
        first: Any,
        trees: Sequence[ShardedTree],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Policy,
    ) -> Any:
        """Run `fn` on the full parameters of `first`, in which `trees` are the sharded ones."""
        if self.closed:
            raise ValueError(
                "a sharded tree was kept from inside a differentiated function and used after it; "
                "use the tree that was passed to value_and_grad"
            )
        precision = policy.precision or self.precision
        of_trees = [self.buckets.of(tree) for tree in trees]
        fulls = list(dict.fromkeys(full for of_tree in of_trees for full in of_tree))
        self._enter(fulls, precision)
        for full in fulls:
            full.uses += 1
            full.budget = max(full.budget, policy.budget)
            full.lasting |= policy.budget == math.inf and not (self.carry.last or full.derived or full.alone)
        try:
            args, kwargs = precision.inputs((args, kwargs))
            out = precision.outputs(fn(self._substitute(first, of_trees), *args, **kwargs))
        finally:
            for full in fulls:
                full.uses -= 1
        found = check_outputs(out, fulls)
        if not self.backward:
            self._leave(fulls, found)
        return out

    def _leave(self, fulls: Sequence[Full], outputs: Sequence[Tensor]) -> None:
        """The call's outputs lead backward to it."""
        if all(full.sole for full in fulls):
            return
        self._clock += 1
        end = len(self._ends)
        needed = any(full.trainable for full in fulls) or any(x.grad_fn for x in outputs)
        self._ends.append(_End(self._clock, tuple(full.key for full in fulls), needed))
        for full in fulls:
            self._first_end.setdefault(full.key, end)
        for node in nodes_of(outputs):
            node.register_prehook(functools.partial(self._before_backward, end))

    def _enter(self, fulls: Sequence[Full], precision: MixedPrecision) -> None:
        """Have the buckets filled; in forward, also free idle ones and start the next."""
        for full in fulls:
            full.prepare(precision.cast(full.local.dtype), self.carry.kept.get(full.key))
            full.called = True
            full.sole = self.is_sole(full)
        if self.backward:  # recomputation inside a checkpoint
            self._revisit(fulls)
            return
        self._clock += 1
        index = len(self.calls)
        self.calls.append(tuple(full.key for full in fulls))
        self.filling.enter(fulls, index, precision)
        for full in fulls:
            if not full.sole:
                self.reducer.used(full, self._clock)

    def is_sole(self, full: Full) -> bool:
        """Whether nothing is sent for a bucket, neither its parameters nor its gradients."""
        return full.alone and not full.derived and full.reduces == full.local.dtype and self.reducer.spares(full)

    def _revisit(self, fulls: Sequence[Full]) -> None:
        for full in fulls:
            full.revisited = True
        self.filling.ensure(fulls)

    def _substitute(self, first: Any, of_trees: Sequence[Sequence[Full]]) -> Any:
        """`first` with full leaves in place of its sharded trees, whose buckets are given in order."""
        fulls = iter(of_trees)

        def full_tree(tree: Any) -> Any:
            if not isinstance(tree, ShardedTree):
                return tree
            leaves = [x for full in next(fulls) for x in full.leaves(self)]
            return optree.tree_unflatten(tree.selection.structure, [leaves[i] for i in tree.selection.order])

        return full_tree(first) if is_sharded(first) else optree.tree_map(full_tree, first, is_leaf=is_sharded)

    # Backward

    def start_backward(self) -> None:
        self.backward, self._visited = True, len(self._ends)
        self._route = [end for end in reversed(range(len(self._ends))) if self._ends[end].needed]
        self._turns = {end: turn for turn, end in enumerate(self._route)}
        self._ahead = Ahead([sum(full.nbytes for full in self._fulls_of(end)) for end in self._route])
        self.reducer.start()

    def _before_backward(self, end: int, _: Any) -> None:
        if self.closed:
            return
        if self.backward:
            self._come_down(end)
        else:  # a gradient inside the loss, such as a penalty on it
            fulls = self._read_by(end)
            self._revisit(fulls)
            self.filling.stay(fulls)
            if not torch.is_grad_enabled():
                for later in range(end + 1, len(self._ends)):
                    self._leave_call(later, trainable=True)
            else:
                # It will be differentiated itself, by nodes that read the parameters and belong to no call.
                for full in fulls:
                    full.budget = math.inf

    def _come_down(self, end: int) -> None:
        """Backward reaches a call: visit those above it that this rank's loss didn't reach, then it."""
        while self._visited > end:
            if self._visited < len(self._ends):
                self._leave_call(self._visited, trainable=False)
            self._visited -= 1
            self.reducer.above(self._ends[self._visited].tick)
            turn = self._turns.get(self._visited)
            if turn is not None:
                self.filling.ensure(self._read_by(self._visited))
                self.filling.start([full for t in self._ahead.due(turn) for full in self._read_by(self._route[t])])

    def _leave_call(self, end: int, trainable: bool) -> None:
        """Backward has left a call: empty what no call before it reads. Trainable buckets wait for their gradients."""
        for full in self._fulls_of(end):
            over = self._first_end[full.key] >= end and not full.uses
            if (trainable or not full.trainable) and not full.lasting and over:
                full.wait()
                full.empty()

    def _fulls_of(self, end: int) -> list[Full]:
        return [self.buckets[key] for key in self._ends[end].keys]

    def _read_by(self, end: int) -> list[Full]:
        return [full for full in self._fulls_of(end) if not full.reduced and not full.unread]

    def anchors(self) -> list[Tensor]:
        """A full leaf of each bucket that was computed: backward from it reaches the computation on every rank."""
        return [found for full in self.buckets if full.derived and (found := full.anchor()) is not None]

    def collect(self, full: Full, grads: tuple[Tensor | None, ...]) -> Tensor | None:
        """Gradients of a bucket are complete: reduce them, in the one order of all ranks."""
        if full.reduced or not self.backward:
            raise ValueError(
                f"gradients of unit {full.bucket.unit!r} arrive a second time; differentiate with respect to "
                "parameters once per step, by value_and_grad alone"
            )
        if full.sole:
            full.reduced = True
            self.reducer.take(full, grads)
            return None
        if full.derived:  # this rank's loss may not reach its calls
            self._come_down(self._first_end.get(full.key, len(self._ends)))
        if not full.unread:
            self.filling.ensure([full])
        full.reduced = True
        return self.reducer.collect(full, grads, self._lent(full, grads))

    def _lent(self, full: Full, grads: tuple[Tensor | None, ...]) -> bool:
        """Whether some gradient lies where parameters do: a backward may return what it saved."""
        homes = {home.address: home for home in self.buckets if home.address}
        lenders = [homes[at] for at in map(address_of, grads) if at in homes]
        if any(home is not full and home.reduced for home in lenders) or any(map(is_freed, grads)):
            raise ValueError(
                f"a backward returned, as a gradient of unit {full.bucket.unit!r}, a tensor that lies on another "
                "unit's parameters, whose memory was freed or used for gradients since; return a clone() of it"
            )
        return bool(lenders)

    def finish(self) -> None:
        """After backward: visit what is left, zeros for what got no gradient, and the last reduce."""
        self._come_down(0)
        self.reducer.above(-1)
        self.reducer.land()
        kept = {full.key: full.keep() for full in self.buckets if full.lasting and full.filled}
        self.carry.kept.clear()
        self.carry.kept.update(kept)

    # The end

    def course(self, forward: int) -> Schedule:
        """What the step did, for the next one.

        Args:
          forward: how many of its collectives belong to forward.
        """
        assert self.recorder is not None
        casts, nbytes = self.buckets.casts, self.buckets.nbytes
        spare = [full.key for full in self.buckets if full.spare and not full.revisited]
        return Schedule.learn(self.calls, self.recorder.seen, forward, casts, nbytes, spare)

    def settle(self) -> None:
        """Let everything in flight arrive, whatever state the step is in.

        Raises:
          Exception: the first of those that the waits raised, after all of them.
        """
        failed: Exception | None = None
        fulls, reductions = list(self.buckets), self.reducer.unfinished()
        for wait in [full.wait for full in fulls] + [pending.wait for pending in reductions]:
            try:
                wait()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Free everything; trees that carry this scope are dead from now on.

        After an interruption messages may still be on their way: their memory stays.
        """
        self.closed = True
        sending, kept = self.reducer.sending(), self.carry.kept
        for full in self.buckets:
            if full.pending is None and full not in sending and not full.keeps(kept.get(full.key)):
                full.empty()
            full.clear()
        for done in self.at_close:
            done()
        self.at_close = []
        self.buckets.clear()
        self.filling.clear()
        self.reducer.clear()
