"""Every collective of the library. The one module that calls `torch.distributed`'s.

CPU tensors travel from rank to rank over the default group, as bytes (gloo takes no int16, uint16 or fp8), straight
from and into place: faster than gloo's own collectives, reduced in one fixed order, and any set of ranks can do it
without a process group of its own. Device tensors use the backend's collectives. In a group of one nothing is sent.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ragged.groups import Group
from ragged.sums import cut, in_order, joined, sum_parts

__all__ = [
    "Done",
    "Event",
    "Group",
    "Pending",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "exchange",
    "plain",
    "record",
    "reduce_scatter",
    "tags",
]

# torch 2.13 renamed these; the old names warn there, the new ones are missing before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SMALL = 1 << 14  # bytes that are reduced in one round of messages, everybody sending everything


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


def _nothing() -> Tensor:
    raise AssertionError("finished twice")


class Pending:
    """A collective in flight; `wait` returns its result, and is idempotent."""

    def __init__(self, works: Sequence[Any] = (), finish: Callable[[], Tensor] = _nothing) -> None:
        self._works, self._finish = works, finish
        self._result: Tensor | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it has been waited for."""
        return self._result is not None

    def wait(self) -> Tensor:
        if self._error is not None:  # what has failed once would be waited for until the backend gives up
            raise self._error
        if self._result is None:
            try:
                self._result = self._complete()
            except Exception as error:
                self._error = error
                raise
        return self._result

    def _complete(self) -> Tensor:
        for work in self._works:
            work.wait()
        result = self._finish()
        self._works, self._finish = (), _nothing
        return result


