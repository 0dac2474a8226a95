"""`functionalize`: an existing `nn.Module` as a function of its parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import optree
from torch import Tensor, nn

from fsdp.gates import Gate, Options, Point, Run, again, entered, place, placed
from fsdp.stages import Part, all_names, points_of, slots_of
from fsdp.unit_options import options_by_unit
from ragged import ShardedTree
from ragged.tree import sharded_trees

__all__ = ["Apply", "flat", "functionalize", "nested", "without_values"]

Tree = dict[str, Any]


def functionalize(
    module: nn.Module, *, reshard_after_forward: Any = True, remat: Any = False, precision: Any = None
) -> tuple[Apply, Tree, Tree]:
    """Split a module into a pure function, its parameters and its buffers.

    The module is left as it is, and so are its values: `params` and `buffers` hold its own tensors, as nested dicts
    under its own names, so `layers.0.weight` is `params["layers"]["0"]["weight"]`. A parameter that has
    several names (tied weights, a module under two parents) is kept once, under its first one.

    `apply(params, buffers, *args, **kwargs)` returns what the module would, and the buffers as it left them.
    Sharded parameters are gathered unit by unit: when the module runs that all leaves of the unit belong to, and
    where else one of them is used. Like any gathered function it is differentiated by `value_and_grad`. Units follow
    the plan's: `plan(params, mesh, spec, units=["layers.*"])`.

    Args:
      module: on any device, also meta; in the mode (`train`, `eval`) that `apply` shall have.
      reshard_after_forward, remat, precision: as in `gathered`: one value, or `rules({...})` on the names of the
        plan's units. A unit of a module that calls modules with units of their own isn't recomputed as a whole.

    Returns:
      `(apply, params, buffers)`.

    Raises:
      ValueError: from `apply`, for a tree without one of the module's names, or with others.

    Example:
      >>> import torch
      >>> from fsdp import functionalize, value_and_grad
      >>> from ragged import P, make_mesh, shard
      >>> module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
      >>> apply, params, buffers = functionalize(module)
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> params = shard(params, mesh, P(ragged="fsdp"), units=["*"])
      >>> def loss_fn(params, x):
      ...     out, _ = apply(params, buffers, x)
      ...     return out.square().mean()
      >>> loss, grads = value_and_grad(loss_fn)(params, torch.ones(3, 4))
      >>> bool(loss == module(torch.ones(3, 4)).square().mean()), grads.paths
      (True, ('0.bias', '0.weight', '2.bias', '2.weight'))
    """
    names, options = all_names(module), Options(reshard_after_forward, remat, precision)
    params = {name: p.detach().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    return Apply(without_values(module), names, options), nested(params), nested(buffers)


def without_values(module: nn.Module) -> nn.Module:
    """A copy of the structure, on the meta device: what belongs to the caller is not touched when it runs."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = b.detach().to("meta")
    return copy.deepcopy(module, memo)


def nested(flat: Mapping[str, Any]) -> Tree:
    out: Tree = {}
    for name, x in flat.items():
        *parents, last = name.split(".")
        at = out
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = x
    return out


def flat(tree: Any) -> dict[str, Tensor]:
    """Plain tensors by name."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, ShardedTree))
    pairs = zip(paths, leaves, strict=True)
    return {".".join(map(str, path)): x for path, x in pairs if not isinstance(x, ShardedTree)}


class Apply:
    """What `functionalize` returns first; `train()` and `eval()` return it in another mode."""

    def __init__(self, module: nn.Module, names: Mapping[str, list[str]], options: Options) -> None:
        self._module, self._names, self._options = module, names, options
        self._skeleton = _Skeleton(copy.deepcopy(module), names, options)

    def __call__(self, params: Any, buffers: Any, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        return self._skeleton.run(params, buffers, args, kwargs)

    def train(self, mode: bool = True) -> Apply:
        """Another function, of the module in training mode (or not)."""
        return Apply(copy.deepcopy(self._module).train(mode), self._names, self._options)

    def eval(self) -> Apply:
        """Another function, of the module in evaluation mode."""
        return self.train(False)


class _Skeleton:
    """The structure without values, which get their places while `apply` runs.

    What a run placed comes back whenever backward enters its results, since checkpoints run modules again then. It
    stays until the step ends, or the next run.
    """

    def __init__(self, module: nn.Module, names: Mapping[str, list[str]], options: Options) -> None:
        self.module, self.names, self.options = module, names, options
        self._slots = [slot for found in slots_of(module, names).values() for slot in found]
        self._nothing = {slot.path: slot.entries[slot.name] for slot in self._slots}
        self._points: dict[Any, dict[Gate, Point]] = {}

    def run(self, params: Any, buffers: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tree]:
        kept = {name: b.clone() for name, b in flat(buffers).items()}  # modules change buffers in place
        trees = tuple(sharded_trees(params))
        given = kept | flat(params)
        self._check(given, trees)
        run = Run(trees, self._points_of(trees))
        with placed(self._slots, given), entered(run):
            out = self.module(*args, **kwargs)
            # also those that the module assigned anew
            found = {slot.path: slot.entries[slot.name] for slot in self._slots if slot.path in kept}
        again(out, run, self._slots, given)
        if trees and trees[0].scope is not None:
            trees[0].scope.at_close.append(self._clear)
        return out, nested({name: b.detach() for name, b in found.items()})

    def _clear(self) -> None:
        place(self._slots, self._nothing)
        for points in self._points.values():
            for gate in points:
                gate.later = None

    def _check(self, given: Mapping[str, Tensor], trees: tuple[ShardedTree, ...]) -> None:
        have = {*given, *(path for tree in trees for path in tree.paths)}
        for name in self.names:
            if name not in have:
                raise ValueError(f"the module needs {name!r}, which neither the parameters nor the buffers have")
        for name in have:
            if name not in self.names:
                raise ValueError(f"the module has nothing called {name!r}; its names are {list(self.names)[:20]}")

    def _points_of(self, trees: tuple[ShardedTree, ...]) -> dict[Gate, Point]:
        token = tuple((tree.plan, tree.selection) for tree in trees)
        if token not in self._points:
            parts = [Part("", tree, options_by_unit(tree.plan, self.options)) for tree in trees]
            self._points[token] = points_of(self.module, self.names, parts)
        return self._points[token]
