"""Training with dropout by key: the same losses and gradients however many ranks share the batch, recomputed or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import gathered, value_and_grad
from ragged import P, make_mesh, shard, unshard
from ragged.random import dropout


def trained(remat: bool) -> tuple[float, Tensor]:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    draws = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=draws, dtype=torch.float64) for shape in ((12, 4), (4, 6)))
    each = 12 // dist.get_world_size()
    start = each * dist.get_rank()

    @gathered(remat=remat)
    def layer(p: Any, x: Tensor, step: int) -> Tensor:
        return dropout((x @ p["w"]).tanh(), 0.4, 5, f"layer/{step}", start=start)

    f = value_and_grad(lambda p, x, step: layer(p, x, step).square().mean())
    params = shard({"w": w}, mesh, P(ragged="fsdp"))
    total, grads = 0.0, None
    for step in range(2):
        loss, grads = f(params, x[start : start + each], step)
        total += loss.item()
    return total, unshard(grads)["w"]


def test_the_number_of_ranks_changes_nothing(run: Any) -> None:
    ((loss, grad),) = run(1, trained, False)
    assert grad.abs().sum() > 0
    for ranks, remat in ((2, False), (2, True), (3, False)):
        for other, found in run(ranks, trained, remat):
            assert abs(other - loss) < 1e-14
            assert torch.allclose(found, grad, rtol=0, atol=1e-15)
