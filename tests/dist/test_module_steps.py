"""Steps of sharded modules that begin and end otherwise than usual: passes, checkpoints, failures, lifetimes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import ShardedLeaf, fully_shard
from fsdp.module_steps import ModuleStep
from ragged import P, make_mesh, rules


class Two(nn.Module):
    """Two layers, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = self.a(x).tanh()
        return self.b(x) if both else x


def pair() -> tuple[Any, Any]:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    return fully_shard(Two(), mesh=mesh, units=["*"]), Two()


def batch(seed: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def same_grads(a: Any, b: Any) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert isinstance(p, ShardedLeaf), name
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6), name


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_the_plain_module(run: Any, case: Callable[[Any, Any], None]) -> None:
    run(2, behaves, case)


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
    words = ["changed between", "'a.weight' was replaced", "'b.bias' was replaced or removed", "create_graph", "assign", ".data"]
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


def recovered() -> None:
    """A backward pass fails in a child's own call, or in the whole; what comes next finds parameters in place."""

    def fail(_: Tensor) -> None:
        raise RuntimeError("broken here")

    def broken(call: Callable[[Tensor], Tensor], hooked: nn.Module) -> None:
        hook = hooked.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        with pytest.raises(RuntimeError, match="broken here"):
            call(batch(0)).sum().backward()
        hook.remove()

    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    a = nn.Sequential(nn.Linear(3, 3), Two())
    a[0].requires_grad_(False).weight.data.copy_(torch.eye(3))
    b = nn.Sequential(nn.Linear(3, 3), Two())
    b.load_state_dict(a.state_dict() | {"0.bias": torch.zeros(3)})
    a.load_state_dict(b.state_dict())
    b[0].requires_grad_(False)
    fully_shard(a[1], mesh=mesh, units=["*"])
    fully_shard(a, mesh=mesh)
    for call in (a[1], a):
        broken(call, a[1].a)
        new = {name: x + 1 for name, x in b.state_dict().items()}
        for m in (a, b):
            m.load_state_dict(new)
            m.zero_grad()
        assert all(torch.equal(x, new[name]) for name, x in a.state_dict().items())
        for own in (a[1], a):
            for m, through in ((a, own), (b, b[1] if own is a[1] else b)):
                m.zero_grad()
                through(batch(0)).sum().backward()
            same_grads(a, b)


def test_a_failed_pass_leaves_nothing_behind(run: Any) -> None:
    run(2, recovered)


def fails_beside_a_flush() -> str:
    """One rank fails where the others reduce what an earlier pass held of a unit that this one doesn't use."""
    a, _ = pair()
    said = "nothing"
    for step in range(3):
        try:
            a.set_requires_gradient_sync(False)
            a(batch(0)).sum().backward()
            a.set_requires_gradient_sync(True)
            if step == 2 and dist.get_rank() == 0:
                a.a.register_forward_hook(lambda *_: 1 / 0)
            a(batch(1), False).sum().backward()
        except (ValueError, ZeroDivisionError) as error:
            said = str(error)
    return said


def test_failing_beside_gradients_that_waited(run: Any) -> None:
    said = run(2, fails_beside_a_flush, timeout=60)
    assert said[0] == "division by zero"
    assert "rank 0 failed: division by zero" in said[1]


def unready_on_one(train: bool) -> str:
    with torch.device("meta"):
        a: Any = nn.Linear(3, 3)
    fully_shard(a, mesh=make_mesh((-1,), ("fsdp",), device_type="cpu")).to_empty(device="cpu")
    if dist.get_rank() == 0:
        a.load_state_dict(nn.Linear(3, 3).state_dict())
    with pytest.raises(ValueError, match="has no values") as error, torch.set_grad_enabled(train):
        a(batch(0))
    return str(error.value)


@pytest.mark.parametrize("train", [False, True])
def test_values_that_one_rank_lacks(run: Any, train: bool) -> None:
    said = run(2, unready_on_one, train, timeout=60)
    assert "rank 1 failed" in said[0]


def shrunk() -> None:
    """A sharded child goes after the first step."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    torch.manual_seed(0)
    a = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    for i in range(3):
        fully_shard(a[i], mesh=mesh)
    fully_shard(a, mesh=mesh)
    a(batch(0)).sum().backward()
    del a[2]
    out = a(batch(0))
    out.sum().backward()
    assert out.shape == (4, 3)


def test_a_child_that_goes(run: Any) -> None:
    run(2, shrunk)


def tied_apart() -> None:
    """One parameter in two modules that are sharded one after the other."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.e, self.h = nn.Embedding(5, 3), nn.Linear(3, 5, bias=True)
            self.h.weight = self.e.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.h(self.e(x))

    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    a, b = Tied(), Tied()
    for m in (a.e, a.h, a):
        fully_shard(m, mesh=mesh)
    assert len(list(a.parameters())) == 2
    x = torch.arange(5)
    for m in (a, b):
        m(x).square().sum().backward()
    same_grads(a, b)


def test_ties_across_calls_of_fully_shard(run: Any) -> None:
    run(2, tied_apart)


def nested_on_meta() -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    with torch.device("meta"):
        a = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    fully_shard(a[2], mesh=mesh)
    fully_shard(a, mesh=mesh)
    a.to_empty(device="cpu")
    assert all(isinstance(p, ShardedLeaf) and not p.is_meta for p in a.parameters())
    torch.zeros_like(a[0].weight).zero_()  # a state, not the parameter
    with pytest.raises(ValueError, match=r"'2\.bias' has no values|'0\.bias' has no values"):
        a(batch(0))
    torch.manual_seed(0)
    for i in range(3):
        a[i].reset_parameters()
    with pytest.raises(ValueError, match="dtypes"):
        a.half()
    assert a[1].running_mean.dtype == torch.float32
    assert torch.isfinite(a(batch(0))).all()


def test_nested_modules_on_meta_get_memory_once(run: Any) -> None:
    run(2, nested_on_meta)


def experts() -> None:
    """Axes that cut parameters evenly have to be said to see other data, or the same."""
    mesh = make_mesh((-1,), ("ep",), device_type="cpu")
    spec = rules({"a.weight": P("ep"), "**": None})

    class Experts(Two):
        def forward(self, x: Tensor, both: bool = True) -> Tensor:
            return (self.a.weight.sum() + self.b.weight.sum()) * x.sum()

    def module() -> nn.Module:
        torch.manual_seed(0)
        m = Experts()
        m.a = nn.Linear(3, 4, bias=False)
        m.b = nn.Linear(3, 3, bias=False)
        return m

    with pytest.raises(ValueError, match="data_axes"):
        fully_shard(module(), mesh=mesh, units=["."], spec=spec)
    a = fully_shard(module(), mesh=mesh, units=["."], spec=spec, data_axes="ep")
    a(torch.tensor([1.0 + dist.get_rank()])).backward()
    shared: Any = a.b.weight.grad
    assert torch.equal(shared.to_local(), torch.full((9,), 1.5))


def test_even_axes_have_to_be_said(run: Any) -> None:
    run(2, experts)


def scaled() -> list[float]:
    a, _ = pair()
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    for bad in (False, True):
        optimizer.zero_grad()
        factor = float("inf") if bad and dist.get_rank() == 1 else 1.0
        scaler.scale(a(batch(0)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


def test_gradient_scaling_skips_on_all_ranks(run: Any) -> None:
    assert run(2, scaled) == [[4.0, 2.0]] * 2
