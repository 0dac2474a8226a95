"""Optimizers on plain trees and on one-process sharded trees, against torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import optim
from optim import schedules
from ragged import P, ShardedTree, make_mesh, shard, unshard

STEPS = 12


def w(shape: tuple[int, ...], k: int) -> Tensor:
    i = torch.arange(math.prod(shape), dtype=torch.int64)
    return (((37 * i + 11 * k) % 101 - 50) / 50).float().view(shape)


def params() -> dict[str, Any]:
    return {"a": w((6, 5), 1), "b": {"c": w((7,), 2), "none": None}, "s": torch.tensor(0.5), "z": torch.zeros(0, 3)}


def grads(k: int) -> dict[str, Any]:
    return {"a": w((6, 5), k), "b": {"c": w((7,), k + 1), "none": None}, "s": w((), k), "z": torch.zeros(0, 3)}


def sharded(tree: Any) -> ShardedTree:
    return shard(tree, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"))


def plain(tree: Any) -> Any:
    return unshard(tree) if isinstance(tree, ShardedTree) else tree


def close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))


def no_decay(path: str, leaf: Any) -> bool:
    return len(leaf.shape) >= 2


def rate(count: Any) -> Any:
    return schedules.warmup_cosine_decay_schedule(0.02, 0.1, 3, 10)(count)


Make = Callable[[list[Tensor]], torch.optim.Optimizer]
CASES: dict[str, tuple[optim.GradientTransformation, Make, bool]] = {
    "adamw": (optim.adamw(0.1, weight_decay=0.2), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2), False),
    "adamw betas": (
        optim.adamw(0.03, 0.8, 0.95, 1e-3, weight_decay=0.0),
        lambda p: torch.optim.AdamW(p, lr=0.03, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.0),
        False,
    ),
    "adamw mask": (
        optim.adamw(0.1, weight_decay=0.2, mask=no_decay),
        lambda p: torch.optim.AdamW(
            [{"params": [x for x in p if x.ndim >= 2]}, {"params": [x for x in p if x.ndim < 2], "weight_decay": 0.0}],
            lr=0.1,
            weight_decay=0.2,
        ),
        False,
    ),
    "adamw schedule": (
        optim.adamw(rate, weight_decay=0.2),
        lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.2),
        True,
    ),
    "sgd": (optim.sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1), False),
    "momentum": (optim.sgd(0.1, 0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
    "nesterov": (optim.sgd(0.1, 0.9, True), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), False),
    "sgd schedule": (optim.sgd(rate), lambda p: torch.optim.SGD(p, lr=1.0), True),
}


def reference(make: Make, scheduled: bool) -> Any:
    tree = params()
    leaves = [x.requires_grad_() for x in optree.tree_leaves(tree)]
    optimizer = make(leaves)
    for k in range(STEPS):
        for x, g in zip(leaves, optree.tree_leaves(grads(k)), strict=True):
            x.grad = g
        if scheduled:
            for group in optimizer.param_groups:
                group["lr"] = rate(k)
        optimizer.step()
    return optree.tree_map(lambda x: x.detach(), tree)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", [plain, sharded])
@pytest.mark.parametrize("donate", [False, True])
def test_equal_to_torch(name: str, place: Any, donate: bool) -> None:
    tx, make, scheduled = CASES[name]
    p = place(params())
    state, step = tx.init(p), optim.make_step(tx, donate=donate)
    for k in range(STEPS):
        p, state = step(p, place(grads(k)), state)
    close(plain(p), reference(make, scheduled))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", [plain, sharded])
def test_update_is_pure_and_keeps_state_types(name: str, place: Any) -> None:
    tx = CASES[name][0]
    p, g = place(params()), place(grads(1))
    state = tx.init(p)
    before = optree.tree_map(torch.clone, (p, g, state))
    updates, after = tx.update(g, state, p)
    assert equal((p, g, state), before)
    assert optree.tree_structure(after) == optree.tree_structure(state)
    for x, y in zip(optree.tree_leaves(after), optree.tree_leaves(state), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
    new = optim.apply_updates(p, updates)
    assert equal(p, before[0])
    assert not equal(new, p)
    kept = optim.make_step(tx, donate=False)(p, g, state)
    assert equal((p, g, state), before)
    assert equal(kept[0], new)


@pytest.mark.parametrize("name", CASES)
def test_donation_reuses_storage_and_ends_the_trees(name: str) -> None:
    tx = CASES[name][0]
    p, g = sharded(params()), sharded(grads(1))
    state = tx.init(p)
    where = [t.data_ptr() for t in p.tensors]
    part = p["a"]
    new, _ = optim.make_step(tx)(p, g, state)
    assert [t.data_ptr() for t in new.tensors] == where
    for dead in (p, g, part):
        with pytest.raises(ValueError, match="donated to an optimizer step"):
            _ = dead.tensors
    with pytest.raises(ValueError, match="donated"):
        optim.make_step(tx)(p, sharded(grads(2)), state)
    new["a"].leaf("a")


def test_donated_twice_in_one_call() -> None:
    p = sharded(params())
    tx = optim.adamw(0.1)
    with pytest.raises(ValueError, match="two places"):
        optim.make_step(tx)(p, p, tx.init(p))


def test_moments_are_fp32_for_bf16_parameters() -> None:
    p = optree.tree_map(lambda x: x.bfloat16(), params())
    for mu_dtype in (None, torch.bfloat16):
        tx = optim.adamw(0.1, mu_dtype=mu_dtype)
        state = tx.init(p)
        assert {x.dtype for x in optree.tree_leaves(state[0].mu)} == {mu_dtype or torch.float32}
        assert {x.dtype for x in optree.tree_leaves(state[0].nu)} == {torch.float32}
        new, state = optim.make_step(tx)(optree.tree_map(torch.clone, p), p, state)
        assert {x.dtype for x in optree.tree_leaves(new)} == {torch.bfloat16}
        assert {x.dtype for x in optree.tree_leaves(state[0].nu)} == {torch.float32}
    # areal-project/AReaL#1292: 300 times the same small gradient, against fp64
    tx = optim.adamw(0.0)
    p, g = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 2.0**-8, dtype=torch.bfloat16)
    state, nu = tx.init(p), 0.0
    for _ in range(300):
        _, state = tx.update(g, state, p)
        nu = 0.999 * nu + 0.001 * 2.0**-16
    assert state[0].nu.item() == pytest.approx(nu, rel=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_first_step_is_the_first(decay: float) -> None:
    """NVIDIA/Megatron-LM#5976: state made in advance must not count as a step, nor decay anything."""
    tx = optim.adamw(1e-3, weight_decay=decay)
    p = torch.ones(3)
    state = tx.init(p)
    assert torch.equal(p, torch.ones(3))
    p, _ = optim.make_step(tx)(p, torch.full((3,), 0.5), state)
    torch.testing.assert_close(p, torch.full((3,), 0.999 if decay == 0 else 0.9989), rtol=1e-6, atol=0)


