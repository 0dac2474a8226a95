"""Where the quantization blocks of leaves lie: their number, the layout of their scales, and views of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ragged.layout import Bounds, Bucket, LeafInfo, Unit
from ragged.plans import Plan
from ragged.selection import Selection, select
from ragged.spec import ELEMENT, P, block_elements

__all__ = ["CHUNK", "Blocking", "Grid", "check_blocking", "grid", "regions", "scale_selection", "scale_shape"]

# Elements that are worked on at once on a CPU: few enough for temporaries to stay in the cache, and so many that
# the calls of kernels don't count.
CHUNK = 1 << 17


@dataclass(frozen=True)
class Blocking:
    """Which leaves have blocks, and which: from global shapes alone.

    Attributes:
      block: flat elements, or the sides of tiles over the last two dims.
      min_size: elements from which a leaf is quantized.
    """

    block: int | tuple[int, int]
    min_size: int

    def covers(self, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) >= max(self.min_size, 1)

    def request(self, shape: tuple[int, ...]) -> tuple[Any, int] | None:
        """(block, start alignment) for `plan(optimizer=)`."""
        if not self.covers(shape):
            return None
        if self.flat(shape):
            return self.flat(shape), self.flat(shape)
        return (*(1 for _ in shape[2:]), *self.sides), 1

    @property
    def sides(self) -> tuple[int, int]:
        return (1, self.block) if isinstance(self.block, int) else self.block

    def flat(self, shape: tuple[int, ...]) -> int:
        """Elements of a flat block, 0 where blocks are tiles. Leaves without two dims have no tiles."""
        return math.prod(self.sides) if isinstance(self.block, int) or len(shape) < 2 else 0


def check_blocking(block: Any, min_size: Any) -> Blocking:
    """The blocking, if it is one.

    Raises:
      ValueError: naming the argument.
    """
    sides = block if isinstance(block, tuple) else (1, block)
    if len(sides) != 2 or any(type(b) is not int or b < 1 for b in sides):
        raise ValueError(f"block={block!r}: expected a number of elements such as 256, or a tile such as (32, 32)")
    if type(min_size) is not int or min_size < 0:
        raise ValueError(f"min_size={min_size!r}: expected a number of elements, 0 or more")
    return Blocking(block, min_size)


@dataclass(frozen=True)
class Grid:
    """The blocks of one leaf, in row-major order of the leaf as an even cut leaves it.

    Attributes:
      local: shape after the even dims are cut.
      flat: elements of a flat block, or 0; `sides`: of a tile.
      uncut: contiguous elements that no rank boundary may cut.
    """

    local: tuple[int, ...]
    flat: int
    sides: tuple[int, int]
    uncut: int

    def count(self, x: int) -> int:
        """Blocks that the first `x` elements touch."""
        if self.flat:
            return -(-x // self.flat)
        rows, columns = self.local[-2:]
        (tall, wide), (matrices, rest) = self.sides, divmod(x, rows * columns)
        across = -(-columns // wide)
        return (matrices * -(-rows // tall) + -(-rest // (columns * tall))) * across


def grid(blocking: Blocking, path: str, shape: tuple[int, ...], local: tuple[int, ...]) -> Grid:
    """The blocks of a leaf.

    Raises:
      ValueError: an even cut goes through a block.
    """
    request = blocking.request(shape)
    assert request is not None
    flat = blocking.flat(shape)
    cut = [d for d in range(len(shape)) if shape[d] != local[d]]
    if flat:
        run = math.prod(local[cut[-1] :]) if cut else 0
        good, best = run % flat == 0, math.gcd(run, flat)
    else:
        off = [d for d, side in zip((-2, -1), blocking.sides, strict=True) if shape[d] != local[d] and local[d] % side]
        good, best = not off, 0
    if not good:
        remedy = f"block={best}" if best > 1 else "other blocks, or ragged= in place of the even cut"
        raise ValueError(
            f"adamw8bit: the even cut of leaf {path!r} from shape {shape} to {local} goes through blocks of "
            f"{blocking.block}; use {remedy}, so that codes are the same on any mesh"
        )
    return Grid(local, flat, blocking.sides, block_elements(request[0], local))


def scale_shape(flat: int, sides: tuple[int, int], shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a leaf: the shape with its innermost dims counted in blocks.

    Args:
      shape: the leaf's shape, or what an even cut left of it; `like`: its global shape, which decides.

    >>> scale_shape(256, (1, 256), (4, 512), (4, 512)), scale_shape(0, (32, 32), (40, 64), (40, 64))
    ((4, 2), (2, 2))
    """
    if not flat:
        return (*shape[:-2], -(-shape[-2] // sides[0]), -(-shape[-1] // sides[1]))
    for dim in reversed(range(len(shape))):
        if math.prod(like[dim:]) % flat == 0:
            return (*shape[:dim], math.prod(shape[dim:]) // flat)
    return (-(-math.prod(shape) // flat),)


def scale_selection(plan: Plan, selection: Selection, blocking: Blocking) -> tuple[Plan, Selection]:
    """A layout of scales: under the paths of the leaves, every rank has the scales of the blocks it has.

    A plan like any other: scales shard, gather and move. Its buckets are those of `plan`, without gaps, and with
    as many elements on a rank as it has blocks.

    Raises:
      ValueError: a rank boundary or an even cut goes through a block, naming the leaf and the remedy.
    """
    wanted = set(selection.paths)
    units = [Unit(unit.name, tuple(_scale_bucket(b, wanted, blocking) for b in unit.buckets)) for unit in plan.units]
    placed = {leaf.path: leaf for unit in units for leaf in unit.leaves}
    leaves = {path: placed[path] for path in selection.paths}
    made = Plan(plan.axes, leaves, tuple(units), 1, selection.structure, plan.comm, price=plan.price)
    return made, select(made, selection.structure, selection.paths)


def _scale_bucket(bucket: Bucket, wanted: set[str], blocking: Blocking) -> Bucket:
    leaves = [f for f in bucket.leaves if f.path in wanted]
    grids = [grid(blocking, f.path, f.shape, f.local_shape) for f in leaves]
    starts = [0]
    for leaf, g in zip(leaves, grids, strict=True):
        starts.append(starts[-1] + g.count(leaf.size))
    offsets, borders = [f.offset for f in leaves], []
    for k in range(bucket.ranks + 1):
        at = bucket.bounds(k)
        i = bisect_right(offsets, at) - 1
        inside = min(at - offsets[i], leaves[i].size) if i >= 0 else 0
        if inside and inside < leaves[i].size and inside % grids[i].uncut:
            raise ValueError(
                f"adamw8bit: the plan cuts leaf {leaves[i].path!r} of shape {leaves[i].shape} after {inside} elements, "
                f"inside a block of {blocking.block}; plan with optimizer=, as in plan(tree, mesh, spec, optimizer=tx)"
            )
        borders.append(starts[i] + grids[i].count(inside) if i >= 0 else 0)
    bounds = Bounds(bucket.ranks, 0, tuple(borders))

    def scales(leaf: LeafInfo, g: Grid, offset: int) -> LeafInfo:
        shape = scale_shape(g.flat, g.sides, leaf.shape, leaf.shape)
        return replace(
            leaf,
            shape=shape,
            local_shape=scale_shape(g.flat, g.sides, leaf.local_shape, leaf.shape),
            dtype=torch.float32,
            spec=P(*leaf.spec.dims[: len(shape)], ragged=leaf.spec.ragged or None, block=ELEMENT),
            block=1,
            offset=offset,
            bounds=bounds,
            requests=(),
        )

    made = tuple(scales(*each) for each in zip(leaves, grids, starts[:-1], strict=True))
    return replace(bucket, dtype=torch.float32, bounds=bounds, leaves=made)


Views = tuple[list[Tensor], list[Tensor], tuple[int, ...]]


def regions(g: Grid, tensors: list[Tensor], scales: list[Tensor]) -> Iterator[Views]:
    """Views of a run of whole blocks, as (elements, scales, dims that a block spans), a part at a time.

    Args:
      tensors: 1-D, of equal length; `scales`: 1-D, one element per block.
    """
    n = tensors[0].numel()
    if not n:
        return
    chunk = CHUNK if tensors[0].device.type == "cpu" else max(n, 1)
    if g.flat:
        whole = n // g.flat
        step = max(chunk // g.flat, 1)
        for a in range(0, whole, step):
            b = min(a + step, whole)
            part = [t[a * g.flat : b * g.flat].view(-1, g.flat) for t in tensors]
            yield part, [s[a:b].view(-1, 1) for s in scales], (1,)
        if whole * g.flat < n:
            yield [t[whole * g.flat :].view(1, -1) for t in tensors], [s[whole:].view(1, 1) for s in scales], (1,)
        return
    rows, columns = g.local[-2:]
    tall, wide = g.sides
    if rows % tall == 0 or n <= rows * columns:  # bands of tiles follow each other, whatever the matrix
        rows = n // columns
    yield from _tiles(
        [t.view(-1, rows, columns) for t in tensors],
        [s.view(-1, -(-rows // tall), -(-columns // wide)) for s in scales],
        g.sides,
        chunk,
    )


def _tiles(tensors: list[Tensor], scales: list[Tensor], sides: tuple[int, int], chunk: int) -> Iterator[Views]:
    """Matrices cut into tiles: the full ones, and those at the ragged edges."""
    count, rows, columns = tensors[0].shape
    tall, wide = sides
    full_rows, full_columns = rows // tall * tall, columns // wide * wide
    for m in range(count):
        for r0, r1, height in ((0, full_rows, tall), (full_rows, rows, rows - full_rows)):
            for c0, c1, width in ((0, full_columns, wide), (full_columns, columns, columns - full_columns)):
                if r0 == r1 or c0 == c1:
                    continue
                step = max(chunk // (height * (c1 - c0)), 1) * height
                j0, j1 = c0 // wide, -(-c1 // wide)
                for a in range(r0, r1, step):
                    b = min(a + step, r1)
                    part = [t[m, a:b, c0:c1].view((b - a) // height, height, j1 - j0, width) for t in tensors]
                    own = [s[m, a // tall : -(-b // tall), None, j0:j1, None] for s in scales]
                    yield part, own, (1, 3)
