"""Plans in words: the summary table and the reasons behind a block."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import optree
import torch

from ragged.drafts import met
from ragged.layout import Bucket, LeafInfo, Request, Unit
from ragged.paths import natural_key
from ragged.planner import Item, lower_bound, pack

if TYPE_CHECKING:
    from ragged.plans import Plan

__all__ = ["MOMENTS", "explain", "size", "state_bytes", "summary", "table"]

MOMENTS = 8  # bytes per element of what an optimizer keeps if none is given: two fp32 moments, as Adam's


def size(n: float) -> str:
    """Bytes for a reader.

    >>> size(3 * 2**20), size(100)
    ('3.0 MiB', '100 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned, the first to the left and the rest to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _groups(unit: Unit) -> list[tuple[Bucket, ...]]:
    """Buckets whose leaves could share a buffer: what the planner solved as one problem."""
    groups: dict[object, list[Bucket]] = defaultdict(list)
    for b in unit.buckets:
        alone = b.index if b.bounds.explicit else None
        groups[b.frozen, b.dtype, b.ragged, b.even, alone].append(b)
    return [tuple(group) for group in groups.values()]


def _step(align: int, leaves: Iterable[LeafInfo]) -> int:
    """The start alignment with every request met."""
    return math.lcm(align, *(r.align for leaf in leaves for r in leaf.requests))


def _least(plan: Plan, group: Sequence[Bucket]) -> int:
    """Elements of the global buffers below which no layout of the group's leaves gets."""
    if group[0].bounds.explicit:
        return group[0].length
    leaves = [leaf for b in group for leaf in b.leaves]
    items = [Item(leaf.size, leaf.block) for leaf in leaves]
    return group[0].ranks * lower_bound(items, group[0].ranks, align=_step(plan.align, leaves))


def state_bytes(plan: Plan, optimizer: Any) -> dict[int, int]:
    """Bytes of optimizer state per rank, by bucket index.

    The optimizer's `init` runs on tensors without memory (meta tensors) of all leaves that aren't frozen.
    """
    from ragged.mesh import Nowhere
    from ragged.selection import select
    from ragged.tree import ShardedTree, sharded_trees

    there = replace(plan, comm=Nowhere(plan.axes), memo={})
    trained = [None if plan.buckets[f.bucket].frozen else p for p, f in plan.leaves.items()]
    paths, structure = optree.tree_flatten(optree.tree_unflatten(plan.structure, trained))
    selection = select(there, structure, cast(list[str], paths))
    sizes = [piece.bucket.bounds.size(0) for piece in selection.pieces]
    tensors = [
        torch.empty(n, dtype=p.bucket.dtype, device="meta") for n, p in zip(sizes, selection.pieces, strict=True)
    ]
    out = dict.fromkeys(range(len(plan.buckets)), 0)
    for tree in sharded_trees(optimizer.init(ShardedTree(there, selection, tensors))):
        for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
            # A part of a buffer lies on some ranks more than on others: its share of the mean.
            elements = piece.bucket.shard if piece.whole else -(-(piece.stop - piece.start) // piece.bucket.ranks)
            out[piece.bucket.index] += elements * tensor.itemsize
    return out


class _Bytes(NamedTuple):
    """Per rank: parameters, gradients, optimizer state."""

    params: int
    grads: int
    states: int

    @staticmethod
    def of(group: Sequence[Bucket], states: Mapping[int, int] | None) -> _Bytes:
        params = sum(b.shard * b.dtype.itemsize for b in group)
        grads = sum(b.shard * b.dtype.itemsize for b in group if b.trains)
        if states is None:
            return _Bytes(params, grads, sum(b.shard * MOMENTS for b in group if b.trains))
        return _Bytes(params, grads, sum(states[b.index] for b in group))


def summary(plan: Plan, optimizer: Any = None) -> str:
    """A row per kind of unit and dtype; equal units are counted, not repeated."""
    states = None if optimizer is None else state_bytes(plan, optimizer)
    kinds: dict[object, list[Unit]] = defaultdict(list)
    for unit in plan.units:
        own = () if states is None else tuple(states[b.index] for b in unit.buckets)
        kinds[unit.kind, own].append(unit)
    heads = "leaves dtype ranks elements buffers S m*S padding at_least params grads states"
    rows: list[tuple[str, ...]] = [("unit", *(head.replace("_", " ") for head in heads.split()))]
    elements = least = 0
    total = _Bytes(0, 0, 0)
    for units in kinds.values():
        for first, last in zip(_groups(units[0]), _groups(units[-1]), strict=True):
            names = first[0].name, last[0].name
            label = names[0] if len(units) == 1 else f"{names[0]} .. {names[1]} ({len(units)}x)"
            here, bytes_ = _least(plan, first), _Bytes.of(first, states)
            rows.append(_row(label + (" frozen" if first[0].frozen else ""), first, here, bytes_))
            elements += len(units) * sum(b.elements for b in first)
            least += len(units) * here
            total = _Bytes(*(t + len(units) * n for t, n in zip(total, bytes_, strict=True)))
    axes = " x ".join(f"{name} {n}" for name, n in plan.axes.items()) or "no mesh axes"
    return (
        f"{table(rows)}\n"
        f"{len(plan.leaves)} leaves in {len(plan.units)} units on {axes}: {elements:,} elements, "
        f"padding {plan.padding:.2%}, unavoidable at least {_share(least, elements)}\n"
        f"per rank: {size(total.params)} of parameters, {size(total.grads)} of gradients, "
        f"{size(total.states)} of optimizer state" + (f" (at {MOMENTS} bytes per element)" if states is None else "")
    )


def _share(length: int, elements: int) -> str:
    return f"{length / elements - 1 if elements else 0.0:.2%}"


def _row(label: str, group: Sequence[Bucket], least: int, bytes_: _Bytes) -> tuple[str, ...]:
    elements, length = sum(b.elements for b in group), sum(b.length for b in group)
    return (
        label,
        str(sum(len(b.leaves) for b in group)),
        str(group[0].dtype).removeprefix("torch."),
        str(group[0].ranks),
        f"{elements:,}",
        str(len(group)),
        f"{sum(b.shard for b in group):,}",
        f"{length:,}",
        _share(length, elements),
        _share(least, elements),
        *map(size, bytes_),
    )


def explain(plan: Plan, path: str) -> str:
    """Who asked for a leaf's block and start, and what S would be without each request.

    Raises:
      ValueError: no such leaf.
    """
    if not isinstance(path, str) or path not in plan.leaves:
        raise ValueError(f"the plan has no leaf {path!r}; its leaves are {list(plan.leaves)[:20]}")
    leaf = plan.leaves[path]
    bucket = plan.buckets[leaf.bucket]
    group = next(g for g in _groups(plan.unit[leaf.unit]) if bucket in g)
    shard = sum(b.shard for b in group)
    lines = [
        f"{path}: shape {leaf.shape}, spec {leaf.spec!r}",
        f"  unit {leaf.unit!r}, bucket {bucket.name!r}, {bucket.ranks} ranks, "
        f"[{leaf.offset:,}, {leaf.stop:,}) of {bucket.length:,}",
        f"  {math.ceil(leaf.size / leaf.block):,} blocks of {leaf.block:,} elements"
        + (f"; shares {leaf.spec.shares} set the runs: {bucket.bounds.sizes}" if bucket.bounds.explicit else ""),
    ]
    if bucket.bounds.explicit:
        return "\n".join(lines)
    now = _Packed(shard, len(group))
    lines.append(f"  S = {shard:,} elements per rank in {_buffers(len(group))}")
    for request in leaf.requests:
        wants = [f"blocks of {request.block:,} elements"]
        if request.align > 1:
            wants.append(f"a start at a multiple of {request.align:,}")
        others = tuple(r for r in leaf.requests if r is not request)
        free = _repacked(plan, group, {path: others}, plan.align)
        lines.append(f"  {request.who} asks for {' and '.join(wants)}: {_cost(now, free, group[0].ranks, plan.price)}")
    free = _repacked(plan, group, {}, 1)
    text = _cost(now, free, group[0].ranks, plan.price)
    lines.append(f"  alignment starts every leaf at a multiple of {plan.align:,} elements: {text}")
    return "\n".join(lines)


class _Packed(NamedTuple):
    """S over all buffers of a unit, and how many there are."""

    shard: int
    buffers: int


def _buffers(count: int) -> str:
    return "1 buffer" if count == 1 else f"{count} buffers"


def _repacked(plan: Plan, group: Sequence[Bucket], instead: Mapping[str, tuple[Request, ...]], align: int) -> _Packed:
    """The leaves of a group packed anew, with other requests of some of them and another alignment."""
    leaves = sorted((leaf for b in group for leaf in b.leaves), key=lambda leaf: natural_key(leaf.path))
    asked = [met(instead.get(leaf.path, leaf.requests), leaf.size) for leaf in leaves]
    items = [Item(leaf.size, block) for leaf, (block, _) in zip(leaves, asked, strict=True)]
    step = math.lcm(align, *(start for _, start in asked))
    labels = [leaf.label for leaf in leaves]
    packing = pack(items, group[0].ranks, align=step, price=plan.price, labels=labels)
    return _Packed(packing.shard, len(packing.buffers))


def _cost(now: _Packed, free: _Packed, ranks: int, price: int) -> str:
    """What a request costs: what the planner would have reached without it."""
    gain = ranks * (now.shard - free.shard) + price * (now.buffers - free.buffers)
    if gain < 0:  # the search is not exact: more freedom may find less
        return "no cheaper layout is known without it"
    if gain == 0:
        return "costs nothing"
    there = "" if now.buffers == free.buffers else f" in {_buffers(free.buffers)}"
    less = now.shard - free.shard
    what = f"{less:,} elements per rank" if less > 0 else "a collective"
    return f"S would be {free.shard:,}{there} without it, so it costs {what}"
