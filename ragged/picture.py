"""Layouts for the eye: one line per leaf, one column per rank."""

from __future__ import annotations

from typing import Any

import torch

from ragged.layout import Bucket, LeafInfo
from ragged.plans import Plan
from ragged.report import table
from ragged.tree import ShardedTree

__all__ = ["typeof", "visualize"]

_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_MOST_RANKS = 16


def typeof(x: Any) -> str:
    """Dtype, global shape and layout of every leaf, in JAX's notation.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, shard, typeof
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> print(typeof(shard({"w": torch.ones(4, 2)}, mesh, P(ragged="fsdp"))["w"]))
      f32[4,2] ragged fsdp, blocks of 2
    """
    if isinstance(x, ShardedTree):
        home = x.selection.home
        types = {p: _type(x.plan.leaves[p], x.tensors[home[p]].dtype) for p in x.paths}
        if x.selection.structure.is_leaf():
            return types[x.paths[0]]
    elif isinstance(x, Plan):
        types = {p: _type(f, f.dtype) for p, f in x.leaves.items()}
    elif isinstance(x, torch.Tensor):
        return f"{_dtype(x.dtype)}[{','.join(map(str, x.shape))}]"
    else:
        raise ValueError(f"typeof takes a ShardedTree, a Plan or a tensor, got {type(x).__name__}")
    return table(list(types.items())) if types else "{}"


def _dtype(dtype: torch.dtype) -> str:
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def _type(leaf: LeafInfo, dtype: torch.dtype) -> str:
    dims = []
    for i, n in enumerate(leaf.shape):
        axes = leaf.spec.dims[i] if i < len(leaf.spec.dims) else ()
        dims.append(f"{n}@{'+'.join(axes)}" if axes else str(n))
    text = f"{_dtype(dtype)}[{','.join(dims)}]"
    if not leaf.spec.ragged:
        return text if leaf.spec.dims else f"{text} replicated"
    return f"{text} ragged {'+'.join(leaf.spec.ragged)}, blocks of {leaf.block}"


def visualize(x: ShardedTree | Plan, format: str = "text") -> str:
    """Which rank owns which part of each leaf, with blocks and padding.

    Args:
      x: a plan, or a tree, of which the buckets that it lies in are drawn.
      format: "text": a row per leaf and a column per rank; each cell has the elements of the
        run, `·` where a rank owns nothing. Above 16 ranks the columns are groups of ranks.

    Raises:
      ValueError: an unknown format.
    """
    if format != "text":
        raise ValueError(f'format={format!r}: expected "text"')
    if isinstance(x, ShardedTree):
        buckets = list({piece.bucket.index: piece.bucket for piece in x.selection.pieces}.values())
    else:
        buckets = list(x.buckets)
    return "\n\n".join(_draw(b) for b in buckets)


def _draw(bucket: Bucket) -> str:
    group = -(-bucket.ranks // _MOST_RANKS)
    columns = [(k, min(k + group, bucket.ranks)) for k in range(0, bucket.ranks, group)]
    heads = [f"rank {a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in columns]
    rows: list[tuple[str, ...]] = [("", "block", *heads)]
    for leaf in bucket.leaves:
        cells = []
        for a, b in columns:
            n = leaf.span(b - 1)[1] - leaf.span(a)[0]
            cells.append(f"{n:,}" if n else "·")
        rows.append((leaf.path, f"{leaf.block:,}", *cells))
    used = [sum(f.span(b - 1)[1] - f.span(a)[0] for f in bucket.leaves) for a, b in columns]
    size = [bucket.bounds(b) - bucket.bounds(a) for a, b in columns]
    pads = [f"{n - u:,}" if n > u else "·" for n, u in zip(size, used, strict=True)]
    rows.append(("(padding)", "", *pads))
    bars = [("█" * round(8 * u / n) if n else "").ljust(8, "░") for n, u in zip(size, used, strict=True)]
    rows.append(("(filled)", "", *bars))
    axes = "+".join(bucket.ragged) or "every rank"
    dtype = str(bucket.dtype).removeprefix("torch.")
    return f"{bucket.name}  {dtype}, S = {bucket.shard:,} over {axes}\n{table(rows)}"
