"""Muon: momentum, orthogonalized matrix by matrix, on shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from optim.base import (
    GradientTransformation,
    global_leaves,
    is_partial,
    is_sharded,
    refuse,
    require_like,
    resolve_leaves,
)
from optim.decay import split_tensors
from optim.matrices import Matrices, matrices_of
from optim.newton_schulz import newton_schulz
from optim.roots import orthogonalized
from optim.scaling import new_count
from optim.schedules import Schedule
from ragged import ShardedTree
from ragged.paths import Shaped

__all__ = ["MuonState", "muon"]


class MuonState(NamedTuple):
    """count: steps done, int32; mu: momentum, a tree like the parameters."""

    count: Tensor  # type: ignore[assignment]  # optax's name; it hides tuple.count
    mu: Any


def muon(
    learning_rate: float | Schedule = 1e-3,
    momentum: float = 0.95,
    *,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    mask: Any = None,
    adjust_lr_fn: str = "original",
    matrix: Any = None,
    split: Any = None,
    roots: str = "balanced",
    ns: Callable[[Tensor], Tensor] | None = None,
    ns_steps: int = 5,
    ns_dtype: torch.dtype | None = None,
    mu_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Muon with decoupled weight decay, equal to `torch.optim.Muon` and the same on any mesh.

    Momentum lives on the shards. Per unit one packed move takes the matrices to their roots, where each is
    orthogonalized once, equal shapes as a batch, and one takes them back; meanwhile the next unit travels. Roots
    are balanced by cost over the whole tree and all ranks, replicas too; a matrix that lies on one rank
    already (`block=TENSOR`) stays there, and nothing is sent.

    Args:
      learning_rate: a number, or a schedule of the count before the step.
      momentum: of `mu = momentum * mu + (1 - momentum) * g`.
      weight_decay: times the learning rate, not scaled by shapes; mask: leaves that decay, all by default.
      adjust_lr_fn: the factor of a matrix's step, from its global shape. "original":
        `sqrt(max(1, rows / cols))`; "match_rms_adamw": `0.2 * sqrt(max(rows, cols))`.
      matrix: how leaves are matrices, for the resolver: None for a 2-D leaf, an einops pattern whose last two axes
        are the matrix and whose others are batch (`"e m n -> e m n"`), or `(pattern, {axis: size})`
        (`("(h d) m -> h d m", {"h": 8})`).
      split: row counts of a fused matrix's sections (`rules({"**.qkv": (512, 128, 128), "**": None})`).
      ns: another orthogonalization, of stacks `(batch, rows, cols)`; ns_steps: of the default one.
      ns_dtype: of the moves and the iteration. By default bfloat16, but fp32 on the CPU, as few multiply bf16 fast.
      mu_dtype: of the momentum; the parameters' by default.

    Raises:
      ValueError: by path: integer, bool or complex leaves, leaves that are no matrices and have no pattern, patterns
        or sections that don't fit; an unknown rule for the step or the roots.

    Example:
      >>> import torch
      >>> from optim import apply_updates, muon
      >>> tx, params = muon(0.1, weight_decay=0.0, ns_dtype=torch.float32), {"w": torch.zeros(4, 4)}
      >>> updates, state = tx.update({"w": 5 * torch.eye(4)}, tx.init(params), params)
      >>> [round(x, 4) for x in apply_updates(params, updates)["w"].diagonal().tolist()]
      [-0.0765, -0.0765, -0.0765, -0.0765]

    Source: Jordan et al., Muon (2024); arXiv 2502.16982 (scale rules); arXiv 2602.22437, section 6 (roots).
    """
    if adjust_lr_fn not in ("original", "match_rms_adamw"):
        raise ValueError(f'adjust_lr_fn={adjust_lr_fn!r}: expected "original" or "match_rms_adamw"')
    if roots != "balanced":
        raise ValueError(f'roots={roots!r}: expected "balanced"')
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum}: expected a number in [0, 1)")
    iterate = ns if ns is not None else functools.partial(newton_schulz, steps=ns_steps)

    def orthogonalize(x: Tensor) -> Tensor:
        factor = _factor(x.shape[-2], x.shape[-1], adjust_lr_fn)
        y = iterate(x)
        return y if factor == 1.0 else (y.to(_wide(y)) * factor).to(y.dtype)

    recipes: dict[Any, dict[str, Matrices]] = {}  # by names and shapes: patterns are resolved once

    def recipe(params: Any) -> dict[str, Matrices]:
        names, leaves = global_leaves(params)
        partial = is_partial(params)
        key = partial, tuple((name, tuple(leaf.shape)) for name, leaf in zip(names, leaves, strict=True))
        if key not in recipes:
            recipes[key] = resolved(names, leaves, partial)
        return recipes[key]

    def resolved(names: list[str], leaves: list[Shaped], partial: bool) -> dict[str, Matrices]:
        where = (names, leaves)
        patterns = resolve_leaves(matrix, *where, partial, what="matrix pattern", is_value=_is_pattern)
        sections = resolve_leaves(split, *where, partial, what="split", is_value=_is_split)
        each = zip(names, leaves, patterns, sections, strict=True)
        return {name: matrices_of(name, tuple(leaf.shape), how, cut) for name, leaf, how, cut in each}

    def init_fn(params: Any) -> MuonState:
        refuse(params, "Muon")
        recipe(params)
        return MuonState(new_count(params), optree.tree_map(lambda p: torch.zeros_like(p, dtype=mu_dtype), params))

    def directions(grads: Any, mu: Any, how: Mapping[str, Matrices]) -> Any:
        """The orthogonalized momentum, in ns_dtype, each matrix scaled by its shape's factor."""

        def ahead(g: Tensor, m: Tensor) -> Tensor:
            wide = g.to(torch.promote_types(m.dtype, torch.float32))
            fast = torch.float32 if g.device.type == "cpu" else torch.bfloat16
            return (wide.lerp(m.to(wide.dtype), momentum) if nesterov else m).to(ns_dtype or fast)

        seen = optree.tree_map(ahead, grads, mu)
        return _orthogonalized(seen, how, orthogonalize)

    def rate_of(count: Tensor) -> Any:
        return learning_rate(count) if callable(learning_rate) else learning_rate

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("muon needs the parameters: call update(updates, state, params)")
        mu = optree.tree_map(
            lambda g, m: m.to(_wide(m)).lerp(g.to(_wide(m)), 1 - momentum).to(m.dtype), updates, state.mu
        )
        out = directions(updates, mu, recipe(params))
        rate = rate_of(state.count)
        new = optree.tree_map(lambda o, p: o.to(_wide(p)) * -rate, out, params)
        for decays, (u, p) in split_tensors(mask, params, new, params):
            if decays and weight_decay:
                u.sub_(p.to(u.dtype) * (rate * weight_decay))
        return new, MuonState(state.count + 1, mu)

    def step_fn(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        require_like(params, state.mu, "mu")
        mu = optree.tree_map(lambda g, m: m.lerp_(g.to(m.dtype), 1 - momentum), grads, state.mu)
        out = directions(grads, mu, recipe(params))
        rate = rate_of(state.count)
        for decays, (p, o) in split_tensors(mask, params, params, out):
            wide = p.to(_wide(p))  # rounded to the parameters' dtype once: alone the decay of bf16 would vanish
            if decays and weight_decay:
                wide.mul_(1 - rate * weight_decay)
            wide.sub_(o.to(wide.dtype) * rate)
            if wide is not p:
                p.copy_(wide)
        # new tree objects on the same storage: the ones passed in are dead now
        return optree.tree_map(lambda p: p, params), MuonState(state.count + 1, mu)

    return GradientTransformation(init_fn, update_fn, step_fn)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _is_pattern(x: Any) -> bool:
    return x is None or isinstance(x, str) or (isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str))


