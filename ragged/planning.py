"""`plan`: from shapes to a layout. Pure: no process group, no collective, no allocation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from ragged.layout import Bounds, Bucket, LeafInfo, Unit, axis_size
from ragged.mesh import Comm, mesh_axes
from ragged.paths import Shaped, flatten, natural_key, shaped
from ragged.planner import Item, Packing, pack_in_order
from ragged.plans import Plan
from ragged.resolver import Rules, brief, match_prefix, resolve
from ragged.spec import P, block_elements

__all__ = ["plan"]


class HasBlocks(Protocol):
    """What `plan(optimizer=)` needs: a `GradientTransformation` has it."""

    @property
    def blocks(self) -> Callable[[str, tuple[int, ...], torch.dtype], tuple[Any, int] | None] | None: ...


def plan(
    tree: Any,
    mesh: DeviceMesh | Mapping[str, int],
    spec: Any,
    *,
    units: Sequence[Any] = (),
    optimizer: HasBlocks | None = None,
    frozen: Any = None,
    align: int = 64,
) -> Plan:
    """Compile specs into a layout.

    Args:
      tree: pytree of tensors, meta tensors or `(shape, dtype)` pairs.
      mesh: a mesh with named axes, or their sizes, `{"fsdp": 1024}`.
      spec: a `P` (or None: replicated) per leaf: one value, a prefix pytree, a callable
        `(path, leaf)`, or `rules({...})`.
      units: patterns on path prefixes, e.g. `["layers.*"]`; every distinct match is gathered as
        one unit. Leaves that no pattern matches form one unit per top-level key.
      optimizer: a transformation whose `blocks` must not be cut either.
      frozen: leaves that are gathered but never reduced, as a mask for the resolver.
      align: every leaf starts at a multiple of so many elements, and S is one.

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
    axes = mesh_axes(mesh)
    if not isinstance(align, int) or align < 1:
        raise ValueError(f"align must be a positive number of elements, got {align!r}")
    paths, leaves, structure = flatten(tree)
    shapes = [shaped(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    where = (paths, leaves)
    specs = resolve(spec, tree, what="spec", is_value=_is_spec, paths_leaves=where)
    for path, value in zip(paths, specs, strict=True):
        if not _is_spec(value):
            raise ValueError(f"spec for leaf {path!r} is {brief(value)}, expected P(...) or None")
    cold = (
        [False] * len(paths)
        if frozen is None
        else resolve(frozen, tree, what="frozen mask", is_value=lambda x: isinstance(x, bool), paths_leaves=where)
    )
    blocks = None if optimizer is None else optimizer.blocks
    drafts = [
        _Draft.of(path, shape, P() if s is None else s, axes, bool(f), blocks)
        for path, shape, s, f in zip(paths, shapes, specs, cold, strict=True)
    ]
    packed: dict[object, Packing] = {}
    unit_list: list[Unit] = []
    count = 0
    for name, members in _units(drafts, units).items():
        buckets: list[Bucket] = []
        for key, group in _buckets(members).items():
            label = name if not buckets else f"{name}#{len(buckets)}"
            buckets.append(_pack(count, label, name, key, group, axes, align, packed))
            count += 1
        unit_list.append(Unit(name, tuple(buckets)))
    placed = {leaf.path: leaf for unit in unit_list for leaf in unit.leaves}
    comm = Comm(mesh) if isinstance(mesh, DeviceMesh) else None
    return Plan(axes, {p: placed[p] for p in paths}, tuple(unit_list), align, structure, comm)


class _Draft:
    """A leaf before it has a place."""

    def __init__(self, path: str, shape: Shaped, spec: P, local: tuple[int, ...]) -> None:
        self.path, self.shape, self.dtype, self.spec, self.local = path, shape.shape, shape.dtype, spec, local
        self.key: tuple[Any, ...] = ()
        self.block = 1
        self.align = 1
        self.requests: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(
        path: str,
        shape: Shaped,
        spec: P,
        axes: Mapping[str, int],
        frozen: bool,
        blocks: Callable[[str, tuple[int, ...], torch.dtype], tuple[Any, int] | None] | None,
    ) -> _Draft:
        draft = _Draft(path, shape, spec, local_shape(path, shape.shape, spec, axes))
        size = math.prod(draft.local)
        requests = [("spec", _block(path, shape.shape, spec, spec.block, draft.local) if spec.ragged else 1)]
        asked = blocks(path, shape.shape, shape.dtype) if blocks is not None else None
        if asked is not None:
            requests.append(("optimizer", _block(path, shape.shape, spec, asked[0], draft.local)))
            draft.align = asked[1]
        # A boundary that is a multiple of both blocks cuts neither.
        draft.block = min(math.lcm(*(b for _, b in requests)), max(size, 1))
        draft.requests = tuple(requests)
        ragged = tuple(a for a in spec.ragged if a in axes)
        even = tuple(sorted({a for d in spec.dims for a in d if a in axes}))
        draft.key = (frozen, shape.dtype, ragged, even, path if spec.shares is not None else None)
        return draft


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, P)


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


def _units(drafts: Sequence[_Draft], patterns: Sequence[Any]) -> dict[str, list[_Draft]]:
    """Leaves by unit, units and leaves in natural order whatever the tree's own order."""
    if isinstance(patterns, (str, Rules)):
        raise ValueError(f'units={patterns!r}: expected a sequence of patterns, e.g. units=["layers.*"]')
    for pattern in patterns:
        if not isinstance(pattern, (str, re.Pattern)):
            raise ValueError(f"units pattern {pattern!r} is neither a glob string nor a compiled regex")
    hit = [False] * len(patterns)
    units: dict[str, list[_Draft]] = {}
    for draft in sorted(drafts, key=lambda d: natural_key(d.path)):
        found = [match_prefix(pattern, draft.path) for pattern in patterns]
        hit = [h or f is not None for h, f in zip(hit, found, strict=True)]
        name = next((f for f in found if f is not None), draft.path.split(".")[0])
        units.setdefault(name, []).append(draft)
    if not all(hit):
        pattern = next(p for p, h in zip(patterns, hit, strict=True) if not h)
        raise ValueError(f"units pattern {pattern!r} matches no leaf; correct or remove it")
    return dict(sorted(units.items(), key=lambda item: natural_key(item[0])))


def _buckets(members: Sequence[_Draft]) -> dict[tuple[Any, ...], list[_Draft]]:
    groups: dict[tuple[Any, ...], list[_Draft]] = {}
    for draft in members:
        groups.setdefault(draft.key, []).append(draft)
    return groups


def _pack(
    index: int,
    label: str,
    unit: str,
    key: tuple[Any, ...],
    group: Sequence[_Draft],
    axes: Mapping[str, int],
    align: int,
    packed: dict[object, Packing],
) -> Bucket:
    """Give the leaves of a bucket their places; equal problems are solved once."""
    frozen, dtype, ragged, even, _ = key
    ranks = axis_size(axes, ragged)
    if group[0].spec.shares is not None:
        bounds = _shares(group[0], ranks)
        starts: tuple[int, ...] = (0,)
    else:
        items = tuple(Item(math.prod(d.local), d.block) for d in group)
        step = math.lcm(align, *(d.align for d in group))
        problem = (items, ranks, step)
        if problem not in packed:
            packed[problem] = pack_in_order(items, ranks, step)
        bounds, starts = Bounds(ranks, packed[problem].shard), packed[problem].starts
    leaves = [
        LeafInfo(d.path, d.shape, d.local, d.dtype, d.spec, d.block, unit, index, start, bounds, d.requests)
        for d, start in zip(group, starts, strict=True)
    ]
    # Empty leaves share their start with a neighbour: a stable sort keeps them in plan order.
    leaves.sort(key=lambda leaf: leaf.offset)
    return Bucket(index, label, unit, dtype, ragged, even, bounds, tuple(leaves), frozen)


def _shares(draft: _Draft, ranks: int) -> Bounds:
    """Rank boundaries of a leaf whose spec gives the shares outright."""
    shares = draft.spec.shares
    assert shares is not None
    size = math.prod(draft.local)
    blocks = -(-size // draft.block)
    about = f"leaf {draft.path!r} of shape {draft.shape}, spec {draft.spec!r}"
    if len(shares) != ranks:
        raise ValueError(f"{about}: {len(shares)} shares for {ranks} ranks of {draft.spec.ragged}; give one per rank")
    if blocks % sum(shares):
        raise ValueError(
            f"{about}: sum(shares) = {sum(shares)} does not divide its {blocks} blocks of {draft.block} "
            "elements; change the shares, or use a smaller block="
        )
    each, borders = blocks // sum(shares), [0]
    for share in shares:
        borders.append(min(borders[-1] + share * each * draft.block, size))
    return Bounds(ranks, 0, tuple(borders))
