"""Modules as they are, trained sharded by `functionalize` and by `fully_shard`, equal to themselves unsharded."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import fully_shard, functionalize, value_and_grad
from optim import adamw, make_step
from ragged import P, make_mesh, shard, unshard
from tests.modules import MODELS, RATE, STEPS, straight, tokens

Result = tuple[list[float], dict[str, Tensor]]


def by_functions(name: str) -> Result:
    make, units, options = MODELS[name]
    module, loss_of = make(**options)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    apply, full, buffers = functionalize(module)
    params = shard(full, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=units)

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> tuple[Tensor, Any]:
        out, buffers = apply(params, buffers, batch)
        return loss_of(out, batch), buffers

    f, tx = value_and_grad(loss_fn, has_aux=True), adamw(RATE, weight_decay=0.1)
    state, step_fn, losses = tx.init(params), make_step(tx), []
    for step in range(STEPS):
        (loss, buffers), grads = f(params, buffers, tokens(dist.get_rank(), dist.get_world_size(), step))
        params, state = step_fn(params, grads, state)
        losses.append(loss.item())
    if "calls" in buffers:
        assert buffers["calls"] == STEPS
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())  # it was not touched
    whole = unshard(params)
    return losses, {path: functools.reduce(lambda t, k: t[k], path.split("."), whole) for path in params.paths}


def in_place(name: str, nested: bool) -> Result:
    """The loop of `straight`, with one line more; `nested`: FSDP2's way, the layers first."""
    make, units, options = MODELS[name]
    module, loss_of = make(**options)
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    if nested:
        layers = module.get_submodule("model.layers" if name.startswith("llama") else "layers")
        for layer in dict.fromkeys(layers.children()):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        fully_shard(module, mesh=mesh, units=units)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        batch = tokens(dist.get_rank(), dist.get_world_size(), step)
        optimizer.zero_grad()
        loss = loss_of(module(batch), batch)
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    names = {name for name, _ in module.named_parameters()}
    return losses, {name: x for name, x in module.state_dict().items() if name in names}


def trained(name: str) -> list[Result]:
    ways = [by_functions(name), in_place(name, True)]
    return ways if dist.get_world_size() > 2 else [*ways, in_place(name, False)]


MAIN = ("gpt", "llama")


@pytest.mark.parametrize(("name", "ranks"), [(n, r) for n in MODELS for r in ((1, 2, 4) if n in MAIN else (2,))])
def test_modules_train_as_they_do_unsharded(run: Any, name: str, ranks: int) -> None:
    losses, params = straight(name)
    assert losses[-1] < losses[0]
    for results in run(ranks, trained, name):
        for got, found in results:
            assert got == pytest.approx(losses, abs=1e-5)
            assert found.keys() == params.keys()
            for path, x in found.items():
                assert torch.allclose(x, params[path], rtol=0, atol=1e-5), path
