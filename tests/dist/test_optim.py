"""What one rank alone sees must decide for all: non-finite values in replicated and in plain leaves."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

import optim
from ragged import P, collectives, make_mesh, shard, unshard

ORDERS = (1, 2, 3, math.inf)


def gradients(kind: str) -> Any:
    """Every rank holds all of leaf `b`: as a replicated leaf, a replica of a shard, or a plain tensor."""
    w, b = torch.ones(6, 2), torch.ones(4)
    if kind == "replicated":
        mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
        return shard({"w": w, "b": b}, mesh, {"w": P(ragged="fsdp"), "b": None})
    if kind == "hybrid":
        return shard({"w": w, "b": b}, make_mesh((-1, 1), ("replica", "fsdp"), device_type="cpu"), P(ragged="fsdp"))
    return {"w": shard({"w": w}, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp")), "b": b}


def spoil(tree: Any, value: float) -> None:
    (tree["b"] if isinstance(tree, dict) else tree.leaf("b"))[1] = value


def one_rank_decides(kind: str, bad_rank: int, value: float) -> None:
    grads = gradients(kind)
    assert optim.all_finite(grads)
    assert [optim.global_norm(grads, ord).item() for ord in (1, 2)] == [16, 4]
    if dist.get_rank() == bad_rank:
        spoil(grads, value)
    with collectives.record() as events:
        assert not optim.all_finite(grads)
        norms = [optim.global_norm(grads, ord).item() for ord in ORDERS]
    assert all(math.isnan(n) if math.isnan(value) else n == math.inf for n in norms), norms
    assert len(events) == 1 + len(ORDERS)
    for donate in (False, True):
        tx = optim.apply_if_finite(optim.adamw(0.1))
        params = optree.tree_map(torch.ones_like, grads)
        before = optree.tree_map(torch.clone, params)
        new, state = optim.make_step(tx, donate=donate)(params, optree.tree_map(torch.clone, grads), tx.init(params))
        assert optree.tree_all(optree.tree_map(torch.equal, new, before))
        assert state.total_notfinite.item() == 1
        assert state.inner_state[0].count.item() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bad_rank", [0, 1, 2])
@pytest.mark.parametrize("kind", ["replicated", "hybrid", "plain"])
def test_one_rank_decides_for_all(run: Any, kind: str, bad_rank: int, value: float) -> None:
    run(3, one_rank_decides, kind, bad_rank, value)


def momentum() -> list[float]:
    """In-place sgd on ranks with and without elements, behind a clip."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    start = {"w": torch.linspace(-1, 1, 35).view(7, 5), "s": torch.tensor(0.5)}
    results = []
    for donate in (False, True):
        p = shard(start, mesh, P(ragged="fsdp"))
        tx = optim.chain(optim.clip_by_global_norm(2.0), optim.sgd(0.1, 0.9, nesterov=True))
        state, step = tx.init(p), optim.make_step(tx, donate=donate)
        for k in range(10):
            g = shard(optree.tree_map(lambda x, k=k: (x + k).cos(), start), p.plan)
            p, state = step(p, g, state)
        results.append(unshard(p))
    assert optree.tree_all(optree.tree_map(torch.equal, *results))
    return [*results[0]["w"].flatten().tolist(), results[0]["s"].item()]


def test_momentum_is_the_same_on_any_number_of_ranks(run: Any) -> None:
    start = [torch.linspace(-1, 1, 35).view(7, 5).requires_grad_(), torch.tensor(0.5, requires_grad=True)]
    first = [x.detach().clone() for x in start]
    optimizer = torch.optim.SGD(start, lr=0.1, momentum=0.9, nesterov=True)
    for k in range(10):
        for x, x0 in zip(start, first, strict=True):
            x.grad = (x0 + k).cos()
        torch.nn.utils.clip_grad_norm_(start, 2.0)
        optimizer.step()
    want = [*start[0].flatten().tolist(), start[1].item()]
    for n in (1, 2, 3):
        for got in run(n, momentum):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-5)


def apart() -> None:
    """Trees on meshes of different ranks have no norm in common."""
    from torch.distributed.device_mesh import DeviceMesh

    everyone = make_mesh((-1,), ("fsdp",), device_type="cpu")
    own = DeviceMesh("cpu", [dist.get_rank()], mesh_dim_names=("fsdp",))
    trees = {"a": shard({"w": torch.ones(4)}, everyone, P(ragged="fsdp")), "b": shard({"w": torch.ones(4)}, own, P())}
    for norm in (optim.global_norm, optim.all_finite):
        with pytest.raises(ValueError, match="different ranks"):
            norm(trees)


def test_trees_on_different_ranks_are_refused(run: Any) -> None:
    run(2, apart)
