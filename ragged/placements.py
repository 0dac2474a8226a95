"""Torch's placements and this library's layouts, each said in the words of the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged.layout import LeafInfo
from ragged.mesh import Comm
from ragged.moves import Grid, Holding
from ragged.moves.boxes import strides
from ragged.moves.holdings import Part
from ragged.places import coordinates

if TYPE_CHECKING:  # importing it takes as long as everything else together, so it waits until it is needed
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["Cut", "Pieces", "Where", "as_dtensor", "check_ascending", "cut_of", "placements_of", "where_of"]


def placements_of(leaf: LeafInfo, axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[Placement, ...]:
    """A leaf's even dims as torch says them, one placement per axis; its ragged axes count as gathered.

    Torch cuts a dim by the mesh's axes in the mesh's order, the first outermost.

    Args:
      axes: of the DTensor's mesh, in order; `sizes`: of all axes.

    Raises:
      ValueError: the spec cuts a dim in another order, naming path, spec and remedy.
    """
    from torch.distributed.tensor import Replicate, Shard

    out: dict[str, Placement] = {}
    for dim, names in enumerate(leaf.spec.dims):
        cutting = [a for a in names if sizes.get(a, 1) > 1]
        if sorted(cutting, key=axes.index) != cutting:
            right = tuple(sorted(cutting, key=axes.index))
            raise ValueError(
                f"leaf {leaf.path!r} of shape {leaf.shape}, spec {leaf.spec!r}: a DTensor on mesh axes {list(axes)} "
                f"can't cut dim {dim} by {tuple(cutting)} in this order; redistribute it to a spec with {right} there"
            )
        out |= {a: Shard(dim) for a in names}
    return tuple(out.get(a, Replicate()) for a in axes)


def as_dtensor(local: Tensor, leaf: LeafInfo, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A leaf's part after the even dims as a DTensor, on the same memory and differentiable."""
    from torch.distributed.tensor import DTensor

    shape, steps = torch.Size(leaf.shape), strides(leaf.shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=steps)


def check_ascending(mesh: DeviceMesh, axes: Iterable[int]) -> None:
    """Refuse to cut tensors by axes along which ranks descend.

    There torch's `distribute_tensor` and `full_tensor` cut and join in ascending order of ranks, and its shapes and
    `src_data_rank=None` go by coordinates, so such a DTensor means two things.

    Raises:
      ValueError: naming mesh and axis.
    """
    for axis in axes:
        if not bool((mesh.mesh.diff(dim=axis) > 0).all()):
            name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis
            raise ValueError(
                f"ranks don't ascend along axis {name!r} of the mesh {mesh.mesh.tolist()}, where torch's DTensor mixes "
                "up their order; cut DTensors by axes of a mesh along which they do"
            )


class Cut(NamedTuple):
    """How a tensor lies on a mesh: the mesh, and per dim the mesh's own axes that cut it, first outermost."""

    mesh: DeviceMesh
    dims: tuple[tuple[int, ...], ...]


def cut_of(placements: Sequence[Any], mesh: DeviceMesh, ndim: int) -> Cut | None:
    """What placements say; None for those that only torch itself understands.

    Raises:
      ValueError: a sum that is still to be reduced, or a mesh on which torch mixes up the order of ranks.
    """
    from torch.distributed.tensor import Shard

    check_ascending(mesh, [axis for axis, placement in enumerate(placements) if not placement.is_replicate()])
    dims: list[list[int]] = [[] for _ in range(ndim)]
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(
                f"placements {tuple(placements)}: a sum that is still to be reduced is no layout; reduce it "
                "first, x.redistribute(placements=...) with Shard or Replicate in place of Partial"
            )
        if type(placement) is Shard:  # torch has strided ones too, some versions as a subclass
            dims[placement.dim % ndim].append(axis)
        elif not placement.is_replicate():
            return None
    return Cut(mesh, tuple(map(tuple, dims)))


@dataclass(frozen=True)
class Pieces(Holding):
    """A leaf as a DTensor holds it: dims cut into equal chunks, of which the last may be short or empty.

    So a rank holds one box of the leaf.
    """

    def box(self, axes: Mapping[str, int], coordinate: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """What a rank holds: per dim start and stop."""
        out = []
        for dim, size in enumerate(self.shape):
            start, stop = 0, size
            for name in self.dims[dim]:
                step = -(-(stop - start) // axes[name])
                first = start + coordinate.get(name, 0) * step
                start, stop = min(first, stop), min(first + step, stop)
            out.append((start, stop))
        return tuple(out)

    def parts(self, axes: Mapping[str, int], coordinate: Mapping[str, int], cut: set[int]) -> Iterator[Part]:
        box = self.box(axes, coordinate)
        if any(start == stop for start, stop in box):
            return
        # A folded dim begins with the dim that is cut; what was joined to it is whole.
        heads = [0, *sorted(d for d in cut if d > 0)]
        rest = [math.prod(self.shape[d + 1 : e]) for d, e in zip(heads, [*heads[1:], len(box)], strict=True)]
        ends = [box[d] for d in heads] if box else [(0, 1)]
        folded = tuple((start * n, stop * n) for (start, stop), n in zip(ends, rest, strict=True))
        yield Part(folded, 0, strides([stop - start for start, stop in folded]))


@dataclass(frozen=True)
class Where:
    """The grid that a DTensor lies on.

    Attributes:
      names: of the mesh's axes on the grid; `foreign`: it is not the plan's grid.
      text: equal on all ranks, which see different parts of a mesh.
    """

    grid: Grid
    names: tuple[str, ...]
    foreign: bool
    text: str

    def pieces(self, cut: Cut, shape: tuple[int, ...]) -> Pieces:
        """The holding of a leaf that is tensor 0 of its move."""
        dims = tuple(tuple(self.names[i] for i in axes) for axes in cut.dims)
        # Not cut raggedly, so its one span is all that a rank holds, and `parts` says what that is.
        return Pieces(shape, dims, (), lambda _: (0, math.prod(shape)), 0, 0)


def where_of(mesh: DeviceMesh, comm: Comm) -> Where:
    """On the grid of `comm`, if the mesh is its own or a part of that along whole axes; else on one of its own.

    Raises:
      ValueError: a mesh of other ranks.
    """
    grid = Grid.of(comm)
    sizes, ranks = tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist()
    names = tuple(mesh.mesh_dim_names or ())
    if names and set(names) <= set(comm.axes) and sizes == tuple(comm.axes[a] for a in names):
        mine = [grid.rank_at({**comm.coordinate, **at}) for at in coordinates(comm.axes, names)]
        if mine == ranks:
            return Where(grid, names, False, f"axes {names} of the mesh")
    if sorted(ranks) != sorted(grid.ranks):
        raise ValueError(
            f"a mesh of the ranks {mesh.mesh.tolist()} for a plan on {comm.axes} over {comm.mesh.mesh.tolist()}; "
            "use the plan's mesh, a part of it along whole axes, or another one of the same ranks"
        )
    names = tuple(f"axis {i} of the DTensor" for i in range(mesh.ndim))
    own = Grid(dict(zip(names, sizes, strict=True)), tuple(ranks))
    return Where(own, names, True, f"the mesh {mesh.mesh.tolist()}")
