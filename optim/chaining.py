"""`chain` and `named_chain`: transformations one after the other."""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor

from optim.base import Blocks, GradientTransformation, Labels

__all__ = ["chain", "named_chain"]


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations in order; the state is a tuple of theirs.

    On the fused path (`make_step`) all but the last run `update`, and the last its `step`. The
    blocks of a leaf are the least common multiple of what the members ask for.

    Example:
      >>> import torch
      >>> from optim import chain, scale
      >>> tx = chain(scale(2.0), scale(-0.5))
      >>> tx.update(torch.ones(1), tx.init(None), None)[0].item()
      -1.0
    """

    def init_fn(params: Any) -> tuple[Any, ...]:
        return tuple(tx.init(params) for tx in transformations)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, tuple[Any, ...]]:
        _check(state)
        out = []
        for tx, s in zip(transformations, state, strict=True):
            updates, s = tx.update(updates, s, params)
            out.append(s)
        return updates, tuple(out)

    def step_fn(params: Any, grads: Any, state: Any) -> tuple[Any, tuple[Any, ...]]:
        _check(state)
        out = []
        for tx, s in zip(transformations[:-1], state[:-1], strict=True):
            grads, s = tx.update(grads, s, params)
            out.append(s)
        last = transformations[-1].step
        assert last is not None
        params, s = last(params, _apart(grads, (params, out)), state[-1])
        return params, (*out, s)

    def _check(state: Any) -> None:
        if len(state) != len(transformations):
            raise ValueError(f"chain of {len(transformations)} transformations got a state of {len(state)} parts")

    fused = bool(transformations) and transformations[-1].step is not None
    return GradientTransformation(
        init_fn, update_fn, step_fn if fused else None, _blocks(transformations), _labels(transformations)
    )


def named_chain(*transformations: tuple[str, GradientTransformation]) -> GradientTransformation:
    """As `chain`, of (name, transformation) pairs; the state is a dict of theirs by name.

    Raises:
      ValueError: a name that occurs twice.

    Example:
      >>> import torch
      >>> from optim import named_chain, scale, trace
      >>> tx = named_chain(("momentum", trace(0.9)), ("rate", scale(-0.1)))
      >>> updates, state = tx.update(torch.ones(1), tx.init(torch.ones(1)), None)
      >>> state["momentum"].trace.item()
      1.0

    Source: optax.named_chain.
    """
    names = [name for name, _ in transformations]
    if len(set(names)) < len(names):
        raise ValueError(f"named_chain: the names {names} are not distinct; their states are told apart by them")
    inner = chain(*(tx for _, tx in transformations))

    def named(states: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(names, states, strict=True))

    def in_order(state: Any) -> tuple[Any, ...]:
        if set(state) != set(names):
            raise ValueError(f"named_chain of {names} got a state of {sorted(state)}")
        return tuple(state[name] for name in names)

    def init_fn(params: Any) -> dict[str, Any]:
        return named(inner.init(params))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, dict[str, Any]]:
        updates, states = inner.update(updates, in_order(state), params)
        return updates, named(states)

    def step_fn(params: Any, grads: Any, state: Any) -> tuple[Any, dict[str, Any]]:
        assert inner.step is not None
        params, states = inner.step(params, grads, in_order(state))
        return params, named(states)

    fused = None if inner.step is None else step_fn
    return GradientTransformation(init_fn, update_fn, fused, inner.blocks, inner.labels)


def _apart(updates: Any, kept: Any) -> Any:
    """Updates that the last member may overwrite: copies of those that are also some member's state."""
    held = {x.data_ptr() for x in optree.tree_leaves(kept) if isinstance(x, Tensor) and x.numel()}
    return optree.tree_map(lambda u: u.clone() if u.data_ptr() in held else u, updates)


def _labels(transformations: tuple[GradientTransformation, ...]) -> Labels | None:
    asking = [tx.labels for tx in transformations if tx.labels is not None]
    if len(asking) <= 1:
        return asking[0] if asking else None
    return lambda path, shape, dtype: tuple(ask(path, shape, dtype) for ask in asking)


def _blocks(transformations: tuple[GradientTransformation, ...]) -> Blocks | None:
    asking = [tx.blocks for tx in transformations if tx.blocks is not None]
    if len(asking) <= 1:
        return asking[0] if asking else None

    def blocks(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, int] | None:
        from ragged.spec import block_elements

        wanted = [b for ask in asking if (b := ask(path, shape, dtype)) is not None]
        if len(wanted) <= 1:
            return wanted[0] if wanted else None
        flat = math.lcm(*(block_elements(block, shape) for block, _ in wanted))
        return flat, math.lcm(*(align for _, align in wanted))

    return blocks
