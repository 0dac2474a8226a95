"""Checkpoints, saved-tensor hooks and compiled functions around and inside gathered ones."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fsdp import gathered, value_and_grad
from ragged import collectives
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
