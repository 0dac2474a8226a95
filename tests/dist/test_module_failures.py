"""What a failed pass, or a rank that lacks something, leaves in sharded modules: nothing, and no rank waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import fully_shard
from ragged import make_mesh
from tests.module_pairs import Two, batch, pair, same_grads


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
