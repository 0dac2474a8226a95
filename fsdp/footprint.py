"""What one unit's function allocates, measured on plain tensors: what a plan's `memory` can't know."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's CommDebugMode counts

from fsdp.outputs import tensors_in

__all__ = ["Footprint", "footprint"]


class Footprint(NamedTuple):
    """Bytes that one call of a unit's function needs.

    Its parameters don't count, and of its arguments those do that require grad: they are results of earlier calls,
    and each of them belongs to the call that has it as an argument. So a result counts once along a chain of calls;
    an argument that several calls share counts in each.

    Attributes:
      saved: alive between forward and backward because autograd keeps it, arguments included, results not.
      forward: the most alive at once in forward, arguments and results included.
      backward: the most alive at once in backward: what autograd kept (results too, where this call's backward needs
        them), the gradients of results, parameters and arguments, and temporaries.
      passed: gradients of the arguments, alive when backward goes on to an earlier call.
    """

    saved: int
    forward: int
    backward: int
    passed: int


def footprint(fn: Callable[..., Any], params: Any, *args: Any) -> Footprint:
    """Run a function forward and backward once, and count what it allocates.

    It needs no process group: `params` are full tensors, as a gathered function sees them, in the dtype in which
    it does (`MixedPrecision.param_dtype`). The result goes into `plan.memory(footprints=)`.

    Storages are counted, each once, from the operator that returns them until they are freed. What a kernel uses
    inside is not seen, nor are sparse tensors.

    Args:
      fn: `fn(params, *args)`, gathered or not; its results are tensors in any pytree.
      params: a pytree of tensors. Floating point ones are differentiated, whether they require grad or not.
      args: as in the loss, on the same device. What an earlier unit computed must require grad here, as it does
        there (`x.requires_grad_()`), or the way back to that unit is not counted.

    Returns:
      A `Footprint`, in bytes.

    Raises:
      ValueError: `params` has no floating point tensor; no result depends on one.

    Example:
      >>> import torch
      >>> from fsdp import footprint
      >>> layer = lambda p, x: torch.tanh(x @ p["w"])
      >>> params, x = {"w": torch.ones(8, 8)}, torch.ones(4, 8, requires_grad=True)
      >>> footprint(layer, params, x)  # 128 bytes each: x, x @ w, the result, their gradients; 256 the gradient of w
      Footprint(saved=128, forward=384, backward=640, passed=128)

    Source: as torch.distributed._tools.MemTracker counts.
    """
    traced: Any = optree.tree_map(_leaf, params)
    weights = [x for x in optree.tree_leaves(traced) if isinstance(x, Tensor)]
    starts = [x for x in weights if x.requires_grad]
    if not starts:
        raise ValueError("footprint: params has no floating point tensor; pass the unit's full parameters")
    with torch.enable_grad():
        anchor = torch.zeros((), device=starts[0].device, requires_grad=True)
        given, own, others = _entered(args, anchor)
        live = _Live([*weights, *others])
        passed = live.bytes_of(own)
        del own
        with live:
            out = fn(traced, *given)
        del given
        results = tensors_in(out)
        saved = live.now - live.bytes_of(results)
        forward = live.restart()
        ends = [x for x in results if x.requires_grad]
        if not ends:
            raise ValueError("footprint: no result of the function requires grad; return what its parameters computed")
        total = _Sum.apply(*ends)  # type: ignore[no-untyped-call]
    del out, results, ends
    one = torch.ones_like(total)
    with live:
        grads = torch.autograd.grad(total, [*starts, anchor], one, allow_unused=True)
    del grads
    return Footprint(saved, forward, live.restart(), passed)


def _leaf(x: Any) -> Any:
    """A parameter without a history, to differentiate if that can be."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(x.is_floating_point() or x.is_complex())


def _entered(args: Any, anchor: Tensor) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The arguments, those that require grad on memory of their own; these, and the other tensors."""
    leaves: list[Any]
    leaves, structure = optree.tree_flatten(args)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    learning = [x for x in tensors if x.requires_grad]
    own = list(_Enter.apply(anchor, *learning)) if learning else []  # type: ignore[no-untyped-call]
    each = iter(own)
    entered = [next(each) if isinstance(x, Tensor) and x.requires_grad else x for x in leaves]
    out: Any = optree.tree_unflatten(structure, entered)
    return out, own, [x for x in tensors if not x.requires_grad]


class _Enter(torch.autograd.Function):
    """Arguments on memory of their own, that only the function holds. Their gradients wait here for backward's end."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        return (None,) * (len(grads) + 1)


class _Sum(torch.autograd.Function):
    """A number that depends on tensors but keeps none of them; their gradients are made when backward begins."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operators return, from then on until nobody has them any more.

    Args:
      known: tensors whose storages don't count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known = {id(x): x for x in (t.untyped_storage() for t in known)}
        self._seen: dict[int, tuple[Any, int]] = {}

    def restart(self) -> int:
        """The most since the last restart."""
        most, self.most = self.most, self.now
        return most

    def see(self, x: Tensor) -> int:
        """Count a tensor's storage, if it wasn't: its bytes, 0 for a known one."""
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return 0
        # A storage's Python object lives as long as the storage, so its death is the storage's.
        ref, before = self._seen.get(key) or (weakref.ref(storage, partial(self._gone, key)), 0)
        self._seen[key] = ref, size
        self.now += size - before
        self.most = max(self.most, self.now)
        return size

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """The bytes of tensors, each storage once, without known ones."""
        return sum({id(x.untyped_storage()): self.see(x) for x in tensors}.values())

    def _gone(self, key: int, _: Any) -> None:
        self.now -= self._seen.pop(key)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        most, out = self.most, func(*args, **(kwargs or {}))
        for x in optree.tree_leaves(out):
            if isinstance(x, Tensor) and x.layout is torch.strided:
                self.see(x)
        if func is torch.ops.aten.index_put.default and not torch.is_grad_enabled():
            self.most = most  # backward of x[i] writes in place, but not where a mode looks on; the copy is gone soon
        return out
