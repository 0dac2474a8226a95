"""Memory for full parameters: a storage that fills and empties, and the leaves on it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ragged.buffer import full_views
from ragged.layout import Bucket, contiguous_strides

__all__ = ["Room", "empty_room", "room_on", "room_over"]


class Room(NamedTuple):
    """A bucket's global buffer, and its leaves, in the bucket's order.

    Attributes:
      buffer: 1-D.
      leaves: tensors on the buffer's memory.
    """

    buffer: Tensor
    leaves: tuple[Tensor, ...]


def empty_room(bucket: Bucket, dtype: torch.dtype, device: torch.device) -> Room:
    """A room without memory, which its storage gets and loses while autograd holds the leaves.

    They are not views in autograd's sense but have version counters of their own, so a refill does not count as an
    in-place change of them. Every step has rooms of its own: a graph that outlives its step finds them empty.
    """
    return room_over(torch.empty(0, dtype=dtype, device=device).untyped_storage(), bucket, dtype)


def room_over(storage: torch.UntypedStorage, bucket: Bucket, dtype: torch.dtype) -> Room:
    """New tensors on the storage of a room, which stays as full or as empty as it is."""
    size, nothing = storage.nbytes(), torch.empty(0, dtype=dtype, device=storage.device)
    with torch.no_grad():
        buffer, *leaves = (
            nothing.new_empty(0).set_(storage, start, shape, contiguous_strides(shape))
            for start, shape in ((0, (bucket.length,)), *((leaf.offset, leaf.local_shape) for leaf in bucket.leaves))
        )
    if storage.nbytes() != size:  # `set_` gave it memory
        storage.resize_(size)
    return Room(buffer, tuple(leaves))


def room_on(buffer: Tensor, bucket: Bucket) -> Room:
    """A room on memory that is there already and stays as it is: its leaves are plain views."""
    return Room(buffer, tuple(full_views(buffer, bucket).values()))
