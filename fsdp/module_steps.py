"""From a sharded module's forward to the gradients of its parameters: a step that autograd begins and ends.

Nobody calls the end of such a step, so it lives as long as the graph: hooks on the graph's nodes hold it, and what it
holds of the graph has weak references only to come back by.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp.ending import Averaging
from fsdp.full import Full
from fsdp.leaves import ShardedLeaf, Whereabouts
from fsdp.reducing import flush
from fsdp.rescue import take_part
from fsdp.schedule import Recorder, Schedule
from fsdp.step import Step
from fsdp.tracing import explained
from ragged.agree import agree, same

__all__ = ["Begin", "ModuleStep"]


class ModuleStep(Step):
    """A step of which autograd knows the beginning: the parameters, to which backward comes last.

    Attributes:
      over: how gradients are averaged.
      learnt: called with the order of collectives when the step ended well.
      entered: called with the step when a backward pass begins on it; `left` when the pass is over.
      shards: the local tensors of each tree.
      begin: the node that leads to the parameters, None if none of them learns.
    """

    def __init__(
        self,
        over: Averaging,
        recorder: Recorder | None,
        learnt: Callable[[Schedule], None],
        entered: Callable[[ModuleStep], None],
        left: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(over.comm, recorder=recorder, how=over.how, **options)
        self.over, self.learnt, self.entered, self.left = over, learnt, entered, left
        self.begin: Any = None
        self.shards: list[list[Tensor]] = []
        self._pass = -1  # the graph task that is on
        self._forward_events = 0

    def is_sole(self, full: Full) -> bool:
        """Never: hooks on a module's calls say when a backward pass begins, and where it ends."""
        return False

    def enter_pass(self) -> None:
        """Backward is here; the first time in a pass, find out whether it goes on to the parameters.

        Raises:
          ValueError: passes that this can't serve.
        """
        task = torch._C._current_graph_task_id()  # torch has no public name for it
        if task == self._pass or task == -1:
            return
        if self.backward:
            raise ValueError(
                "a backward pass inside another one reached the parameters of a sharded module: use "
                "checkpoint(..., use_reentrant=False)"
            )
        self._pass = task
        self.entered(self)
        torch.autograd.Variable._execution_engine.queue_callback(self._leave_pass)  # nor for this
        if self.begin is None or not torch._C._will_engine_execute_node(self.begin):
            return
        if self.recorder is not None:
            if self.ended:  # once more over a graph that was retained: ranks compare every step of it
                self.recorder = self.reducer.recorder = self.filling.recorder = Recorder(None, self.comm)
            else:
                self._forward_events = len(self.recorder.seen)
        self.start_backward()

    def _leave_pass(self) -> None:
        self._pass = -1
        self.left()
        if not self.closed:
            self.settle()
            for full in self.buckets:
                # in use: the pass was inside a forward; kept without end: a gradient is yet to be differentiated
                if not full.uses and (self.ended or full.budget < math.inf):
                    full.empty()

    def _before_backward(self, end: int, x: Any) -> None:
        with self._told():
            if not self.closed:
                self.enter_pass()
            super()._before_backward(end, x)

    def collect(self, full: Any, grads: Any) -> Any:
        with self._told():
            self.enter_pass()
            if torch.is_grad_enabled():
                raise ValueError(
                    "backward(create_graph=True) through a sharded module's parameters: their gradients leave autograd "
                    "when they are reduced. Differentiate twice with respect to inputs only"
                )
            return super().collect(full, grads)

    def end(self) -> dict[str, Tensor]:
        """Backward has come to the parameters: gradients by bucket key, where they are reduced in this pass."""
        recorder = self.recorder
        assert recorder is not None
        with self._told():
            if torch._C._current_graph_task_id() != self._pass or not self.backward:
                raise ValueError("backward reached the parameters of a sharded module without passing its outputs")
            self.finish()
            self.settle()
            if self.carry.sync:  # what earlier passes held of units that this one didn't use
                for key, grad in flush(self.carry, self.over.how, self.comm, recorder.issue).items():
                    mine = self.reducer.grads.get(key)
                    self.reducer.grads[key] = grad if mine is None else mine.add_(grad)
        self.backward = False
        self._say(None)
        if recorder.learning and not self.ended:
            self.learnt(self.course(self._forward_events))
        self.ended = True
        grads, self.reducer.grads = self.reducer.grads, {}
        return grads

    def fail(self, error: Exception) -> None:
        """Take part in what the other ranks wait for, and tell them.

        Raises:
          Exception: the error, or what explains it.
        """
        recorder, known = self.recorder, self.closed
        self.carry.held.clear()
        try:
            if recorder is not None and not recorder.lost and not known:
                try:
                    self.settle()
                finally:
                    if not recorder.learning:
                        take_part(recorder.remaining(), self.over.how, self.comm)
                    self._say(explained(error))
        finally:
            self.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What fails inside doesn't leave other ranks waiting."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def _say(self, error: Exception | None) -> None:
        assert self.recorder is not None
        if self.recorder.learning:
            agree("the end of the step", {}, self.comm.everyone, error)
        else:
            same("the end of a step", "", dict, self.comm.everyone, error)


class Begin(torch.autograd.Function):
    """The shards of a step from a module's parameters; its backward is the end of the step."""

    @staticmethod
    def forward(
        ctx: Any, step: ModuleStep, shards: Sequence[Tensor], homes: Sequence[tuple[str, Whereabouts]], *params: Tensor
    ) -> tuple[Tensor, ...]:
        """`homes`: the bucket keys and places of `params`."""
        ctx.step, ctx.homes = weakref.ref(step), homes
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in shards)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        step = ctx.step()
        assert step is not None
        grads = step.end()
        wanted = ctx.needs_input_grad[3:]
        out = [
            _run(grads.get(key), home) if need else None for (key, home), need in zip(ctx.homes, wanted, strict=True)
        ]
        return None, None, None, *out


def _run(shard: Tensor | None, home: Whereabouts) -> ShardedLeaf | None:
    """A leaf's gradient, on the buffer of its bucket."""
    return None if shard is None else ShardedLeaf(home.of(shard), home)
