"""The spec language: how one leaf is laid out on a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = ["ELEMENT", "ROW", "TENSOR", "Block", "P", "block_elements"]


@dataclass(frozen=True)
class Granularity:
    """A named block size. Use the constants `ELEMENT`, `ROW` and `TENSOR`."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name  # copies and pickles are the constant itself


ELEMENT: Final = Granularity("ELEMENT")
"""Any element may start a new rank."""
ROW: Final = Granularity("ROW")
"""One index of tensor dim 0 is never cut (the default)."""
TENSOR: Final = Granularity("TENSOR")
"""The whole leaf stays on one rank."""

Block: TypeAlias = Granularity | int | tuple[int | None, ...]
Axes: TypeAlias = str | tuple[str, ...] | None


class P:
    """How one leaf is cut: some tensor dims evenly, the rest raggedly at block borders.

    Args:
      dims: per tensor dim `None`, a mesh axis, or a tuple of axes (outermost first) that cut
        it evenly, as in `jax.sharding.PartitionSpec`. Missing trailing entries are uncut.
      ragged: the mesh axis, or tuple of axes (first outermost), over which what is left after
        the even dims is flattened row-major and cut into contiguous runs of whole blocks.
      block: what no rank boundary may cut, in elements per tensor dim of what is left after
        the even dims: `ELEMENT`, `ROW`, `TENSOR`, `n` flat elements, or a tuple with `None`
        for a full dim. See `block_elements`.
      shares: relative shares of the blocks per rank of `ragged`, zeros allowed.

    An axis that is not named holds replicas. `P()` is replicated everywhere.

    Raises:
      ValueError: a mesh axis named twice, a block that is not positive, or shares without a
        ragged axis, negative, or summing to zero.

    Example:
      >>> P(None, "tp", ragged="fsdp", block=(32, 32))
      P(None, 'tp', ragged='fsdp', block=(32, 32))
      >>> P("tp") == P("tp", None)
      True

    Source: RaggedShard, arXiv 2602.22437, section 4.
    """

    __slots__ = ("_hash", "block", "dims", "ragged", "shares")

    dims: tuple[tuple[str, ...], ...]
    ragged: tuple[str, ...]
    block: Block
    shares: tuple[int, ...] | None
    _hash: int

    def __init__(
        self,
        *dims: Axes,
        ragged: Axes = None,
        block: Block = ROW,
        shares: Sequence[int] | None = None,
    ) -> None:
        axes = tuple(_axes(d, f"dim {i}") for i, d in enumerate(dims))
        while axes and not axes[-1]:
            axes = axes[:-1]
        set_ = object.__setattr__
        set_(self, "dims", axes)
        set_(self, "ragged", _axes(ragged, "ragged"))
        set_(self, "block", _checked_block(block))
        set_(self, "shares", tuple(shares) if isinstance(shares, Sequence) else shares)
        named = [a for d in self.dims for a in d] + list(self.ragged)
        if twice := sorted({a for a in named if named.count(a) > 1}):
            raise ValueError(f"{self!r} names mesh axis {twice[0]!r} twice; each axis can cut a leaf once")
        if self.shares is not None:
            if not self.ragged:
                raise ValueError(f"{self!r}: shares= needs ragged=, the axis whose ranks they belong to")
            good = isinstance(self.shares, tuple) and all(type(s) is int and s >= 0 for s in self.shares)
            if not good or sum(self.shares) == 0:
                raise ValueError(f"{self!r}: shares must be integers >= 0, not all zero; got {self.shares}")
        set_(self, "_hash", hash((self.dims, self.ragged, self.block, self.shares)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"P is immutable; write a new spec in place of setting {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self._key() == other._key()

    def __hash__(self) -> int:
        return self._hash

    def _key(self) -> tuple[object, ...]:
        return self.dims, self.ragged, self.block, self.shares

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.dims, self.ragged, self.block, self.shares)

    def __repr__(self) -> str:
        parts = [repr(_short(d)) for d in self.dims]
        if self.ragged:
            parts.append(f"ragged={_short(self.ragged)!r}")
            if self.block is not ROW:
                parts.append(f"block={self.block!r}")
        if self.shares is not None:
            parts.append(f"shares={self.shares!r}")
        return f"P({', '.join(parts)})"


def _rebuild(
    dims: tuple[tuple[str, ...], ...], ragged: tuple[str, ...], block: Block, shares: tuple[int, ...] | None
) -> P:
    return P(*dims, ragged=ragged, block=block, shares=shares)


def _axes(value: Axes, where: str) -> tuple[str, ...]:
    axes = () if value is None else tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(a, str) and a for a in axes):
        raise ValueError(f"{where}: expected a mesh axis name, a tuple of names, or None; got {value!r}")
    return axes


def _short(axes: tuple[str, ...]) -> Axes:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _checked_block(block: Block) -> Block:
    if isinstance(block, Granularity):
        return block
    entries = block if isinstance(block, tuple) else (block,)
    good = all((b is None and isinstance(block, tuple)) or (type(b) is int and b >= 1) for b in entries)
    if not good or not entries:
        raise ValueError(
            f"block={block!r}: expected ELEMENT, ROW, TENSOR, a positive int of flat elements, "
            "or a tuple of positive ints with None for a full dim"
        )
    return block


def block_elements(block: Block, shape: Sequence[int]) -> int:
    """The number of contiguous elements that no rank boundary may cut.

    A tuple closes to the smallest contiguous run whose every multiple lies on tile borders (a
    short last tile counts as a full one): tiles of `(32, 32)` on `(4096, 1024)` are cut only
    between bands of 32 full rows; tiles of `(1, 128, None)` on `(E, 2880, N)` only between
    experts, since 128 does not divide 2880.

    Args:
      block: the block of a spec.
      shape: the leaf's shape after the even dims are cut.

    Returns:
      Elements, at least 1 and at most the number of elements of the leaf (1 for empty leaves).

    Raises:
      ValueError: a tuple with more entries than the shape has dims.

    Example:
      >>> block_elements((32, 32), (4096, 1024)), block_elements(ROW, (8, 3, 2))
      (32768, 6)
    """
    size = math.prod(shape)
    if size == 0 or block is ELEMENT:
        return 1
    if block is TENSOR:
        return size
    if isinstance(block, int):
        return min(block, size)
    tiles: tuple[int | None, ...] = (1,) if isinstance(block, Granularity) else block
    if len(tiles) > len(shape):
        if isinstance(block, Granularity):  # ROW of a 0-d leaf
            return 1
        raise ValueError(f"block={block} has {len(tiles)} entries for a leaf of shape {tuple(shape)}")
    return _closure(tiles, tuple(shape))


def _closure(tiles: tuple[int | None, ...], shape: tuple[int, ...]) -> int:
    """Smallest run whose multiples never split a tile, by dims from the outside in.

    A cut inside index i of dim 0 parts the tiles of the rows above from those below, so it is
    legal only if tiles are one row high; and then only if the inner cuts of all rows line up,
    that is if the inner run divides a row. Otherwise cuts fall between bands of tiles.
    """
    if not shape:
        return 1
    row = math.prod(shape[1:])
    height = shape[0] if not tiles or tiles[0] is None else min(tiles[0], shape[0])
    if not tiles or height > 1:
        return height * row
    inner = _closure(tiles[1:], shape[1:]) if len(tiles) > 1 else row
    return inner if shape[0] == 1 or row % inner == 0 else row