def _is_split(x: Any) -> bool:
    return x is None or (isinstance(x, tuple) and all(type(n) is int for n in x))


def _factor(rows: int, cols: int, rule: str) -> float:
    """The step's factor, from a matrix's global shape: at its root it is whole."""
    return math.sqrt(max(1.0, rows / cols)) if rule == "original" else 0.2 * math.sqrt(max(rows, cols))


def _prefixed(prefix: str, path: str) -> str:
    return ".".join(filter(None, (prefix, path)))


def _named(tree: Any) -> Any:
    """Leaves and sharded trees of a pytree, with their dotted places in it."""
    paths, leaves, structure = optree.tree_flatten_with_path(tree, is_leaf=is_sharded)
    return [".".join(map(str, path)) for path in paths], leaves, structure


def _orthogonalized(tree: Any, how: Mapping[str, Matrices], ns: Callable[[Tensor], Tensor]) -> Any:
    names, leaves, structure = _named(tree)
    out: list[Any] = []
    for name, x in zip(names, leaves, strict=True):
        if isinstance(x, ShardedTree):
            out.append(orthogonalized(x, {p: how[_prefixed(name, p)] for p in x.paths}, ns))
        else:
            out.append(how[name].map(ns, x) if x.numel() else x)
    return optree.tree_unflatten(structure, out)
