"""AdamW, element-wise over flat buffers, with torch's fused kernel on the donated path."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from optim.base import GradientTransformation, refuse
from optim.chaining import chain
from optim.decay import add_decayed_weights
from optim.scaling import new_count, scale_by_learning_rate
from optim.schedules import Schedule
from ragged import ShardedTree, partition
from ragged.paths import flatten
from ragged.resolver import resolve

__all__ = ["ScaleByAdamState", "adamw", "scale_by_adam"]


class ScaleByAdamState(NamedTuple):
    """count: steps done, int32; mu, nu: first and second moments, trees like the parameters."""

    count: Tensor  # type: ignore[assignment]  # optax's name; it hides tuple.count
    mu: Any
    nu: Any


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, mu_dtype: torch.dtype | None = None
) -> GradientTransformation:
    """Rescale updates by Adam's moments.

    Moments are fp32 (fp64 for fp64 parameters), whatever the dtype of the parameters, unless
    `mu_dtype` says otherwise for the first one. They are fixed at `init`.

    Raises:
      ValueError: integer, bool or complex leaves, by path.

    Source: Kingma and Ba, arXiv 1412.6980; torch's bias correction.
    """

    def init_fn(params: Any) -> ScaleByAdamState:
        refuse(params, "Adam")

        def moments(dtype: torch.dtype | None) -> Any:
            return optree.tree_map(lambda p: torch.zeros_like(p, dtype=dtype or _moment_dtype(p)), params)

        return ScaleByAdamState(new_count(params), moments(mu_dtype), moments(None))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1
        mu = optree.tree_map(lambda g, m: (b1 * m + (1 - b1) * g).to(m.dtype), updates, state.mu)
        nu = optree.tree_map(lambda g, v: b2 * v + (1 - b2) * g.to(v.dtype).square(), updates, state.nu)
        # fp64, since 1 - b2^t loses digits at the first steps
        t = count.double()
        c1, c2 = 1 - b1**t, 1 - b2**t

        def rescale(m: Tensor, v: Tensor) -> Tensor:
            root = v.sqrt().div_(c2.sqrt().to(v.dtype)).add_(eps)
            return m.to(v.dtype).div(c1.to(v.dtype)).div_(root)

        return optree.tree_map(rescale, mu, nu), ScaleByAdamState(count, mu, nu)

    return GradientTransformation(init_fn, update_fn)


def adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay: float = 1e-4,
    mask: Any = None,
    mu_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """AdamW: Adam with decoupled weight decay, equal to `torch.optim.AdamW`.

    Args:
      learning_rate: a number, or a schedule of the count before the step.
      mask: leaves that decay, as in `add_decayed_weights`; all by default.
      mu_dtype: dtype of the first moment.

    On the donated path (`make_step`) torch's fused kernel runs over whole buffers.

    Example:
      >>> import torch
      >>> from optim import adamw, make_step
      >>> tx, params = adamw(0.1, weight_decay=0.0), torch.ones(2)
      >>> params, state = make_step(tx)(params, torch.full((2,), 0.5), tx.init(params))
      >>> [round(x, 4) for x in params.tolist()]
      [0.9, 0.9]

    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    tx = chain(
        scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )

    def step_fn(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        adam, *rest = state
        rate = learning_rate(rest[-1].count) if callable(learning_rate) else learning_rate
        if isinstance(rate, Tensor) and rate.device.type == "cpu":
            rate = rate.item()
        parts = _groups(params, grads, adam, mask)
        for (ps, gs, ms, vs), decays in parts:
            if ps:
                count = adam.count.float()
                torch_adamw(
                    ps,
                    [g.to(p.dtype) for p, g in zip(ps, gs, strict=True)],
                    ms,
                    vs,
                    [],
                    [count.clone() for _ in ps],
                    fused=True,
                    amsgrad=False,
                    beta1=b1,
                    beta2=b2,
                    lr=rate,
                    weight_decay=weight_decay if decays else 0.0,
                    eps=eps,
                    maximize=False,
                )
        after = [s._replace(count=s.count + 1) if "count" in s._fields else s for s in rest]
        # new tree objects on the same storage: the ones passed in are dead now
        params, mu, nu = (optree.tree_map(lambda x: x, tree) for tree in (params, adam.mu, adam.nu))
        return params, (ScaleByAdamState(adam.count + 1, mu, nu), *after)

    def fused_or_not(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        if _fusable(params, state[0]):
            return step_fn(params, grads, state)
        updates, state = tx.update(grads, state, params)
        return optree.tree_map(lambda p, u: p.add_(u), params, updates), state

    return GradientTransformation(tx.init, tx.update, fused_or_not)


def _moment_dtype(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def _fusable(params: Any, state: ScaleByAdamState) -> bool:
    """torch's kernel wants one dtype for parameters and moments."""
    flat = zip(optree.tree_leaves(params), optree.tree_leaves(state.mu), optree.tree_leaves(state.nu), strict=True)
    return all(p.dtype == m.dtype == v.dtype for p, m, v in flat)


def _groups(params: Any, grads: Any, state: ScaleByAdamState, mask: Any) -> list[tuple[list[list[Tensor]], bool]]:
    """Tensors to step together: those that decay, and those that don't."""
    trees = (params, grads, state.mu, state.nu)
    if mask is None:
        return [([optree.tree_leaves(t) for t in trees], True)]
    if isinstance(params, ShardedTree):
        chosen, rest = partition(params, mask)
        return [
            ([list(t.view(part.selection).tensors) for t in trees], decays)
            for part, decays in ((chosen, True), (rest, False))
        ]
    paths, leaves, _ = flatten(params)
    flags = resolve(mask, params, what="mask", is_value=lambda x: isinstance(x, bool), paths_leaves=(paths, leaves))
    flat = [optree.tree_leaves(t) for t in trees]
    return [
        ([[x for x, m in zip(xs, flags, strict=True) if m is decays] for xs in flat], decays)
        for decays in (True, False)
    ]
