"""What public training scripts do with FSDP2, with the import changed: the same losses and parameters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

STEPS = 4


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleDict({str(i): Block(8) for i in range(2)})
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        out: Tensor = self.head(x).clone()  # FSDP2 warns of views
        return out


def tokens(step: int) -> Tensor:
    draws = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (8, 5), generator=draws).chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(batch).flatten(0, 1), batch.flatten())


def as_in_torchs_example(api: Any) -> nn.Module:
    """pytorch/examples, distributed/FSDP2: every layer, then the whole; Adam and clipping."""
    module = Model()
    for layer in module.layers.values():
        api.fully_shard(layer)
    api.fully_shard(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss_of(module, tokens(step)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
    return module


def as_in_torchtitan(api: Any) -> nn.Module:
    """torchtitan: bf16, fp32 sums, meta device, a mesh, a policy, the last layer kept, to_empty and initializers."""
    with torch.device("meta"):
        module = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy}
    for name, layer in module.layers.items():
        api.fully_shard(layer, **options, reshard_after_forward=int(name) < len(module.layers) - 1)
    api.fully_shard(module, **options)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.fill_(0.1) if p.ndim < 2 else p.copy_(torch.full_like(p, 0.02 * (k + 1)))
        nn.init.constant_(module.embedding.weight, 0.3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(module, tokens(step)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()
        schedule.step()
    return module


def as_in_nanogpts_kin(api: Any) -> nn.Module:
    """No decay below two dims, gradient accumulation without communication in between, gradients scaled by hand."""
    module = Model()
    for layer in module.layers.values():
        api.fully_shard(layer)
    api.fully_shard(module)
    named = dict(module.named_parameters())
    decay = [p for p in named.values() if p.dim() >= 2]
    rest = [p for p in named.values() if p.dim() < 2]
    assert sum(p.numel() for p in decay) == 2 * 2 * 8 * 16 + 2 * 8 * 11
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(STEPS):
        for part in range(3):
            module.set_requires_gradient_sync(part == 2)
            (loss_of(module, tokens(3 * step + part)) / 3).backward()
        torch.nn.utils.clip_grad_norm_([p for p in module.parameters() if p.grad is not None], 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return module


def both(pattern: Callable[[Any], nn.Module]) -> float:
    full = []
    for name in ("torch.distributed.fsdp", "fsdp"):
        module = pattern(importlib.import_module(name))
        full.append({k: p.full_tensor() for k, p in module.named_parameters()})
    assert full[0].keys() == full[1].keys()
    return max((full[0][k] - x).abs().max().item() for k, x in full[1].items())


@pytest.mark.parametrize("pattern", [as_in_torchs_example, as_in_torchtitan, as_in_nanogpts_kin])
def test_scripts_run_with_the_import_changed(run: Any, pattern: Callable[[Any], nn.Module]) -> None:
    assert all(apart < 1e-6 for apart in run(2, both, pattern))
