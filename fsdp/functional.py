"""`functionalize`: an existing `nn.Module` as a function of its parameters and buffers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fsdp.gathering import gathered
from ragged import ShardedTree, partition
from ragged.plans import Plan
from ragged.selection import Selection
from ragged.tree import sharded_trees

__all__ = ["Apply", "functionalize"]

Tree = dict[str, Any]


def functionalize(module: nn.Module) -> tuple[Apply, Tree, Tree]:
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

    Returns:
      `(apply, params, buffers)`.

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
    names = _names(module)
    params = {name: p.detach().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    return Apply(_without_values(module), names), _nested(params), _nested(buffers)


def _names(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter and buffer, under its first."""
    first: dict[int, str] = {}
    out: dict[str, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            out.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return out


def _without_values(module: nn.Module) -> nn.Module:
    """A copy of the structure, on the meta device: what belongs to the caller is not touched when it runs."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = b.detach().to("meta")
    return copy.deepcopy(module, memo)


def _nested(flat: Mapping[str, Any]) -> Tree:
    out: Tree = {}
    for name, x in flat.items():
        *parents, last = name.split(".")
        at = out
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = x
    return out


def _flat(tree: Any) -> dict[str, Tensor]:
    """Plain tensors by name."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, ShardedTree))
    pairs = zip(paths, leaves, strict=True)
    return {".".join(map(str, path)): x for path, x in pairs if not isinstance(x, ShardedTree)}


class Apply:
    """What `functionalize` returns first; `train()` and `eval()` return it in another mode."""

    def __init__(self, module: nn.Module, names: Mapping[str, list[str]]) -> None:
        self._module, self._names = module, names
        self._skeleton = _Skeleton(copy.deepcopy(module), names)

    def __call__(self, params: Any, buffers: Any, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        return self._skeleton.run(params, buffers, args, kwargs)

    def train(self, mode: bool = True) -> Apply:
        """Another function, of the module in training mode (or not)."""
        return Apply(copy.deepcopy(self._module).train(mode), self._names)

    def eval(self) -> Apply:
        """Another function, of the module in evaluation mode."""
        return self.train(False)


class _Point(NamedTuple):
    """A module at whose call units are gathered: (which tree, what of it); names inside the module by path."""

    parts: tuple[tuple[int, Selection], ...]
    names: Mapping[str, tuple[str, ...]]


class _Running(NamedTuple):
    """One call of `apply`."""

    trees: tuple[ShardedTree, ...]
    points: Mapping[str, _Point]


class _Skeleton:
    """The structure without values, and what its modules need to find while `apply` runs."""

    def __init__(self, module: nn.Module, names: Mapping[str, list[str]]) -> None:
        self.module, self.names = module, names
        self._running: _Running | None = None
        self._values: dict[str, Tensor] = {}  # what the modules had in the last run, for checkpoints in them
        self._depth = 0  # of runs and of calls with values in place; a module may call apply again
        self._points: dict[Any, dict[str, _Point]] = {}
        modules: dict[int, tuple[nn.Module, list[str]]] = {}
        for name, each in module.named_modules(remove_duplicate=False):
            modules.setdefault(id(each), (each, []))[1].append(name)
        below = _below(names)
        for each, places in modules.values():
            self._intercept(each, places, below.get(places[0], {}))

    def run(self, params: Any, buffers: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tree]:
        kept = {name: b.clone() for name, b in _flat(buffers).items()}  # modules change buffers in place
        trees = tuple(sharded_trees(params))
        given = kept | _flat(params)
        self._check(given, trees)
        before = self._running, self._values
        self._running = _Running(trees, self._points_of(trees)) if trees else None
        self._values = {**(self._values if self._depth else {}), **given}
        self._depth += 1
        try:
            inside = {f"module.{alias}": x for name, x in given.items() for alias in self.names[name]}
            out, found = functional_call(_Harvest(self.module), inside, (tuple(kept), args, kwargs), strict=False)
        finally:
            self._depth -= 1
            if self._depth:
                self._running = before[0]
            elif not torch.is_grad_enabled():  # else it stays for backward, in which checkpoints run modules again
                self._running, self._values = before
        return out, _nested(found)

    def _check(self, given: Mapping[str, Tensor], trees: tuple[ShardedTree, ...]) -> None:
        have = {*given, *(path for tree in trees for path in tree.paths)}
        for name in self.names:
            if name not in have:
                raise ValueError(f"the module needs {name!r}, which neither the parameters nor the buffers have")
        for name in have:
            if name not in self.names:
                raise ValueError(f"the module has nothing called {name!r}; its names are {list(self.names)[:20]}")

    def _points_of(self, trees: tuple[ShardedTree, ...]) -> dict[str, _Point]:
        token = tuple((tree.plan, tree.selection) for tree in trees)
        if token not in self._points:
            found: dict[str, tuple[list[str], dict[str, list[str]]]] = {}
            for place, unit, path, name in self._uses({tree.plan for tree in trees}):
                units, names = found.setdefault(place, ([], {}))
                if unit not in units:
                    units.append(unit)
                names.setdefault(path, []).append(name)
            points = {
                place: _Point(_parts(trees, units), {path: tuple(inside) for path, inside in names.items()})
                for place, (units, names) in found.items()
            }
            self._points[token] = points
        return self._points[token]

    def _uses(self, plans: set[Plan]) -> Iterator[tuple[str, str, str, str]]:
        """(module, unit, leaf, name below the module): where units are gathered, and what goes where."""
        for plan in plans:
            for unit in plan.units:
                home = self._called(_common([leaf.path.rpartition(".")[0] for leaf in unit.leaves]))
                for leaf in unit.leaves:
                    for name in self.names[leaf.path]:
                        inside = not home or name.startswith(f"{home}.")
                        place = home if inside else self._called(name.rpartition(".")[0])
                        yield place, unit.name, leaf.path, name[len(place) + 1 :] if place else name

    def _called(self, place: str) -> str:
        """The module itself, or the innermost one around it that is called: containers have no forward."""
        while place and type(self.module.get_submodule(place)).forward is nn.Module.forward:
            place = place.rpartition(".")[0]
        return place

    def _intercept(self, module: nn.Module, places: list[str], below: Mapping[str, str]) -> None:
        """Have a module's forward go through here, which gathers a unit, or only finds the values of the last run."""
        inner, shell = module.forward, _Shell(module, module.forward)

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            points = {} if self._running is None else self._running.points
            point = next((points[place] for place in places if place in points), None)
            if point is not None:
                assert self._running is not None
                parts = [self._running.trees[i].view(selection) for i, selection in point.parts]
                return gathered(self._with_values)(parts, shell, point, args, kwargs)
            if self._depth:
                return inner(*args, **kwargs)
            again = {f"module.{name}": self._values[path] for name, path in below.items() if path in self._values}
            return self._inside(shell, again, args, kwargs)  # a checkpoint inside a module computes it again

        module.forward = forward

    def _with_values(self, full: Any, shell: _Shell, point: _Point, args: Any, kwargs: Any) -> Any:
        values = {path: x for tree in full for path, x in _flat(tree).items()}
        self._values |= values
        names = {name: path for path, found in point.names.items() for name in found if path in values}
        return self._inside(shell, {f"module.{name}": values[path] for name, path in names.items()}, args, kwargs)

    def _inside(self, shell: _Shell, values: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        self._depth += 1
        try:
            return functional_call(shell, values, (args, kwargs), strict=False)
        finally:
            self._depth -= 1


def _below(names: Mapping[str, list[str]]) -> dict[str, dict[str, str]]:
    """For every module, by its name: first names by the names below it."""
    out: dict[str, dict[str, str]] = {}
    for path, aliases in names.items():
        for alias in aliases:
            parts = alias.split(".")
            for n in range(len(parts)):
                out.setdefault(".".join(parts[:n]), {})[".".join(parts[n:])] = path
    return out


def _parts(trees: Sequence[ShardedTree], units: Collection[str]) -> tuple[tuple[int, Selection], ...]:
    """What trees have of some units: (which tree, its selection)."""
    found = []
    for i, tree in enumerate(trees):
        part, _ = partition(tree, lambda path, leaf, plan=tree.plan: plan.leaves[path].unit in units)
        if part.paths:
            found.append((i, part.selection))
    return tuple(found)


def _common(modules: list[str]) -> str:
    """The innermost module that all lie in."""
    parts = [m.split(".") if m else [] for m in modules]
    shared = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return ".".join(shared)


class _Shell(nn.Module):
    """A module's own forward, to be called with other tensors in it."""

    def __init__(self, module: nn.Module, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.inner = module, inner

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.inner(*args, **kwargs)


class _Harvest(nn.Module):
    """A module that returns its buffers too, as they are after the call: also those that it assigned anew."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        out = self.module(*args, **kwargs)
        found = dict(self.module.named_buffers(remove_duplicate=False))
        return out, {name: found[name].detach() for name in names}
