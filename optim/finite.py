"""Skip steps whose gradients are not finite."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from optim.base import GradientTransformation
from optim.norms import all_finite
from optim.scaling import new_count

__all__ = ["ApplyIfFiniteState", "apply_if_finite"]


class ApplyIfFiniteState(NamedTuple):
    """inner_state: the transformation's own; total_notfinite: steps skipped so far, int32."""

    inner_state: Any
    total_notfinite: Tensor


def apply_if_finite(inner: GradientTransformation) -> GradientTransformation:
    """Skip a whole step, state and counter included, if any gradient is infinite or NaN.

    All ranks take the same decision, by one all-reduce. The step waits for it.

    Example:
      >>> import torch
      >>> from optim import apply_if_finite, sgd
      >>> tx = apply_if_finite(sgd(0.1))
      >>> updates, state = tx.update(torch.tensor([float("nan")]), tx.init(torch.ones(1)), None)
      >>> updates.tolist(), state.total_notfinite.item()
      ([0.0], 1)
    """

    def init_fn(params: Any) -> ApplyIfFiniteState:
        return ApplyIfFiniteState(inner.init(params), new_count(params))

    def skip(state: Any) -> ApplyIfFiniteState:
        # new tree objects, so that a donated input and the result are not the same tree
        return ApplyIfFiniteState(optree.tree_map(lambda x: x, state.inner_state), state.total_notfinite + 1)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not all_finite(updates):
            return optree.tree_map(torch.zeros_like, updates), skip(state)
        updates, inner_state = inner.update(updates, state.inner_state, params)
        return updates, ApplyIfFiniteState(inner_state, state.total_notfinite)

    def step_fn(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        if not all_finite(grads):
            return optree.tree_map(lambda x: x, params), skip(state)
        if inner.step is not None:
            params, inner_state = inner.step(params, grads, state.inner_state)
        else:
            updates, inner_state = inner.update(grads, state.inner_state, params)
            params = optree.tree_map(lambda p, u: p.add_(u), params, updates)
        return params, ApplyIfFiniteState(inner_state, state.total_notfinite)

    return GradientTransformation(init_fn, update_fn, step_fn, inner.blocks, inner.labels)
