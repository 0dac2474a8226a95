"""`inject_hyperparams`: numbers of an optimizer that can be changed between steps, as a part of its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim.base import GradientTransformation

__all__ = ["InjectHyperparamsState", "inject_hyperparams"]


class InjectHyperparamsState(NamedTuple):
    """count: steps done, int32; hyperparams: by name, what the last step used; inner_state: the optimizer's own."""

    count: Tensor  # type: ignore[assignment]  # optax's name; it hides tuple.count
    hyperparams: dict[str, Any]
    inner_state: Any


def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation], static_args: str | Iterable[str] = ()
) -> Callable[..., GradientTransformation]:
    """A factory whose optimizers keep their numbers in the state, where a program may read and set them.

    Real numbers, given or by default, are hyperparameters, and so are schedules, which are asked in every step and
    overwrite what was set. What a factory counts in whole numbers (`block=256`) is not, nor is a function in
    place of an optional argument (`mask=None`).

    The numbers are 0-d fp64 tensors on the CPU whatever the parameters' device: a step reads them without
    waiting, and has the bits of an optimizer made with them. Set them to the same values on all ranks.

    Args:
      inner_factory: e.g. `adamw`; it is called in every step.
      static_args: names of arguments that are none.

    Returns:
      A function with the arguments of `inner_factory`.

    Raises:
      ValueError: a name in `static_args` that the factory doesn't have.

    Example:
      >>> import torch
      >>> from optim import inject_hyperparams, sgd
      >>> tx = inject_hyperparams(sgd)(learning_rate=0.1)
      >>> state = tx.init(torch.zeros(1))
      >>> state.hyperparams["learning_rate"] = 0.5
      >>> tx.update(torch.ones(1), state, torch.zeros(1))[0].item()
      -0.5

    Source: optax.inject_hyperparams.
    """
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    signature = inspect.signature(inner_factory)
    if unknown := static - set(signature.parameters):
        raise ValueError(f"static_args {sorted(unknown)} are no arguments; there are {list(signature.parameters)}")

    def factory(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        kinds = {
            name: _kind(value, signature.parameters[name].default)
            for name, value in bound.arguments.items()
            if name not in static
        }
        numbers = [name for name, kind in kinds.items() if kind == "number"]
        schedules = {name: bound.arguments[name] for name, kind in kinds.items() if kind == "schedule"}

        def made(values: Mapping[str, Any]) -> GradientTransformation:
            now = inspect.BoundArguments(signature, dict(bound.arguments))
            now.arguments.update({name: float(value) for name, value in values.items()})
            return inner_factory(*now.args, **now.kwargs)

        def asked(count: int) -> dict[str, Any]:
            return {name: schedule(count) for name, schedule in schedules.items()}

        first = made({name: bound.arguments[name] for name in numbers} | asked(0))

        def init_fn(params: Any) -> InjectHyperparamsState:
            values = {name: bound.arguments[name] for name in numbers} | asked(0)
            count = torch.zeros((), dtype=torch.int32, device="cpu")
            return InjectHyperparamsState(count, _tensors(values), first.init(params))

        def inner_of(state: Any) -> tuple[GradientTransformation, InjectHyperparamsState]:
            values = {**state.hyperparams, **asked(int(state.count))}
            if unknown := set(values) ^ {*numbers, *schedules}:
                raise ValueError(f"hyperparams {sorted(unknown)}: the state must have {sorted((*numbers, *schedules))}")
            return made(values), state._replace(count=state.count + 1, hyperparams=_tensors(values))

        def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            tx, after = inner_of(state)
            updates, inner = tx.update(updates, state.inner_state, params)
            return updates, after._replace(inner_state=inner)

        def step_fn(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
            tx, after = inner_of(state)
            assert tx.step is not None
            params, inner = tx.step(params, grads, state.inner_state)
            return params, after._replace(inner_state=inner)

        fused = None if first.step is None else step_fn
        return GradientTransformation(init_fn, update_fn, fused, first.blocks, first.labels)

    return factory


def _kind(value: Any, default: Any) -> str:
    whole = type(value) is int and type(default) is int
    if isinstance(value, float | Tensor) or (type(value) is int and not whole and default is not None):
        return "number"
    return "schedule" if callable(value) and default is not None and not isinstance(value, type) else "other"


def _tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.tensor(float(value), dtype=torch.float64, device="cpu") for name, value in values.items()}
