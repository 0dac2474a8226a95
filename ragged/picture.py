"""Layouts for the eye: types of leaves, and pictures of plans."""

from __future__ import annotations

from typing import Any

import torch

from ragged.layout import LeafInfo
from ragged.picture_parts import panels
from ragged.picture_svg import draw_svg
from ragged.picture_text import draw_text
from ragged.plans import Plan
from ragged.report import table
from ragged.tree import ShardedTree

__all__ = ["typeof", "visualize"]

_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


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


def visualize(x: ShardedTree | Plan, format: str = "text", *, color: bool | None = None) -> str:
    """Which rank owns which part of each leaf, with blocks and padding.

    Units of equal layout are drawn once, as `layers.0 .. layers.31 (32x)`.

    Args:
      x: a plan, or a tree, of which the buckets that it lies in are drawn.
      format: "text": a row per leaf and a column per rank; each cell has the elements of the
        run, `·` where a rank owns nothing. Above 16 ranks the columns are groups of ranks.
        "svg": a standalone picture, ranks as columns and leaves as coloured runs in the order in
        which they lie there, padding hatched. Above 64 ranks the columns are groups of ranks that
        show their mix of leaves; above 21 leaves, those whose paths differ in numbers share a colour.
      color: of the text, with ANSI codes; None: if the package rich is installed, stdout is a
        terminal and the environment has no NO_COLOR.

    Returns:
      The text, or the SVG document.

    Raises:
      ValueError: an unknown format, or colours without rich.

    Example:
      >>> import torch
      >>> from ragged import P, plan, visualize
      >>> layout = plan({"w": ((96, 8), torch.float32)}, {"fsdp": 2}, P(ragged="fsdp", block=(32, None)))
      >>> print(visualize(layout))
      w  float32, S = 512 over fsdp
                 block    rank 0    rank 1
      w            256       512       256
      (padding)                ·       256
      (filled)          ████████  ████░░░░
      >>> visualize(layout, format="svg").startswith("<svg")
      True
    """
    if format not in ("text", "svg"):
        raise ValueError(f'format={format!r}: expected "text" or "svg"')
    if isinstance(x, ShardedTree):
        buckets = list({piece.bucket.index: piece.bucket for piece in x.selection.pieces}.values())
    elif isinstance(x, Plan):
        buckets = list(x.buckets)
    else:
        raise ValueError(f"visualize takes a ShardedTree or a Plan, got {type(x).__name__}")
    parts = panels(buckets)
    return draw_text(parts, color) if format == "text" else draw_svg(parts)
