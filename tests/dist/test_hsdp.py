"""Shards inside, replicas across: the same training as with shards only, and replicas that never part."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples import train_gpt as gpt
from fsdp import gathered, value_and_grad
from optim import adamw, global_norm, make_step
from ragged import P, collectives, init, make_mesh, plan, reduce_scatter, shard, unshard
from tests.dist.test_train_gpt import CLOSE, DECAY, EPS, RATE, SIZES, by_path, draw
from tests.pool import Pool

STEPS = {torch.float32: 10, torch.float64: 3}  # why: test_train_gpt.py
BOTH = ("replica", "fsdp")


def train(
    dtype: torch.dtype, shape: tuple[int, ...], axes: tuple[str, ...]
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses, full parameters, and this rank's own tensors of parameters and optimizer state, with its coordinates."""
    mesh = make_mesh(shape, axes, device_type="cpu")
    layout = plan(gpt.shapes(**SIZES, dtype=dtype), mesh, gpt.specs(), units=["layers.*"])
    params = init(layout, gpt.INITIALIZERS, seed=0)
    tx = adamw(RATE, eps=EPS, weight_decay=DECAY)
    state, step_fn, loss_and_grad = tx.init(params), make_step(tx), value_and_grad(gpt.loss_fn)
    losses = []
    for step in range(STEPS[dtype]):
        loss, grads = loss_and_grad(params, draw(step, (dist.get_rank(), dist.get_world_size())))
        params, state = step_fn(params, grads, state)
        losses.append(loss.item())
    return losses, by_path(unshard(params)), (layout.bound().coordinate, optree.tree_leaves((params, state)))


@pytest.fixture(scope="module")
def others(pool: Pool) -> dict[torch.dtype, list[Any]]:
    """By dtype: shards only, and one process."""
    return {d: [pool.run(n, train, d, (n,), ("fsdp",))[0] for n in (4, 1)] for d in CLOSE}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 2), BOTH), ((2, 2), BOTH[::-1]), ((4, 1), BOTH), ((1, 4), BOTH)], ids=str
)
def test_training(
    run: Any, others: dict[torch.dtype, list[Any]], dtype: torch.dtype, shape: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    """Equal to shards only and to one process; replicas bitwise equal after ten steps, states too."""
    results = run(4, train, dtype, shape, axes)
    for other in others[dtype]:
        for losses, params, _ in results:
            assert losses == pytest.approx(other[0], rel=0, abs=CLOSE[dtype])
            assert max((params[k] - x).abs().max().item() for k, x in other[1].items()) < CLOSE[dtype]
    shards: dict[int, list[Any]] = {}
    for _, _, (at, tensors) in results:
        shards.setdefault(at["fsdp"], []).append(tensors)
    assert [len(replicas) for replicas in shards.values()] == [shape[axes.index("replica")]] * len(shards)
    for first, *rest in shards.values():
        for other in rest:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def messages() -> list[tuple[str, int, int]]:
    mesh = make_mesh((2, 2), BOTH, device_type="cpu")
    params = shard({"w": torch.ones(1024, 10)}, mesh, P(ragged="fsdp"))
    f = value_and_grad(gathered(lambda p: p["w"].sum()))
    f(params)
    with collectives.record() as events:
        f(params)
    return [(e.kind, e.ranks, e.sent) for e in events if e.sent > 1000]


def test_reduced_inside_before_across(run: Any) -> None:
    """What goes from replica to replica is a shard."""
    half = 1024 * 10 * 4 // 2
    want = [("all_gather", 2, half), ("reduce_scatter", 2, half), ("all_reduce", 2, half)]
    assert run(4, messages) == [want] * 4


def contributions(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    """Rank r contributes r + 1 to everything; one leaf is cut unequally, one not at all."""
    mesh = make_mesh(shape, axes, device_type="cpu")
    ranks, mine = dist.get_world_size(), dist.get_rank() + 1
    mean = (ranks + 1) / 2
    sizes = {"a": (4,), "b": (5, 3), "c": (6,), "d": (7,)}
    m = mesh.size(axes.index("fsdp"))
    shares = tuple(range(m)) if m > 2 else (0, 1) if m == 2 else (1,)
    spec = {name: P(ragged="fsdp") for name in "ab"} | {"c": P(ragged="fsdp", shares=shares), "d": None}
    params = shard({name: torch.ones(size) for name, size in sizes.items()}, mesh, spec)
    given = {name: torch.full(size, float(mine)) for name, size in sizes.items()}
    loss = gathered(lambda p: sum(x.sum() * mine for x in p.values()))
    for op, want in (("mean", mean), ("sum", mean * ranks)):
        for got in (reduce_scatter(given, params.plan, op=op), value_and_grad(loss, op=op)(params)[1]):
            for x in unshard(got).values():
                assert x.unique().tolist() == [want]


@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 2), BOTH), ((4, 1), BOTH), ((1, 4), BOTH), ((4,), ("fsdp",))], ids=str
)
def test_every_contribution_counts_once(run: Any, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    """The mean is divided neither twice nor by a part of the ranks."""
    run(4, contributions, shape, axes)


def norms(shape: tuple[int, ...], axes: tuple[str, ...]) -> float:
    mesh = make_mesh(shape, axes, device_type="cpu")
    return global_norm(
        shard({"w": torch.full((9,), 1.0), "b": torch.full((16,), 1.0)}, mesh, {"w": P(ragged="fsdp"), "b": None})
    ).item()


@pytest.mark.parametrize(("shape", "axes"), [((4,), ("fsdp",)), ((2, 2), BOTH), ((2, 2), ("fsdp", "tp"))], ids=str)
def test_replicated_gradients_count_once_in_the_norm(run: Any, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    assert run(4, norms, shape, axes) == [5.0] * 4
