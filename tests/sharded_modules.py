"""A module to be sharded by `fully_shard`, its batches and its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import (
    ShardedModule,
    full_parameters,
    fully_shard,
)
from ragged import make_mesh

__all__ = ["batch", "differ", "loss_of", "mesh", "mine", "model", "sharded"]


def model(d: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, d), nn.LayerNorm(d), nn.Linear(d, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def mesh(*shape: int) -> Any:
    names = ("replica", "fsdp") if len(shape) == 2 else ("fsdp",)
    return make_mesh(shape or (-1,), names, device_type="cpu")


def sharded(module: nn.Module, **options: Any) -> ShardedModule:
    made = fully_shard(module, **{"mesh": mesh(), "units": ["*"], **options})
    assert isinstance(made, ShardedModule)
    return made


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = (module(x) - 1).square().mean()
    return out


def differ(module: ShardedModule, other: nn.Module) -> float:
    full = full_parameters(module)
    return max((full[name] - p).abs().max().item() for name, p in other.named_parameters() if p.numel())
