"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from optim.base import GradientTransformation, identity, refuse, require_like
from optim.chaining import chain
from optim.scaling import scale_by_learning_rate
from optim.schedules import Schedule

__all__ = ["TraceState", "sgd", "trace"]


class TraceState(NamedTuple):
    """trace: decaying sums of updates, a tree like the parameters."""

    trace: Any


def trace(decay: float, nesterov: bool = False, accumulator_dtype: torch.dtype | None = None) -> GradientTransformation:
    """Replace updates by their decaying sum `t = g + decay * t` (Nesterov: by `g + decay * t`).

    Source: optax.trace; torch.optim.SGD without dampening.
    """

    def init_fn(params: Any) -> TraceState:
        refuse(params, "sgd", complex_too=False)
        return TraceState(optree.tree_map(lambda p: torch.zeros_like(p, dtype=accumulator_dtype or p.dtype), params))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = optree.tree_map(lambda g, t: (g + decay * t).to(t.dtype), updates, state.trace)
        out = optree.tree_map(lambda g, t: (g + decay * t).to(g.dtype), updates, new) if nesterov else new
        return out, TraceState(new)

    return GradientTransformation(init_fn, update_fn)


def sgd(
    learning_rate: float | Schedule, momentum: float | None = None, nesterov: bool = False
) -> GradientTransformation:
    """Gradient descent, with momentum if given.

    The donated path (`make_step`) works in place, with the same bits as `update`.

    Example:
      >>> import torch
      >>> from optim import apply_updates, sgd
      >>> tx = sgd(0.5)
      >>> updates, _ = tx.update(torch.ones(1), tx.init(torch.zeros(1)), None)
      >>> apply_updates(torch.zeros(1), updates).item()
      -0.5
    """
    first = identity() if momentum is None else trace(momentum, nesterov)

    def init_fn(params: Any) -> Any:
        refuse(params, "sgd", complex_too=False)
        return tx.init(params)

    tx = chain(first, scale_by_learning_rate(learning_rate))

    def step_fn(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        memory, last = state
        rate = learning_rate(last.count) if callable(learning_rate) else learning_rate
        updates = grads
        if momentum is not None:
            require_like(params, memory.trace, "trace")
            updates = optree.tree_map(lambda g, t: t.mul_(momentum).add_(g), grads, memory.trace)
            memory = TraceState(updates)
            if nesterov:
                updates = optree.tree_map(lambda g, t: (g + momentum * t).to(g.dtype), grads, memory.trace)

        def descend(p: Tensor, g: Tensor, u: Tensor) -> Tensor:
            # the gradient is scratch now; product and sum stay apart, so that bits are those of `update`
            return p.add_(torch.mul(u, -1 * rate, out=g) if g.dtype == u.dtype else u * (-1 * rate))

        params = optree.tree_map(descend, params, grads, updates)
        return params, (memory, last._replace(count=last.count + 1) if callable(learning_rate) else last)

    return GradientTransformation(init_fn, tx.update, step_fn)
