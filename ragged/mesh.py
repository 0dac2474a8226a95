"""Meshes with named axes, and the process group of any set of them in coordinate order."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ragged.groups import Group, make_group
from ragged.layout import axis_size
from ragged.places import flat_rank

__all__ = ["Comm", "Nowhere", "make_mesh", "mesh_axes"]

_HashStore: Any = dist.HashStore  # type: ignore[attr-defined]  # missing from torch's stubs


def make_mesh(shape: Sequence[int], axis_names: Sequence[str], *, device_type: str | None = None) -> DeviceMesh:
    """A `DeviceMesh` of all processes, starting a process group if there is none.

    Under `torchrun` it joins that launcher's processes; under plain `python` it starts a
    group of one process, so that every program runs both ways.

    Args:
      shape: ranks per axis, outermost first; one entry may be -1 (all that is left).
      axis_names: one name per axis.
      device_type: "cpu" or "cuda"; by default "cuda" where a device is available.

    Raises:
      ValueError: names and shape differ in length, a name occurs twice, or the number of
        ranks is not that of the processes.

    Example:
      >>> from ragged import make_mesh
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> mesh.mesh_dim_names
      ('fsdp',)
    """
    shape, names = tuple(shape), tuple(axis_names)
    if len(shape) != len(names) or len(set(names)) != len(names) or not names:
        raise ValueError(f"mesh shape {shape} needs one distinct axis name per entry, got {names}")
    if any(n < 1 and n != -1 for n in shape) or shape.count(-1) > 1:
        raise ValueError(f"mesh shape {shape}: entries are positive, and at most one is -1")
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if not dist.is_initialized():
        # gloo beside NCCL carries what is compared between hosts without a device transfer.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=_HashStore(), rank=0, world_size=1)
    ranks, known = dist.get_world_size(), math.prod(n for n in shape if n != -1)
    if -1 in shape and ranks % known == 0:
        shape = tuple(ranks // known if n == -1 else n for n in shape)
    if math.prod(shape) != ranks:
        raise ValueError(f"mesh {dict(zip(names, shape, strict=True))} does not fit {ranks} processes")
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def mesh_axes(mesh: DeviceMesh | Mapping[str, int]) -> dict[str, int]:
    """Sizes by axis name, in mesh order.

    Raises:
      ValueError: a mesh without names, with a repeated rank, or sizes below 1.
    """
    if not isinstance(mesh, DeviceMesh):
        if not isinstance(mesh, Mapping):
            raise ValueError(f'mesh={mesh!r}: expected a DeviceMesh (ragged.make_mesh) or sizes, e.g. {{"fsdp": 8}}')
        axes = dict(mesh)
        if any(type(n) is not int or n < 1 or not isinstance(a, str) for a, n in axes.items()):
            raise ValueError(f"mesh axes {axes}: names must be strings, sizes positive integers")
        return axes
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no axis names; make it with ragged.make_mesh or mesh_dim_names=")
    table = mesh.mesh  # slow to ask
    ranks = table.flatten().tolist()
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"mesh {table.tolist()} names a rank twice")
    return dict(zip(mesh.mesh_dim_names, table.shape, strict=True))


class Comm:
    """The process groups of one mesh, made when first needed.

    Every set of axes has one group whose member k is the rank at flattened coordinate k, so
    that what a plan calls "rank k" is position k in every collective, also on meshes whose
    rank order is not the identity.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.axes = mesh_axes(mesh)
        self._groups: dict[tuple[str, ...], Group] = {}

    @cached_property
    def coordinate(self) -> dict[str, int]:
        """This rank's coordinate per axis.

        Raises:
          ValueError: this process is not part of the mesh.
        """
        found = self.mesh.get_coordinate()
        if found is None:
            raise ValueError(f"process {dist.get_rank()} is not in the mesh {self.mesh.mesh.tolist()}")
        return dict(zip(self.axes, found, strict=True))

    @cached_property
    def me(self) -> int:
        """This process's global rank."""
        return dist.get_rank()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in row-major order of coordinates."""
        return tuple(self.mesh.mesh.flatten().tolist())

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._plain is None else self._plain

    @cached_property
    def _plain(self) -> torch.device | None:
        kind = self.mesh.device_type
        return None if kind == "cuda" else torch.device(kind)

    def rank(self, axes: Sequence[str]) -> int:
        """This rank's coordinate on the flattened axes, first axis outermost."""
        return flat_rank(self.axes, self.coordinate, axes)

    @property
    def everyone(self) -> Group:
        """All ranks of the mesh, in mesh order."""
        return self.group(tuple(self.axes))

    def group(self, axes: tuple[str, ...]) -> Group:
        """The ranks that differ from this one on `axes` only, in coordinate order."""
        if axes not in self._groups:
            _ = self.coordinate  # says so if this process is not in the mesh
            real = tuple(a for a in axes if self.axes.get(a, 1) > 1)
            self._groups[axes] = make_group(self._siblings(real), self.mesh.device_type)
        return self._groups[axes]

    def _siblings(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """For every coordinate on the other axes the ranks along these, in coordinate order."""
        names = list(self.axes)
        rest = [a for a in names if a not in axes]
        table = self.mesh.mesh.permute([names.index(a) for a in (*rest, *axes)])
        size = axis_size(self.axes, axes)
        return [tuple(row) for row in table.reshape(-1, size).tolist()]


class Nowhere(Comm):
    """The first rank of a mesh that doesn't exist: for shapes without processes. It has no groups."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.axes = dict(axes)

    @property
    def coordinate(self) -> dict[str, int]:
        return dict.fromkeys(self.axes, 0)

    @property
    def device(self) -> torch.device:
        return torch.device("meta")
