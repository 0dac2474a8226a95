"""The end of a step on all ranks together: the mean loss, or an error everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp.rescue import take_part
from fsdp.schedule import Recorder
from ragged.agree import agree
from ragged.collectives import all_gather_object, all_reduce
from ragged.layout import Bucket, axis_size
from ragged.mesh import Comm
from ragged.reduction import Reduction, reduction

__all__ = ["Averaging", "as_axes", "end_step"]

SAME = 1e-5  # losses that differ by less, relatively, differ by rounding


def as_axes(axes: str | Sequence[str]) -> tuple[str, ...]:
    """Names of mesh axes, given one or several."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass(frozen=True)
class Averaging:
    """Over which axes losses and gradients are summed, and by what the sums are divided.

    Attributes:
      data_axes: along which ranks see different data; `guessed` if nobody said so.
      sum_axes: model axes on which gradients are partial sums.
      op: "mean" or "sum".
    """

    comm: Comm = field(compare=False)
    data_axes: tuple[str, ...]
    guessed: bool = True
    sum_axes: tuple[str, ...] = ()
    op: str = "mean"
    _known: dict[Any, Reduction] = field(default_factory=dict, compare=False, repr=False)

    def how(self, bucket: Bucket) -> Reduction:
        """How the gradients of a bucket are reduced."""
        key = bucket.ragged, bucket.even
        if key not in self._known:
            self._known[key] = reduction(bucket, self.comm.axes, self.data_axes, self.sum_axes, self.op)
        return self._known[key]

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes along which all ranks should have the same batch and the same loss, if that was guessed."""
        if not self.guessed:
            return ()
        return tuple(a for a in self.comm.axes if a not in self.data_axes and a not in self.sum_axes)


def end_step(recorder: Recorder, over: Averaging, loss: Tensor | None, error: Exception | None) -> Tensor:
    """The loss, averaged like the gradients.

    Raises:
      Exception: this rank's error, or a `ValueError` about another's, or about losses that differ along axes where
        they should not.
    """
    comm, group = over.comm, over.comm.everyone
    if recorder.lost:  # every rank raised in the same comparison
        assert error is not None
        raise error
    if recorder.learning:
        agree("the end of the step", {}, group, error)
        if over.guessed:
            assert loss is not None
            agree("the losses of a step", {}, group, _uneven_losses(loss, over))
    elif error is not None:
        take_part(recorder.remaining(), over.how, comm)
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
        value.copy_(loss)
    report[0] = 0.0 if apart else value
    report[1] = 0.0 if error is None else 1.0
    # Zero if losses are equal along model axes, which was seen once and must stay so.
    model = over.model_axes
    weight = comm.rank(model) - (axis_size(comm.axes, model) - 1) / 2
    if not apart:
        report[2], report[3] = weight * value, value.abs()
    all_reduce(report, group).wait()
    if report[1].item() > 0:
        agree("a step", {}, group, error)
    assert loss is not None
    total = all_reduce(value, group).wait() if apart else report[0]
    if abs(report[2].item()) > SAME * axis_size(comm.axes, model) * report[3].item():
        raise _other_batches(over, "in this step")
    data = axis_size(comm.axes, over.data_axes)
    share = group.size if over.op == "mean" else group.size // data
    return (total / share).to(loss.dtype)


def _uneven_losses(loss: Tensor, over: Averaging) -> ValueError | None:
    """Whether ranks along the axes that were taken for model axes have seen different data.

    An axis that cuts some leaf evenly and is ragged for none may be tensor parallelism (one batch, equal losses) or
    expert parallelism (a batch per rank): layouts look the same, losses don't.
    """
    values = all_gather_object(loss.item(), over.comm.group(over.model_axes))
    if not all(map(math.isfinite, values)) or max(values) - min(values) <= SAME * max(map(abs, values)):
        return None
    return _other_batches(over, f"from {min(values):.6g} to {max(values):.6g}")


def _other_batches(over: Averaging, which: str) -> ValueError:
    model = over.model_axes
    names = ", ".join(map(repr, (*over.data_axes, *model)))
    return ValueError(
        f"ranks along {model} returned different losses, {which}, but these axes cut some leaf evenly and no leaf "
        "raggedly, so they are taken for model axes, along which all ranks see the same batch. If each rank has its "
        f"own (expert parallelism), say value_and_grad(..., data_axes=({names},)); if each has a part of the loss "
        "(sequence parallelism), sum it over them first"
    )
