"""`value_and_grad`: JAX's, for sharded trees, with torch's autograd underneath."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fsdp.accumulating import Sums
from fsdp.ending import Averaging, as_axes, end_step
from fsdp.precision import MixedPrecision, as_precision
from fsdp.schedule import Recorder, Schedule
from fsdp.step import Step, is_sharded
from fsdp.tracing import collected, detached, explained, frozen_pieces, leaf, same_start, trace
from ragged.layout import Bucket
from ragged.mesh import Comm
from ragged.reduction import default_data_axes
from ragged.tree import ShardedTree, sharded_trees

__all__ = ["ValueAndGrad", "value_and_grad"]


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    data_axes: str | Sequence[str] | None = None,
    sum_axes: str | Sequence[str] = (),
    op: str = "mean",
    precision: Any = None,
) -> ValueAndGrad:
    """A function that returns the loss and its gradient with respect to sharded trees.

    `f(params, *args) -> (loss, grads)`, or `((loss, aux), grads)`. Every rank passes its own
    batch; loss and gradients are the mean (or sum) over the data axes. `grads` has the plan of
    the parameters; a leaf that the loss doesn't use has gradient zero on every rank.

    Pass every sharded tree that the loss uses as an argument, frozen ones too. Plain trees of
    tensors work as well: then nothing is sharded, averaged or sent.

    Gradients of several batches are summed by `f.accumulate(params, *args)`, which returns the loss (or
    `(loss, aux)`) of each, and `f.finish()`, which returns the sum; `microbatch` does it for one batch in parts.

    Args:
      loss_fn: returns a scalar tensor, or `(scalar, aux)` with `has_aux`.
      argnums: the positional arguments to differentiate.
      data_axes: mesh axes along which ranks see different data. By default axes that are ragged for
        some leaf, and axes that no leaf names. Others, which cut leaves evenly (tensor
        parallelism), see the same data and are never averaged over. An expert parallel axis on which
        other leaves are replicated looks the same, so it has to be named here.
      sum_axes: axes that are no data axes, but over which gradients of leaves that they
        don't cut are partial sums (sequence parallelism).
      op: "mean" or "sum".
      precision: a `MixedPrecision`, of all gathered functions that don't say their own.

    Raises:
      ValueError: on all ranks: a loss that is no scalar, integer leaves, trees on different
        meshes, plain and sharded trees mixed in the differentiated arguments, or units used in
        another order than on other ranks or in earlier steps; different losses along axes that were
        taken for model axes by default. If any rank fails, all raise.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, shard, unshard
      >>> from fsdp import gathered, value_and_grad
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> params = shard({"w": torch.ones(3)}, mesh, P(ragged="fsdp"))
      >>> loss = gathered(lambda p, x: (p["w"] * x).sum())
      >>> value, grads = value_and_grad(loss)(params, torch.arange(3.0))
      >>> value.item(), unshard(grads)["w"].tolist()
      (3.0, [0.0, 1.0, 2.0])
    """
    return ValueAndGrad(
        loss_fn,
        (argnums,) if isinstance(argnums, int) else tuple(argnums),
        isinstance(argnums, int),
        has_aux,
        None if data_axes is None else as_axes(data_axes),
        as_axes(sum_axes),
        op,
        as_precision(precision),
    )


class ValueAndGrad:
    """What `value_and_grad` returns: a function that remembers the order of its collectives.

    Between `accumulate` and `finish` it also holds the sum of gradients.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        argnums: tuple[int, ...],
        single: bool,
        has_aux: bool,
        data_axes: tuple[str, ...] | None,
        sum_axes: tuple[str, ...],
        op: str,
        precision: MixedPrecision,
    ) -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f'op={op!r}: expected "mean" or "sum"')
        functools.update_wrapper(self, loss_fn, updated=())
        self.loss_fn, self.argnums, self.single, self.has_aux = loss_fn, argnums, single, has_aux
        self.data_axes, self.sum_axes, self.op, self.precision = data_axes, sum_axes, op, precision
        self._schedules: dict[Any, Schedule] = {}
        self._sums: Sums | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sums = Sums()
        out = self.add(sums, args, kwargs)
        return out, self.total(sums)

    def accumulate(self, *args: Any, sync: bool = True, last: bool = False, **kwargs: Any) -> Any:
        """The loss (or `(loss, aux)`) of a micro-batch; its gradients are added to those of earlier ones.

        Args:
          args, kwargs: of the loss function; the differentiated trees must be the same every time.
          sync: reduce the gradients now, with all that wasn't reduced before. False keeps them on this rank as
            they are, as large as the full parameters: no message, more memory.
          last: no other micro-batch follows. Otherwise full parameters of functions with
            `reshard_after_forward=False` stay for the next one.

        Raises:
          ValueError: as a call does, and for trees unlike those of earlier micro-batches. An error ends the
            accumulation: nothing of it is left.
        """
        sums, self._sums = self._sums or Sums(), None
        out = self.add(sums, args, kwargs, sync, last)
        self._sums = sums
        return out

    def finish(self) -> Any:
        """The gradients of all micro-batches since the last `finish`, summed; what isn't reduced yet is now.

        Raises:
          ValueError: there was no micro-batch.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            raise ValueError("finish() without gradients: call accumulate(params, *args) before it")
        return self.total(sums)

    def total(self, sums: Sums) -> Any:
        """The sum of gradients, in the form of the differentiated arguments."""
        grads = sums.finish()
        return grads[0] if self.single else tuple(grads)

    def add(
        self, sums: Sums, args: tuple[Any, ...], kwargs: dict[str, Any], sync: bool = True, last: bool = True
    ) -> Any:
        """The loss (or `(loss, aux)`); the gradients are added to a sum."""
        sums.carry.sync, sums.carry.last = sync, last
        trees = sharded_trees((args, kwargs))
        if not trees:
            loss, aux = self._plain(args, kwargs, self._positions(args), sums)
        else:
            loss, aux = self._sharded(args, kwargs, trees, sums)
        return (loss, aux) if self.has_aux else loss

    def _positions(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """argnums counted from the front."""
        n = len(args)
        out = tuple(i + n if i < 0 else i for i in self.argnums)
        if not out or len(set(out)) < len(out) or not all(0 <= i < n for i in out):
            raise ValueError(f"argnums={self.argnums} must be distinct positions among {n} positional arguments")
        return out

    def _plain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: tuple[int, ...], sums: Sums
    ) -> tuple[Tensor, Any]:
        """Without sharded trees: ordinary gradients of ordinary tensors."""
        sums.check([args[i] for i in argnums])
        traced: list[Any] = list(args)
        for i in argnums:
            traced[i] = optree.tree_map(leaf, args[i])
        wanted: Any = [traced[i] for i in argnums]
        leaves: list[Tensor] = optree.tree_leaves(wanted)
        with torch.enable_grad():
            loss, aux = self._split(self.loss_fn(*traced, **kwargs))
        grads: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        sums.add_plain(wanted, leaves, grads)
        return loss.detach(), optree.tree_map(detached, aux)

    def _sharded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], trees: list[ShardedTree], sums: Sums
    ) -> tuple[Tensor, Any]:
        comm = trees[0].plan.bound()
        loss, aux, forward = None, None, 0
        error: Exception | None = None
        argnums: tuple[int, ...] = ()
        learns: tuple[bool, ...] = ()
        try:
            argnums = self._positions(args)
            learns = self._check(trees, args, argnums, comm)
            sums.check([args[i] for i in argnums])
        except Exception as caught:
            error = caught
        key = tuple((t.plan, t.selection, tuple(x.dtype for x in t._tensors), frozen_pieces(t)) for t in trees)
        known = (key, learns, sums.token)
        schedule = self._schedules.get(known)
        same_start(trees, learns, schedule, sums.token, comm, error)
        recorder = Recorder(schedule, comm)
        guessed = self.data_axes is None
        data_axes = default_data_axes(_buckets(trees), comm.axes) if self.data_axes is None else self.data_axes
        over = Averaging(comm, data_axes, guessed, self.sum_axes, self.op)
        step = Step(comm, schedule, recorder, over.how, self.precision, sums.carry)
        try:
            traced_args, traced_kwargs, leaves = trace(args, kwargs, argnums, step)
            with torch.enable_grad():
                loss, aux = self._split(self.loss_fn(*traced_args, **traced_kwargs))
            forward = len(recorder.seen)
            if recorder.learning:
                step.filling.find_spare()
            step.start_backward()
            direct: list[Tensor | None] = [None] * len(leaves)
            # A computed tree's gradient goes on through autograd, on ranks whose loss doesn't reach the tree too.
            roots = [x for x in (loss, *step.anchors()) if x.requires_grad]
            if roots:
                seeds = [None if x is loss else x.new_zeros(()).expand(x.shape) for x in roots]
                direct = list(torch.autograd.grad(roots, leaves, seeds, allow_unused=True))
            step.finish()
            wanted = [traced_args[i] for i in argnums]
            found = collected(wanted, step, dict(zip(map(id, leaves), direct, strict=True)))
            loss, aux = loss.detach(), optree.tree_map(detached, aux, is_leaf=is_sharded)
        except Exception as caught:
            error = explained(caught)
        except BaseException:
            step.close()
            raise
        learnt = step.course(forward) if recorder.learning and error is None else None
        try:
            step.settle()
            value = end_step(recorder, over, loss, error)
        finally:
            step.close()
        if learnt is not None:
            self._schedules[known] = learnt
        sums.add(wanted, found, over)
        return value, aux

    def _check(
        self, trees: list[ShardedTree], args: tuple[Any, ...], argnums: tuple[int, ...], comm: Comm
    ) -> tuple[bool, ...]:
        """Which trees are differentiated."""
        wanted: Any = [args[i] for i in argnums]
        if not sharded_trees(wanted):
            raise ValueError("no sharded tree among the differentiated arguments, but one among the others")
        if any(isinstance(x, Tensor) for x in optree.tree_leaves(wanted, is_leaf=is_sharded)):
            raise ValueError(
                "the differentiated arguments mix sharded trees and plain tensors; shard those too, with spec "
                "None (replicated) if they are small"
            )
        for tree in trees:
            if tree.scope is not None:
                raise ValueError("value_and_grad inside a differentiated function: nesting is not supported")
            if tree.plan.bound().mesh != comm.mesh:
                raise ValueError("the sharded trees of one step lie on different meshes; shard them on one")
            _ = tree.tensors  # says so if the tree was donated
        unknown = [a for a in (*(self.data_axes or ()), *self.sum_axes) if a not in comm.axes]
        if unknown:
            raise ValueError(f"mesh axis {unknown[0]!r} is not one of {list(comm.axes)}")
        mine = {id(tree) for tree in sharded_trees(wanted)}
        return tuple(id(tree) in mine for tree in trees)

    def _split(self, out: Any) -> tuple[Tensor, Any]:
        if self.has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise ValueError(f"has_aux=True, but the loss function returned {type(out).__name__}, not (loss, aux)")
        loss, aux = out if self.has_aux else (out, None)
        if isinstance(loss, Tensor) and hasattr(loss, "full_tensor"):  # a DTensor, of gathered(as_dtensor=True)
            loss = loss.full_tensor()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the loss must be one real number in a tensor, got {what}; reduce it, or use has_aux")
        return loss.reshape(()), aux


def _buckets(trees: Sequence[ShardedTree]) -> list[Bucket]:
    return [piece.bucket for tree in trees for piece in tree.selection.pieces]
