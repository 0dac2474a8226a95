"""Ranks of a collective in coordinate order, and torch's process group where the backend needs one."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Group", "make_group"]

_TAGS = 1 << 12  # messages of one group that can be told apart while in flight


@dataclass(frozen=True)
class Group:
    """Ranks of a collective in coordinate order.

    Messages between CPU tensors go from rank to rank over the default group (`ragged.collectives`), so on the
    CPU any set of ranks in any order is a group at no cost. NCCL needs a communicator of its own per group.

    Attributes:
      ranks: global ranks; `rank`: this process's position among them.
      handle: torch's process group for device tensors; None on the CPU and for a single rank.
      host: device of small messages that the host reads at once: the CPU where gloo is there.
      tags: numbers that tell messages apart, in the one order in which all ranks launch collectives.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: Any = field(default=None, repr=False, compare=False)
    host: str = field(default="cpu", compare=False)
    tags: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


def make_group(siblings: Sequence[tuple[int, ...]], device_type: str) -> Group:
    """This process's group among `siblings`, groups that the same axes form at other coordinates.

    All ranks of all siblings call it, in the same order as other groups.

    Args:
      siblings: disjoint tuples of global ranks, each in coordinate order.

    Raises:
      ValueError: the order can't be expressed in this version of torch.
    """
    mine, world = dist.get_rank(), dist.group.WORLD
    ranks = next(group for group in siblings if mine in group)
    known = _groups.get((ranks, device_type))
    if known is not None and known[0] is world:
        return known[1]
    at, tags = ranks.index(mine), _tags(ranks)
    if device_type == "cpu" or len(ranks) == 1:
        group = Group(ranks, at, tags=tags)
    else:
        # Where gloo runs beside NCCL the host asks it, and doesn't wait for the device.
        host = "cpu" if "gloo" in dist.get_backend_config(world) else device_type
        group = Group(ranks, at, _device_group(siblings, ranks), host, tags)
    _groups[ranks, device_type] = world, group
    return group


# Groups live as long as torch's world group does, and so does the count of the messages between their ranks.
_groups: dict[tuple[tuple[int, ...], str], tuple[Any, Group]] = {}


def _tags(ranks: tuple[int, ...]) -> Iterator[int]:
    """Equal on all members, and with hardly a chance to meet those of another group of the same ranks."""
    digest = int.from_bytes(hashlib.blake2b(repr(ranks).encode(), digest_size=4).digest())
    base = (1 << 30) + (digest >> 2) // _TAGS * _TAGS
    return (base + i % _TAGS for i in itertools.count())


def _device_group(siblings: Sequence[tuple[int, ...]], ranks: tuple[int, ...]) -> Any:
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    # If the siblings are everybody, all processes make all groups, in one order: that works whatever groups a
    # process has made before. Members of a part of the processes can only make their own by themselves.
    everybody = sum(map(len, siblings)) == dist.get_world_size()
    found = None
    for group in siblings if everybody else [ranks]:
        order: dict[str, Any] = {} if list(group) == sorted(group) else {"sort_ranks": False}
        try:
            handle = dist.new_group(list(group), use_local_synchronization=not everybody, **order)
        except TypeError:
            raise ValueError(
                f"torch {torch.__version__} can't make a process group in the order {group}; "
                "use a mesh whose ranks ascend, or torch >= 2.13"
            ) from None
        found = handle if group == ranks else found
    return found
