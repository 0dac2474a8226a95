"""Compare what must be equal on all ranks before anything that would hang or abort on it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch

from ragged.collectives import Group, all_gather_object, all_reduce

__all__ = ["agree", "same"]


def agree(what: str, facts: Mapping[str, str], group: Group, error: Exception | None = None) -> None:
    """Raise on every rank unless all ranks hold the same facts and none met an error.

    Args:
      what: what is being compared, for the message.
      facts: values by name, most telling first.
      error: what went wrong on this rank before it came here, if anything did. Ranks that
        fail early still call this, so that the others learn of it rather than wait.

    Raises:
      ValueError: naming the first difference, a rank on either side and both values; or the
        failing rank and its message. The failing rank raises its own error.
    """
    same(what, "\n".join(f"{name}\t{value}" for name, value in facts.items()), lambda: facts, group, error)


def same(
    what: str, text: str, facts: Callable[[], Mapping[str, str]], group: Group, error: Exception | None = None
) -> None:
    """`agree` where facts are many: one message of 16 bytes while all ranks are of one mind.

    Every comparison begins with that message, so ranks that compare different things find out too.

    Args:
      text: what has to be equal on all ranks.
      facts: the same by name, asked for only if it isn't.
      error: as in `agree`.
    """
    if group.size > 1:
        raw = hashlib.blake2b(f"{what}\n{text}".encode() if error is None else b"failed", digest_size=8).digest()
        digest = int.from_bytes(raw) >> 12  # 52 bits: exact in fp64
        ends = all_reduce(torch.tensor([digest, -digest], dtype=torch.float64, device=group.host), group, "max").wait()
        if ends[0].item() != -ends[1].item():
            _explain(what, facts, group, error)
    if error is not None:
        raise error


def _explain(what: str, facts: Callable[[], Mapping[str, str]], group: Group, error: Exception | None) -> None:
    """Find out who differs, on all ranks, and raise."""
    failures = all_gather_object(None if error is None else f"{error}", group)
    failed = [(k, message) for k, message in enumerate(failures) if message is not None]
    if error is not None:
        raise error
    if failed:
        rank, message = failed[0]
        raise ValueError(f"{what}: rank {group.ranks[rank]} failed: {message}")
    tables = all_gather_object({"what this rank does": what, **facts()}, group)
    raise ValueError(f"{what} differs between ranks: {_difference(tables, group.ranks)}")


def _difference(tables: list[dict[str, str]], ranks: tuple[int, ...]) -> str:
    for name in dict.fromkeys(name for table in tables for name in table):
        for k, table in enumerate(tables):
            if table.get(name) != tables[0].get(name):
                here, there = (t.get(name, "nothing") for t in (tables[0], table))
                return f"{name}: rank {ranks[0]} has {here}, rank {ranks[k]} has {there}"
    return "the order of " + ", ".join(list(tables[0])[:3])
