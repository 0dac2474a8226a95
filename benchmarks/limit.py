"""The limit of a sharded step: what can't be left out, by a program without this library.

Unsharded compute of the same local batch with the optimizer on 1/m of the parameters, and the same bytes through the
fastest way that the backend has, with no Python between. Their times are measured apart, and added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt import GPT, Config, batch, full_params

__all__ = ["limit_bytes", "limit_compute"]


def limit_compute(
    config: Config, mark: Callable[[str], None] | None = None, bf16: bool = False
) -> Callable[[], Tensor]:
    """Unsharded compute of the same local batch, with the optimizer on 1/m of the parameters."""
    model = GPT(full_params(config), config)
    if bf16:
        model = model.bfloat16()
    named = list(model.parameters())
    total = sum(p.numel() for p in named)
    share = torch.nn.Parameter(torch.randn(total // dist.get_world_size()))
    share.grad = torch.randn_like(share)
    optimizer = torch.optim.AdamW([share], lr=1e-4, weight_decay=0.01, fused=True)
    tokens, targets = batch(config, dist.get_rank())

    def step() -> Tensor:
        loss: Tensor = model(tokens, targets)
        if mark:
            mark("forward")
        grads = torch.autograd.grad(loss, named)
        if mark:
            mark("backward")
        optimizer.step()
        if mark:
            mark("optimizer")
        del grads
        return loss.detach()

    return step


def limit_bytes(config: Config, mark: Callable[[str], None] | None = None, bf16: bool = False) -> Callable[[], Tensor]:
    """The same bytes through the fastest collectives of the backend: no Python between, no compute.

    Every unit is gathered in forward, every layer again in backward, and reduced once: the head is still there, and
    backward reads nothing of the embedding. On gloo the fastest way is to send straight from rank to rank; its own
    collectives copy through buffers.
    """
    m, rank = dist.get_world_size(), dist.get_rank()
    dtype = torch.bfloat16 if bf16 else torch.float32
    params = full_params(config)
    sizes = [
        sum(x.numel() for x in optree.tree_leaves(u)) for u in (params["embed"], *params["layers"], params["head"])
    ]
    sizes = [-(-n // m) * m for n in sizes]
    full = [torch.zeros(n, dtype=dtype) for n in sizes]
    shards = [torch.zeros(n // m, dtype=dtype) for n in sizes]
    received = [torch.zeros(n // m * (m - 1), dtype=dtype).chunk(m - 1) if m > 1 else () for n in sizes]
    peers = [k for k in range(m) if k != rank]

    def swap(sent: Any, places: Any) -> None:
        works = [dist.irecv(_bytes(place), k) for k, place in zip(peers, places, strict=True)]
        works += [dist.isend(_bytes(piece), k) for k, piece in zip(peers, sent, strict=True)]
        for work in works:
            work.wait()

    def step() -> Tensor:
        for i in [*range(len(sizes)), *reversed(range(1, len(sizes) - 1))]:
            pieces = full[i].chunk(m)
            swap([shards[i]] * len(peers), [pieces[k] for k in peers])
            pieces[rank].copy_(shards[i])
        for i in reversed(range(len(sizes))):
            pieces = full[i].chunk(m)
            swap([pieces[k] for k in peers], received[i])
            shards[i].copy_(pieces[rank])
            for part in received[i]:
                shards[i].add_(part)
        return full[0][0]

    return step


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