class Done(Pending):
    """A result that needed no collective."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self._result = result


def plain(x: Tensor) -> Tensor:
    """Values as they are meant, in plain memory: no strides, no pending conjugation or sign."""
    return x.resolve_conj().resolve_neg().contiguous()


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _swap(
    sent: Sequence[Tensor | None], received: Sequence[Tensor | None], group: Group, tag: int | None = None
) -> list[Any]:
    """Send piece k to rank k and receive from it, straight from and into place, any sizes.

    On gloo this beats its collectives, which go through buffers of their own. Peers are visited from the next
    rank on, so that not everybody sends to rank 0 first.
    """
    tag = next(group.tags) if tag is None else tag
    works = []
    for step in range(1, group.size):
        k, j = (group.rank + step) % group.size, (group.rank - step) % group.size
        source, target = sent[k], received[j]
        if target is not None and target.numel():
            works.append(dist.irecv(_bytes(target), group.ranks[j], tag=tag))
        if source is not None and source.numel():
            works.append(dist.isend(_bytes(source), group.ranks[k], tag=tag))
    return works


def all_gather(out: Tensor, shard: Tensor, group: Group, sizes: Sequence[int] | None = None) -> Pending:
    """Concatenate the shards of all ranks, in coordinate order, straight into `out`.

    Args:
      out: 1-D, the sum of the shards' elements.
      shard: this rank's, 1-D, same dtype; it may be its own place in `out`.
      sizes: elements per rank, where they are not all equal.
    """
    if group.size == 1:
        _place(shard, out)
        return Done(out)
    if out.numel() == 0:
        return Done(out)
    shard = plain(shard)
    _note("all_gather", shard.nbytes * (group.size - 1), group)
    native = out.device.type != "cpu"
    if native and sizes is None:
        works = [_all_gather_single(_bytes(out), _bytes(shard), group=group.handle, async_op=True)]
        return Pending(works, lambda: out)
    pieces = torch.split(out, list(sizes) if sizes is not None else [shard.numel()] * group.size)
    if native:
        _place(shard, pieces[group.rank])
        works = [
            dist.broadcast(_bytes(piece), group.ranks[k], group=group.handle, async_op=True)
            for k, piece in enumerate(pieces)
            if piece.numel()
        ]
    else:
        works = _swap([shard] * group.size, pieces, group)
        _place(shard, pieces[group.rank])
    return Pending(works, lambda: out)


def _place(x: Tensor, where: Tensor) -> None:
    """Copy, unless it lies there already."""
    if x.numel() and x.data_ptr() != where.data_ptr():
        where.copy_(x)


def reduce_scatter(
    full: Tensor | Sequence[Tensor], group: Group, sizes: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Pending:
    """Sum the ranks' full buffers and keep this rank's shard of the sum.

    On the CPU the contributions travel as they are and are summed in rank order, in fp32 for 16-bit floats. It is
    faster than gloo's own reduce-scatter, and bitwise the same whatever the timing.

    Args:
      full: 1-D contributions for all ranks; must not change until `wait`. In several tensors, on the CPU each is sent
        from where it is; all ranks must have them in the same sizes.
      sizes: elements per rank, where they are not all equal.
      dtype: of the result, if not that of the contributions: on the CPU the sum is rounded to it once.

    Returns:
      Pending with a new tensor, or `full` itself in a group of one.
    """
    parts = [full] if isinstance(full, Tensor) else list(full)
    length, kind = sum(x.numel() for x in parts), parts[0].dtype
    dtype = kind if dtype is None else dtype
    if group.size == 1:
        return Done(joined(parts).to(dtype))
    cuts = [length // group.size] * group.size if sizes is None else list(sizes)
    mine = cuts[group.rank]
    _note("reduce_scatter", (length - mine) * kind.itemsize, group)
    if parts[0].device.type != "cpu":
        full = joined(parts)
        pieces, out = torch.split(full, cuts), full.new_empty(mine)
        if sizes is None:
            works = [_reduce_scatter_single(out, full, group=group.handle, async_op=True)]
            return Pending(works, lambda: out.to(dtype))
        works = [
            dist.reduce(piece, group.ranks[k], group=group.handle, async_op=True)
            for k, piece in enumerate(pieces)
            if piece.numel()
        ]
        return Pending(works, lambda: out.copy_(pieces[group.rank]).to(dtype))
    collected, works = _collect(cut(parts, cuts), group)
    if len(collected) == 1:
        return Pending(works, lambda: in_order(collected[0], torch.add, dtype))
    return Pending(works, lambda: sum_parts(collected, torch.empty(mine, dtype=dtype, device="cpu")))


def _collect(
    pieces: Sequence[Sequence[Tensor]], group: Group, drawn: Sequence[int] = ()
) -> tuple[list[list[Tensor]], list[Any]]:
    """What all ranks have for this one, once the works are done: in rank order, for each tensor of its piece."""
    own = pieces[group.rank]
    numbers = drawn or [next(group.tags) for _ in range(max(map(len, pieces)))]
    received = [list(x.new_empty((group.size - 1, x.numel()))) for x in own]
    works = []
    for i, tag in enumerate(numbers):
        places = [] if i >= len(own) else [*received[i][: group.rank], None, *received[i][group.rank :]]
        sent = [piece[i] if i < len(piece) else None for piece in pieces]
        works += _swap(sent, places or [None] * group.size, group, tag)
    return [[*r[: group.rank], x, *r[group.rank :]] for x, r in zip(own, received, strict=True)], works


Tags = tuple[int, int]


def tags(group: Group) -> Tags | None:
    """The numbers of an all-reduce that is launched later, drawn now: in the order in which all ranks come here."""
    return (next(group.tags), next(group.tags)) if group.size > 1 else None


def all_reduce(x: Tensor, group: Group, op: str = "sum", drawn: Tags | None = None) -> Pending:
    """Reduce in place over the group; `op` is "sum" or "max".

    On the CPU in rank order: every rank gets the same bits.

    Args:
      drawn: of `tags`, where ranks may launch it in different orders.
    """
    if group.size == 1 or x.numel() == 0:
        return Done(x)
    if x.device.type != "cpu":
        _note("all_reduce", 2 * x.nbytes * (group.size - 1) // group.size, group)
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
        return Pending([dist.all_reduce(x, ops[op], group=group.handle, async_op=True)], lambda: x)
    combine: Any = {"sum": torch.add, "max": torch.maximum}[op]
    first, second = drawn or (next(group.tags), next(group.tags))
    flat = x.reshape(-1)
    if flat.nbytes <= SMALL:
        _note("all_reduce", flat.nbytes * (group.size - 1), group)
        (parts,), works = _collect([[flat]] * group.size, group, [first])
        return Pending(works, lambda: x.copy_(in_order(parts, combine).view_as(x)))
    share = -(-flat.numel() // group.size)
    pieces = [flat[k * share : (k + 1) * share] for k in range(group.size)]
    _note("all_reduce", flat.nbytes - pieces[group.rank].nbytes + pieces[group.rank].nbytes * (group.size - 1), group)
    (parts,), works = _collect([[piece] for piece in pieces], group, [first])
    return _Rejoin(x, flat, pieces, Pending(works, lambda: in_order(parts, combine)), group, second)


class _Rejoin(Pending):
    """The second half of a large all-reduce: everybody gets the reduced shares."""

    def __init__(
        self, x: Tensor, flat: Tensor, pieces: Sequence[Tensor], reduced: Pending, group: Group, tag: int
    ) -> None:
        super().__init__()
        self._parts = x, flat, pieces, reduced, group, tag

    def _complete(self) -> Tensor:
        x, flat, pieces, reduced, group, tag = self._parts
        pieces[group.rank].copy_(reduced.wait())
        for work in _swap([pieces[group.rank]] * group.size, pieces, group, tag):
            work.wait()
        return x if x.data_ptr() == flat.data_ptr() else x.copy_(flat.view_as(x))


def exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: Group) -> Pending:
    """All-to-all of any amounts, zeros included: piece k of `sent` goes to rank k, into its place there.

    Args:
      sent, received: contiguous tensors by rank; this rank's own piece is copied.

    Returns:
      Pending without a result of its own: the received tensors are filled.
    """
    own = group.rank
    _note("exchange", sum(x.nbytes for k, x in enumerate(sent) if k != own), group)
    if group.size == 1 or sent[own].device.type == "cpu":
        works = _swap(sent, received, group) if group.size > 1 else []
        _place(sent[own], received[own])
        return Pending(works, lambda: received[own])
    outputs, inputs = [_bytes(x) for x in received], [_bytes(x) for x in sent]
    return Pending([dist.all_to_all(outputs, inputs, group=group.handle, async_op=True)], lambda: received[own])


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """The small Python values of all ranks, in coordinate order. Sizes may differ."""
    if group.size == 1:
        return [value]
    _note("all_gather_object", 0, group)
    if group.host != "cpu":
        out: list[Any] = [None] * group.size
        dist.all_gather_object(out, value, group=group.handle)
        return out
    raw = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.empty(group.size, dtype=torch.int64, device="cpu")  # whatever the default device is
    counts = list(torch.split(sizes, 1))
    counts[group.rank].fill_(raw.numel())
    for work in _swap([counts[group.rank]] * group.size, counts, group):
        work.wait()
    texts = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in sizes.tolist()]
    texts[group.rank] = raw
    for work in _swap([raw] * group.size, texts, group):
        work.wait()
    return [pickle.loads(bytes(text.tolist())) for text in texts]
