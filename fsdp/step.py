"""One run of a differentiated function: which buckets are full, what is in flight, what comes next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fsdp.full import Full
from fsdp.outputs import check_outputs
from fsdp.schedule import Event, Recorder, Schedule
from ragged.buffer import compare
from ragged.collectives import Pending, all_reduce
from ragged.layout import Bucket
from ragged.mesh import Comm
from ragged.reduction import Reduction, reduce_buffer
from ragged.tree import ShardedTree, sharded_trees

__all__ = ["Step", "is_sharded"]


def is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedTree)


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
      depth: how many calls ahead forward gathers run.
      hints: trees that the next calls will use, while no schedule is known.
    """

    def __init__(
        self,
        comm: Comm,
        schedule: Schedule | None = None,
        recorder: Recorder | None = None,
        how: Callable[[Bucket], Reduction] | None = None,
    ) -> None:
        self.comm, self.schedule, self.recorder, self.how = comm, schedule, recorder, how
        self.last_call = {} if schedule is None else schedule.last_call
        self.calls: list[tuple[str, ...]] = []
        self.grads: dict[str, Tensor] = {}
        self.depth = 1
        self.hints: list[ShardedTree] = []
        self.backward = False
        self.closed = False
        self._by_tensor: dict[int, Full] = {}
        self._by_key: dict[str, Full] = {}
        self.derived = False  # some gathered tree was computed in the loss
        self._clock = 0  # ticks when a call begins and when it ends
        self._ends: list[_End] = []  # calls in the order in which they ended; backward visits them in reverse
        self._order: list[tuple[int, Full]] = []  # trainable buckets by the tick of their first use
        self._visited = 0  # backward has come down to this many ends
        self._ready: dict[str, Tensor] = {}
        self._flying: list[tuple[Full, Pending]] = []  # reduces of one unit

    # Trees and buckets

    def register(self, tree: ShardedTree, name: str, trainable: bool) -> None:
        """Know a tree's whole buckets by name, so that they can be started ahead."""
        for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
            if piece.whole:
                learns = trainable and tensor.requires_grad
                self._add(name, tensor, piece.bucket, tree.plan.bound(), learns)

    def _add(self, name: str, tensor: Tensor, bucket: Bucket, comm: Comm, trainable: bool) -> Full:
        key = f"{name}{bucket.name}"
        full = Full(key, f"{name}{bucket.unit}", tensor, bucket, comm, trainable)
        self._by_tensor[id(tensor)] = self._by_key[key] = full
        return full

    def _fulls(self, tree: ShardedTree) -> list[Full]:
        """The buckets of a tree, which must be whole."""
        tree.require_whole_buckets("a gathered function")
        out = []
        for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
            full = self._by_tensor.get(id(tensor))
            if full is None:
                name = f"derived {len(self._by_key)}: "
                self.derived = True
                full = self._add(name, tensor, piece.bucket, tree.plan.bound(), tensor.requires_grad)
            out.append(full)
        return out

    def key_of(self, tensor: Tensor) -> str:
        """The name under which a tensor was registered, "" if it was not."""
        full = self._by_tensor.get(id(tensor))
        return "" if full is None else full.key

    # Forward

    def call(
        self, fn: Callable[..., Any], first: Any, args: tuple[Any, ...], kwargs: dict[str, Any], keep: bool
    ) -> Any:
        """Run `fn` on the full parameters of the trees in `first`."""
        if self.closed:
            raise ValueError(
                "a sharded tree was kept from inside a differentiated function and used after it; "
                "use the tree that was passed to value_and_grad"
            )
        fulls = list({f.key: f for tree in sharded_trees(first) for f in self._fulls(tree)}.values())
        self._enter(fulls)
        for full in fulls:
            full.uses += 1
            full.keep |= keep
        try:
            out = fn(self._substitute(first), *args, **kwargs)
        finally:
            for full in fulls:
                full.uses -= 1
        found = check_outputs(out, fulls)
        if not self.backward:
            self._leave(fulls, found)
        return out

    def _leave(self, fulls: Sequence[Full], outputs: Sequence[Tensor]) -> None:
        """The call's outputs lead backward to it."""
        self._clock += 1
        end = len(self._ends)
        needed = any(full.trainable for full in fulls) or any(x.grad_fn for x in outputs)
        self._ends.append(_End(self._clock, tuple(full.key for full in fulls), needed))
        for x in outputs:
            # An in-place change of a view gives it a new history from its base on, past its own node.
            for node in {x.grad_fn, x._base.grad_fn if x._base is not None else None} - {None}:
                assert node is not None
                node.register_prehook(functools.partial(self._before_backward, end))

    def _enter(self, fulls: Sequence[Full]) -> None:
        """Have the buckets filled; in forward, also free idle ones and start the next."""
        if self.backward:  # recomputation inside a checkpoint
            self._ensure(fulls)
            return
        self._clock += 1
        index = len(self.calls)
        self.calls.append(tuple(full.key for full in fulls))
        for other in self._by_key.values():
            idle = other.filled and not other.uses and not other.keep and other not in fulls
            if idle and self.last_call.get(other.key, -1) < index:
                other.empty()
        self._ensure(fulls, self._next(index))
        known = {full.key for _, full in self._order}
        self._order += [(self._clock, full) for full in fulls if full.trainable and full.key not in known]

    def _ensure(self, fulls: Sequence[Full], ahead: Sequence[Full] = ()) -> None:
        """Have buckets filled, and more on their way: all are launched before any is waited for."""
        self._start([*fulls, *ahead])
        for full in fulls:
            full.wait()

    def _start(self, fulls: Sequence[Full]) -> None:
        new = [full for full in dict.fromkeys(fulls) if not full.filled and full.pending is None]
        for full in new:
            if full.reduced:
                raise ValueError(f"unit {full.key!r} is used again in backward after its gradient was complete")
        if self.recorder is None:  # without a schedule ranks compare what they are about to gather
            for ragged in dict.fromkeys(full.bucket.ragged for full in new):
                buckets = [(full.bucket, full.local.dtype) for full in new if full.bucket.ragged == ragged]
                compare("gather", buckets, self.comm.group(ragged))
        for full in new:
            if self.recorder is not None:
                self.recorder.issue(Event("gather", full.key, full.bucket, full.local.dtype))
            full.fill()

    def _next(self, index: int) -> list[Full]:
        """The buckets of the calls that follow."""
        if self.schedule is not None:
            calls = self.schedule.calls[index + 1 : index + 1 + self.depth]
            # a derived tree doesn't exist yet
            return [self._by_key[key] for call in calls for key in call if key in self._by_key]
        return [full for tree in self.hints[: self.depth] for full in self._fulls(tree)]

    def _substitute(self, first: Any) -> Any:
        def full_tree(tree: Any) -> Any:
            if not isinstance(tree, ShardedTree):
                return tree
            views: dict[str, Tensor] = {}
            for full in self._fulls(tree):
                views |= full.views(self._collect)
            return optree.tree_unflatten(tree.selection.structure, [views[p] for p in tree.paths])

        return optree.tree_map(full_tree, first, is_leaf=is_sharded)

    # Backward

    def start_backward(self) -> None:
        self.backward, self._visited = True, len(self._ends)

    def _before_backward(self, end: int, _: Any) -> None:
        if self.closed:
            return
        if self.backward:
            self._come_down(end)
        else:  # a gradient inside the loss, such as a penalty on it
            fulls = self._fulls_of(end)
            self._ensure(fulls)
            if torch.is_grad_enabled():
                # It will be differentiated itself, by nodes that read the parameters and belong to no call.
                for full in fulls:
                    full.keep = True

    def _come_down(self, end: int) -> None:
        """Backward reaches a call: visit those above it that this rank's loss didn't reach, then it."""
        while self._visited > end:
            self._visited -= 1
            self._reduce_above(self._ends[self._visited].tick)
            if self._ends[self._visited].needed:
                self._ensure([f for f in self._fulls_of(self._visited) if not f.reduced])
                before = next((i for i in range(self._visited - 1, -1, -1) if self._ends[i].needed), None)
                if before is not None:
                    self._start([full for full in self._fulls_of(before) if not full.reduced])

    def _fulls_of(self, end: int) -> list[Full]:
        return [self._by_key[key] for key in self._ends[end].keys]

    def _collect(self, full: Full, grads: tuple[Tensor | None, ...]) -> Tensor | None:
        """Gradients of a bucket are complete: reduce them, in the one order of all ranks."""
        assert self.how is not None
        if full.reduced or not self.backward:
            raise ValueError(
                f"gradients of unit {full.bucket.unit!r} arrive a second time; differentiate with respect to "
                "parameters once per step, by value_and_grad alone"
            )
        self._ensure([full])
        full.reduced = True
        if full.shard.grad_fn is not None:
            return self._collect_now(full, grads)
        self._ready[full.key] = full.contributions(grads)
        self._reduce_ready()
        return None

    def _collect_now(self, full: Full, grads: tuple[Tensor | None, ...]) -> Tensor:
        """The gradient of a computed shard goes on through autograd, so it can't wait.

        It is a sum over the ragged axes. The sum over replicas and the division come at the end (`direct`), once
        for all that reaches a leaf this way.
        """
        assert self.how is not None
        while self._order[-1][1] is not full:
            self._reduce_last()
        self._order.pop()
        buffer = full.contributions(grads)
        self._issue_reduce(full)
        out = reduce_buffer(buffer, full.bucket, full.comm, Reduction((), 1)).wait()
        full.empty()
        return out

    def _reduce_above(self, tick: int) -> None:
        """Reduce buckets first used after a tick that are still open: they get no gradient any more."""
        while self._order and self._order[-1][0] > tick:
            self._reduce_last()

    def _reduce_last(self) -> None:
        last = self._order[-1][1]
        if last.key not in self._ready:
            self._ready[last.key] = self._zeros(last)
        self._reduce_ready()

    def direct(self, tensor: Tensor, bucket: Bucket, grad: Tensor | None) -> Tensor | None:
        """The gradient that reached a local tensor itself, not through its own gather: mean or sum it.

        Raises:
          ValueError: replicas would have to be summed, and ranks can't know whether they all got here.
        """
        assert self.how is not None
        how = self.how(bucket)
        group = self.comm.group(how.across)
        if group.size > 1 and self.derived and tensor.requires_grad:
            if self.recorder is not None:
                self.recorder.issue(Event("sum", bucket.name, bucket, tensor.dtype))
            grad = all_reduce(torch.zeros_like(tensor) if grad is None else grad.clone(), group).wait()
        elif group.size > 1 and grad is not None:
            raise ValueError(
                f"the loss uses local tensors of unit {bucket.unit!r} directly, and {how.across} holds replicas of "
                "it; use it in a gathered function (for weight decay: in the optimizer)"
            )
        return None if grad is None else grad / how.divisor

    def _zeros(self, full: Full) -> Tensor:
        full.wait()
        full.reduced = True
        return full.contributions(None)

    def _issue_reduce(self, full: Full) -> None:
        if self._flying and self._flying[0][0].unit != full.unit:
            self._land()
        if self.recorder is not None:
            self.recorder.issue(Event("reduce", full.key, full.bucket, full.local.dtype))

    def _reduce_ready(self) -> None:
        """Launch what is complete, as long as it is next in order; the buckets of one unit stay in flight."""
        assert self.how is not None
        while self._order and self._order[-1][1].key in self._ready:
            _, full = self._order.pop()
            self._issue_reduce(full)
            buffer = self._ready.pop(full.key)
            self._flying.append((full, reduce_buffer(buffer, full.bucket, full.comm, self.how(full.bucket))))

    def _land(self) -> None:
        for full, pending in self._flying:
            self.grads[full.key] = pending.wait()
            full.empty()
        self._flying = []

    def finish(self) -> None:
        """After backward: visit what is left, zeros for what got no gradient, and the last reduce."""
        self._come_down(0)
        self._reduce_above(-1)
        self._land()

    # The end

    def settle(self) -> None:
        """Let everything in flight arrive, whatever state the step is in.

        Raises:
          Exception: the first of those that the waits raised, after all of them.
        """
        failed: Exception | None = None
        for wait in [full.wait for full in self._by_key.values()] + [pending.wait for _, pending in self._flying]:
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
        sending = [full for full, pending in self._flying if not pending.done]
        for full in self._by_key.values():
            if full.pending is None and full not in sending:
                full.empty()
            full.clear()
        self._by_key.clear()
        self._by_tensor.clear()
        self._order.clear()
        self._ready.clear()
        self.hints = []
