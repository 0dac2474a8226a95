"""Steps of sharded modules that begin and end otherwise than usual: passes, checkpoints, failures, lifetimes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import ShardedLeaf, fully_shard
from fsdp.module_steps import ModuleStep
from ragged import make_mesh
from tests.module_pairs import Two, batch, pair, same_grads


def held_back(a: Any, b: Any) -> None:
    """What a pass held of a unit that the reducing pass doesn't use, or that another module's call held."""
    a.set_requires_gradient_sync(False)
    a(batch(0)).sum().backward()
    a.set_requires_gradient_sync(True)
    a(batch(1), False).sum().backward()
    b(batch(0)).sum().backward()
    b(batch(1), False).sum().backward()
    same_grads(a, b)


def overlapping(a: Any, b: Any) -> None:
    """Whether a pass reduces is said when it begins."""
    for m in (a, b):
        if m is a:
            a.set_requires_gradient_sync(False)
        first = m(batch(0)).sum()
        if m is a:
            a.set_requires_gradient_sync(True)
        second = m(batch(1)).sum()
        first.backward()
        if m is a:
            assert m.a.weight.grad is None
        second.backward()
    same_grads(a, b)


def inputs_only(a: Any, b: Any) -> None:
    """Gradients of inputs, before those of parameters and without them."""
    for m in (a, b):
        x = batch(0).requires_grad_()
        loss = m(x).square().sum()
        (g,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        m.seen = (g, x.grad)
        m(x).sum()
    assert all(torch.allclose(u, v, atol=1e-6) for u, v in zip(a.seen, b.seen, strict=True))
    same_grads(a, b)


def retained(a: Any, b: Any) -> None:
    """Two losses over one forward pass, one after the other."""
    for m in (a, b):
        out = m(batch(0))
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
    same_grads(a, b)


def frozen(a: Any, b: Any) -> None:
    """No parameter learns, but the input does: a critic, a perceptual loss."""
    for m in (a, b):
        m.requires_grad_(False)
        x = batch(0).requires_grad_()
        m(x).square().sum().backward()
        m.seen = x.grad
    assert torch.allclose(a.seen, b.seen, atol=1e-6)
    same_grads(a, b)


def around(a: Any, b: Any) -> None:
    """A checkpoint around the module and more, twice before one backward."""
    for m in (a, b):
        losses = [checkpoint(lambda x, m=m: m(x).square().sum(), batch(i), use_reentrant=False) for i in (0, 1)]
        sum(losses).backward()
    same_grads(a, b)


def penalty(a: Any, b: Any) -> None:
    """A gradient with respect to inputs inside the loss, differentiated again."""
    for m in (a, b):
        x = batch(0).requires_grad_()
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        (m(x).sum() + g.square().sum()).backward()
    same_grads(a, b)


def other_branches(a: Any, b: Any) -> None:
    for both in (True, False, True):
        for m in (a, b):
            m(batch(0), both).sum().backward()
    same_grads(a, b)


def evaluated_between(a: Any, b: Any) -> None:
    for m in (a, b):
        loss = m(batch(0)).sum()
        with torch.no_grad():
            m(batch(1))
        with torch.inference_mode():
            m(batch(1))
        loss.backward()
    same_grads(a, b)


def broken(a: Any, b: Any) -> None:
    """An error in the user's part of backward, on all ranks; then all is as before."""

    def fail(_: Tensor) -> None:
        raise RuntimeError("broken here")

    out = a(batch(0))
    out.register_hook(fail)
    with pytest.raises(RuntimeError, match="broken here"):
        out.sum().backward()
    hook = a.a.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    with pytest.raises(RuntimeError, match="broken here"):
        a(batch(0)).sum().backward()
    hook.remove()
    assert all(isinstance(p, ShardedLeaf) for p in a.parameters())
    for m in (a, b):
        m(batch(0)).sum().backward()
    same_grads(a, b)


CASES = [
    held_back, overlapping, inputs_only, retained, frozen, around, penalty, other_branches, evaluated_between, broken,
]  # fmt: skip


def behaves(case: Callable[[Any, Any], None]) -> None:
    a, b = pair()
    for _ in range(3):  # when the order is learnt, and when it is known
        a.requires_grad_(True)
        b.requires_grad_(True)
        for m in (a, b):
            m.zero_grad()
        case(a, b)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_the_plain_module(run: Any, case: Callable[[Any, Any], None], n: int) -> None:
    run(n, behaves, case)


def refuses() -> list[str]:
    said = []

    def of(error: type[Exception], what: Callable[[Any], Any]) -> None:
        a, _ = pair()
        with pytest.raises(error) as caught:
            what(a)
        said.append(str(caught.value))

    def changed(a: Any) -> None:
        first, second = a(batch(0)).sum(), a(batch(1)).sum()
        optimizer = torch.optim.SGD(a.parameters(), lr=0.1)
        second.backward()
        optimizer.step()
        first.backward()

    def replaced(a: Any) -> None:
        a.a.weight = nn.Parameter(torch.zeros(3, 3))
        a(batch(0))

    def gone(a: Any) -> None:
        del a.b
        a(batch(0), False)

    of(ValueError, changed)
    of(ValueError, replaced)
    of(ValueError, gone)
    of(ValueError, lambda a: a(batch(0)).sum().backward(create_graph=True))
    of(ValueError, lambda a: a.load_state_dict(Two().state_dict(), assign=True))
    of(ValueError, lambda a: setattr(a.a.weight, "data", torch.zeros(3, 3)))
    return said


def test_what_is_refused(run: Any) -> None:
    words = [
        "changed between",
        "'a.weight' was replaced",
        "'b.bias' was replaced or removed",
        "create_graph",
        "assign",
        ".data",
    ]
    for said in run(2, refuses):
        for word, text in zip(words, said, strict=True):
            assert word in text


def lives() -> tuple[int, int]:
    """Steps alive after passes that end, that don't, and that are thrown away, without the cycle collector."""
    gc.collect()
    gc.disable()
    try:
        before = sum(type(x) is ModuleStep for x in gc.get_objects())
        a, _ = pair()
        for i in range(6):
            a(batch(i)).sum().backward()
            a.zero_grad()
            a(batch(i))
            x = batch(i).requires_grad_()
            torch.autograd.grad(a(x).sum(), x)
        a(batch(0)).sum().backward()
        steps = sum(type(x) is ModuleStep for x in gc.get_objects()) - before
        leaf = weakref.ref(a.a.weight)
        a.zero_grad()
        del a
        return steps, int(leaf() is not None)
    finally:
        gc.enable()


def test_steps_and_modules_go_with_their_last_reference(run: Any) -> None:
    assert run(2, lives) == [(0, 0)] * 2


class Forces(nn.Module):
    """A gradient inside the module's own forward, above units that ran already."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 3))
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        energy = self.b(torch.tanh(self.a(x @ self.w))).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        out: Tensor = (force @ self.w).square().sum() + energy
        return out


def forces() -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    a, b = fully_shard(Forces(), mesh=mesh, units=["a", "b", "."]), Forces()
    for _ in range(3):
        for m in (a, b):
            m.zero_grad()
            m(batch(0).requires_grad_()).backward()
        same_grads(a, b)


def test_gradients_inside_a_forward(run: Any) -> None:
    run(2, forces)
