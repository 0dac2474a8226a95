"""Sums of the ranks' contributions in one fixed order, and buffers that lie in several tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["cut", "in_order", "joined", "sum_parts"]


def in_order(
    parts: Sequence[Tensor],
    combine: Callable[..., Tensor],
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Combine in the order given, so that the result is the same on every run and machine; a new tensor, or `out`."""
    straight = None if out is None or out.dtype != parts[0].dtype else out
    if parts[0].dtype in (torch.bfloat16, torch.float16):
        total = combine(parts[0].float(), parts[1])
    else:
        total = combine(parts[0], parts[1], out=straight)
    for part in parts[2:]:
        combine(total, part, out=total)
    if out is not None:
        return total if total is out else out.copy_(total)
    return total.to(parts[0].dtype if dtype is None else dtype)


def sum_parts(collected: Sequence[Sequence[Tensor]], out: Tensor) -> Tensor:
    """Sum what belongs together, part after part."""
    for place, same in zip(out.split_with_sizes([parts[0].numel() for parts in collected]), collected, strict=True):
        in_order(same, torch.add, out=place)
    return out


def joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def cut(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Tensors that follow each other, cut into pieces of given sizes: views.

    Example:
      >>> import torch
      >>> [[x.tolist() for x in piece] for piece in cut([torch.arange(3), torch.arange(3, 6)], [1, 4, 1])]
      [[[0]], [[1, 2], [3, 4]], [[5]]]
    """
    if len(parts) == 1:
        return [[piece] for piece in torch.split(parts[0], list(sizes))]
    out: list[list[Tensor]] = []
    rest, i, at = 0, 0, 0
    for size in sizes:
        piece, rest = [], size
        while rest:
            n = min(rest, parts[i].numel() - at)
            piece += [parts[i][at : at + n]] if n else []
            rest, at = rest - n, at + n
            if at == parts[i].numel():
                i, at = i + 1, 0
        out.append(piece)
    return out
