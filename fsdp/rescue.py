"""What a failing rank still does for the others, so that all of them can raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdp.schedule import Event
from ragged.buffer import gather_into
from ragged.collectives import all_reduce
from ragged.layout import Bucket
from ragged.mesh import Comm
from ragged.reduction import Reduction, reduce_buffer

__all__ = ["take_part"]


def take_part(events: Sequence[Event], how: Callable[[Bucket], Reduction], comm: Comm) -> None:
    """Join collectives that other ranks wait for, with zeros; their step will raise at its end."""
    for event in events:
        bucket = event.bucket
        local = torch.zeros(bucket.bounds.size(comm.rank(bucket.ragged)), dtype=event.dtype, device=comm.device)
        full = torch.zeros(bucket.length, dtype=event.dtype, device=comm.device)
        if event.kind == "gather":
            gather_into(full, local, bucket, comm).wait()
        elif event.kind == "sum":
            all_reduce(local, comm.group(how(bucket).across)).wait()
        elif event.kind == "scatter":
            reduce_buffer(full, bucket, comm, Reduction((), 1)).wait()
        else:
            reduce_buffer(full, bucket, comm, how(bucket)).wait()
