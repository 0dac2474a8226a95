"""Optimizers on several ranks: norms, clipping, skipping, and the same result as on one."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

import optim
from ragged import P, make_mesh, plan, reduce_scatter, shard, unshard


def mesh(sizes: tuple[int, ...] = (-1,), names: tuple[str, ...] = ("fsdp",)) -> Any:
    return make_mesh(sizes, names, device_type="cpu")


def one_row_each() -> None:
    """pytorch/pytorch#170862: the norm of the whole, not of the local shard."""
    grads = shard({"g": torch.ones(4, 9)}, plan({"g": ((4, 9), torch.float32)}, mesh(), P(ragged="fsdp"), align=1))
    assert grads.tensors[0].numel() == 9
    assert optim.global_norm(grads).item() == 6.0
    tx = optim.clip_by_global_norm(1.0)
    clipped, _ = tx.update(grads, tx.init(grads), None)
    torch.testing.assert_close(unshard(clipped)["g"], torch.full((4, 9), 1 / 6))


def test_the_norm_is_global(run: Any) -> None:
    run(4, one_row_each)


def pieces() -> None:
    """torchrec#3199: p-norms, with an empty piece in the middle."""
    values = torch.tensor([1.0, 2, 3, -6, -5, -4, -3])
    tree = shard({"x": values}, mesh(), P(ragged="fsdp", shares=(3, 0, 4)))
    for ord, want in ((1, 24.0), (2, 10.0), (3, 7.763936), (math.inf, 6.0)):
        assert optim.global_norm(tree, ord).item() == pytest.approx(want, rel=1e-6)
    bad = values.clone()
    bad[5] = math.nan
    for ord in (1, 2, 3, math.inf):
        assert optim.global_norm(shard({"x": bad}, mesh(), P(ragged="fsdp", shares=(3, 0, 4))), ord).isnan()


def test_norms_of_any_order(run: Any) -> None:
    run(3, pieces)


def counted_once(sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    """NVIDIA-NeMo RL#3788: replicated leaves are not counted once per rank."""
    tree = {"w": torch.full((9, 4), 0.5), "b": torch.full((16,), 1.0)}
    grads = shard(tree, mesh(sizes, names), {"w": P(ragged="fsdp"), "b": None})
    assert optim.global_norm(grads).item() == pytest.approx(5.0)
    assert optim.global_norm(grads["b"]).item() == pytest.approx(4.0)
    assert optim.global_norm({"x": grads["w"], "y": torch.full((16,), 1.0)}).item() == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("sizes", "names"), [((4,), ("fsdp",)), ((2, 2), ("replica", "fsdp")), ((2, 2), ("fsdp", "tp"))]
)
def test_replicated_leaves_count_once(run: Any, sizes: Any, names: Any) -> None:
    run(4, counted_once, sizes, names)


def skipping(bad_rank: int, value: float) -> None:
    """WeatherGenerator#2718: one rank's NaN makes all ranks skip, counters included."""
    m = mesh()
    params = shard({"w": torch.ones(7, 3), "b": torch.ones(2)}, m, P(ragged="fsdp"))
    for donate in (False, True):
        tx = optim.apply_if_finite(optim.adamw(0.1))
        step = optim.make_step(tx, donate=donate)
        p = optree.tree_map(torch.clone, params)
        state = tx.init(p)
        good = reduce_scatter({"w": torch.ones(7, 3), "b": torch.ones(2)}, p.plan)
        p, state = step(p, good, state)
        want, count = unshard(p), state.inner_state[0].count.item()
        bad = reduce_scatter({"w": torch.ones(7, 3), "b": torch.ones(2)}, p.plan)
        if dist.get_rank() == bad_rank:
            for t in bad.tensors:
                t[:1] = value
        p, state = step(p, bad, state)
        assert optree.tree_all(optree.tree_map(torch.equal, unshard(p), want))
        assert state.inner_state[0].count.item() == count == 1
        assert state.total_notfinite.item() == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_all_ranks_skip_together(run: Any, bad_rank: int, value: float) -> None:
    run(3, skipping, bad_rank, value)


def trained(order: str) -> Any:
    """rank lists that end with an empty shard (TransformerEngine#3207), in both orders."""
    shapes = {"a": torch.linspace(-1, 1, 32).view(8, 4), "b": torch.linspace(1, 2, 4).view(1, 4)}
    if order == "ba":
        shapes = {"z": shapes["a"], "b": shapes["b"]}
    p = shard(shapes, plan(shapes, mesh(), P(ragged="fsdp"), align=1))
    tx = optim.chain(
        optim.clip_by_global_norm(3.0), optim.adamw(0.1, mask=lambda path, leaf: path != "b", weight_decay=0.3)
    )
    state, step = tx.init(p), optim.make_step(tx)
    for k in range(3):
        g = reduce_scatter(optree.tree_map(lambda x, k=k: x.cos() + k, shapes), p.plan)
        p, state = step(p, g, state)
    return optree.tree_map(lambda x: x.tolist(), unshard(p))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_same_result_on_any_number_of_ranks(run: Any, order: str) -> None:
    (want,) = run(1, trained, order)
    for n in (2, 3, 4):
        for got in run(n, trained, order):
            for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
                assert a == pytest.approx(b, rel=1e-6, abs=1e-6)


def parts_trained_apart() -> None:
    """Donating a part ends that part and the whole, not its siblings."""
    tree = shard({"a": torch.ones(6, 2), "b": torch.ones(6)}, mesh(), P(ragged="fsdp"))
    one, two = tree["a"], tree["b"]
    tx = optim.adamw(0.1, weight_decay=0.0)
    new, _ = optim.make_step(tx)(one, optree.tree_map(torch.ones_like, one), tx.init(one))
    for dead in (one, tree):
        with pytest.raises(ValueError, match="donated"):
            _ = dead.tensors
    assert unshard(two).tolist() == [1.0] * 6
    assert unshard(new)[0, 0].item() == pytest.approx(0.9)


def test_parts_are_donated_apart(run: Any) -> None:
    run(2, parts_trained_apart)
