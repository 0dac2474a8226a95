"""Several buffers per unit and dtype: one unit all the same, its collectives in flight together."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import fold, gathered, value_and_grad
from ragged import P, ShardedTree, collectives, init, make_mesh, plan, random, rules, shard, unshard

# Two matrices whose blocks don't divide one another: on 4 ranks S of one buffer is a multiple of 12 rows.
SHAPES = {"layers": [{"a": ((12, 64), torch.float32), "b": ((16, 64), torch.float32)} for _ in range(3)]}
SPEC = rules({"**.a": P(ragged="fsdp", block=(3, None)), "**.b": P(ragged="fsdp", block=(4, None))})


def make_params() -> ShardedTree:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    made = plan(SHAPES, mesh, SPEC, units=["layers.*"], price=0)
    assert [[b.name for b in unit.buckets] for unit in made.units] == [
        [f"layers.{i}", f"layers.{i}#1"] for i in range(3)
    ]
    assert made.padding == 0
    return init(made, random.normal(0.1), seed=0)


def layer(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["a"].T) @ p["a"] + torch.tanh(x @ p["b"].T) @ p["b"]


def launches_and_waits() -> list[tuple[str, str]]:
    """What one later step launches and waits for, in order, without the tiny messages."""
    log: list[tuple[str, str]] = []
    kinds: dict[int, str] = {}
    made, waited = collectives.Pending.__init__, collectives.Pending.wait

    def launch(self: Any, *args: Any) -> None:
        made(self, *args)
        if type(self) is collectives.Pending:  # not what only follows one
            kinds[id(self)] = events[-1].kind
            log.append(("launch", events[-1].kind))

    def wait(self: Any) -> Tensor:
        if kinds.pop(id(self), None) is not None:
            log.append(("wait", ""))
        return waited(self)

    params = make_params()
    f = value_and_grad(lambda p, x: fold(gathered(layer), p["layers"], x).square().mean())
    x = torch.ones(2, 64)
    for _ in range(2):
        f(params, x)
    with collectives.record() as events, mock.patch.multiple(collectives.Pending, __init__=launch, wait=wait):
        f(params, x)
    return [entry for entry in log if entry[1] != "all_reduce"]


def test_collectives_of_a_unit_are_in_flight_together(run: Any) -> None:
    for log in run(4, launches_and_waits):
        kinds = [kind for what, kind in log if what == "launch"]
        assert kinds.count("all_gather") == 2 * (3 + 2)
        assert kinds.count("reduce_scatter") == 2 * 3
        # launches come in pairs: no wait between those of one unit
        launched = [i for i, (what, _) in enumerate(log) if what == "launch"]
        assert all(b == a + 1 for a, b in zip(launched[::2], launched[1::2], strict=True)), log


def views_and_gradients() -> None:
    params = make_params()
    made = params.plan

    def check(p: Any, x: Tensor) -> Tensor:
        buffers = set()
        for name, full in p.items():
            leaf = made.leaves[f"layers.1.{name}"]
            storage = full.untyped_storage()
            assert storage.nbytes() == made.buckets[leaf.bucket].length * full.itemsize
            assert full.data_ptr() == storage.data_ptr() + leaf.offset * full.itemsize
            buffers.add(storage.data_ptr())
        assert len(buffers) == 2
        return layer(p, x)

    x = torch.linspace(-1, 1, 8 * 64).view(8, 64)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    _, grads = value_and_grad(lambda p, x: gathered(check)(p["layers"][1], x).square().mean())(params, mine)

    full = unshard(params)["layers"][1]
    for leaf in full.values():
        leaf.requires_grad_()
    layer(full, x).square().mean().backward()
    for name, leaf in unshard(grads)["layers"][1].items():
        torch.testing.assert_close(leaf, full[name].grad)


def test_views_lie_in_the_buffers_of_the_plan(run: Any) -> None:
    run(4, views_and_gradients)


def round_trip() -> None:
    params = make_params()
    full = unshard(params)
    again = shard(full, params.plan)
    assert all(torch.equal(a, b) for a, b in zip(again.tensors, params.tensors, strict=True))
    part = params["layers"][2]
    assert torch.equal(unshard(part)["b"], full["layers"][2]["b"])


def test_shard_and_unshard(run: Any) -> None:
    run(4, round_trip)
