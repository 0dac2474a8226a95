"""A small model in sharded and plain form, for the tests of `fsdp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fsdp import fold, gathered
from ragged import P, Plan, ShardedTree, init, make_mesh, plan, random, rules

D, V, LAYERS, TOKENS = 16, 32, 4, 24

SHAPES: dict[str, Any] = {
    "embed": ((V, D), torch.float32),
    "layers": [{"w": ((D, D), torch.float32), "b": ((D,), torch.float32)} for _ in range(LAYERS)],
    "head": {"norm": ((D,), torch.float32), "w": ((D, V), torch.float32)},
}


def make_plan(**options: Any) -> Plan:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    return plan(SHAPES, mesh, P(ragged="fsdp"), **{"units": ["layers.*"], **options})


def make_params(**options: Any) -> ShardedTree:
    how = rules({"**.b": random.uniform(-0.5, 0.5), "**.norm": random.ones, "**": random.normal(0.3)})
    return init(make_plan(**options), how, seed=3)


def tokens(share: bool = True) -> Tensor:
    """The global batch, or this rank's share of it."""
    generator = torch.Generator().manual_seed(7)
    all_ranks = torch.randint(0, V, (TOKENS,), generator=generator)
    return all_ranks.view(dist.get_world_size(), -1)[dist.get_rank()] if share else all_ranks


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


class _Fallible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: Callable[[str], bool]) -> Tensor:
        ctx.fails = fails
        if fails("forward"):
            raise RuntimeError("no luck in forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        if ctx.fails("backward"):
            raise RuntimeError("no luck in backward")
        return g, None


def fallible(x: Tensor, fails: Callable[[str], bool]) -> Tensor:
    """The same values, unless `fails` says of "forward" or "backward" that it fails there."""
    out: Tensor = _Fallible.apply(x, fails)  # type: ignore[no-untyped-call]
    return out


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def make_loss(layer: Any = block, keep: bool = False, tied: bool = False) -> Any:
    """The loss with gathered functions; on plain trees it is the reference."""
    embed = gathered(lambda p, t: p[t], reshard_after_forward=not keep)
    body = gathered(layer, reshard_after_forward=not keep)
    head = gathered(lambda p, x, t: cross_entropy((x * p["norm"]) @ p["w"], t), reshard_after_forward=not keep)
    unembed = gathered(lambda p, x, t: cross_entropy(x @ p.t(), t), reshard_after_forward=not keep)

    def loss(params: Any, t: Tensor) -> Tensor:
        x = fold(body, params["layers"], embed(params["embed"], t))
        return unembed(params["embed"], x, t) if tied else head(params["head"], x, t)

    return loss
