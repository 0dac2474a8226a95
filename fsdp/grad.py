"""`value_and_grad`: JAX's, for sharded trees, with torch's autograd underneath."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fsdp.rescue import take_part
from fsdp.schedule import Recorder, Schedule
from fsdp.step import Step, is_sharded
from fsdp.tracing import collected, default_data_axes, detached, explained, frozen_pieces, leaf, same_start, trace
from ragged.agree import agree
from ragged.collectives import all_gather_object, all_reduce
from ragged.layout import Bucket, axis_size
from ragged.mesh import Comm
from ragged.reduction import Reduction, reduction
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
) -> ValueAndGrad:
    """A function that returns the loss and its gradient with respect to sharded trees.

    `f(params, *args) -> (loss, grads)`, or `((loss, aux), grads)`. Every rank passes its own
    batch; loss and gradients are the mean (or sum) over the data axes. `grads` has the plan of
    the parameters; a leaf that the loss doesn't use has gradient zero on every rank.

    Pass every sharded tree that the loss uses as an argument, frozen ones too. Plain trees of
    tensors work as well: then nothing is sharded, averaged or sent.

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
        None if data_axes is None else _axes(data_axes),
        _axes(sum_axes),
        op,
    )


def _axes(axes: str | Sequence[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


class ValueAndGrad:
    """What `value_and_grad` returns: a function that remembers the order of its collectives."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        argnums: tuple[int, ...],
        single: bool,
        has_aux: bool,
        data_axes: tuple[str, ...] | None,
        sum_axes: tuple[str, ...],
        op: str,
    ) -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f'op={op!r}: expected "mean" or "sum"')
        functools.update_wrapper(self, loss_fn, updated=())
        self.loss_fn, self.argnums, self.single, self.has_aux = loss_fn, argnums, single, has_aux
        self.data_axes, self.sum_axes, self.op = data_axes, sum_axes, op
        self._schedules: dict[Any, Schedule] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trees = sharded_trees((args, kwargs))
        if not trees:
            return self._plain(args, kwargs, self._positions(args))
        return self._sharded(args, kwargs, trees)

    def _positions(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """argnums counted from the front."""
        n = len(args)
        out = tuple(i + n if i < 0 else i for i in self.argnums)
        if not out or len(set(out)) < len(out) or not all(0 <= i < n for i in out):
            raise ValueError(f"argnums={self.argnums} must be distinct positions among {n} positional arguments")
        return out

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: tuple[int, ...]) -> Any:
        """Without sharded trees: ordinary gradients of ordinary tensors."""
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
        found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
        out: Any = optree.tree_unflatten(optree.tree_structure(wanted), found)
        return self._result(loss.detach(), optree.tree_map(detached, aux), out)

    def _sharded(self, args: tuple[Any, ...], kwargs: dict[str, Any], trees: list[ShardedTree]) -> Any:
        comm = trees[0].plan.bound()
        loss, aux, grads, forward = None, None, None, 0
        error: Exception | None = None
        argnums: tuple[int, ...] = ()
        learns: tuple[bool, ...] = ()
        try:
            argnums = self._positions(args)
            learns = self._check(trees, args, argnums, comm)
        except Exception as caught:
            error = caught
        key = tuple((t.plan, t.selection, tuple(x.dtype for x in t._tensors), frozen_pieces(t)) for t in trees)
        schedule = self._schedules.get((key, learns))
        same_start(trees, learns, schedule, comm, error)
        recorder = Recorder(schedule, comm)
        data_axes = self.data_axes if self.data_axes is not None else default_data_axes(trees, comm)

        def how(bucket: Bucket) -> Reduction:
            return reduction(bucket, comm.axes, data_axes, self.sum_axes, self.op)

        step = Step(comm, schedule, recorder, how)
        try:
            traced_args, traced_kwargs, leaves = trace(args, kwargs, argnums, step)
            with torch.enable_grad():
                loss, aux = self._split(self.loss_fn(*traced_args, **traced_kwargs))
            forward = len(recorder.seen)
            step.start_backward()
            direct: list[Tensor | None] = [None] * len(leaves)
            if loss.requires_grad:
                direct = list(torch.autograd.grad(loss, leaves, allow_unused=True))
            step.finish()
            wanted = [traced_args[i] for i in argnums]
            grads = collected(wanted, step, dict(zip(map(id, leaves), direct, strict=True)))
            loss, aux = loss.detach(), optree.tree_map(detached, aux, is_leaf=is_sharded)
        except Exception as caught:
            error = explained(caught)
        except BaseException:
            step.close()
            raise
        calls = tuple(step.calls)
        try:
            step.settle()
            value = self._close(comm, recorder, how, loss, error, data_axes)
        finally:
            step.close()
        if recorder.learning:
            self._schedules[key, learns] = Schedule.learn(calls, recorder.seen, forward)
        return self._result(value, aux, grads)

    def _close(
        self,
        comm: Comm,
        recorder: Recorder,
        how: Callable[[Bucket], Reduction],
        loss: Tensor | None,
        error: Exception | None,
        data_axes: tuple[str, ...],
    ) -> Tensor:
        """End the step on all ranks together: the mean loss, or an error everywhere."""
        if recorder.lost:  # every rank raised in the same comparison
            assert error is not None
            raise error
        if recorder.learning:
            agree("the end of the step", {}, comm.everyone, error)
            if self.data_axes is None:
                assert loss is not None
                found = _uneven_losses(loss, comm, self._model_axes(comm, data_axes), data_axes)
                agree("the losses of a step", {}, comm.everyone, found)
        elif error is not None:
            take_part(recorder.remaining(), how, comm)
        group = comm.everyone
        if group.size == 1:
            if error is not None:
                raise error
            assert loss is not None
            return loss
        # One message for the loss and for whether anybody failed; sums of fp64 lose nothing.
        report = torch.zeros(4, dtype=torch.float64, device=group.host)
        apart = comm.device.type != group.host
        value = torch.zeros((), dtype=torch.float64, device=comm.device)
        if loss is not None and error is None:
            value = loss.double()
        report[0] = 0.0 if apart else value
        report[1] = 0.0 if error is None else 1.0
        # Zero if losses are equal along model axes, which was seen once and must stay so.
        model = self._model_axes(comm, data_axes) if self.data_axes is None else ()
        weight = comm.rank(model) - (axis_size(comm.axes, model) - 1) / 2
        if not apart:
            report[2], report[3] = weight * value, value.abs()
        all_reduce(report, group).wait()
        if report[1].item() > 0:
            agree("a step", {}, group, error)
        assert loss is not None
        total = all_reduce(value, group).wait() if apart else report[0]
        if abs(report[2].item()) > SAME * axis_size(comm.axes, model) * report[3].item():
            raise _other_batches(model, data_axes, "in this step")
        data = axis_size(comm.axes, data_axes)
        share = group.size if self.op == "mean" else group.size // data
        return (total / share).to(loss.dtype)

    def _model_axes(self, comm: Comm, data_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Axes along which all ranks should have the same batch and the same loss."""
        return tuple(a for a in comm.axes if a not in data_axes and a not in self.sum_axes)

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

    def _result(self, loss: Tensor, aux: Any, grads: list[Any] | None) -> Any:
        assert grads is not None
        out = grads[0] if self.single else tuple(grads)
        return ((loss, aux), out) if self.has_aux else (loss, out)


SAME = 1e-5  # losses that differ by less, relatively, differ by rounding


def _uneven_losses(loss: Tensor, comm: Comm, model: tuple[str, ...], data_axes: tuple[str, ...]) -> ValueError | None:
    """Whether ranks along the axes that were taken for model axes have seen different data.

    An axis that cuts some leaf evenly and is ragged for none may be tensor parallelism (one batch, equal losses) or
    expert parallelism (a batch per rank): layouts look the same, losses don't.
    """
    values = all_gather_object(loss.item(), comm.group(model))
    if not all(map(math.isfinite, values)) or max(values) - min(values) <= SAME * max(map(abs, values)):
        return None
    return _other_batches(model, data_axes, f"from {min(values):.6g} to {max(values):.6g}")


def _other_batches(model: tuple[str, ...], data_axes: tuple[str, ...], which: str) -> ValueError:
    names = ", ".join(map(repr, (*data_axes, *model)))
    return ValueError(
        f"ranks along {model} returned different losses, {which}, but these axes cut some leaf evenly and no leaf "
        "raggedly, so they are taken for model axes, along which all ranks see the same batch. If each rank has its "
        f"own (expert parallelism), say value_and_grad(..., data_axes=({names},)); if each has a part of the loss "
        "(sequence parallelism), sum it over them first"
    )
