"""Checkpoints, saved-tensor hooks, compiled functions and gradients around and inside gathered ones."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fsdp import fully_shard, gathered, value_and_grad
from ragged import P, collectives, make_mesh, shard, unshard
from tests.models import block, make_loss, make_params, tokens


def checkpoint_inside(p: Any, x: Tensor) -> Tensor:
    return checkpoint(block, p, x, use_reentrant=False)  # type: ignore[no-any-return]


def save_inside(p: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return block(p, x)


def hooks_inside(p: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        return block(p, x)


def clones_inside(p: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return block(p, x)


def in_context(context: Any, loss: Any) -> Any:
    def wrapped(params: Any, t: Tensor) -> Tensor:
        with context():
            return loss(params, t)  # type: ignore[no-any-return]

    return wrapped


def losses() -> dict[str, Any]:
    body = gathered(block)
    outside = make_loss()

    def checkpoint_around(params: Any, t: Tensor) -> Tensor:
        x = gathered(lambda p, t: p[t])(params["embed"], t)
        for layer in params["layers"]:
            x = checkpoint(body, layer, x, use_reentrant=False)
        return gathered(lambda p, x, t: torch.nn.functional.cross_entropy((x * p["norm"]) @ p["w"], t))(
            params["head"], x, t
        )

    def checkpoint_two_layers(params: Any, t: Tensor) -> Tensor:
        def pair(a: Any, b: Any, x: Tensor) -> Tensor:
            return body(b, body(a, x))

        x = gathered(lambda p, t: p[t])(params["embed"], t)
        layers = params["layers"]
        for i in range(0, len(layers), 2):
            x = checkpoint(pair, layers[i], layers[i + 1], x, use_reentrant=False)
        return gathered(lambda p, x, t: torch.nn.functional.cross_entropy((x * p["norm"]) @ p["w"], t))(
            params["head"], x, t
        )

    return {
        "checkpoint inside": make_loss(checkpoint_inside),
        "save_on_cpu inside": make_loss(save_inside),
        "hooks inside": make_loss(hooks_inside),
        "cloning hooks inside": make_loss(clones_inside),
        "save_on_cpu outside": in_context(save_on_cpu, outside),
        "hooks outside": in_context(lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t), outside),
        "checkpoint around": checkpoint_around,
        "checkpoint around two": checkpoint_two_layers,
    }


def same_as_plain(loss_fn: Any) -> None:
    params = make_params()
    plain, other = value_and_grad(make_loss()), value_and_grad(loss_fn)
    for _ in range(3):
        with collectives.record() as want_events:
            want_loss, want = plain(params, tokens())
        with collectives.record() as events:
            loss, grads = other(params, tokens())
        assert torch.equal(loss, want_loss)
        for a, b in zip(grads.tensors, want.tensors, strict=True):
            assert torch.equal(a, b)
        assert Counter(e.kind for e in events) == Counter(e.kind for e in want_events)


def compare(name: str) -> None:
    same_as_plain(losses()[name])


@pytest.mark.parametrize("name", losses())
@pytest.mark.parametrize("n", [1, 2])
def test_bitwise_the_gradients_and_the_counts_of_the_plain_run(run: Any, name: str, n: int) -> None:
    run(n, compare, name)


def compiled() -> None:
    # dynamo looks at the grad of non-leaf inputs, activations too, and hides torch's warning from print only
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    same_as_plain(make_loss(torch.compile(block, backend="aot_eager", fullgraph=True)))


def test_compiled_functions(run: Any) -> None:
    run(2, compiled, timeout=120)


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a * b).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        a, b = ctx.saved_tensors
        return b, a


def gradients_that_are_parameters() -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard({"a": torch.arange(4.0), "b": torch.arange(4.0) * 10}, mesh, P(ragged="fsdp"), units=["."])
    loss = gathered(lambda p: _Swapped.apply(p["a"], p["b"]))  # type: ignore[no-untyped-call]
    grads = unshard(value_and_grad(loss)(params)[1])
    assert grads["a"].tolist() == [0.0, 10.0, 20.0, 30.0]
    assert grads["b"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_gradient_may_be_a_parameter(run: Any) -> None:
    run(2, gradients_that_are_parameters)


def gradient_inside_a_call() -> None:
    """It goes through an ended call of a unit, while another call of it runs."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard({"a": torch.eye(8) * 2, "b": torch.eye(8) * 3}, mesh, P(ragged="fsdp"))

    def loss(p: Any, x: Tensor) -> Tensor:
        times = gathered(lambda w, x: x @ w)
        y = times(p["b"], times(p["a"], x))

        def body(w: Tensor, x: Tensor) -> Tensor:
            (g,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
            return x @ w + g

        return gathered(body)(p["b"], x).sum()  # type: ignore[no-any-return]

    value, _ = value_and_grad(loss)(params, torch.ones(1, 8, requires_grad=True))
    assert value == 8 * (3 + 2 * 36)


def test_a_gradient_inside_a_call_leaves_its_parameters(run: Any) -> None:
    run(2, gradient_inside_a_call)


def evaluated_first() -> None:
    torch.manual_seed(0)
    module = fully_shard(torch.nn.Linear(4, 2))
    for _ in range(2):
        with torch.inference_mode():
            module(torch.ones(1, 4))
        module(torch.ones(1, 4)).sum().backward()
        assert module.weight.grad.full_tensor().tolist() == [[1.0] * 4] * 2
        module.zero_grad()


def test_inference_mode_leaves_nothing_to_training(run: Any) -> None:
    run(2, evaluated_first)
