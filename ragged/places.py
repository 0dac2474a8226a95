"""From global coordinates to a rank's elements: the even dims, the runs, the flat indices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ragged.layout import Bucket, LeafInfo

__all__ = ["coordinates", "even_slices", "fill_shard", "flat_rank", "global_index"]


def even_slices(leaf: LeafInfo, axes: Mapping[str, int], coordinate: Mapping[str, int]) -> tuple[slice, ...]:
    """The part of a global leaf that the even dims leave at a mesh coordinate."""
    out = []
    for dim, size in enumerate(leaf.local_shape):
        names = leaf.spec.dims[dim] if dim < len(leaf.spec.dims) else ()
        index = flat_rank(axes, coordinate, names)
        out.append(slice(index * size, (index + 1) * size))
    return tuple(out)


def flat_rank(axes: Mapping[str, int], coordinate: Mapping[str, int], names: Sequence[str]) -> int:
    """Coordinate on flattened axes, first outermost."""
    out = 0
    for name in names:
        out = out * axes.get(name, 1) + coordinate.get(name, 0)
    return out


def coordinates(axes: Mapping[str, int], names: Sequence[str]) -> Iterator[dict[str, int]]:
    """All coordinates on some axes in the order of their flat ranks; one, {}, for no axes."""
    for digits in itertools.product(*(range(axes[name]) for name in names)):
        yield dict(zip(names, digits, strict=True))


def fill_shard(
    out: Tensor,
    bucket: Bucket,
    tensors: Mapping[str, Tensor],
    axes: Mapping[str, int],
    coordinate: Mapping[str, int],
) -> None:
    """Copy a coordinate's runs of full tensors into its (zeroed) shard."""
    rank = flat_rank(axes, coordinate, bucket.ragged)
    base = bucket.bounds(rank)
    for leaf in bucket.leaves:
        start, stop = leaf.span(rank)
        if stop > start:
            # reshape copies only what isn't row-major already; values, not strides, are kept
            local = tensors[leaf.path].detach()[even_slices(leaf, axes, coordinate)].reshape(-1)
            begin = leaf.offset + start - base
            out[begin : begin + stop - start].copy_(local[start:stop])


def global_index(
    leaf: LeafInfo,
    axes: Mapping[str, int],
    coordinate: Mapping[str, int],
    start: int,
    stop: int,
    device: torch.device,
) -> Tensor:
    """Flat indices in the *global* leaf of its local elements `[start, stop)`, int64."""
    local = torch.arange(start, stop, device=device)
    if leaf.local_shape == leaf.shape:
        return local
    out = torch.zeros_like(local)
    stride = 1
    slices = even_slices(leaf, axes, coordinate)
    for dim in range(len(leaf.shape) - 1, -1, -1):
        n = leaf.local_shape[dim]
        out += (local % n + slices[dim].start) * stride
        local = local // n
        stride *= leaf.shape[dim]
    return out
