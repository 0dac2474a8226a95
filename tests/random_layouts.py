"""Random trees and layouts, and where every element of them lies by the plainest reading of the words."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragged import ELEMENT, ROW, TENSOR, P, Plan, plan
from ragged.layout import Bucket, LeafInfo
from ragged.spec import block_elements

__all__ = [
    "DTYPES",
    "Layout",
    "Mesh",
    "numbers",
    "other_mesh",
    "places",
    "random_layout",
    "random_mesh",
    "random_shapes",
    "raw",
]

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int16,
    torch.bool,
    torch.complex64,
    torch.int64,
)
Shape = tuple[int, ...]
Shapes = dict[str, dict[str, tuple[Shape, torch.dtype]]]  # by unit and name


@dataclass(frozen=True)
class Mesh:
    """Sizes by axis name, and the global ranks in row-major order of their coordinates."""

    axes: Mapping[str, int]
    ranks: tuple[int, ...]

    def coordinates(self) -> dict[int, dict[str, int]]:
        """By global rank."""
        cells = itertools.product(*map(range, self.axes.values()))
        return {rank: dict(zip(self.axes, cell, strict=True)) for rank, cell in zip(self.ranks, cells, strict=True)}

    def index(self, coordinate: Mapping[str, int], names: Sequence[str]) -> int:
        """The coordinate on several axes read as one number, first axis most significant; absent axes have size 1."""
        out = 0
        for name in names:
            if name in self.axes:
                out = out * self.axes[name] + coordinate[name]
        return out

    def size(self, names: Sequence[str]) -> int:
        return math.prod(self.axes.get(name, 1) for name in names)


@dataclass(frozen=True)
class Layout:
    """All that makes a plan of some shapes."""

    mesh: Mesh
    specs: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, shapes: Shapes) -> Plan:
        return plan(shapes, dict(self.mesh.axes), self.specs, **self.options)


def random_mesh(rng: random.Random, ranks: Sequence[int]) -> Mesh:
    """One to three axes, sizes 1 among them, over these ranks in any order."""
    sizes, n = [1] * rng.choice([1, 2, 2, 2, 3, 3]), len(ranks)
    while n > 1:
        factor = next(f for f in range(2, n + 1) if n % f == 0)
        sizes[rng.randrange(len(sizes))] *= factor
        n //= factor
    order = list(ranks)
    if rng.randrange(3) == 0:
        rng.shuffle(order)
    names = rng.sample("xyz", len(sizes))
    return Mesh(dict(zip(names, sizes, strict=True)), tuple(order))


def random_shapes(rng: random.Random, *, leaves: int, elements: int) -> Shapes:
    """Up to so many leaves of 0 to 4 dims, in one or two units."""
    out: Shapes = {}
    for i in range(rng.randint(1, leaves)):
        shape: Shape = ()
        for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4])):
            fits = [n for n in (8, 4, 4, 2, 2, 6, 3, 12, 1, 5, 7, 0) if n * math.prod(shape) <= elements]
            # zero-size leaves are worth a few tries only
            shape = (*shape, rng.choice(fits if rng.randrange(8) == 0 else [n for n in fits if n]))
        dtype = rng.choice(DTYPES if rng.randrange(2) else DTYPES[:2])  # few dtypes: buffers of several leaves
        out.setdefault(rng.choice("uuv"), {})[f"leaf{i}"] = shape, dtype
    return out


def other_mesh(rng: random.Random, mesh: Mesh) -> Mesh:
    """Another one of the same ranks, sometimes with nothing but the axes in another order."""
    if rng.randrange(2):
        return random_mesh(rng, sorted(mesh.ranks))
    return Mesh(dict(reversed(mesh.axes.items())), mesh.ranks)


def random_layout(rng: random.Random, shapes: Shapes, mesh: Mesh, near: Layout | None = None) -> Layout:
    """A spec per leaf, many of them alike in a third of the layouts.

    Args:
      near: a layout to stay close to: a leaf's axes cut other dims, or in another order, or other blocks.
    """
    alike = P(ragged=tuple(mesh.axes), block=rng.choice([ELEMENT, ROW, TENSOR, 2, 5]))
    often = rng.choice([0, 0, 3])
    specs: Any = {unit: {} for unit in shapes}
    for unit, leaves in shapes.items():
        for name, (shape, _) in leaves.items():
            cuts = _cuts(rng, shape, mesh) if near is None else _near(rng, near.specs[unit][name] or P(), shape, mesh)
            specs[unit][name] = alike if rng.randrange(4) < often else _spec(rng, cuts, shape, mesh)
    options = {
        "units": rng.choice([(), (), ("**",)]),
        "align": rng.choice([1, 8, 64]),
        "price": rng.choice([0, 1 << 23]),
    }
    return Layout(mesh, specs, options)


Cuts = list[tuple[str, int | None]]  # axes, outermost first, and the dim that each cuts evenly; None: raggedly


def _cuts(rng: random.Random, shape: Shape, mesh: Mesh) -> Cuts:
    names = rng.sample([*mesh.axes, "absent"], len(mesh.axes) + 1)
    cuts: Cuts = []
    for name in names:
        fits = [d for d, size in enumerate(shape) if size % mesh.size([name]) == 0]
        # the first dim that fits, rather often: then several axes cut one dim
        d = rng.choice([None, None, fits[0], fits[0], rng.choice(fits)]) if fits else None
        if rng.randrange(6):
            cuts.append((name, d))
    return cuts


def _near(rng: random.Random, spec: P, shape: Shape, mesh: Mesh) -> Cuts:
    cuts: Cuts = [(name, d) for d, names in enumerate(spec.dims) for name in names]
    cuts += [(name, None) for name in spec.ragged]
    how = rng.randrange(4)
    if how == 0:
        rng.shuffle(cuts)
    if how == 1 and cuts:
        del cuts[rng.randrange(len(cuts))]
    if how < 3:
        for cut in [c for c in _cuts(rng, shape, mesh) if c[0] not in dict(cuts)][: rng.randint(0, 2)]:
            cuts.insert(rng.randint(0, len(cuts)), cut)
    return cuts


def _spec(rng: random.Random, cuts: Cuts, shape: Shape, mesh: Mesh) -> P | None:
    dims: list[list[str]] = [[] for _ in shape]
    ragged: list[str] = []
    local = list(shape)
    for name, d in cuts:
        if d is not None and local[d] % mesh.size([name]) == 0:
            dims[d].append(name)
            local[d] //= mesh.size([name])
        else:
            ragged.append(name)
    even = [tuple(d) for d in dims]
    if not ragged:
        return P(*even) if any(even) or rng.randrange(2) else None
    tile = tuple(rng.choice([None, 1, 2, 3]) for _ in shape[: rng.randint(1, 4)])
    block = rng.choice([ELEMENT, ELEMENT, ROW, TENSOR, rng.randint(1, 9), tile or ROW])
    return P(*even, ragged=tuple(ragged), block=block, shares=_shares(rng, tuple(local), block, mesh.size(ragged)))


def _shares(rng: random.Random, local: Shape, block: Any, ranks: int) -> tuple[int, ...] | None:
    if rng.randrange(4):
        return None
    count = -(-math.prod(local) // block_elements(block, local))
    total = rng.choice([n for n in range(1, count + 1) if count % n == 0] or [3])
    out = [0] * ranks
    for _ in range(min(total, 6)):
        out[rng.randrange(ranks)] += 1
    out[rng.randrange(ranks)] += total - sum(out)
    return tuple(out)


def numbers(shape: Shape, dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits, NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    n = math.prod(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=generator).bool().view(shape)
    bits = torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def raw(x: Tensor) -> np.ndarray:
    """The bytes of every element: (elements, itemsize)."""
    flat = x.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().reshape(flat.numel(), flat.itemsize)


def places(leaf: LeafInfo, bucket: Bucket, mesh: Mesh) -> list[tuple[int, tuple[int, ...]]]:
    """For every element of the global leaf: its place in the global buffer, and all global ranks that hold it."""
    dims = [*leaf.spec.dims, *[()] * (len(leaf.shape) - len(leaf.spec.dims))]
    local = [n // mesh.size(names) for n, names in zip(leaf.shape, dims, strict=True)]
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in sorted(mesh.coordinates().items()):
        key = *(mesh.index(coordinate, names) for names in dims), mesh.index(coordinate, leaf.spec.ragged)
        holders.setdefault(key, []).append(rank)
    borders = [bucket.bounds(k) for k in range(bucket.ranks + 1)]
    out = []
    for element in itertools.product(*map(range, leaf.shape)):
        cell, flat = [], 0
        for i, n in zip(element, local, strict=True):
            cell.append(i // n)
            flat = flat * n + i % n
        place = leaf.offset + flat
        owner = next(k for k in range(bucket.ranks) if borders[k] <= place < borders[k + 1])
        out.append((place, tuple(holders[*cell, owner])))
    return out