@pytest.mark.parametrize("place", [plain, sharded])
def test_integer_and_complex_leaves_are_refused_by_path(place: Any) -> None:
    bad = place({"a": torch.ones(2), "deep": {"n": torch.arange(3)}})
    for tx in (optim.adamw(0.1), optim.sgd(0.1), optim.sgd(0.1, 0.9)):
        with pytest.raises(ValueError, match=r"deep\.n.*int64"):
            tx.init(bad)
    with pytest.raises(ValueError, match="complex"):
        optim.adamw(0.1).init(place({"c": torch.ones(2, dtype=torch.complex64)}))
    optim.sgd(0.1).init(place({"c": torch.ones(2, dtype=torch.complex64)}))


@pytest.mark.parametrize("place", [plain, sharded])
def test_norms(place: Any) -> None:
    tree = place({"a": torch.tensor([1.0, 2, 3]), "b": torch.tensor([-6.0, -5, -4, -3]), "z": torch.zeros(0)})
    for ord, want in ((1, 24.0), (2, 10.0), (3, 7.763936), (math.inf, 6.0)):
        assert optim.global_norm(tree, ord).item() == pytest.approx(want, rel=1e-6)
    assert optim.global_norm({}).item() == 0
    for bad in (math.nan, math.inf):
        got = optim.global_norm(place({"a": torch.tensor([1.0, bad])}))
        assert not got.isfinite()
    assert optim.global_norm(place({"a": torch.full((10000,), 300.0).half()})).item() == pytest.approx(30000)
    with pytest.raises(ValueError, match="ord"):
        optim.global_norm(tree, 0.5)


