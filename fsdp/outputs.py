"""What a gathered function returned: the tensors in it, through which backward comes back to the function."""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fsdp.full import Full

__all__ = ["check_outputs", "nodes_of", "tensors_in"]

_VALUES = (bool, int, float, complex, str, bytes, enum.Enum, type(None), torch.dtype, torch.device, range, slice)
_ATOMS = (*_VALUES, type, types.BuiltinFunctionType, types.ModuleType, torch.Generator)


def tensors_in(x: Any) -> list[Tensor]:
    """All tensors in an object: in containers, attributes and closures, each once.

    Raises:
      ValueError: an object that can't be looked into, by type.

    Example:
      >>> import torch
      >>> from types import SimpleNamespace
      >>> [t.item() for t in tensors_in({"a": torch.tensor(1), "b": SimpleNamespace(c=[torch.tensor(2)], d="text")})]
      [1, 2]
    """
    return [x] if type(x) is Tensor else list(_walk(x, set()))


def _inner(x: Any) -> Iterator[Tensor]:
    """The tensors that hold a tensor's values: for DTensors and the like those inside, else itself."""
    if type(x) is not Tensor and hasattr(x, "__tensor_flatten__"):
        for part in (getattr(x, name) for name in x.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):
                yield from _inner(part)
    else:
        yield x


def _walk(x: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(x, _ATOMS) or id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        yield x
        return
    for part in _inside(x):
        yield from _walk(part, seen)


def _inside(x: Any) -> Iterable[Any]:
    """What an object consists of."""
    if isinstance(x, Mapping):
        return [*x.values(), *getattr(x, "__dict__", {}).values()]
    if isinstance(x, (list, tuple, set, frozenset, deque)):
        return [*x, *getattr(x, "__dict__", {}).values()]
    if not optree.tree_is_leaf(x):
        return optree.tree_leaves(x)
    if isinstance(x, types.FunctionType):
        return [c.cell_contents for c in x.__closure__ or () if c != types.CellType()]
    if isinstance(x, types.MethodType):
        return [x.__self__]
    if isinstance(x, functools.partial):
        return [x.func, x.args, x.keywords]
    slots = {name for c in type(x).__mro__ for name in _names(c.__dict__.get("__slots__", ()))}
    if not hasattr(x, "__dict__") and not slots:
        raise ValueError(
            f"a gathered function returned a {type(x).__name__}, in which tensors for backward could hide; "
            "return tensors in containers or attributes, or register the class with optree"
        )
    return [*getattr(x, "__dict__", {}).values(), *(getattr(x, name) for name in slots if hasattr(x, name))]


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def nodes_of(outputs: Iterable[Tensor]) -> set[Any]:
    """The autograd nodes through which backward enters what computed some tensors."""
    found: set[Any] = set()
    for x in outputs:
        if (node := x.grad_fn) is not None:
            found.add(node)
        # An in-place change of a view gives it a new history from its base on, past its own node.
        if (base := x._base) is not None and (node := base.grad_fn) is not None:
            found.add(node)
    return found


def check_outputs(out: Any, fulls: Sequence[Full]) -> list[Tensor]:
    """The tensors in the result of a gathered function.

    Raises:
      ValueError: one that backward could not serve.
    """
    try:
        found = tensors_in(out)
    except ValueError:
        if torch.is_grad_enabled():
            raise
        found = [x for x in optree.tree_leaves(out) if isinstance(x, Tensor)]
    if not found:
        return found
    addresses = {full.address for full in fulls} - {0}
    for x in found:
        if any(y.untyped_storage().data_ptr() in addresses for y in _inner(x)):
            raise ValueError(
                f"a gathered function returned a tensor of shape {tuple(x.shape)} that is a view of its "
                "parameters, whose memory is freed now; return a computed value or a clone"
            )
    return found
