"""A small module, sharded and plain, and what has to be equal of the two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp import ShardedLeaf, fully_shard
from ragged import make_mesh

__all__ = ["Two", "batch", "pair", "same_grads"]


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