@pytest.mark.parametrize("place", [plain, sharded])
@pytest.mark.parametrize("donate", [False, True])
def test_clipping(place: Any, donate: bool) -> None:
    def clip(tree: Any, limit: float) -> Any:
        tx = optim.chain(optim.clip_by_global_norm(limit), optim.sgd(1.0))
        p = place(optree.tree_map(torch.zeros_like, tree))
        new, _ = optim.make_step(tx, donate=donate)(p, place(tree), tx.init(p))
        return optree.tree_map(lambda x: -x, plain(new))

    zero = {"a": torch.zeros(6, 5)}
    assert equal(clip(zero, 1.0), zero)
    small = {"a": w((6, 5), 2) * (0.5 / 3.192491)}
    assert equal(clip(small, 1.0), small)
    ten = {"a": w((6, 5), 2) * (10 / 3.192491)}
    assert equal(clip(ten, 0.0), zero)
    close(clip({"a": w((6, 5), 2)}, 1.0), {"a": w((6, 5), 2) * 0.313235}, 2e-6)


@pytest.mark.parametrize("place", [plain, sharded])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_with_bad_gradients_is_skipped_whole(place: Any, donate: bool, bad: float) -> None:
    tx = optim.apply_if_finite(optim.adamw(0.1))
    step = optim.make_step(tx, donate=donate)
    p = place(params())
    state = tx.init(p)
    p, state = step(p, place(grads(1)), state)
    before = optree.tree_map(torch.clone, (p, state.inner_state))
    wrong = grads(2)
    wrong["b"]["c"][3] = bad
    p, state = step(p, place(wrong), state)
    assert equal((p, state.inner_state), before)
    assert state.total_notfinite.item() == 1
    p, state = step(p, place(grads(2)), state)
    want = place(params())
    inner = optim.adamw(0.1)
    want_state = inner.init(want)
    for k in (1, 2):
        want, want_state = optim.make_step(inner, donate=donate)(want, place(grads(k)), want_state)
    assert equal(p, want)


def test_schedules_on_numbers_and_tensors() -> None:
    made = [
        schedules.constant_schedule(0.3),
        schedules.linear_schedule(0.1, 0.7, 5, 2),
        schedules.cosine_decay_schedule(0.8, 9, 0.1),
        schedules.warmup_cosine_decay_schedule(0.1, 1.0, 4, 12, 0.2),
        schedules.warmup_cosine_decay_schedule(0.1, 1.0, 0, 12, 0.2),
    ]
    for schedule in made:
        for count in range(20):
            got = schedule(torch.tensor(count, dtype=torch.int32))
            assert float(got) == pytest.approx(schedule(count), abs=1e-6)
    last = made[3]
    assert [last(c) for c in (0, 2, 4, 12, 50)] == pytest.approx([0.1, 0.55, 1.0, 0.2, 0.2])
    assert last(8) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="decay_steps"):
        schedules.warmup_cosine_decay_schedule(0, 1, 10, 10)


def test_chain_of_another_length() -> None:
    tx = optim.chain(optim.scale(2.0), optim.scale(3.0))
    with pytest.raises(ValueError, match="2 transformations got a state of 1"):
        tx.update(torch.ones(1), tx.init(torch.ones(1))[:1], None)
    assert tx.update(torch.ones(1), tx.init(torch.ones(1)), None)[0].item() == 6


def test_chain_joins_blocks() -> None:
    def asking(block: Any, align: int) -> optim.GradientTransformation:
        return optim.identity()._replace(blocks=lambda path, shape, dtype: (block, align))

    both = optim.chain(asking(6, 64), asking((2, None), 256), optim.identity())
    assert both.blocks is not None
    assert both.blocks("w", (8, 5), torch.float32) == (30, 256)
    assert optim.chain(optim.identity()).blocks is None


@pytest.mark.parametrize("loss", [lambda w: 3 * w.sum(), lambda w: (w.t() * torch.arange(6.0).view(3, 2)).sum()])
@pytest.mark.parametrize("turned", [False, True])
def test_adamw_reads_gradients_of_any_strides(loss: Any, turned: bool) -> None:
    w = torch.randn(3, 2).t() if turned else torch.randn(2, 3)
    x = w.clone().requires_grad_()
    grad = torch.autograd.grad(loss(x), x)[0]
    tx, start = optim.adamw(0.1), w.clone(memory_format=torch.contiguous_format)
    want, _ = optim.make_step(tx, donate=False)(start, grad.contiguous(), tx.init(start))
    got, _ = optim.make_step(tx)(w, grad, tx.init(w))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
