"""Plans in words: the summary table and the reasons behind a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragged.layout import Bucket, Unit
from ragged.planner import Item, pack_in_order

if TYPE_CHECKING:
    from ragged.plans import Plan

__all__ = ["explain", "summary"]


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
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


def _kind(unit: Unit) -> object:
    """Units with equal layouts are one row."""
    return tuple(
        (b.dtype, b.ragged, b.even, b.bounds, b.frozen, tuple((f.offset, f.local_shape) for f in b.leaves))
        for b in unit.buckets
    )


def summary(plan: Plan) -> str:
    """A row per kind of bucket; equal units are counted, not repeated."""
    kinds: dict[object, list[Unit]] = {}
    for unit in plan.units:
        kinds.setdefault(_kind(unit), []).append(unit)
    rows: list[tuple[str, ...]] = [
        ("unit", "leaves", "dtype", "ranks", "elements", "S", "m*S", "padding", "bytes/rank")
    ]
    for units in kinds.values():
        for i, b in enumerate(units[0].buckets):
            name = units[0].buckets[i].name
            label = name if len(units) == 1 else f"{name} .. {units[-1].buckets[i].name} ({len(units)}x)"
            rows.append(_row(label + (" frozen" if b.frozen else ""), b))
    axes = " x ".join(f"{name} {n}" for name, n in plan.axes.items()) or "no mesh axes"
    elements = sum(b.elements for b in plan.buckets)
    total = (
        f"{len(plan.leaves)} leaves in {len(plan.units)} units on {axes}: {elements:,} elements, "
        f"padding {plan.padding:.2%}, {_size(plan.bytes_per_rank())} per rank"
    )
    return f"{table(rows)}\n{total}"


def _row(label: str, b: Bucket) -> tuple[str, ...]:
    padding = b.length / b.elements - 1 if b.elements else 0.0
    return (
        label,
        str(len(b.leaves)),
        str(b.dtype).removeprefix("torch."),
        str(b.ranks),
        f"{b.elements:,}",
        f"{b.shard:,}",
        f"{b.length:,}",
        f"{padding:.2%}",
        _size(b.shard * b.dtype.itemsize),
    )


def explain(plan: Plan, path: str) -> str:
    """Who asked for a leaf's block, and the S the bucket would have without it.

    Raises:
      ValueError: no such leaf.
    """
    if path not in plan.leaves:
        raise ValueError(f"the plan has no leaf {path!r}; its leaves are {list(plan.leaves)[:20]}")
    leaf = plan.leaves[path]
    bucket = plan.buckets[leaf.bucket]
    lines = [
        f"{path}: shape {leaf.shape}, spec {leaf.spec!r}",
        f"  unit {leaf.unit!r}, bucket {bucket.name!r}, {bucket.ranks} ranks, "
        f"[{leaf.offset:,}, {leaf.stop:,}) of {bucket.length:,}",
    ]
    for who, block in leaf.requests:
        lines.append(f"  {who} asks for blocks of {block:,} elements")
    blocks = math.ceil(leaf.size / leaf.block)
    lines.append(f"  together: {blocks:,} blocks of {leaf.block:,} elements")
    if bucket.bounds.explicit is None:
        items = [Item(f.size, 1 if f.path == path else f.block) for f in bucket.leaves]
        free = pack_in_order(items, bucket.ranks, plan.align).shard
        lines.append(
            f"  S = {bucket.shard:,}; with this leaf cut anywhere it would be {free:,}: "
            f"its block costs {bucket.shard - free:,} elements per rank"
        )
    else:
        lines.append(f"  shares {leaf.spec.shares} set the runs: {bucket.bounds.sizes} elements")
    return "\n".join(lines)
