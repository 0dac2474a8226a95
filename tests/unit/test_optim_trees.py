"""Optimizers on trees that don't match, mixed trees, other dtypes, and what donation may overwrite."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import optim
from optim import schedules
from ragged import P, ShardedTree, make_mesh, partition, shard, unshard


def sharded(tree: Any) -> ShardedTree:
    return shard(tree, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"))


def whole(tree: Any) -> Any:
    return optree.tree_map(
        lambda x: unshard(x) if isinstance(x, ShardedTree) else x, tree, is_leaf=lambda x: isinstance(x, ShardedTree)
    )


def pointers(tree: Any) -> list[int]:
    return [x.data_ptr() for x in optree.tree_leaves(tree) if x.ndim]


def ramp(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).view(shape)


TXS = {
    "adamw": optim.adamw(0.1, weight_decay=0.2),
    "adamw mask": optim.adamw(0.1, weight_decay=0.2, mask=lambda path, leaf: len(leaf.shape) >= 2),
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, 0.9),
    "nesterov": optim.sgd(schedules.linear_schedule(0.1, 0.01, 5), 0.9, True),
    "clipped": optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, 0.9)),
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", TXS)
@pytest.mark.parametrize("place", [dict, sharded])
def test_gradients_of_another_tree_are_refused(name: str, donate: bool, place: Any) -> None:
    tx = TXS[name]
    p = place({"a": torch.ones(3, 1), "b": torch.ones(3)})
    other = place({"a": torch.ones(3, 1), "zzz": torch.ones(3)})
    with pytest.raises(ValueError, match=r"grads.*'b'"):
        optim.make_step(tx, donate=donate)(p, other, tx.init(p))
    assert all(bool((x == 1).all()) for x in optree.tree_leaves(whole(p)))  # neither changed nor dead


@pytest.mark.parametrize("donate", [False, True])
def test_gradients_of_another_shape_are_refused(donate: bool) -> None:
    tx = optim.adamw(0.1)
    with pytest.raises(ValueError, match=r"grads.*'a'.*\(1,\).*\(5,\)"):
        optim.make_step(tx, donate=donate)({"a": torch.ones(5)}, {"a": torch.ones(1)}, tx.init({"a": torch.ones(5)}))


def test_a_state_of_another_tree_is_refused() -> None:
    tx = optim.adamw(0.1)
    state = tx.init(sharded({"a": torch.ones(3), "zzz": torch.ones(3)}))
    p = sharded({"a": torch.ones(3), "b": torch.ones(3)})
    g = sharded({"a": torch.ones(3), "b": torch.ones(3)})
    with pytest.raises(ValueError, match=r"mu.*'b'"):
        optim.make_step(tx)(p, g, state)


@pytest.mark.parametrize("name", TXS)
def test_one_tree_in_two_places_is_refused(name: str) -> None:
    p, tx = sharded({"a": torch.ones(3, 1)}), TXS[name]
    with pytest.raises(ValueError, match="two places"):
        optim.make_step(tx)(p, p, tx.init(p))
    assert p.tensors


@pytest.mark.parametrize("donate", [False, True])
def test_a_mask_sees_the_leaves_of_sharded_trees_inside_a_tree(donate: bool) -> None:
    def tree() -> Any:
        return {"x": sharded({"w": torch.ones(2, 2), "b": torch.ones(2)}), "y": torch.ones(2, 2), "z": torch.ones(2)}

    seen: dict[str, tuple[int, ...]] = {}

    def mask(path: str, leaf: Any) -> bool:
        seen[path] = tuple(leaf.shape)
        return len(leaf.shape) >= 2

    tx = optim.adamw(0.1, weight_decay=1.0, mask=mask)
    p = tree()
    new, _ = optim.make_step(tx, donate=donate)(p, optree.tree_map(torch.zeros_like, p), tx.init(p))
    got = whole(new)
    assert seen == {"x.b": (2,), "x.w": (2, 2), "y": (2, 2), "z": (2,)}
    for leaf, want in ((got["x"]["w"], 0.9), (got["y"], 0.9), (got["x"]["b"], 1.0), (got["z"], 1.0)):
        torch.testing.assert_close(leaf, torch.full_like(leaf, want))


@pytest.mark.parametrize("donate", [False, True])
def test_a_mask_tree_on_a_mixed_tree(donate: bool) -> None:
    p = {"x": sharded({"w": torch.ones(2), "b": torch.ones(2)}), "y": torch.ones(2)}
    tx = optim.adamw(0.1, weight_decay=1.0, mask={"x": {"w": True, "b": False}, "y": False})
    got = whole(optim.make_step(tx, donate=donate)(p, optree.tree_map(torch.zeros_like, p), tx.init(p))[0])
    assert [x[0].item() for x in (got["x"]["w"], got["x"]["b"], got["y"])] == pytest.approx([0.9, 1, 1])


@pytest.mark.parametrize("name", TXS)
@pytest.mark.parametrize("part", [False, True])
def test_donated_steps_reuse_parameters_and_state(name: str, part: bool) -> None:
    tx = TXS[name]

    def place(scale: float) -> ShardedTree:
        tree = sharded({"a": ramp(6, 5) * scale, "b": ramp(7) * scale})
        return partition(tree, lambda path, leaf: path == "b")[0] if part else tree

    results = []
    for donate in (False, True):
        p, step = place(1.0), optim.make_step(tx, donate=donate)
        state = tx.init(p)
        at = pointers((p, state))
        for k in range(10):
            p, state = step(p, place(0.3 * k - 1), state)
        assert (pointers((p, state)) == at) is donate
        results.append([t.clone() for t in p.tensors])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_scratch_gradients_are_never_a_members_state() -> None:
    """`trace` returns its state as the updates; the last member may overwrite updates, not the state."""
    tx = optim.chain(optim.trace(0.9), optim.sgd(0.5))
    results = []
    for donate in (False, True):
        p = sharded({"a": ramp(4)})
        state, step = tx.init(p), optim.make_step(tx, donate=donate)
        for _ in range(3):
            p, state = step(p, sharded({"a": torch.ones(4)}), state)
        assert whole(state[0].trace)["a"].tolist() == pytest.approx([2.71] * 4)  # 1 + 0.9 * (1 + 0.9)
        results.append(whole(p)["a"])
    assert torch.equal(*results)


def test_bf16_gradients_enter_fp32_moments_unrounded() -> None:
    g = torch.linspace(0.5, 1, 1000).bfloat16()
    tx = optim.scale_by_adam()
    _, state = tx.update(g, tx.init(g), g)
    torch.testing.assert_close(state.mu, 0.1 * g.float(), rtol=1e-6, atol=0)
    tx = optim.add_decayed_weights(0.1)
    updates, _ = tx.update(torch.zeros(1000), tx.init(g), g)
    torch.testing.assert_close(updates, 0.1 * g.float(), rtol=1e-6, atol=0)


def test_bf16_parameters_step_in_fp32_and_reuse_their_moments() -> None:
    """Against torch's AdamW in fp32, with the parameters rounded after every step."""
    tx = optim.adamw(0.01, weight_decay=0.1)
    p = ramp(64).bfloat16()
    reference = p.float().requires_grad_()
    other = torch.optim.AdamW([reference], lr=0.01, weight_decay=0.1)
    state, step = tx.init(p), optim.make_step(tx)
    at = pointers((p, state))
    for k in range(10):
        g = (ramp(64) + 0.1 * k).cos().bfloat16()
        reference.grad = g.float()
        other.step()
        with torch.no_grad():
            reference.copy_(reference.bfloat16())
        p, state = step(p, g, state)
        assert torch.equal(p.float(), reference)
    assert pointers((p, state)) == at
    torch.testing.assert_close(state[0].mu, other.state[reference]["exp_avg"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("value", [1e20, math.inf, math.nan])
def test_clipping_by_a_norm_that_is_not_finite_shows(value: float) -> None:
    """Finite gradients whose squares overflow must not turn into a step of zeros."""
    tx = optim.clip_by_global_norm(1.0)
    g = torch.tensor([1.0, value, value])
    assert not tx.update(g, tx.init(g), g)[0].isfinite().any()


@pytest.mark.parametrize("bad", [{"eps": 0.0}, {"eps": -1e-8}, {"b1": 1.0}, {"b2": 1.0}, {"b1": -0.1}])
def test_adam_refuses_numbers_that_give_nan(bad: dict[str, float]) -> None:
    for make in (lambda: optim.scale_by_adam(**bad), lambda: optim.adamw(0.1, **bad)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 4095, 4097, 5_000_003])
def test_norms_of_long_vectors_are_accurate(dtype: torch.dtype, size: int) -> None:
    x = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = x.double().abs()
    for ord, want in ((1, wide.sum()), (2, wide.square().sum().sqrt()), (3, wide.pow(3).sum() ** (1 / 3))):
        got = optim.global_norm(x, ord)
        assert got.dtype == torch.float32
        assert got.item() == pytest.approx(want.item(), rel=1e-6)


def test_schedules_keep_the_digits_of_small_rates() -> None:
    for rate in (1e-3, 1e-9, 1e-14):
        want = rate * 0.5 * (1 + math.cos(math.pi * 3 / 7))
        assert schedules.cosine_decay_schedule(rate, 7)(3) == pytest.approx(want, rel=1e-12, abs=0)


def test_a_leaf_that_is_no_tensor_is_refused_by_path() -> None:
    for tx in (optim.sgd(0.1), optim.adamw(0.1)):
        with pytest.raises(ValueError, match=r"'deep\.rate' is a float"):
            tx.init({"deep": {"rate": 0.1}})
