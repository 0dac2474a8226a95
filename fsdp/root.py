"""A run of a sharded module: who gathers where, and the step that its backward belongs to."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp.gates import Gate, Point, Run, again, entered, in_backward, place
from fsdp.module_steps import Begin, ModuleStep
from fsdp.reducing import Carry, Held
from fsdp.schedule import Recorder, Schedule
from fsdp.stages import Part, points_of
from fsdp.step import Step
from fsdp.tracing import same_start
from ragged.agree import same
from ragged.mesh import Comm
from ragged.tree import ShardedTree

if TYPE_CHECKING:
    from fsdp.sharded_module import Managed

__all__ = ["Root"]

SCHEDULES = 64  # orders that are kept, for so many kinds of arguments


class Root:
    """A module whose forward was called from outside, with all that `fully_shard` made in it.

    Attributes:
      parts: by the name of the module, with a dot.
      leaves: parameters by name.
    """

    def __init__(self, module: nn.Module, gate: Gate, parts: Mapping[str, Managed]) -> None:
        self.gate = gate
        self.parts: dict[str, Managed] = {prefix: weakref.proxy(each) for prefix, each in parts.items()}
        self.trees = tuple(each.tree for each in parts.values())
        self.over = next(iter(parts.values())).over
        self.comm: Comm = self.over.comm
        for prefix, each in parts.items():
            if each.over != self.over or each.over.comm.mesh != self.comm.mesh:
                raise ValueError(
                    f"{prefix.removesuffix('.')!r} is sharded on another mesh, or with other data axes, than the rest "
                    "of the module"
                )
        self.leaves: dict[str, Any] = {
            prefix + path: leaf for prefix, each in parts.items() for path, leaf in each.leaves.items()
        }
        at = {id(leaf): name for name, leaf in self.leaves.items()}
        names: dict[str, list[str]] = {}
        for alias, leaf in module.named_parameters(remove_duplicate=False):
            if id(leaf) in at:
                names.setdefault(at[id(leaf)], []).append(alias)
        if gone := [name for name in self.leaves if name not in names]:
            raise _replaced(gone[0])
        stages = [Part(prefix, each.tree, each.options) for prefix, each in parts.items()]
        self.points: dict[Gate, Point | None] = {each.gate: None for each in parts.values()}
        self.points |= points_of(module, names, stages)
        self.slots = [slot for point in self.points.values() if point is not None for slot in point.slots]
        self._schedules: dict[Any, Schedule] = {}
        self._steps: list[weakref.ref[ModuleStep]] = []  # that backward may come to
        self._on: list[ModuleStep] = []  # that backward is in

    @property
    def current(self) -> bool:
        """Whether the parameters are where they were."""
        try:
            return all(each.tree is tree for each, tree in zip(self.parts.values(), self.trees, strict=True))
        except ReferenceError:  # a part of the module is gone
            return False

    def run(self, inner: Callable[..., Any], training: bool, args: Any, kwargs: Any) -> Any:
        """The module on these arguments."""
        if in_backward() and (replayed := self._replayed()) is not None:  # a checkpoint around the module
            replayed.enter_pass()
            return self._through(self._run_of(replayed), inner, args, kwargs)
        self.leave()  # what a backward pass that failed left behind
        error = self._error()
        if torch.is_grad_enabled():
            return self._trained(inner, training, args, kwargs, error)
        same("the start of a forward pass", "", dict, self.comm.everyone, error)
        step = Step(self.comm)
        try:
            run = Run(tuple(_scoped(tree, step) for tree in self.trees), self.points)
            return self._through(run, inner, args, kwargs)
        finally:
            step.settle()
            step.close()

    def _trained(
        self, inner: Callable[..., Any], training: bool, args: Any, kwargs: Any, error: Exception | None
    ) -> Any:
        wanted = [leaf for leaf in self.leaves.values() if leaf.requires_grad]
        learns = tuple(leaf.requires_grad for leaf in self.leaves.values())
        carry = Carry(all(each.sync for each in self.parts.values()), held=_HeldByPart(self.parts))
        token = training, carry.sync, tuple(sorted(carry.held)), _form(args, kwargs)
        schedule, recorder = self._schedules.get((learns, token)), None
        same_start(self.trees, learns, schedule, token, self.comm, error)
        if wanted:
            recorder = Recorder(schedule, self.comm, "other arguments, or a module of its own")

        def learnt(found: Schedule) -> None:
            if len(self._schedules) >= SCHEDULES:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[learns, token] = found

        step = ModuleStep(self.over, recorder, learnt, self._enter, self.leave, schedule=schedule, carry=carry)
        try:
            self._begin(step, wanted)
            run = self._run_of(step)
            self._steps = [*(ref for ref in self._steps if ref() is not None), weakref.ref(step)]
            out = self._through(run, inner, args, kwargs)
            again(out, run, (), {})
        except Exception as caught:
            step.fail(caught)
            raise
        return out

    def _begin(self, step: ModuleStep, wanted: Any) -> None:
        """Give a step its shards; the trainable ones lead back to the parameters."""
        keys: dict[int, str] = {}  # by bucket
        for prefix, tree in zip(self.parts, self.trees, strict=True):
            for piece in tree.selection.pieces:
                keys[id(piece.bucket)] = f"{_label(prefix)}{piece.bucket.name}"
        learning = {id(leaf.home.bucket) for leaf in wanted}
        shards = [
            tensor
            for tree in self.trees
            for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True)
            if id(piece.bucket) in learning
        ]
        homes = [(keys[id(leaf.home.bucket)], leaf.home) for leaf in wanted]
        outputs = Begin.apply(step, shards, homes, *wanted) if wanted else ()  # type: ignore[no-untyped-call]
        step.begin = outputs[0].grad_fn if outputs else None
        begun = iter(outputs)
        for prefix, tree in zip(self.parts, self.trees, strict=True):
            tensors = [
                next(begun) if id(piece.bucket) in learning else tensor.detach()
                for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True)
            ]
            step.buckets.register(ShardedTree(tree.plan, tree.selection, tensors), _label(prefix), True)
            step.shards.append(tensors)

    def _run_of(self, step: ModuleStep) -> Run:
        """Trees with a step's shards; the step holds no tree, as trees hold the step."""
        pairs = zip(self.trees, step.shards, strict=True)
        trees = [ShardedTree(tree.plan, tree.selection, tensors, scope=step) for tree, tensors in pairs]
        return Run(tuple(trees), self.points)

    def _through(self, run: Run, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with entered(run):
            return self.gate.through(run, self.points[self.gate], inner, args, kwargs)

    def _enter(self, step: ModuleStep) -> None:
        """A backward pass is on: hold the step until it is over, whatever becomes of the graph."""
        for each in self.parts.values():
            each.roots.add(self)
        if step not in self._on:
            self._on.append(step)

    def _replayed(self) -> ModuleStep | None:
        """The step that a checkpoint computes again: backward comes to the last one first."""
        alive = [step for ref in self._steps if (step := ref()) is not None and not step.ended and not step.closed]
        return alive[-1] if alive else None

    def leave(self) -> None:
        """Sharded parameters in their places, and no backward pass on, of this root or another that shares them."""
        for root in {root for each in self.parts.values() for root in each.roots}:
            root.put_back()

    def put_back(self) -> None:
        """What this root's backward passes placed goes, but for modules whose calls are still on."""
        for step in self._on:
            if step.backward:  # its pass failed half-way: what it began to gather has to arrive
                step.settle()
                step.close()
        for gate, point in self.points.items():
            gate.later = None
            if point is not None and not gate.inside:
                place(point.slots, self.leaves)
        self._on.clear()
        for each in self.parts.values():
            with contextlib.suppress(ReferenceError):
                each.roots.discard(self)

    def _error(self) -> ValueError | None:
        """What is wrong with a parameter that isn't in its places, or has no values."""
        for slot in self.slots:
            if slot.entries.get(slot.name) is not self.leaves[slot.path]:
                return _replaced(slot.path)
        for name, leaf in self.leaves.items():
            if not leaf.home.ready:
                return ValueError(
                    f"parameter {name!r} has no values: after module.to_empty(device=...) initialise every parameter, "
                    "or load a state dict"
                )
        return None


def _replaced(name: str) -> ValueError:
    return ValueError(
        f"parameter {name!r} was replaced or removed after fully_shard; to change its values copy into it, under "
        "torch.no_grad() or by load_state_dict, and change the module before fully_shard"
    )


class _HeldByPart(MutableMapping[str, Held]):
    """Contributions that wait, kept with what `fully_shard` made, whichever module was called."""

    def __init__(self, parts: Mapping[str, Managed]) -> None:
        self._parts = parts

    def _find(self, key: str) -> tuple[dict[str, Held], str]:
        label, _, name = key.rpartition(": ")
        return self._parts[f"{label}." if label else ""].held, name

    def __getitem__(self, key: str) -> Held:
        held, name = self._find(key)
        return held[name]

    def __setitem__(self, key: str, value: Held) -> None:
        held, name = self._find(key)
        held[name] = value

    def __delitem__(self, key: str) -> None:
        held, name = self._find(key)
        del held[name]

    def __iter__(self) -> Iterator[str]:
        return (_label(prefix) + name for prefix, each in self._parts.items() for name in each.held)

    def __len__(self) -> int:
        return sum(len(each.held) for each in self._parts.values())


def _label(prefix: str) -> str:
    """What the keys of a part's buckets begin with."""
    return f"{prefix.removesuffix('.')}: " if prefix else ""


def _form(args: Any, kwargs: Any) -> str:
    """What of the arguments may decide which modules run: which there are, and flags and names among them."""
    pairs = [*enumerate(args), *sorted(kwargs.items())]
    return str([(name, x if isinstance(x, (bool, str)) else type(x).__name__) for name, x in pairs])


def _scoped(tree: ShardedTree, step: Step) -> ShardedTree:
    return ShardedTree(tree.plan, tree.selection, tree.tensors, scope=step)
