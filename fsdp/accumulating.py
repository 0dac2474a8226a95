"""Gradients of several micro-batches: summed on shards, or held until they are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from fsdp.ending import Averaging
from fsdp.reducing import Carry, flush
from fsdp.tracing import Found
from ragged.agree import same
from ragged.tree import ShardedTree, sharded_trees

__all__ = ["Sums"]


@dataclass
class Sums:
    """A running sum of gradients, and what one micro-batch hands on to the next.

    Attributes:
      carry: contributions that aren't reduced yet, and full parameters that stay.
      grads: in the form of the differentiated arguments; empty before the first micro-batch.
    """

    carry: Carry = field(default_factory=Carry)
    grads: list[Any] = field(default_factory=list)
    _keys: list[str] = field(default_factory=list)
    _count: int = 0
    _over: Averaging | None = None

    @property
    def token(self) -> object:
        """What decides about the collectives of a micro-batch, besides its trees."""
        return self._count, self.carry.sync, self.carry.last, tuple(self.carry.kept)

    def check(self, wanted: Sequence[Any]) -> None:
        """Raise for trees unlike those of earlier micro-batches.

        Raises:
          ValueError: naming what differs.
        """
        self._count += 1
        if not self.grads:
            return
        given: Any = [list(wanted), list(self.grads)]
        new, old = (optree.tree_flatten(x) for x in given)
        if new[1] != old[1] or [x.shape for x in new[0]] != [x.shape for x in old[0]]:
            raise ValueError(
                f"the trees of one accumulation differ: first gradients of {self.grads}, now {list(wanted)}; call "
                "finish() before others follow"
            )

    def add(self, wanted: Sequence[Any], found: Sequence[Found], over: Averaging) -> None:
        """The gradients of one more micro-batch."""
        self._over, self._keys = over, [f.key for f in found]
        if self.grads:
            for total, new in zip(self._tensors(), found, strict=True):
                if new.grad is not None:
                    total.add_(new.grad)
            return
        grads = iter(found)

        def first(tree: Any) -> Any:
            if not isinstance(tree, ShardedTree):
                return tree
            out = [torch.zeros_like(x) if (g := next(grads).grad) is None else g for x in tree.tensors]
            return tree.with_tensors(out)

        self.grads = [optree.tree_map(first, tree, is_leaf=lambda x: isinstance(x, ShardedTree)) for tree in wanted]

    def add_plain(self, wanted: Any, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """The gradients of one more micro-batch, of trees that aren't sharded."""
        found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
        earlier: Any = self.grads
        if self.grads:
            found = [a + b for a, b in zip(optree.tree_leaves(earlier), found, strict=True)]
        out: Any = optree.tree_unflatten(optree.tree_structure(wanted), found)
        self.grads = out

    def finish(self) -> list[Any]:
        """The sum, with all that is still held reduced."""
        if self._over is None:  # plain tensors
            return self.grads
        comm, held = self._over.comm, self.carry.held
        if self.carry.last and self.carry.sync and not held:  # as every rank knows from the start of the last step
            return self.grads
        keys = str(sorted(held))
        same("the end of an accumulation", keys, lambda: {"held back": keys}, comm.everyone)
        totals = dict(zip(self._keys, self._tensors(), strict=True))
        for key, grad in flush(self.carry, self._over.how, comm).items():
            totals[key].add_(grad)
        self.carry.kept.clear()
        return self.grads

    def _tensors(self) -> list[Tensor]:
        return [x for tree in sharded_trees(self.grads) for x in tree.tensors]
