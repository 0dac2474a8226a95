"""`fully_shard`: an existing `nn.Module`, sharded in place, for loops that call `loss.backward()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.ending import Averaging, as_axes
from fsdp.functional import flat, nested
from fsdp.gates import Options, gate_of, in_backward
from fsdp.leaves import ShardedLeaf, Whereabouts
from fsdp.precision import as_precision
from fsdp.reducing import Held
from fsdp.root import Root
from fsdp.unit_options import options_by_unit
from ragged import P, ShardedTree, make_mesh, plan, shard, unshard
from ragged.agree import agree
from ragged.plans import Plan
from ragged.reduction import default_data_axes
from ragged.selection import whole
from ragged.sharding import mesh_facts

__all__ = ["Managed", "ShardedModule", "full_parameters", "fully_shard", "managed", "parameter_trees"]


class Managed:
    """What one call of `fully_shard` made of a module.

    Attributes:
      tree: the buffers; `leaves`: the parameters on them, by path.
      options: how each unit is gathered; `over`: how gradients are averaged.
      held: gradients of passes that didn't reduce them, by bucket.
    """

    def __init__(self, module: nn.Module, tree: ShardedTree, options: dict[str, Options], over: Averaging) -> None:
        self.tree, self.options, self.over = tree, options, over
        self.held: dict[str, Held] = {}
        self.leaves: dict[str, Any] = {path: _parameter(tree, path) for path in tree.paths}
        self.module = weakref.ref(module)
        self.gate = gate_of(module, ShardedModule)
        self.gate.root = weakref.WeakMethod(self.run)  # no cycle: modules go with their last reference
        self.root: Root | None = None
        self.roots: weakref.WeakSet[Root] = weakref.WeakSet()  # whose backward may have left full parameters
        self.sync = True

    def run(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The module's call, from outside."""
        module = self.module()
        assert module is not None
        if self.root is None or not self.root.current:
            self.restore()
            self.root = Root(module, self.gate, dict(managed(module)))
        return self.root.run(inner, module.training, args, kwargs)

    @property
    def plan(self) -> Plan:
        return self.tree.plan

    def restore(self) -> None:
        """Have the sharded parameters in their places, also after a backward pass that failed half-way."""
        module = self.module()
        if module is not None and not in_backward():
            for root in {root for _, each in managed(module) for root in each.roots}:
                root.put_back()

    def rebuffer(self, tensors: Sequence[Tensor], ready: bool) -> None:
        """Have the parameters on other buffers of the same sizes."""
        old = self.leaves
        self.tree = ShardedTree(self.plan, self.tree.selection, tensors)
        self.leaves = {path: _parameter(self.tree, path, old[path].requires_grad, ready) for path in old}


def _parameter(tree: ShardedTree, path: str, learns: bool = True, ready: bool = True) -> nn.Parameter:
    info = tree.plan.leaves[path]
    local, bucket = tree.leaf(path), tree.plan.buckets[info.bucket]
    home = Whereabouts(path, info, bucket, tree.plan.bound(), local, ready and not local.is_meta)
    return nn.Parameter(ShardedLeaf(local, home), requires_grad=learns and bucket.trains)


def managed(module: nn.Module) -> Iterator[tuple[str, Managed]]:
    """What `fully_shard` made of a module and the modules in it, with their names and a dot."""
    for name, each in module.named_modules():
        if isinstance(each, ShardedModule):
            yield f"{name}." if name else "", each._managed


