"""ZeRO's levels and DDP as settings of one machine: the same gradients, other messages and other memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import fold, gathered, microbatch, value_and_grad
from optim import adamw
from ragged import P, collectives, make_mesh, shard, unshard
from tests.models import block

LAYERS, PARTS = 3, 2
# spec, reshard_after_forward, sync; then gathers, reductions, and the share of a rank in parameters and states
LEVELS: dict[str, tuple[Any, Any, str, int, int, bool]] = {
    "DDP": (None, True, "last", 0, LAYERS, False),
    "ZeRO-1": (P(ragged="fsdp"), False, "last", LAYERS, LAYERS, True),
    "ZeRO-2": (P(ragged="fsdp"), False, "each", LAYERS, PARTS * LAYERS, True),
    "ZeRO-3": (P(ragged="fsdp"), True, "each", PARTS * (2 * LAYERS - 1), PARTS * LAYERS, True),
}


def stepped(spec: Any, reshard: Any, sync: str) -> tuple[Any, Counter[str], int]:
    """Gradients of a known step, its messages, and bytes of a rank's parameters and optimizer state."""
    draws = torch.Generator().manual_seed(0)
    layers = [
        {"w": torch.randn(128, 128, generator=draws) / 12, "b": torch.randn(128, generator=draws)}
        for _ in range(LAYERS)
    ]
    params = shard({"layers": layers}, make_mesh((-1,), ("fsdp",), device_type="cpu"), spec, units=["layers.*"])
    layer = gathered(block, reshard_after_forward=reshard)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return fold(layer, p["layers"], x).square().mean()

    f = microbatch(value_and_grad(loss_fn), PARTS, sync=sync)
    x = torch.randn(8, 128, generator=draws).chunk(dist.get_world_size())[dist.get_rank()]
    f(params, x)
    with collectives.record() as events:
        _, grads = f(params, x)
    state = adamw(1e-3).init(params)
    held = sum(t.nbytes for t in optree.tree_leaves((params, state)) if t.ndim)
    return unshard(grads), Counter(e.kind for e in events if e.sent > 64), held


def test_levels_are_settings(run: Any) -> None:
    results = {name: run(2, stepped, *level[:3]) for name, level in LEVELS.items()}
    (want, _, whole), _ = results["DDP"]
    for name, (_, _, _, gathers, reductions, sharded) in LEVELS.items():
        for grads, kinds, held in results[name]:
            close = optree.tree_map(lambda a, b: torch.allclose(a, b, rtol=0, atol=1e-6), grads, want)
            assert optree.tree_all(close), name
            assert kinds["all_gather"] == gathers, name
            assert kinds["reduce_scatter" if sharded else "all_reduce"] == reductions, name
            # rows aren't cut, so one rank may hold a row more
            assert whole / 2 <= held <= 0.51 * whole if sharded else held == whole, name
