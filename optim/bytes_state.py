"""State of one byte per element: what it consists of, and its parts beside the parameters they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from optim.base import is_sharded, require_like
from optim.blockwise import Blocking, Grid, grid, scale_shape
from optim.decay import resolve_mask
from optim.segments import layout, segments
from ragged import ShardedTree

__all__ = ["Blockwise", "Part", "parts", "zeros"]


class Blockwise(NamedTuple):
    """A moment of all leaves of a tree.

    Attributes:
      codes: uint8, a tree like the parameters with None in place of small leaves; sharded trees have the plan of
        the parameters.
      scales: fp32, one per block (of the second moment: of its square root), under the same paths. Sharded trees
        have a plan of their own, that follows from the parameters': on every rank the scales of the blocks it
        holds. Global shapes are those of the leaves, with the innermost dims counted in blocks.
      small: fp32, the moments of small leaves, with None in place of the others.
    """

    codes: Any
    scales: Any
    small: Any


def zeros(params: Any, blocking: Blocking) -> Blockwise:
    """A moment of zeros, like the parameters."""
    tops, structure = optree.tree_flatten(params, is_leaf=is_sharded)
    columns: tuple[list[Any], ...] = ([], [], [])
    for name, top in zip(_names(params), tops, strict=True):
        for column, made in zip(columns, _zeros_of(name, top, blocking), strict=True):
            column.append(made)
    return Blockwise(*(optree.tree_unflatten(structure, column) for column in columns))


def _zeros_of(name: str, top: Any, blocking: Blocking) -> tuple[Any, Any, Any]:
    if not isinstance(top, ShardedTree):
        if not blocking.covers(top.shape):
            return None, None, torch.zeros_like(top, dtype=torch.float32, memory_format=torch.contiguous_format)
        g = grid(blocking, name, tuple(top.shape), tuple(top.shape))
        scales = torch.zeros(scale_shape(g.flat, g.sides, g.local, g.local), device=top.device)
        return torch.zeros_like(top, dtype=torch.uint8, memory_format=torch.contiguous_format), scales, None
    found = layout(top, blocking)

    def like(selection: Any, dtype: torch.dtype) -> ShardedTree:
        view = top.view(selection)
        return view.with_tensors([torch.zeros_like(x, dtype=dtype) for x in view.tensors])

    codes = like(found.large, torch.uint8)
    comm = found.scale_plan.bound()
    device = next((x.device for x in top.tensors), comm.device)
    sizes = [piece.bucket.bounds.size(comm.rank(piece.bucket.ragged)) for piece in found.scales.pieces]
    kept = [torch.zeros(n, device=device) for n in sizes]
    return codes, ShardedTree(found.scale_plan, found.scales, kept), like(found.small, torch.float32)


def _names(tree: Any) -> list[str]:
    return [".".join(map(str, path)) for path in optree.tree_paths(tree, is_leaf=is_sharded)]


class Part(NamedTuple):
    """1-D tensors that belong together; codes and scales where there is a grid, else moments."""

    p: Tensor
    g: Tensor
    target: Tensor
    moments: tuple[Tensor, ...]
    grid: Grid | None
    decays: bool


def parts(
    params: Any, grads: Any, target: Any, mu: Blockwise, nu: Blockwise, blocking: Blocking, mask: Any
) -> Iterator[Part]:
    """Trees side by side, in few parts.

    Args:
      target: like the parameters: where updates go.
      mask: leaves that decay.

    Raises:
      ValueError: gradients or moments that don't fit the parameters.
    """
    require_like(params, grads, "grads")
    flags = None
    if mask is not None:
        flags = iter(resolve_mask(mask, params))
    tops, structure = optree.tree_flatten(params, is_leaf=is_sharded)
    held = [structure.flatten_up_to(tree) for tree in (grads, target, *mu, *nu)]
    for name, p, g, out, *state in zip(_names(params), tops, *held, strict=True):
        _check(name, p, state, blocking)
        if isinstance(p, ShardedTree):
            decays = None if flags is None else {path: next(flags) for path in p.paths}
            yield from _sharded(p, g, out, state, blocking, decays)
            continue
        decay = True if flags is None else next(flags)
        large = blocking.covers(tuple(p.shape))
        moments = [state[i].view(-1) for i in ((0, 1, 3, 4) if large else (2, 5))]
        shape = tuple(p.shape)
        own = grid(blocking, name, shape, shape) if large else None
        flat = out.reshape(-1)
        yield Part(p.reshape(-1), g.reshape(-1), flat, tuple(moments), own, decay)
        if not out.is_contiguous():
            out.copy_(flat.view(shape))


def _sharded(p: Any, g: Any, out: Any, state: list[Any], blocking: Blocking, decays: Any) -> Iterator[Part]:
    found = layout(p, blocking)
    for selection, own in zip((found.large, found.small), segments(p, blocking, decays), strict=True):
        ps, gs, outs = (tree.view(selection).tensors for tree in (p, g, out))
        for s in own:
            cut = slice(s.start, s.stop)
            if s.grid is None:
                moments = tuple(tree.tensors[s.piece][cut] for tree in (state[2], state[5]))
            else:
                blocks = slice(s.scale_start, s.scale_stop)
                moments = (
                    state[0].tensors[s.piece][cut],
                    state[1].tensors[s.scale_piece][blocks],
                    state[3].tensors[s.piece][cut],
                    state[4].tensors[s.scale_piece][blocks],
                )
            yield Part(ps[s.piece][cut], gs[s.piece][cut], outs[s.piece][cut], moments, s.grid, s.decays)


def _check(name: str, top: Any, state: list[Any], blocking: Blocking) -> None:
    """State of other parameters would be read in wrong places."""
    if isinstance(top, ShardedTree):
        found = layout(top, blocking)
        wanted = [(top.plan, found.large), (found.scale_plan, found.scales), (top.plan, found.small)] * 2
        good = all(
            isinstance(x, ShardedTree) and (x.plan, x.selection) == w for x, w in zip(state, wanted, strict=True)
        )
    else:
        kept = [None if x is None else x.shape for x in state]
        large = blocking.covers(tuple(top.shape))
        good = kept[0] == kept[3] == (top.shape if large else None) and kept[2] == kept[5]
        good = good and kept[2] == (None if large else top.shape)
    if not good:
        raise ValueError(
            f"adamw8bit: the state of {name or 'the parameters'!r} is that of other parameters, of another plan, "
            f"or of other blocks than {blocking.block} from {blocking.min_size} elements; use tx.init(params)"
        )
