"""The systems that a benchmark compares, each as a `step()` over the same model and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt import GPT, Config, batch, full_params, make_loss

LR = 1e-4


def ours(config: Config, **options: Any) -> Callable[[], Tensor]:
    """This library: ragged shards, zero-copy gathers, fused AdamW on the donated path."""
    from fsdp import value_and_grad
    from optim import adamw, make_step
    from ragged import P, make_mesh, shard

    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard(full_params(config), mesh, P(ragged="fsdp"), units=["layers.*"])
    f = value_and_grad(make_loss(config, **options))
    tx = adamw(LR, weight_decay=0.01)
    update = make_step(tx, donate=True)
    box = [params, tx.init(params)]
    del params
    tokens, targets = batch(config, dist.get_rank())

    def step() -> Tensor:
        loss, grads = f(box[0], tokens, targets)
        params, state = box
        box.clear()
        box.extend(update(params, grads, state))
        return loss

    return step


def fsdp2(config: Config, **options: Any) -> Callable[[], Tensor]:
    """torch's `fully_shard` on every block and on the root, fused `torch.optim.AdamW`."""
    from torch.distributed.fsdp import fully_shard

    return in_place(config, fully_shard, **options)


def ours_in_place(config: Config, **options: Any) -> Callable[[], Tensor]:
    """This library's `fully_shard`, in the same loop as torch's."""
    from fsdp import fully_shard

    return in_place(config, fully_shard, **options)


def in_place(config: Config, fully_shard: Any, **options: Any) -> Callable[[], Tensor]:
    from ragged import make_mesh

    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    model = GPT(full_params(config), config)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
    tokens, targets = batch(config, dist.get_rank())

    def step() -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def limit_compute(config: Config) -> Callable[[], Tensor]:
    """Unsharded compute of the same local batch, with the optimizer on 1/m of the parameters."""
    model = GPT(full_params(config), config)
    named = list(model.parameters())
    total = sum(p.numel() for p in named)
    share = torch.nn.Parameter(torch.randn(total // dist.get_world_size()))
    share.grad = torch.randn_like(share)
    optimizer = torch.optim.AdamW([share], lr=LR, weight_decay=0.01, fused=True)
    tokens, targets = batch(config, dist.get_rank())

    def step() -> Tensor:
        loss: Tensor = model(tokens, targets)
        grads = torch.autograd.grad(loss, named)
        optimizer.step()
        del grads
        return loss.detach()

    return step


def limit_bytes(config: Config) -> Callable[[], Tensor]:
    """The same bytes through the fastest collectives of the backend: no Python between, no compute.

    Every unit is gathered in forward, every unit but the last again in backward, and reduced once.
    """
    m, rank = dist.get_world_size(), dist.get_rank()
    params = full_params(config)
    sizes = [
        sum(x.numel() for x in optree.tree_leaves(u)) for u in (params["embed"], *params["layers"], params["head"])
    ]
    sizes = [-(-n // m) * m for n in sizes]
    full = [torch.zeros(n) for n in sizes]
    shards = [torch.randn(n // m) for n in sizes]
    received = [torch.zeros(n // m * (m - 1)).chunk(m - 1) if m > 1 else () for n in sizes]
    peers = [k for k in range(m) if k != rank]

    def swap(sent: Any, places: Any) -> None:
        works = [dist.irecv(place, k) for k, place in zip(peers, places, strict=True)]
        works += [dist.isend(piece, k) for k, piece in zip(peers, sent, strict=True)]
        for work in works:
            work.wait()

    def step() -> Tensor:
        for i in [*range(len(sizes)), *reversed(range(len(sizes) - 1))]:
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


SYSTEMS: dict[str, Callable[[Config], Callable[[], Tensor]]] = {
    "ours": ours,
    "ours, in place": ours_in_place,
    "FSDP2": fsdp2,
    "limit: compute": limit_compute,
    "limit: bytes": limit_bytes,
}
