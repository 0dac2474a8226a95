"""Sharded modules of special structure: ties, nesting without values, axes that cut evenly, scaled gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import ShardedLeaf, fully_shard
from ragged import P, make_mesh, rules
from tests.module_pairs import Two, batch, pair, same_grads


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
