"""Every collective of the library. The one module that calls `torch.distributed`'s.

Differences between backends live here: which calls are fastest, which dtypes travel (gloo
takes no int16, uint16 or fp8, so bytes are sent), names that torch changed, and groups of one
rank, where nothing is sent at all.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Done",
    "Event",
    "Group",
    "Pending",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "exchange",
    "record",
    "reduce_scatter",
]

# torch 2.13 renamed these; the old names warn there, the new ones are missing before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Group:
    """Ranks of a collective in coordinate order.

    Attributes:
      ranks: global ranks; `rank`: this process's position among them.
      handle: torch's process group, None for a single rank.
      native: the backend reduces and scatters well by itself (NCCL).
    """

    ranks: tuple[int, ...]
    rank: int
    handle: Any = field(repr=False, compare=False)
    native: bool
    host: str = field(default="cpu", compare=False)  # device of messages that the host reads at once
    # Messages of different collectives never match, since all ranks launch them in one order.
    tags: Iterator[int] = field(
        default_factory=lambda: itertools.cycle(range(1 << 20, 1 << 21)), repr=False, compare=False
    )

    @property
    def size(self) -> int:
        return len(self.ranks)

    @staticmethod
    def of(ranks: tuple[int, ...], device_type: str) -> Group:
        """The group of these global ranks in this order; all of them call it, nobody else needs to.

        Raises:
          ValueError: the order can't be expressed in this version of torch.
        """
        native = device_type != "cpu"
        me = ranks.index(dist.get_rank())
        if len(ranks) == 1:
            return Group(ranks, me, None, native)
        if ranks == tuple(range(dist.get_world_size())):
            return Group(ranks, me, dist.group.WORLD, native, _host(dist.group.WORLD, device_type))
        world = dist.group.WORLD
        known = _groups.get((ranks, device_type))
        if known is not None and known[0] is world:
            return known[1]
        order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
        try:
            handle = dist.new_group(list(ranks), use_local_synchronization=True, **order)
        except TypeError:
            raise ValueError(
                f"torch {torch.__version__} can't make a process group in the order {ranks}; "
                "use a mesh whose ranks ascend, or torch >= 2.13"
            ) from None
        group = Group(ranks, me, handle, native, _host(handle, device_type))
        _groups[ranks, device_type] = (world, group)
        return group


def _host(handle: Any, device_type: str) -> str:
    """Where gloo runs beside NCCL, the host asks it, and doesn't wait for the device."""
    return "cpu" if device_type == "cpu" or "gloo" in dist.get_backend_config(handle) else device_type


# Torch's groups live as long as the world group does; so does this memo of them.
_groups: dict[tuple[tuple[int, ...], str], tuple[Any, Group]] = {}


class Event(NamedTuple):
    """One collective: what it was, bytes this rank sends, ranks taking part."""

    kind: str
    sent: int
    ranks: int


_logs: list[list[Event]] = []


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """Collect the collectives that this process launches inside the block.

    Example:
      >>> from ragged import collectives
      >>> with collectives.record() as events:
      ...     pass
      >>> events
      []
    """
    log: list[Event] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


def _note(kind: str, sent: int, group: Group) -> None:
    for log in _logs:
        log.append(Event(kind, sent, group.size))


