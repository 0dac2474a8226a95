"""AdamW, element-wise over flat buffers, with torch's fused kernel on the donated path."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from optim.base import GradientTransformation, refuse, require_like
from optim.chaining import chain
from optim.decay import add_decayed_weights, split_tensors
from optim.scaling import new_count, scale_by_learning_rate
from optim.schedules import Schedule

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
      ValueError: integer, bool or complex leaves, by path; b1 or b2 outside [0, 1), eps not above 0.

    Source: Kingma and Ba, arXiv 1412.6980; torch's bias correction.
    """
    _check(b1, b2, eps)

    def init_fn(params: Any) -> ScaleByAdamState:
        refuse(params, "Adam")

        def moments(dtype: torch.dtype | None) -> Any:
            return optree.tree_map(lambda p: torch.zeros_like(p, dtype=dtype or _moment_dtype(p)), params)

        return ScaleByAdamState(new_count(params), moments(mu_dtype), moments(None))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1
        # In the second moment's dtype, fp32 at least; the first is rounded to its own only to be kept.
        wide = optree.tree_map(
            lambda g, m, v: b1 * m.to(v.dtype) + (1 - b1) * g.to(v.dtype), updates, state.mu, state.nu
        )
        nu = optree.tree_map(lambda g, v: b2 * v + (1 - b2) * g.to(v.dtype).square(), updates, state.nu)
        # fp64, since 1 - b2^t loses digits at the first steps
        t = count.double()
        c1, c2 = 1 - b1**t, 1 - b2**t

        def rescale(m: Tensor, v: Tensor) -> Tensor:
            root = v.sqrt().div_(c2.sqrt().to(v.dtype)).add_(eps)
            return m.div(c1.to(v.dtype)).div_(root)

        mu = optree.tree_map(lambda m, old: m.to(old.dtype), wide, state.mu)
        return optree.tree_map(rescale, wide, nu), ScaleByAdamState(count, mu, nu)

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
    """AdamW: Adam with decoupled weight decay, equal to `torch.optim.AdamW` for equal arguments.

    Args:
      learning_rate: a number, or a schedule of the count before the step.
      weight_decay: optax's default; torch's is 0.01.
      mask: leaves that decay, as in `add_decayed_weights`; all by default.
      mu_dtype: dtype of the first moment.

    On the donated path (`make_step`) torch's fused kernel runs over whole buffers. Parameters in
    16 bits step in an fp32 copy and are rounded once. With a 16-bit `mu_dtype` that path computes as
    `update` does, in new buffers.

    Raises:
      ValueError: as `scale_by_adam`.

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
        parts = list(split_tensors(mask, params, params, grads, adam.mu, adam.nu))
        for decays in (True, False):
            mine = [tensors for flag, tensors in parts if flag is decays]
            if not mine:
                continue
            ps, gs, ms, vs = (list(column) for column in zip(*mine, strict=True))
            # The kernel wants one dtype: parameters below the moments' precision step in a copy.
            wide = [p.to(v.dtype) for p, v in zip(ps, vs, strict=True)]
            count = adam.count.float()
            torch_adamw(
                wide,
                [_laid_out(g.to(v.dtype), v) for g, v in zip(gs, vs, strict=True)],
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
            for p, new in zip(ps, wide, strict=True):
                if p is not new:
                    p.copy_(new)
        after = [s._replace(count=s.count + 1) if "count" in s._fields else s for s in rest]
        # new tree objects on the same storage: the ones passed in are dead now
        params, mu, nu = (optree.tree_map(lambda x: x, tree) for tree in (params, adam.mu, adam.nu))
        return params, (ScaleByAdamState(adam.count + 1, mu, nu), *after)

    def fused_or_not(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        require_like(params, state[0].mu, "mu")
        require_like(params, state[0].nu, "nu")
        if _fusable(params, state[0]) and not torch.compiler.is_compiling():  # the compiler makes a kernel of its own
            return step_fn(params, grads, state)
        updates, state = tx.update(grads, state, params)
        return optree.tree_map(lambda p, u: p.add_(u), params, updates), state

    return GradientTransformation(tx.init, tx.update, fused_or_not)


def _moment_dtype(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def _fusable(params: Any, state: ScaleByAdamState) -> bool:
    """torch's kernel wants one dtype for both moments, and reads memory in order, whatever the strides are."""
    columns = [optree.tree_leaves(tree) for tree in (params, state.mu, state.nu)]
    return all(m.dtype == v.dtype and p.stride() == m.stride() == v.stride() for p, m, v in zip(*columns, strict=True))


def _laid_out(g: Tensor, like: Tensor) -> Tensor:
    """A gradient with the strides of a moment: autograd's may be expanded or transposed."""
    return g if g.stride() == like.stride() else torch.empty_like(like).copy_(g)


def _check(b1: float, b2: float, eps: float) -> None:
    for name, b in (("b1", b1), ("b2", b2)):
        if not 0 <= b < 1:
            raise ValueError(f"{name}={b}: expected a number in [0, 1)")
    if not eps > 0:
        raise ValueError(f"eps={eps}: expected a number above 0, or padding and unused parameters become 0/0")
