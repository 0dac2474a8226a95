"""A module's calls behind a gate: full parameters come into their places around them, when a run says so."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.gathering import call_gathered, rematerialized
from fsdp.outputs import nodes_of, tensors_in
from fsdp.step import Policy
from ragged import ShardedTree
from ragged.selection import Selection

__all__ = ["Gate", "Options", "Point", "Run", "Slot", "again", "entered", "gate_of", "in_backward", "place", "placed"]


class Slot(NamedTuple):
    """One place in a module that holds a tensor: an entry of a module's `_parameters` or `_buffers`."""

    entries: dict[str, Any]
    name: str
    path: str


class Options(NamedTuple):
    """How a unit is gathered; see `gathered`."""

    reshard_after_forward: bool | int = True
    remat: bool = False
    precision: Any = None


class Point(NamedTuple):
    """A module at whose call units are gathered.

    Attributes:
      parts: (index of the tree, prefix of its paths, what of it).
      slots: where its full parameters go; their paths begin with the prefix.
      policy: what the options amount to.
    """

    parts: tuple[tuple[int, str, Selection], ...]
    slots: tuple[Slot, ...]
    options: Options
    policy: Policy


class Run(NamedTuple):
    """One run of a module over sharded trees."""

    trees: tuple[ShardedTree, ...]
    points: Mapping[Gate, Point | None]


class Gate:
    """What stands before a module's calls.

    Attributes:
      now: the run that the module takes part in, and its point in it, if it gathers something.
      later: the run that backward is in, for what is computed again there.
      inside: how many calls of the module have passed.
      root: what to do with a call that is part of no run.
    """

    def __init__(self) -> None:
        self.now: tuple[Run, Point | None] | None = None
        self.later: tuple[Run, Point | None] | None = None
        self.inside = 0
        self.root: weakref.WeakMethod[Callable[[Callable[..., Any], Any, Any], Any]] | None = None

    def call(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`inner(*args, **kwargs)` as the run wants it."""
        if self.inside:
            return inner(*args, **kwargs)
        active = self.now or (self.later if self.later and in_backward() and not _over(self.later[0]) else None)
        if active is None:
            root = None if self.root is None else self.root()
            return inner(*args, **kwargs) if root is None else root(inner, args, kwargs)
        return self.through(*active, inner, args, kwargs)

    def through(self, run: Run, point: Point | None, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call on the full parameters of its point."""
        if point is None:
            with self._passed():
                return inner(*args, **kwargs)
        trees = [run.trees[i].view(selection) for i, _, selection in point.parts]

        def body(full: list[Any], args: Any, kwargs: Any) -> Any:
            values: dict[str, Tensor] = {}
            for (_, prefix, selection), tree in zip(point.parts, full, strict=True):
                leaves: list[Any] = selection.structure.flatten_up_to(tree)
                values |= {prefix + path: x for path, x in zip(selection.paths, leaves, strict=True)}
            with self._passed(), placed(point.slots, values):
                out = inner(*args, **kwargs)
            again(out, run, point.slots, values)
            return out

        return call_gathered(
            rematerialized(body) if point.options.remat else body, trees, (args, kwargs), {}, point.policy
        )

    @contextlib.contextmanager
    def _passed(self) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1


def gate_of(module: nn.Module, mixin: type | None = None) -> Gate:
    """A module's gate, which it gets here if it has none: by becoming an instance of a subclass of its class.

    Args:
      mixin: another base of that class.
    """
    gate: Gate | None = module.__dict__.get("_gate")
    kind = type(module)
    if gate is None or (mixin is not None and not issubclass(kind, mixin)):
        module.__dict__["_gate"] = gate = gate or Gate()
        gated: Any = _gated
        module.__class__ = gated(kind, mixin)
    return gate


@functools.cache
def _gated(kind: Any, mixin: type | None) -> type:
    """A class whose calls go through the gate, hooks and all; `forward` alone does too."""
    before = kind.forward

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._gate.call(functools.partial(kind.__call__, self), args, kwargs)

    @functools.wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._gate.inside:
            return before(self, *args, **kwargs)
        return self._gate.call(functools.partial(before, self), args, kwargs)

    entries = {
        "__call__": call,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__qualname__": kind.__qualname__,
    }
    if before is not nn.Module.forward:
        entries["forward"] = forward
    return type(kind.__name__, (kind,) if mixin is None else (mixin, kind), entries)


def _over(run: Run) -> bool:
    """Whether backward has passed a run, so that what is computed again belongs to an earlier one."""
    return any(tree.scope is not None and tree.scope.ended and not tree.scope.backward for tree in run.trees)


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1  # torch has no public name for it


def again(out: Any, run: Run, slots: Sequence[Slot], values: Mapping[str, Tensor]) -> None:
    """Whenever backward enters a result, have values in their places once more: checkpoints run modules again there."""

    def prepare(_: Any) -> None:
        for gate, point in run.points.items():
            gate.later = run, point
        place(slots, values)

    for node in nodes_of(tensors_in(out)):
        node.register_prehook(prepare)


def place(slots: Sequence[Slot], values: Mapping[str, Any]) -> list[tuple[Slot, Any]]:
    """Put tensors into their places; returns what was there."""
    before = []
    for slot in slots:
        if slot.path in values:
            before.append((slot, slot.entries[slot.name]))
            slot.entries[slot.name] = values[slot.path]
    return before


@contextlib.contextmanager
def placed(slots: Sequence[Slot], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Tensors in their places while the block runs."""
    before = place(slots, values)
    try:
        yield
    finally:
        for slot, x in before:
            slot.entries[slot.name] = x


@contextlib.contextmanager
def entered(run: Run) -> Iterator[None]:
    """A run is on while the block runs."""
    before = [(gate, gate.now) for gate in run.points]
    for gate, point in run.points.items():
        gate.now = run, point
    try:
        yield
    finally:
        for gate, now in before:
            gate.now = now