class Pending:
    """A collective in flight; `wait` returns its result, and is idempotent."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Tensor]) -> None:
        self._works, self._finish = works, finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            for work in self._works:
                work.wait()
            self._result = self._finish()
            self._works, self._finish = (), _nothing
        return self._result


def _nothing() -> Tensor:
    raise AssertionError("finished twice")


class Done(Pending):
    """A result that needed no collective."""

    def __init__(self, result: Tensor) -> None:
        self._result = result


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _swap(sent: Sequence[Tensor], received: Sequence[Tensor | None], group: Group) -> list[Any]:
    """Send piece k to rank k and receive from it, straight from and into place, any sizes.

    On gloo this beats its collectives, which go through buffers of their own. Peers are visited from the next
    rank on, so that not everybody sends to rank 0 first.
    """
    tag = next(group.tags)
    works = []
    for step in range(1, group.size):
        k, j = (group.rank + step) % group.size, (group.rank - step) % group.size
        target = received[j]
        if target is not None and target.numel():
            works.append(dist.irecv(_bytes(target), group.ranks[j], group=group.handle, tag=tag))
        if sent[k].numel():
            works.append(dist.isend(_bytes(sent[k]), group.ranks[k], group=group.handle, tag=tag))
    return works


def all_gather(out: Tensor, shard: Tensor, group: Group, sizes: Sequence[int] | None = None) -> Pending:
    """Concatenate the shards of all ranks, in coordinate order, straight into `out`.

    Args:
      out: 1-D, the sum of the shards' elements.
      shard: this rank's, 1-D, same dtype.
      sizes: elements per rank, where they are not all equal.
    """
    if group.size == 1:
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return Done(out)
    if out.numel() == 0:
        return Done(out)
    shard = shard.contiguous()
    _note("all_gather", shard.nbytes * (group.size - 1), group)
    if group.native and sizes is None:
        works = [_all_gather_single(_bytes(out), _bytes(shard), group=group.handle, async_op=True)]
        return Pending(works, lambda: out)
    pieces = torch.split(out, list(sizes) if sizes is not None else [shard.numel()] * group.size)
    if group.native:
        pieces[group.rank].copy_(shard)
        works = [
            dist.broadcast(_bytes(piece), group.ranks[k], group=group.handle, async_op=True)
            for k, piece in enumerate(pieces)
            if piece.numel()
        ]
    else:
        works = _swap([shard] * group.size, pieces, group)
        pieces[group.rank].copy_(shard)
    return Pending(works, lambda: out)


def reduce_scatter(full: Tensor, group: Group, sizes: Sequence[int] | None = None) -> Pending:
    """Sum the ranks' full buffers and keep this rank's shard of the sum.

    On gloo: the contributions travel as they are and are summed in rank order, in fp32 for 16-bit floats. It is
    faster than the backend's own reduce-scatter, and bitwise the same whatever the timing.

    Args:
      full: 1-D contributions for all ranks; must not change until `wait`.
      sizes: elements per rank, where they are not all equal.

    Returns:
      Pending with a new tensor, or `full` itself in a group of one.
    """
    if group.size == 1:
        return Done(full)
    cuts = [full.numel() // group.size] * group.size if sizes is None else list(sizes)
    mine = cuts[group.rank]
    _note("reduce_scatter", (full.numel() - mine) * full.itemsize, group)
    pieces = torch.split(full, cuts)
    if group.native:
        out = full.new_empty(mine)
        if sizes is None:
            works = [_reduce_scatter_single(out, full, group=group.handle, async_op=True)]
            return Pending(works, lambda: out)
        works = [
            dist.reduce(piece, group.ranks[k], group=group.handle, async_op=True)
            for k, piece in enumerate(pieces)
            if piece.numel()
        ]
        return Pending(works, lambda: out.copy_(pieces[group.rank]))
    others = full.new_empty((group.size - 1, mine))
    parts: list[Tensor] = list(others)
    works = _swap(pieces, [*parts[: group.rank], None, *parts[group.rank :]], group)
    parts.insert(group.rank, pieces[group.rank])
    return Pending(works, lambda: _ordered_sum(parts))


def _ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum in the order given, so that it is the same on every run and machine."""
    dtype = parts[0].dtype
    if dtype in (torch.bfloat16, torch.float16):
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        return total.to(dtype)
    total = torch.add(parts[0], parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Pending:
    """Reduce in place over the group; `op` is "sum" or "max"."""
    if group.size == 1 or x.numel() == 0:
        return Done(x)
    _note("all_reduce", 2 * x.nbytes * (group.size - 1) // group.size, group)
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    work = dist.all_reduce(x, ops[op], group=group.handle, async_op=True)
    return Pending([work], lambda: x)


def exchange(
    sent: Tensor, received: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: Group
) -> Pending:
    """All-to-all of bytes, any amounts, zeros included; both tensors 1-D uint8."""
    if group.size == 1:
        received.copy_(sent)
        return Done(received)
    _note("exchange", sent.numel() - send_sizes[group.rank], group)
    work = dist.all_to_all_single(
        received, sent, list(receive_sizes), list(send_sizes), group=group.handle, async_op=True
    )
    return Pending([work], lambda: received)


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """The small Python values of all ranks, in coordinate order. Sizes may differ."""
    if group.size == 1:
        return [value]
    _note("all_gather_object", 0, group)
    out: list[Any] = [None] * group.size
    dist.all_gather_object(out, value, group=group.handle)
    return out
