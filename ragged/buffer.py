"""`DBuffer`: one flat local tensor of which leaves are views, gathered and reduced as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragged.agree import same
from ragged.collectives import Group, Pending, all_gather
from ragged.layout import Bucket
from ragged.mesh import Comm
from ragged.reduction import reduce_buffer, reduction

__all__ = ["DBuffer", "compare", "fill_leaves", "full_views", "gather_into"]


@dataclass(frozen=True)
class DBuffer:
    """This rank's shard of a bucket.

    Attributes:
      tensor: 1-D, S elements (this rank's share where the spec gave `shares`); group arithmetic
        on it is arithmetic on all its leaves, since padding is zero.
      bucket: the layout; `comm`: the mesh's process groups.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, shard
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> (buffer,) = shard({"w": torch.ones(4, 2)}, mesh, P(ragged="fsdp")).buffers
      >>> buffer.views(buffer.gather())["w"].shape
      torch.Size([4, 2])

    Source: DBuffer, arXiv 2602.22437, section 5.
    """

    tensor: Tensor
    bucket: Bucket
    comm: Comm

    @property
    def rank(self) -> int:
        return self.comm.rank(self.bucket.ragged)

    def gather(self, out: Tensor | None = None) -> Tensor:
        """The global buffer, gathered straight into `out` (1-D, `bucket.length` elements).

        Raises:
          ValueError: `out` has another size or dtype; on all ranks: another rank is at another bucket.
        """
        error = None
        if out is None:
            out = self.tensor if self.bucket.ranks == 1 else self.tensor.new_empty(self.bucket.length)
        elif out.shape != (self.bucket.length,) or out.dtype != self.tensor.dtype:
            error = ValueError(
                f"gather of bucket {self.bucket.name!r} needs out of shape ({self.bucket.length},) and dtype "
                f"{self.tensor.dtype}, got {tuple(out.shape)} and {out.dtype}"
            )
        compare("gather", [(self.bucket, self.tensor.dtype)], self.comm.group(self.bucket.ragged), error)
        return gather_into(out, self.tensor, self.bucket, self.comm).wait()

    def reduce(self, full: Tensor, op: str = "mean") -> Tensor:
        """Reduce the ranks' global buffers to this rank's shard of their sum or mean.

        Every rank that doesn't differ on an even axis contributes. `full` may be overwritten.

        Raises:
          ValueError: another size, or an unknown `op`; on all ranks: another rank is at another bucket.
        """
        axes, error = self.comm.axes, None
        data = tuple(a for a in axes if a not in self.bucket.even)
        if full.shape != (self.bucket.length,):
            error = ValueError(
                f"reduce of bucket {self.bucket.name!r} needs shape ({self.bucket.length},), got {tuple(full.shape)}"
            )
        elif op not in ("mean", "sum"):
            error = ValueError(f'op={op!r}: expected "mean" or "sum"')
        compare(f"reduce by {op}", [(self.bucket, full.dtype)], self.comm.group(data), error)
        return reduce_buffer(full, self.bucket, self.comm, reduction(self.bucket, axes, data, op=op)).wait()

    def leaf(self, path: str) -> Tensor:
        """This rank's run of a leaf, a 1-D view; possibly empty.

        Raises:
          ValueError: the bucket has no leaf of that path.
        """
        for info in self.bucket.leaves:
            if info.path == path:
                start, stop = info.span(self.rank)
                begin = info.offset + start - self.bucket.bounds(self.rank) if stop > start else 0
                return self.tensor[begin : begin + stop - start]
        raise ValueError(f"no leaf {path!r} in bucket {self.bucket.name!r}")

    def views(self, full: Tensor) -> dict[str, Tensor]:
        """Full leaves (after the even dims) as views of the global buffer, by path."""
        return full_views(full, self.bucket)


def compare(
    kind: str, buckets: Sequence[tuple[Bucket, torch.dtype]], group: Group, error: Exception | None = None
) -> None:
    """Raise on all ranks of the group unless they are about to do the same with the same buckets."""

    def facts() -> dict[str, str]:
        out = {}
        for i, (b, dtype) in enumerate(buckets):
            leaves = ", ".join(f"{f.path} of shape {f.local_shape} at {f.offset}" for f in b.leaves)
            name = str(dtype).removeprefix("torch.")
            out[f"bucket {i}"] = f"{b.name} of {b.length} elements, {name}, cut into {b.bounds}, with {leaves}"
        return out

    same(f"{kind} of a bucket", repr([(b.digest, dtype) for b, dtype in buckets]), facts, group, error)


def gather_into(out: Tensor, shard: Tensor, bucket: Bucket, comm: Comm) -> Pending:
    """Start gathering a bucket's shards straight into its global buffer."""
    sizes = bucket.bounds.sizes if bucket.bounds.explicit else None
    return all_gather(out, shard, comm.group(bucket.ragged), sizes)


def full_views(full: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    """Full leaves as views of a bucket's global buffer."""
    parts = full.split_with_sizes(bucket.sections)
    return {
        f.path: parts[i] if len(f.local_shape) == 1 else parts[i].view(f.local_shape)
        for f, i in zip(bucket.leaves, bucket.places, strict=True)
    }


def fill_leaves(full: Tensor, bucket: Bucket, values: Sequence[Tensor | None]) -> None:
    """Write leaves into a bucket's global buffer. Padding becomes zero, and so do leaves that are None."""
    for start, stop in bucket.gaps:
        full[start:stop].zero_()
    flat = [
        x if x.dim() == 1 else x.view(-1)
        for x in values
        if x is not None and x.dtype == full.dtype and x.is_contiguous()
    ]
    if len(flat) == len(values):
        for start, stop, first, last in bucket.stretches:  # one kernel for all leaves of a stretch
            torch.cat(flat[first:last], out=full[start:stop] if stop - start < len(full) else full)
        return
    for view, value in zip(full_views(full, bucket).values(), values, strict=True):
        if value is None:
            view.zero_()
        else:
            view.copy_(value)
