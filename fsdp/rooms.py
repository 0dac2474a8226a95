"""Memory for full parameters, kept from step to step: storages that fill and empty, and the leaves on them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ragged.buffer import full_views
from ragged.layout import Bucket

__all__ = ["Room", "Rooms", "room_on", "room_with_memory"]


class Room(NamedTuple):
    """A bucket's global buffer, and its leaves, in the bucket's order.

    Attributes:
      buffer: 1-D.
      leaves: tensors on the buffer's memory.
    """

    buffer: Tensor
    leaves: tuple[Tensor, ...]


def room_with_memory(bucket: Bucket, dtype: torch.dtype, device: torch.device) -> Room:
    """A room whose storage can be emptied and refilled while autograd holds its leaves.

    They are not views in autograd's sense but have version counters of their own, so a refill does not count as an
    in-place change of them.
    """
    buffer = torch.empty(bucket.length, dtype=dtype, device=device)
    storage, start = buffer.untyped_storage(), buffer.storage_offset()
    leaves = []
    with torch.no_grad():
        for leaf in bucket.leaves:
            strides = torch.empty(leaf.local_shape, device="meta").stride()
            leaves.append(buffer.new_empty(0).set_(storage, start + leaf.offset, leaf.local_shape, strides))
    return Room(buffer, tuple(leaves))


def room_on(buffer: Tensor, bucket: Bucket) -> Room:
    """A room on memory that is there already and stays as it is: its leaves are plain views."""
    return Room(buffer, tuple(full_views(buffer, bucket).values()))


class Rooms:
    """Rooms that no step uses at the moment. They are empty: what is kept is not memory but the tensors on it."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], tuple[Bucket, list[Room]]] = {}

    def take(self, bucket: Bucket, dtype: torch.dtype, device: torch.device) -> Room:
        """An empty room for a bucket, another than all that are in use."""
        _, free = self._free.get((id(bucket), dtype), (bucket, []))
        if not free:
            room = room_with_memory(bucket, dtype, device)
            room.buffer.untyped_storage().resize_(0)
            return room
        room = free.pop()
        # A graph of an earlier step that somebody still holds has to find out that its parameters are gone.
        torch.autograd.graph.increment_version(room.leaves)
        return room

    def give(self, bucket: Bucket, room: Room) -> None:
        """Nobody uses a room any more."""
        _, free = self._free.setdefault((id(bucket), room.buffer.dtype), (bucket, []))
        free.append(room)
