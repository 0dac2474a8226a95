"""Parts of a global buffer that travel on their own: gradients of large leaves are sent from where they are.

How a buffer is parted follows from the plan alone, so that all ranks send and expect the same messages, whether a
rank has its gradients apart or next to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ragged.layout import Bucket, Chunk

__all__ = ["address_of", "in_chunks", "is_freed", "split_chunks"]


def split_chunks(full: Tensor, bucket: Bucket) -> Sequence[Tensor]:
    """A global buffer in its parts, as views."""
    return [full] if len(bucket.chunks) == 1 else full.split_with_sizes([c.stop - c.start for c in bucket.chunks])


def in_chunks(values: Sequence[Tensor | None], bucket: Bucket, dtype: torch.dtype) -> list[Tensor] | None:
    """Values of a bucket's leaves as the parts of a global buffer: large ones as they are, copies of the others.

    None stands for zeros; padding is zero.

    Returns:
      1-D tensors of the dtype; None if there are no large leaves, or one of those isn't plain memory of the dtype.
    """
    large = [values[c.leaf] for c in bucket.chunks if c.leaf is not None]
    if not large or any(x is None or x.dtype != dtype or not _is_plain(x) or not _unshared(x) for x in large):
        return None
    given = iter(large)
    return [_pack(c, values, bucket, large[0]) if c.leaf is None else _flat(next(given)) for c in bucket.chunks]


def address_of(x: Tensor | None) -> int:
    """Where a tensor's storage lies; 0 for None, and for what has others inside, or none."""
    strided = x is not None and type(x) is Tensor and x.layout == torch.strided
    return x.untyped_storage().data_ptr() if x is not None and strided else 0


def is_freed(x: Tensor | None) -> bool:
    """Whether a tensor should have values but its storage has no memory any more."""
    if x is None or type(x) is not Tensor or x.layout != torch.strided:
        return False
    return x.numel() > 0 and x.untyped_storage().nbytes() == 0


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor's values lie in its own memory as they are, one after the other."""
    lazy = x.is_conj() or x.is_neg() or x.is_inference()
    return type(x) is Tensor and x.layout == torch.strided and not lazy and x.is_contiguous()


def _unshared(x: Tensor) -> bool:
    """Whether autograd holds a gradient for nobody else, who might change it in place: a hook, for one."""
    found: Any = x
    return bool(found._use_count() == 1)  # torch has no public name for it


def _flat(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.view(-1)


def _pack(chunk: Chunk, values: Sequence[Tensor | None], bucket: Bucket, like: Tensor | None) -> Tensor:
    """What lies between two large leaves, in memory of its own."""
    assert like is not None
    out = like.new_empty(chunk.stop - chunk.start)
    at = 0
    for i in chunk.inside:
        leaf, x = bucket.leaves[i], values[i]
        begin = leaf.offset - chunk.start
        out[at:begin].zero_()
        at = begin + leaf.size
        if x is None:
            out[begin:at].zero_()
        else:
            out[begin:at].view(x.shape).copy_(x)
    out[at:].zero_()
    return out
