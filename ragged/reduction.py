"""Which ranks a buffer is summed over, and by what the sum is divided."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ragged.chunks import split_chunks
from ragged.collectives import Done, Group, Pending, all_reduce, reduce_scatter, tags
from ragged.layout import Bucket, axis_size
from ragged.mesh import Comm

__all__ = ["Reduction", "default_data_axes", "reduce_buffer", "reduction"]


class Reduction(NamedTuple):
    """Reduce-scatter over the bucket's ragged axes, all-reduce over `across`, divide by `divisor`."""

    across: tuple[str, ...]
    divisor: int


def reduction(
    bucket: Bucket,
    axes: Mapping[str, int],
    data_axes: tuple[str, ...],
    sum_axes: tuple[str, ...] = (),
    op: str = "mean",
) -> Reduction:
    """How the contributions of all ranks become the gradient of a bucket.

    The sum runs over the data axes on which no even dim cuts the leaves, and over `sum_axes`;
    a mean divides by *all* data axes, which is right for leaves cut by an even data axis too: their
    owner has already seen the tokens of every rank. Ranks along a ragged axis that is no data
    axis hold equal contributions, so summing and dividing by their number takes one of them.

    Raises:
      ValueError: `op` is neither "mean" nor "sum".
    """
    if op not in ("mean", "sum"):
        raise ValueError(f'op={op!r}: expected "mean" or "sum"')
    across = tuple(
        a for a in axes if (a in data_axes or a in sum_axes) and a not in bucket.ragged and a not in bucket.even
    )
    equal = tuple(a for a in bucket.ragged if a not in data_axes and a not in sum_axes)
    divisor = axis_size(axes, equal)
    if op == "mean":
        divisor *= math.prod(axes[a] for a in data_axes if a in axes)
    return Reduction(across, divisor)


def default_data_axes(buckets: Iterable[Bucket], axes: Iterable[str]) -> tuple[str, ...]:
    """Axes that are ragged for some leaf, and axes that no leaf names: along these ranks see different data."""
    known = list(buckets)
    ragged = {a for b in known for a in b.ragged}
    even = {a for b in known for a in b.even}
    return tuple(a for a in axes if a in ragged or a not in even)


def reduce_buffer(
    full: Tensor | Sequence[Tensor], bucket: Bucket, comm: Comm, how: Reduction, dtype: torch.dtype | None = None
) -> Pending:
    """Start reducing a bucket's global buffer of contributions to this rank's shard of the result.

    Args:
      full: the buffer, or its parts (`bucket.chunks`), 1-D.
      dtype: of the result, if not that of the contributions, in which everything travels.
    """
    ragged = comm.group(bucket.ragged)
    if isinstance(full, Tensor):
        apart = ragged.size > 1 and full.device.type == "cpu"
        parts: Sequence[Tensor] = split_chunks(full, bucket) if apart else [full]
    else:
        parts = full
    dtype = parts[0].dtype if dtype is None else dtype
    if parts[0].dtype == torch.float16 and how.divisor > 1:  # a sum of fp16 may be infinite where the mean isn't
        parts, how = [x.div_(how.divisor) for x in parts], Reduction(how.across, 1)
    sizes = bucket.bounds.sizes if bucket.bounds.explicit else None
    group = comm.group(how.across)
    scattered = reduce_scatter(parts, ragged, sizes, dtype if group.size == 1 else None)
    if group.size == 1 and how.divisor == 1:
        return scattered
    return _Rest(scattered, group, how.divisor, dtype)


class _Rest(Pending):
    """What follows the reduce-scatter once it has arrived: the other axes, and the division."""

    def __init__(self, scattered: Pending, group: Group, divisor: int, dtype: torch.dtype) -> None:
        self._scattered, self._group, self._divisor, self._dtype = scattered, group, divisor, dtype
        super().__init__()
        self._tags = tags(group)

    def _complete(self) -> Tensor:
        shard = all_reduce(self._scattered.wait(), self._group, drawn=self._tags).wait().to(self._dtype)
        result = shard.div_(self._divisor) if self._divisor > 1 else shard
        self._scattered = Done(result)
        return result
