"""Leaves before they have a place: what each asks of the planner, and who asks it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ragged.layout import Bounds, Request, axis_size
from ragged.paths import Shaped
from ragged.planner import Item
from ragged.spec import P, block_elements

__all__ = ["Draft", "HasBlocks", "draft", "local_shape", "met", "shares_bounds"]

Blocks = Callable[[str, tuple[int, ...], torch.dtype], tuple[Any, int] | None]


class HasBlocks(Protocol):
    """What `plan(optimizer=)` needs: a `GradientTransformation` has it, and may have `labels` besides."""

    @property
    def blocks(self) -> Blocks | None: ...


@dataclass(frozen=True)
class Draft:
    """A leaf as the planner gets it.

    Attributes:
      local: shape after the even dims are cut.
      block: elements that no rank boundary cuts, with every request met.
      align: multiple of elements at which the leaf has to start.
      key: leaves of a unit with equal keys may share a buffer.
      requests: who asked for which block.
      label: leaves with equal ones are to be neighbours.
    """

    path: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    dtype: torch.dtype
    spec: P
    block: int
    align: int
    key: tuple[Any, ...]
    requests: tuple[Request, ...]
    label: str

    @property
    def item(self) -> Item:
        return Item(math.prod(self.local), self.block)


def draft(
    path: str,
    shape: Shaped,
    spec: P,
    axes: Mapping[str, int],
    frozen: bool,
    blocks: Blocks | None,
    label: Hashable = "",
    known: tuple[tuple[int, ...], tuple[Request, ...]] | None = None,
) -> Draft:
    """Resolve the requests of a leaf's spec and of the optimizer.

    Args:
      blocks: what the optimizer asks for.
      known: requests beside the spec's that were resolved before, for this local shape.

    Raises:
      ValueError: naming path, shape and spec.
    """
    local = local_shape(path, shape.shape, spec, axes)
    requests = [Request("spec", _block(path, shape.shape, spec, spec.block, local) if spec.ragged else 1)]
    asked = blocks(path, shape.shape, shape.dtype) if blocks is not None else None
    if asked is not None:
        requests.append(_request(path, shape.shape, spec, asked, local))
    if known is not None and known[0] == local:
        requests += known[1]
    ragged = tuple(a for a in spec.ragged if a in axes)
    even = tuple(sorted({a for d in spec.dims for a in d if a in axes}))
    key = (frozen, shape.dtype, ragged, even, path if spec.shares is not None else None)
    block, align = met(requests, math.prod(local))
    return Draft(path, shape.shape, local, shape.dtype, spec, block, align, key, tuple(requests), str(label))


def met(requests: Sequence[Request], size: int) -> tuple[int, int]:
    """(block, start alignment) of a leaf of `size` elements with every request met.

    A boundary that is a multiple of two blocks cuts neither.

    >>> met([Request("spec", 6), Request("optimizer", 4, 16)], 100)
    (12, 16)
    """
    return min(math.lcm(*(r.block for r in requests)), max(size, 1)), math.lcm(*(r.align for r in requests))


def _request(path: str, shape: tuple[int, ...], spec: P, asked: Any, local: tuple[int, ...]) -> Request:
    good = isinstance(asked, tuple) and len(asked) == 2 and type(asked[1]) is int and asked[1] >= 1
    try:
        if good:
            P(ragged="any", block=asked[0])  # checks the block
            return Request("optimizer", _block(path, shape, spec, asked[0], local), asked[1])
    except ValueError:
        good = False
    raise ValueError(
        f"leaf {path!r} of shape {shape}: the optimizer's blocks returned {asked!r}, expected None or "
        "(block, start alignment in elements)"
    )


def _block(path: str, shape: tuple[int, ...], spec: P, block: Any, local: tuple[int, ...]) -> int:
    try:
        return block_elements(block, local)
    except ValueError as error:
        raise ValueError(f"leaf {path!r} of shape {shape}, spec {spec!r}: {error}") from None


def local_shape(path: str, shape: tuple[int, ...], spec: P, axes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape after the even dims are cut.

    Raises:
      ValueError: more dims than the leaf has, or a size that the axes don't divide.
    """
    if len(spec.dims) > len(shape):
        raise ValueError(f"leaf {path!r} of shape {shape} has {len(shape)} dims, spec {spec!r} names {len(spec.dims)}")
    out = list(shape)
    for dim, names in enumerate(spec.dims):
        pieces = axis_size(axes, names)
        if out[dim] % pieces:
            axis = names[0] if len(names) == 1 else names
            raise ValueError(
                f"leaf {path!r} of shape {shape}, spec {spec!r}: dim {dim} of size {out[dim]} does not "
                f"divide over {pieces} ranks of {axis!r}; use ragged={axis!r} for unequal pieces"
            )
        out[dim] //= pieces
    return tuple(out)


def shares_bounds(leaf: Draft, ranks: int) -> Bounds:
    """Rank boundaries of a leaf whose spec gives the shares outright.

    Raises:
      ValueError: another number of shares than of ranks, or their sum does not divide the blocks.
    """
    shares = leaf.spec.shares
    assert shares is not None
    size = math.prod(leaf.local)
    blocks = -(-size // leaf.block)
    about = f"leaf {leaf.path!r} of shape {leaf.shape}, spec {leaf.spec!r}"
    if len(shares) != ranks:
        raise ValueError(f"{about}: {len(shares)} shares for {ranks} ranks of {leaf.spec.ragged}; give one per rank")
    if blocks % sum(shares):
        raise ValueError(
            f"{about}: sum(shares) = {sum(shares)} does not divide its {blocks} blocks of {leaf.block} "
            "elements; change the shares, or use a smaller block="
        )
    each, borders = blocks // sum(shares), [0]
    for share in shares:
        borders.append(min(borders[-1] + share * each * leaf.block, size))
    return Bounds(ranks, 0, tuple(borders))
