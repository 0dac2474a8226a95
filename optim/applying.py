"""Apply updates, and run a whole optimizer step on the fastest path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from optim.base import GradientTransformation, require_like
from ragged.tree import sharded_trees

__all__ = ["apply_updates", "make_step"]

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


@torch.no_grad()
def apply_updates(params: Any, updates: Any, *, donate: bool = False) -> Any:
    """`params + updates`, in the dtype of the parameters.

    Args:
      donate: reuse the storage of `params`; the donated sharded trees raise when used again
        (plain tensors are overwritten, and can't tell).

    Example:
      >>> import torch
      >>> apply_updates({"w": torch.ones(1)}, {"w": torch.tensor([0.5])})
      {'w': tensor([1.5000])}
    """
    out = _added(params, updates, donate)
    if donate:
        _end(params, "apply_updates")
    return out


def _added(params: Any, updates: Any, in_place: bool) -> Any:
    def add(p: Tensor, u: Tensor) -> Tensor:
        if in_place:
            return p.add_(u)
        return p.add(u) if torch.promote_types(p.dtype, u.dtype) == p.dtype else (p + u).to(p.dtype)

    return optree.tree_map(add, params, updates)


def make_step(tx: GradientTransformation, *, donate: bool = True) -> Step:
    """`step(params, grads, state) -> (params, state)`: update and apply, one pass per buffer.

    With `donate=True` the result reuses the storage of params, grads and state, and the donated
    sharded trees are dead, as in JAX: using one again raises and says so. Plain tensors are
    overwritten as well but can't be marked. With `donate=False` the inputs stay as they are.

    Raises:
      ValueError: a tree that was donated before, gradients of another tree, plan or shapes than the
        parameters', or (donating) one tree passed in two places.

    Example:
      >>> import torch
      >>> from optim import make_step, sgd
      >>> step = make_step(sgd(0.1), donate=False)
      >>> step(torch.ones(2), torch.ones(2), sgd(0.1).init(torch.ones(2)))[0].tolist()
      [0.8999999761581421, 0.8999999761581421]
    """

    @torch.no_grad()
    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        require_like(params, grads, "grads")
        if donate:
            _distinct(params, grads, state)
        if not donate or tx.step is None:
            updates, new_state = tx.update(grads, state, params)
            out = _added(params, updates, donate), new_state
        else:
            out = tx.step(params, grads, state)
        if donate:
            _end((params, grads, state), "an optimizer step", keep=out)
        return out

    return step


def _distinct(*trees: Any) -> None:
    """Storage that is written in two roles at once would be garbage."""
    seen: set[int] = set()
    for tree in trees:
        for x in optree.tree_leaves(tree):
            if isinstance(x, Tensor) and x.numel():
                at = x.data_ptr()
                if at in seen:
                    raise ValueError(
                        "make_step(donate=True) got one storage in two places among params, grads and state; "
                        "pass a copy, or use donate=False"
                    )
                seen.add(at)


def _end(trees: Any, cause: str, keep: Any = ()) -> None:
    """Mark donated trees, but not those that came back as they were."""
    kept = sharded_trees(keep)
    for tree in sharded_trees(trees):
        if not any(tree is other for other in kept):
            tree.end(cause)
