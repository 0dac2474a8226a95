"""`plan`: from shapes to a layout. Pure: no process group, no collective, no allocation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import optree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged.drafts import Draft, HasBlocks, draft, shares_bounds
from ragged.layout import Bounds, Bucket, LeafInfo, Unit, axis_size
from ragged.mesh import Comm, mesh_axes
from ragged.paths import Shaped, flatten, natural_key, shaped
from ragged.planner import PRICE, pack
from ragged.plans import Plan
from ragged.resolver import brief, resolve
from ragged.spec import P
from ragged.units import group_units

__all__ = ["plan", "replan"]


def plan(
    tree: Any,
    mesh: DeviceMesh | Mapping[str, int],
    spec: Any,
    *,
    units: Sequence[Any] = (),
    optimizer: HasBlocks | None = None,
    frozen: Any = None,
    align: int = 64,
    price: int = PRICE,
) -> Plan:
    """Compile specs into a layout.

    Args:
      tree: pytree of tensors, meta tensors or `(shape, dtype)` pairs.
      mesh: a mesh with named axes, or their sizes, `{"fsdp": 1024}`.
      spec: a `P` (or None: replicated) per leaf: one value, a prefix pytree, a callable
        `(path, leaf)`, or `rules({...})`.
      units: patterns on path prefixes, e.g. `["layers.*"]`; every distinct match is gathered as
        one unit. Leaves that no pattern matches form one unit per top-level key. `["."]` is one unit of all.
      optimizer: a transformation whose `blocks` must not be cut either, and whose `labels` are kept together.
      frozen: leaves that are gathered but never reduced, as a mask for the resolver.
      align: every leaf starts at a multiple of so many elements, and S is one.
      price: elements of gathered padding, over all ranks, that a collective less is worth: by default 8 MB in
        fp32. A unit gets several buffers of one dtype where that saves more; a very large price means one.

    Returns:
      A `Plan`, bound to the mesh if one was given.

    Raises:
      ValueError: naming path, shape and spec, and what to write instead.

    Example:
      >>> import torch
      >>> from ragged import P, plan
      >>> p = plan({"w": ((96, 8), torch.float32)}, {"fsdp": 2}, P(ragged="fsdp", block=(32, None)))
      >>> p.shard_size(0), p.leaves["w"].runs
      (512, ((0, 512), (512, 768)))
    """
    comm = Comm(mesh) if isinstance(mesh, DeviceMesh) else None
    axes = mesh_axes(mesh) if comm is None else comm.axes
    if type(align) is not int or align < 1:
        raise ValueError(f"align={align!r}: expected a whole number of elements, at least 1")
    if type(price) is not int or price < 0:
        raise ValueError(f"price={price!r}: expected a whole number of elements, e.g. 1 << 60 for one buffer")
    paths, leaves, structure = flatten(tree)
    shapes = [shaped(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    # Callables get something with .shape and .dtype: the tensor itself where there is one.
    where = (paths, [x if isinstance(x, Tensor) else s for x, s in zip(leaves, shapes, strict=True)])
    specs = resolve(spec, tree, what="spec", is_value=_is_spec, paths_leaves=where)
    for path, value in zip(paths, specs, strict=True):
        if not _is_spec(value):
            raise ValueError(f"spec for leaf {path!r} is {brief(value)}, expected P(...) or None")
    cold = (
        [False] * len(paths)
        if frozen is None
        else resolve(frozen, tree, what="frozen mask", is_value=lambda x: isinstance(x, bool), paths_leaves=where)
    )
    if optimizer is not None and not hasattr(optimizer, "blocks"):
        raise ValueError(f"optimizer={brief(optimizer)}: expected a GradientTransformation, or something with .blocks")
    for path, flag in zip(paths, cold, strict=True):
        if not isinstance(flag, bool):
            raise ValueError(f"frozen mask for leaf {path!r} is {brief(flag)}, expected True or False")
    drafts = []
    for path, shape, s, f in zip(paths, shapes, specs, cold, strict=True):
        asked = None if f or not (shape.dtype.is_floating_point or shape.dtype.is_complex) else optimizer
        blocks, labels = getattr(asked, "blocks", None), getattr(asked, "labels", None)
        label = "" if labels is None else labels(path, *shape)
        drafts.append(draft(path, shape, P() if s is None else s, axes, f, blocks, label))
    by_path = {leaf.path: leaf for leaf in drafts}
    members = {unit.name: [by_path[path] for path in unit.paths] for unit in group_units(by_path, units)}
    return _assembled(paths, members, axes, align, price, structure, comm)


def replan(plan: Plan, specs: Mapping[str, P | None]) -> Plan:
    """The same leaves in the same units, with other specs for some of them.

    What the optimizer asked of a leaf stays, unless other even dims leave other blocks of it.

    Raises:
      ValueError: naming path, shape and spec.
    """
    units: dict[str, list[Draft]] = {unit.name: [] for unit in plan.units}
    for path in sorted(plan.leaves, key=natural_key):
        leaf = plan.leaves[path]
        spec = specs.get(path, leaf.spec)
        asked = tuple(r for r in leaf.requests if r.who != "spec")
        frozen = plan.buckets[leaf.bucket].frozen
        shape = Shaped(leaf.shape, leaf.dtype)
        known = leaf.local_shape, asked
        new = draft(path, shape, P() if spec is None else spec, plan.axes, frozen, None, leaf.label, known)
        units[leaf.unit].append(new)
    return _assembled(list(plan.leaves), units, plan.axes, plan.align, plan.price, plan.structure, plan.comm)


def _assembled(
    paths: Sequence[str],
    members: Mapping[str, Sequence[Draft]],
    axes: Mapping[str, int],
    align: int,
    price: int,
    structure: optree.PyTreeSpec,
    comm: Comm | None,
) -> Plan:
    """Give every leaf its place, unit by unit."""
    units: list[Unit] = []
    count = 0
    for name, drafts in members.items():
        buckets: list[Bucket] = []
        for group in _groups(drafts):
            for bounds, leaves in _pack(group, axis_size(axes, group[0].key[2]), align, price):
                label = name if not buckets else f"{name}#{len(buckets)}"
                buckets.append(_bucket(count, label, name, bounds, leaves))
                count += 1
        units.append(Unit(name, tuple(buckets)))
    placed = {leaf.path: leaf for unit in units for leaf in unit.leaves}
    return Plan(axes, {p: placed[p] for p in paths}, tuple(units), align, structure, comm, price=price)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, P)


def _groups(members: Sequence[Draft]) -> list[list[Draft]]:
    """Leaves that may share a buffer."""
    groups: dict[tuple[Any, ...], list[Draft]] = {}
    for leaf in members:
        groups.setdefault(leaf.key, []).append(leaf)
    return list(groups.values())


def _pack(group: Sequence[Draft], ranks: int, align: int, price: int) -> list[tuple[Bounds, list[tuple[Draft, int]]]]:
    """Buffers for leaves of one key: the rank boundaries, and the leaves with their starts in order."""
    if group[0].spec.shares is not None:
        return [(shares_bounds(group[0], ranks), [(group[0], 0)])]
    step = math.lcm(align, *(leaf.align for leaf in group))
    packing = pack([leaf.item for leaf in group], ranks, align=step, price=price, labels=[leaf.label for leaf in group])
    out = []
    for buffer in packing.buffers:
        placed = [(group[i], start) for i, start in zip(buffer.members, buffer.starts, strict=True)]
        out.append((Bounds(ranks, buffer.shard), placed))
    return out


def _bucket(index: int, name: str, unit: str, bounds: Bounds, placed: Sequence[tuple[Draft, int]]) -> Bucket:
    frozen, dtype, ragged, even, _ = placed[0][0].key
    leaves = tuple(
        LeafInfo(d.path, d.shape, d.local, d.dtype, d.spec, d.block, unit, index, start, bounds, d.requests, d.label)
        for d, start in placed
    )
    return Bucket(index, name, unit, dtype, ragged, even, bounds, leaves, frozen)
