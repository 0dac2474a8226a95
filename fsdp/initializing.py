"""`init_module`: values for a module on the meta device, by its own initializers, straight into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.functional import nested, without_values
from fsdp.gates import Slot
from fsdp.stages import all_names, common_module, slots_of
from ragged.agree import agree
from ragged.mesh import Comm
from ragged.places import fill_shard
from ragged.plans import Plan
from ragged.selection import whole
from ragged.sharding import mesh_facts
from ragged.tree import ShardedTree

__all__ = ["init_module"]


def init_module(
    module: nn.Module,
    plan: Plan,
    *,
    seed: int,
    init_fn: Callable[[nn.Module], Any] | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[ShardedTree, dict[str, Any]]:
    """Parameters in shards and buffers, as the module's own initializers make them.

    The module, usually on the meta device, is left alone. A copy of it gets memory for one unit of the plan at a
    time, on every rank, and is initialised as by `module.apply(init_fn)`, children first, with torch's generator
    started from `seed`: so ranks hold what one process makes, whatever the mesh.

    Args:
      plan: of the parameters that `functionalize(module)` returns.
      seed: for `torch.manual_seed`; the generators' states come back afterwards.
      init_fn: called with every submodule. By default its `reset_parameters()` (or `_reset_parameters()`) is.
      mesh: binds the plan, if it isn't bound.

    Returns:
      `(params, buffers)` for what `functionalize` returned first.

    Raises:
      ValueError: on all ranks: a parameter or buffer of which some element isn't initialised, naming it, or an
        initializer that reaches into a unit of which its module isn't a part; another plan or seed on some rank.

    Example:
      >>> import torch
      >>> from fsdp import functionalize, init_module
      >>> from ragged import P, make_mesh, plan
      >>> with torch.device("meta"):
      ...     module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
      >>> apply, shapes, _ = functionalize(module)
      >>> layout = plan(shapes, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=["*"])
      >>> params, buffers = init_module(module, layout, seed=0)
      >>> apply(params, buffers, torch.ones(1, 4))[0].shape
      torch.Size([1, 2])
    """
    comm = plan.bound() if mesh is None else Comm(mesh)
    plan = plan.bind(comm.mesh)
    agree("init_module", mesh_facts(comm) | {"seed": str(seed)} | plan.describe(), comm.everyone)
    work = _Work(module, plan, comm)
    error: Exception | None = None
    try:
        devices = [comm.device] if comm.device.type != "cpu" else []
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(seed)
            for each in work.modules():
                (init_fn or _own)(each)
    except Exception as caught:
        error = caught
    agree("init_module", {}, comm.everyone, error)
    return ShardedTree(plan, whole(plan), work.shards), nested(work.buffers)


def _own(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            reset()
            return


class _Work:
    """A copy of the module that has memory for a unit while `apply` is in the module that holds it."""

    def __init__(self, module: nn.Module, plan: Plan, comm: Comm) -> None:
        self.plan, self.comm = plan, comm
        self.copy = without_values(module)
        names = all_names(module)
        self.slots = slots_of(self.copy, names)
        self.given = dict(module.named_buffers())
        self.buffers = {
            name: _empty(b.shape, b.dtype, comm.device) if b.is_meta else b.detach().clone()
            for name, b in self.given.items()
        }
        for name, b in self.buffers.items():
            _put(self.slots[name], b)
        self.versions = {name: b._version for name, b in self.buffers.items()}
        for path, leaf in plan.leaves.items():
            _put(self.slots[path], _Closed(path, leaf.unit, leaf.shape, leaf.dtype))
        self.shards = [
            torch.zeros(b.bounds.size(comm.rank(b.ragged)), dtype=b.dtype, device=comm.device) for b in plan.buckets
        ]
        self.last = {unit.name: self._last(unit, names) for unit in plan.units}

    def _last(self, unit: Any, names: dict[str, list[str]]) -> str:
        """The module after which nothing changes a unit any more: the one that all of its leaves lie in."""
        return common_module([alias.rpartition(".")[0] for leaf in unit.leaves for alias in names[leaf.path]])

    def modules(self) -> Iterator[nn.Module]:
        """Submodules as `module.apply` visits them, with values in their places."""
        order = list(_children_first("", self.copy))
        ends = {unit: max(i for i, (name, _) in enumerate(order) if name == last) for unit, last in self.last.items()}
        needed: dict[str, int] = {}
        for unit in self.plan.units:
            inside = [i for i, (name, m) in enumerate(order) if self._owns(m, unit)]
            needed[unit.name] = min(inside, default=ends[unit.name])
        for i, (_, module) in enumerate(order):
            for unit in self.plan.units:
                if needed[unit.name] == i:
                    for leaf in unit.leaves:
                        _put(self.slots[leaf.path], nn.Parameter(
                            _empty(leaf.shape, leaf.dtype, self.comm.device), leaf.dtype.is_floating_point
                        ))  # fmt: skip
            yield module
            for unit in self.plan.units:
                if ends[unit.name] == i:
                    self._close(unit)
        for name, b in self.given.items():
            now = self._now(name)
            if b.is_meta:
                _check_filled(now, f"buffer {name!r}")
                same = now is self.buffers[name] and now._version == self.versions[name]
                if same and now.numel() and not now.is_floating_point():  # no value says "unset"
                    raise _unfilled(f"buffer {name!r}")
            self.buffers[name] = now.detach()

    def _owns(self, module: nn.Module, unit: Any) -> bool:
        entries = {id(module._parameters)}
        return any(id(slot.entries) in entries for leaf in unit.leaves for slot in self.slots[leaf.path])

    def _now(self, path: str) -> Tensor:
        slot = self.slots[path][0]
        found: Tensor = slot.entries[slot.name]
        return found

    def _close(self, unit: Any) -> None:
        """Keep this rank's runs of a unit, and let go of the rest."""
        full = {leaf.path: self._now(leaf.path) for leaf in unit.leaves}
        for path, x in full.items():
            _check_filled(x, f"parameter {path!r}")
        for bucket in unit.buckets:
            fill_shard(self.shards[bucket.index], bucket, full, self.comm.axes, self.comm.coordinate)
        for leaf in unit.leaves:
            _put(self.slots[leaf.path], _Closed(leaf.path, leaf.unit, leaf.shape, leaf.dtype))


class _Closed(torch.Tensor):
    """A parameter that has no memory now: who touches it is told."""

    said: str

    @staticmethod
    def __new__(cls, path: str, unit: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Closed:
        out: _Closed = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        out.said = f"{path!r} of unit {unit!r}"
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given: Any = (args, kwargs or {})
        found = next(x for x in optree.tree_leaves(given) if isinstance(x, _Closed))
        if func.overloadpacket.__name__ in ("detach", "alias"):
            return found
        raise ValueError(
            f"an initializer reaches for {found.said}, of which its module isn't a part; plan units that hold what is "
            "initialised together"
        )


_UNSET = float("nan")


def _empty(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory in which one sees what was written."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, _UNSET, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def _check_filled(x: Tensor, what: str) -> None:
    if x.isnan().any():
        raise _unfilled(what)


def _unfilled(what: str) -> ValueError:
    return ValueError(f"nothing initialises {what} of the module, or not all of it; pass init_fn=")


def _put(slots: list[Slot], x: Tensor) -> None:
    for slot in slots:
        slot.entries[slot.name] = x


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `module.apply` goes: a module under two parents twice."""
    for key, child in module.named_children():
        yield from _children_first(f"{name}.{key}" if name else key, child)
    yield name, module