class ShardedModule(nn.Module):
    """What `fully_shard` turns modules into, beside what they are."""

    _managed: Managed

    def set_requires_gradient_sync(self, sync: bool, *, recurse: bool = True) -> None:
        """Whether the following passes reduce gradients. While they don't, each rank keeps its own, as large as the
        full parameters, and the next pass that does adds them; `zero_grad` leaves them.

        It counts when a forward pass begins. One through several sharded modules reduces if all of them say so.
        """
        for _, each in managed(self) if recurse else [("", self._managed)]:
            each.sync = sync

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module: full tensors under plain names, on every rank; every rank has to call it."""
        self._managed.restore()
        with torch.inference_mode(False), torch.no_grad():
            return self._full_state(*args, **kwargs)

    def _full_state(self, *args: Any, **kwargs: Any) -> Any:
        out = super().state_dict(*args, **kwargs)
        if kwargs.get("keep_vars"):
            return out
        wanted = {key: x for key, x in out.items() if isinstance(x, ShardedLeaf)}
        for _, each in managed(self):
            homes = {id(leaf.home): path for path, leaf in each.leaves.items()}
            mine = {key: homes[id(x.home)] for key, x in wanted.items() if id(x.home) in homes}
            if mine:
                full = flat(unshard(each.tree))
                for key, path in mine.items():
                    out[key] = full[path]
        return out

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module: the sharded parameters, also after a backward pass that failed half-way."""
        self._managed.restore()
        yield from super().named_parameters(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As of any module: full tensors under plain names, equal on all ranks, of which each takes its runs."""
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace sharded parameters; use assign=False")
        self._managed.restore()
        return super().load_state_dict(state_dict, strict)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`to`, `cuda`, `to_empty` and the like: buffers of parameters move as wholes."""
        self._managed.restore()
        for _, each in managed(self):
            for x in each.tree.tensors:
                if fn(x[:0]).dtype != x.dtype:
                    raise ValueError(
                        "a sharded module keeps the dtypes of its parameters; convert it before fully_shard, or use "
                        "mp_policy=MixedPrecision(param_dtype=...)"
                    )
        homes = {id(leaf.home): (each, path) for _, each in managed(self) for path, leaf in each.leaves.items()}
        held = [(owner, name, homes[id(leaf.home)]) for owner, name, leaf in _places(self)]
        for owner, name, _ in held:
            owner._parameters[name] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            mine = self._managed
            moved = [fn(x) for x in mine.tree.tensors]
            if any(a is not b for a, b in zip(moved, mine.tree.tensors, strict=True)):
                mine.rebuffer(moved, ready=not any(x.is_meta for x in mine.tree.tensors))
        finally:
            for owner, name, (each, path) in held:
                owner._parameters[name] = each.leaves[path]
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("a sharded module can't be copied; copy it before fully_shard")


def _places(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Where a module holds sharded parameters."""
    return [
        (owner, name, x)
        for owner in module.modules()
        for name, x in owner._parameters.items()
        if isinstance(x, ShardedLeaf)
    ]


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    units: Sequence[Any] | None = None,
    spec: Any = None,
    reshard_after_forward: Any = True,
    mp_policy: Any = None,
    remat: Any = False,
    optimizer: Any = None,
    data_axes: str | Sequence[str] | None = None,
    sum_axes: str | Sequence[str] = (),
    offload: bool = False,
) -> nn.Module:
    """Shard a module's parameters in place, and have it gather them unit by unit when it runs.

    For loops that are written around `loss.backward()` and torch's optimizers, in the shape of FSDP2's function of
    that name. The parameters become `ShardedLeaf`s: they say the global shape and hold this rank's run. Their
    gradients are means over the data axes and arrive in `.grad` during backward.

    Call it once with `units=`, or on submodules first and the whole module last: each call takes the parameters that
    earlier ones left. Parameters that are tied stay tied.

    Args:
      module: with equal values on all ranks, or on the meta device: then `module.to_empty(device=...)` gives it
        memory, and the module's own initializers values.
      mesh: a mesh with named axes; by default one of all processes. Ranks of the axes that `spec` doesn't name hold
        replicas.
      units: patterns on the names of parameters, as in `ragged.plan`; by default all of this call's are one unit.
      spec: as in `ragged.plan`; by default `P(ragged=...)` over the mesh's last axis.
      reshard_after_forward, remat: as in `gathered`: one value, or `rules({...})` on the names of units.
      mp_policy: a `MixedPrecision`, or FSDP2's policy; one, or by unit.
      optimizer: a transformation of `optim` whose blocks must not be cut; see `as_torch_optimizer`.
      data_axes, sum_axes: as in `value_and_grad`. With an axis that cuts some parameter evenly and none raggedly
        `data_axes` has to be said, since tensor and expert parallelism look alike.
      offload: as in `ragged.shard`: parameters, gradients and optimizer states in the CPU's memory.

    Returns:
      The same module, now also a `ShardedModule`.

    Raises:
      ValueError: on all ranks: what `ragged.shard` refuses, such as different values on some rank (start them from
        one seed); a module without parameters, or one that was sharded already.

    Example:
      >>> import torch
      >>> from fsdp import fully_shard
      >>> module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
      >>> module = fully_shard(module, units=["*"])
      >>> optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
      >>> loss = module(torch.ones(3, 4)).square().mean()
      >>> loss.backward()
      >>> torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0).shape
      torch.Size([])
      >>> optimizer.step()

    Source: FSDP2, `torch.distributed.fsdp.fully_shard`.
    """
    if isinstance(module, ShardedModule):
        raise ValueError("this module was sharded already")
    mesh = make_mesh((-1,), ("fsdp",)) if mesh is None else mesh
    _tie(module)
    mine = {name: p for name, p in module.named_parameters() if not isinstance(p, ShardedLeaf)}
    if not mine and not any(managed(module)):
        raise ValueError(f"{type(module).__name__} has no parameters")
    names = mesh.mesh_dim_names
    spec = P(ragged=names[-1]) if spec is None and names else spec
    cold = {name for name, p in mine.items() if not p.requires_grad}
    layout = plan(
        nested(mine),
        mesh,
        spec,
        units=units if units is not None else ["."] if mine else [],
        optimizer=optimizer,
        frozen=(lambda path, leaf: path in cold) if cold else None,
    )
    policy = as_precision(mp_policy) if mp_policy is None or hasattr(mp_policy, "param_dtype") else mp_policy
    options = options_by_unit(layout, Options(reshard_after_forward, remat, policy))
    over = _averaging(layout, data_axes, sum_axes)
    found = Managed(module, _sharded(mine, layout, offload), options, over)
    for path, p in mine.items():
        found.leaves[path].requires_grad_(p.requires_grad)
        p.sharded_leaf = weakref.ref(found.leaves[path])  # type: ignore[attr-defined]  # for ties found later
    _tie(module)
    module._managed = found  # type: ignore[assignment]
    return module


def _tie(module: nn.Module) -> None:
    """Put sharded parameters where a module still has what they were made of."""
    for owner in module.modules():
        for name, x in owner._parameters.items():
            leaf = getattr(x, "sharded_leaf", None)
            if leaf is not None and leaf() is not None:
                owner._parameters[name] = leaf()


def _averaging(layout: Plan, data_axes: str | Sequence[str] | None, sum_axes: str | Sequence[str]) -> Averaging:
    comm = layout.bound()
    data = default_data_axes(layout.buckets, comm.axes) if data_axes is None else as_axes(data_axes)
    unknown = [a for a in (*data, *as_axes(sum_axes)) if a not in comm.axes]
    left = [a for a in comm.axes if a not in data and comm.axes[a] > 1]
    if unknown:
        raise ValueError(f"mesh axis {unknown[0]!r} is not one of {list(comm.axes)}")
    if data_axes is None and left:
        raise ValueError(
            f"axes {left} cut some parameters evenly and none raggedly: say fully_shard(data_axes={data}) if ranks "
            f"along them see the same batch (tensor parallelism), data_axes={(*data, *left)} if each has its own "
            "(expert parallelism)"
        )
    return Averaging(comm, data, False, as_axes(sum_axes))


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Full parameters of a sharded module by name, on every rank; every rank has to call it."""
    full: dict[str, Tensor] = {}
    for prefix, each in managed(module):
        full |= {prefix + path: x for path, x in flat(unshard(each.tree)).items()}
    return full


def parameter_trees(module: nn.Module) -> dict[str, ShardedTree]:
    """The parameters of a sharded module as trees, by the names of the modules that `fully_shard` was called on.

    "" is the module itself. The trees share storage with the parameters: what changes one changes the other. So
    `ragged.checkpoint` saves a sharded module, and loads it where the results are copied in.

    Example:
      >>> import torch
      >>> from fsdp import fully_shard, parameter_trees
      >>> parameter_trees(fully_shard(torch.nn.Linear(4, 2)))[""].paths
      ('bias', 'weight')
    """
    return {prefix.removesuffix("."): each.tree for prefix, each in managed(module)}


def _sharded(params: dict[str, nn.Parameter], layout: Plan, offload: bool) -> ShardedTree:
    """The values of parameters in shards, or shards without values on the meta device."""
    if not any(p.is_meta for p in params.values()):
        return shard(nested({name: p.detach() for name, p in params.items()}), layout, offload=offload)
    comm = layout.bound()
    agree("sharding a module", mesh_facts(comm) | layout.describe(), comm.everyone)
    selection = whole(layout)
    sizes = [piece.bucket.bounds.size(comm.rank(piece.bucket.ragged)) for piece in selection.pieces]
    kinds = [piece.bucket.dtype for piece in selection.pieces]
    pairs = zip(sizes, kinds, strict=True)
    return ShardedTree(layout, selection, [torch.empty(n, dtype=kind, device="meta") for n, kind in pairs])
