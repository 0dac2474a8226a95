"""`as_torch_optimizer`: our transformations in the place of a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fsdp.leaves import ShardedLeaf
from fsdp.sharded_module import Managed, managed
from ragged import ShardedTree, partition

__all__ = ["TransformOptimizer", "as_torch_optimizer"]


def as_torch_optimizer(tx: Any, module: nn.Module) -> TransformOptimizer:
    """An optimizer of `optim` over a sharded module's parameters, for loops that call `optimizer.step()`.

    Gradients are what `loss.backward()` left in `.grad`; a parameter without one has gradient zero. A step uses them
    up: call `zero_grad()` before the next backward, as usual.

    With `inject_hyperparams` the group's `"lr"` is the transformation's `learning_rate`, so torch's schedulers work.

    Args:
      tx: a `GradientTransformation`; pass it to `fully_shard(optimizer=)` too if it treats blocks or matrices.
      module: after `fully_shard`. Parameters that don't require grad now get no state.

    Raises:
      ValueError: a module that `fully_shard` hasn't seen, or parameters beside the sharded ones.

    Example:
      >>> import torch
      >>> from fsdp import as_torch_optimizer, fully_shard
      >>> from optim import muon
      >>> tx = muon(0.02)
      >>> module = fully_shard(torch.nn.Linear(4, 4, bias=False), optimizer=tx)
      >>> optimizer = as_torch_optimizer(tx, module)
      >>> module(torch.ones(2, 4)).sum().backward()
      >>> optimizer.step()
      >>> optimizer.zero_grad()
    """
    return TransformOptimizer(tx, module)


class TransformOptimizer(torch.optim.Optimizer):
    """What `as_torch_optimizer` returns.

    Attributes:
      opt_state: the transformation's state, of sharded trees; `ragged.checkpoint` saves and loads it.
    """

    def __init__(self, tx: Any, module: nn.Module) -> None:
        parts = dict(managed(module))
        plain = [name for name, p in module.named_parameters() if not isinstance(p, ShardedLeaf)]
        if not parts or plain:
            what = f"parameter {plain[0]!r} isn't sharded" if plain else "the module isn't sharded"
            raise ValueError(f"as_torch_optimizer: {what}; call fully_shard on the whole module first")
        self.tx, self._parts = tx, parts
        self._learns = {
            (prefix, path) for prefix, each in parts.items() for path, leaf in each.leaves.items() if leaf.requires_grad
        }
        params = [p for p in module.parameters() if p.requires_grad]
        self.opt_state = tx.init(self._trees())
        lr = getattr(self.opt_state, "hyperparams", {}).get("learning_rate")
        super().__init__(params, {} if lr is None else {"lr": float(lr)})

    def _trees(self, grads: bool = False) -> dict[str, ShardedTree]:
        """Parameters that learn, or their gradients, by the name of the module that was sharded."""
        out = {}
        for prefix, each in self._parts.items():
            tree = _grads(each) if grads else each.tree
            part, rest = partition(tree, lambda path, _, prefix=prefix: (prefix, path) in self._learns)
            if part.paths:
                out[prefix.removesuffix(".")] = part if rest.paths else tree
        return out

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the transformation, in place."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = self.opt_state
        if "lr" in self.param_groups[0]:
            hyperparams = {**state.hyperparams, "learning_rate": self.param_groups[0]["lr"]}
            state = state._replace(hyperparams=hyperparams)
        params, grads = self._trees(), self._trees(grads=True)
        if self.tx.step is not None:
            after, self.opt_state = self.tx.step(params, grads, state)
            for old, new in zip(_tensors(params), _tensors(after), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        else:
            updates, self.opt_state = self.tx.update(grads, state, params)
            for old, new in zip(_tensors(params), _tensors(updates), strict=True):
                old.add_(new)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The groups, and under "state" the transformation's state. Save that with `ragged.checkpoint`."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"state": self.opt_state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, or what `ragged.checkpoint` loaded in its form."""
        if optree.tree_structure(state_dict["state"]) != optree.tree_structure(self.opt_state):
            raise ValueError("load_state_dict: the state is of another optimizer, plan or module")
        self.opt_state = state_dict["state"]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = optree.tree_leaves(tree)
    return found


def _grads(each: Managed) -> ShardedTree:
    """The gradients of a module's parameters as a tree, on the buffers that backward left them in."""
    tree = each.tree
    out = []
    for piece, shard in zip(tree.selection.pieces, tree.tensors, strict=True):
        leaves: list[Any] = [each.leaves[leaf.path] for leaf in piece.bucket.leaves]
        found = _one_buffer(leaves, shard)
        if found is None:
            found = torch.zeros_like(shard)
            for leaf in leaves:
                if leaf.grad is not None:
                    leaf.home.of(found).copy_(leaf.grad.local)
        out.append(found)
    return tree.with_tensors(out)


def _one_buffer(leaves: list[Any], shard: Tensor) -> Tensor | None:
    """The buffer of which all gradients are views, each at its own place."""
    buffer: Tensor | None = None
    for leaf in leaves:
        if leaf.grad is None:
            return None
        local = leaf.grad.local
        if not local.numel():
            continue
        if buffer is None:
            if local.untyped_storage().nbytes() != shard.nbytes:
                return None
            buffer = local.as_strided(shard.shape, (1,), 0)
        if local.data_ptr() != leaf.home.of(buffer).data_ptr():
            return None
    return buffer
