"""Where this rank's part of everything named lies, and among which ranks it is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from ragged.checkpoint.names import Named
from ragged.groups import Group, make_group
from ragged.moves import Grid, Holding, holdings_of
from ragged.tree import ShardedTree, sharded_trees

__all__ = ["Holder", "Ranks", "holders", "plain_holders", "ranks_of"]


class Ranks(NamedTuple):
    """The ranks that save or load together; `me`: this process's global rank."""

    group: Group
    me: int


class Holder(NamedTuple):
    """One tensor of a checkpoint on this rank.

    Attributes:
      held: how it lies on the ranks of `grid`; its offset counts in `tensor`.
      tensor: this rank's tensor, 1-D inside of sharded trees.
      plain: whether it is a tensor outside of sharded trees, which every rank has whole.
    """

    name: str
    held: Holding
    grid: Grid
    tensor: Tensor
    plain: bool


def ranks_of(trees: Any) -> Ranks:
    """The ranks of the trees' meshes: all processes if nothing is sharded, or this one alone without processes.

    Raises:
      ValueError: trees on meshes of different ranks.
    """
    comms = [tree.plan.bound() for tree in sharded_trees(trees)]
    if comms:
        odd = next((c for c in comms if set(c.ranks) != set(comms[0].ranks)), None)
        if odd is not None:
            raise ValueError(f"trees on ranks {comms[0].ranks} and {odd.ranks}; save and load them apart")
        return Ranks(comms[0].everyone, comms[0].me)
    if not dist.is_initialized():
        return Ranks(Group((0,), 0), 0)
    return Ranks(make_group([tuple(range(dist.get_world_size()))], _device(trees)), dist.get_rank())


def _device(trees: Any) -> str:
    found = next((x for x in optree.tree_leaves(trees) if isinstance(x, Tensor)), torch.empty(0))
    return found.device.type


def _all_of(size: int) -> Callable[[int], tuple[int, int]]:
    return lambda k: (0, size)


def holders(parts: Named, ranks: Ranks) -> list[Holder]:
    """This rank's part of every tensor, in the order of names."""
    known: dict[int, tuple[Grid, dict[str, Holding]]] = {}
    out = []
    for entry in parts.entries:
        if entry.shape is None:
            continue
        leaf = parts.leaves[entry.at]
        if isinstance(leaf, ShardedTree):
            if entry.at not in known:
                comm = leaf.plan.bound()
                made = holdings_of(leaf.selection, leaf.plan.leaves, comm)
                known[entry.at] = Grid.of(comm), dict(zip(leaf.paths, made, strict=True))
            assert entry.path is not None
            grid, table = known[entry.at]
            held = table[entry.path]
            out.append(Holder(entry.name, held, grid, leaf.tensors[held.tensor], False))
        else:
            out += plain_holders({entry.name: leaf}, ranks)
    return out


def plain_holders(tensors: Mapping[str, Tensor], ranks: Ranks) -> list[Holder]:
    """Tensors that every rank has whole."""
    everyone = Grid({"rank": ranks.group.size}, ranks.group.ranks)
    return [
        Holder(name, Holding(tuple(x.shape), (), (), _all_of(x.numel()), 0, 0), everyone, x, True)
        for name, x in tensors.items()
    ]
