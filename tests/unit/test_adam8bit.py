"""adamw8bit in one process: codes, accuracy beside fp32 AdamW, blocks, refusals."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import optim
from optim.codes import decode_root, decode_signed, encode_root, encode_signed
from ragged import P, ShardedTree, make_mesh, plan, shard, unshard

BLOCKS: list[Any] = [256, (32, 32)]


def w(shape: tuple[int, ...], k: int) -> Tensor:
    i = torch.arange(math.prod(shape), dtype=torch.int64)
    return (((37 * i + 11 * k) % 101 - 50) / 50).float().view(shape)


def sharded(tree: Any, tx: Any) -> ShardedTree:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    return shard(tree, plan(tree, mesh, P(ragged="fsdp"), optimizer=tx))


def equal(a: Any, b: Any) -> bool:
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def encoded(signed: bool, x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales, x = torch.empty(x.shape, dtype=torch.uint8), torch.empty(1, 1), x.clone()
    if signed:
        encode_signed(x, (1,), codes, scales, torch.empty_like(x), torch.empty_like(x))
    else:
        encode_root(x, (1,), codes, scales, torch.empty_like(x))
    return codes, scales


def decoded(signed: bool, codes: Tensor, scales: Tensor) -> Tensor:
    out = torch.empty(codes.shape)
    return decode_signed(codes, scales, out, torch.empty_like(out)) if signed else decode_root(codes, scales, out)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("scale", [1.0, 3e-30, 7e30])
def test_every_code_comes_back(signed: bool, scale: float) -> None:
    codes = torch.arange(256).to(torch.uint8)[None]
    if signed:
        codes[0, 128] = 127  # -128 is no code
    values = decoded(signed, codes, torch.full((1, 1), scale))
    assert values[0, 0] == 0
    back, scales = encoded(signed, values)
    assert torch.equal(back, codes)
    assert scales.item() == pytest.approx(scale)


def test_codes_rise_and_small_divisors_stay() -> None:
    x = torch.linspace(-1, 1, 20001)[None]
    codes, scales = encoded(True, x)
    assert (decoded(True, codes, scales).diff() >= 0).all()
    assert torch.equal(codes.view(torch.int8), -encoded(True, -x)[0].view(torch.int8))
    assert (decoded(True, codes, scales) - x).abs().max() < 0.009
    assert encoded(False, torch.tensor([[1.0, 1e-12, 1e-30, 0.0]]))[0].tolist() == [[255, 1, 1, 0]]


def spread(sigma: float, block: Any, steps: int = 20) -> float:
    """Relative error of the update against fp32, gradient sizes inside a block spread lognormally."""
    draw = torch.Generator().manual_seed(0)
    shape = (64, 256)
    sizes = torch.exp(sigma * torch.randn(shape, generator=draw))
    p = torch.zeros(shape)
    exact, ours = optim.adamw(1e-3, weight_decay=0.0), optim.adamw8bit(1e-3, weight_decay=0.0, block=block)
    a, b = exact.init(p), ours.init(p)
    for _ in range(steps):
        g = sizes * torch.randn(shape, generator=draw)
        ua, a = exact.update(g, a, p)
        ub, b = ours.update(g, b, p)
    return float((ua - ub).norm() / ua.norm())


@pytest.mark.parametrize(("sigma", "most"), [(0.0, 0.017), (0.5, 0.027), (2.0, 0.5)])
def test_error_beside_fp32(sigma: float, most: float) -> None:
    assert spread(sigma, 256) <= most


def params() -> dict[str, Any]:
    return {
        "a": w((65, 40), 1),
        "b": {"c": w((700,), 2), "none": None},
        "e": w((3, 40, 33), 5),
        "s": torch.tensor(0.5),
        "z": torch.zeros(0, 3),
        "small": w((9,), 4),
    }


def grads(k: int) -> Any:
    return optree.tree_map(lambda x: (x * 3 + k).cos() * (k % 3 + 1), params())


@pytest.mark.parametrize("block", [*BLOCKS, 16])
@pytest.mark.parametrize("place", ["plain", "sharded", "mixed"])
def test_step_has_the_bits_of_update(block: Any, place: str) -> None:
    tx = optim.adamw8bit(
        lambda count: 0.1 / (count + 1), weight_decay=0.1, mask=lambda path, x: x.ndim > 1, block=block, min_size=20
    )

    def put(tree: Any) -> Any:
        if place == "plain":
            return optree.tree_map(torch.clone, tree)
        return sharded(tree, tx) if place == "sharded" else {"x": sharded(tree, tx), "y": tree["a"].clone()}

    p, q = put(params()), put(params())
    s, r = tx.init(p), tx.init(q)
    for k in range(3):
        before = optree.tree_map(torch.clone, (p, s))
        updates, after = tx.update(put(grads(k)), s, p)
        assert equal((p, s), before)
        assert optree.tree_structure(after) == optree.tree_structure(s)
        for x, y in zip(optree.tree_leaves(after), optree.tree_leaves(s), strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
        p, s = optim.apply_updates(p, updates), after
        where = [x.data_ptr() for x in optree.tree_leaves(q)]
        q, r = optim.make_step(tx)(q, put(grads(k)), r)
        assert [x.data_ptr() for x in optree.tree_leaves(q)] == where
        assert equal((p, s), (q, r))


@pytest.mark.parametrize("block", BLOCKS)
def test_plain_and_sharded_trees_agree(block: Any) -> None:
    tx = optim.adamw8bit(0.1, block=block, min_size=20)
    p, q = params(), sharded(params(), tx)
    s, r = tx.init(p), tx.init(q)
    for k in range(3):
        p, s = optim.make_step(tx)(p, grads(k), s)
        q, r = optim.make_step(tx)(q, sharded(grads(k), tx), r)
        assert equal(p, unshard(q))
        for x, y in zip((s[0].mu, s[0].nu), (r[0].mu, r[0].nu), strict=True):
            assert equal(x.codes, unshard(y.codes))
            assert equal(x.small, unshard(y.small))
            assert equal(x.scales, unshard(y.scales))


def test_many_steps_close_to_fp32() -> None:
    exact, ours = optim.adamw(0.01), optim.adamw8bit(0.01, min_size=20)
    p, q = params(), params()
    s, r = exact.init(p), ours.init(q)
    for k in range(10):
        p, s = optim.make_step(exact)(p, grads(k), s)
        q, r = optim.make_step(ours)(q, grads(k), r)
    flat, near, start = (torch.cat([x.flatten() for x in optree.tree_leaves(tree)]) for tree in (p, q, params()))
    assert (near - flat).norm() < 0.03 * (flat - start).norm()
    torch.testing.assert_close(q["small"], p["small"])


def test_short_blocks_have_scales_of_their_own() -> None:
    for shape, block, count in (((13, 10), 16, 9), ((9, 5), 128, 1)):
        tx = optim.adamw8bit(0.1, block=block, min_size=0)
        p = sharded({"x": w(shape, 1)}, tx)
        _, s = optim.make_step(tx)(p, sharded({"x": w(shape, 2)}, tx), tx.init(p))
        last = (0.1 * w(shape, 2)).flatten()[(count - 1) * block :].abs().max()
        scales = unshard(s[0].mu.scales)["x"]
        assert scales.shape == (count,)
        assert scales[-1].item() == pytest.approx(last.item(), rel=1e-6)


def test_outliers_stay_in_their_block() -> None:
    states = []
    for value in (None, 1e4, math.inf, math.nan):
        tx = optim.adamw8bit(0.1, block=(32, 32))
        p, g = w((64, 64), 1), w((64, 64), 1)
        if value is not None:
            g[0, 0] = value
        s = tx.init(p)
        for _ in range(2):
            p, s = optim.make_step(tx)(p, g.clone(), s)
        states.append((p, s[0]))
        if value is not None and not math.isfinite(value):
            assert not p[0, 0].isfinite()
            assert not s[0].nu.scales[0, 0].isfinite()
    (p0, s0), *others = states
    outside = torch.ones(64, 64, dtype=torch.bool)
    outside[:32, :32] = False
    for p, s in others:
        assert torch.equal(p[outside], p0[outside])
        for x, y in ((s.mu, s0.mu), (s.nu, s0.nu)):
            assert torch.equal(x.codes[outside], y.codes[outside])
            assert torch.equal(x.scales.flatten()[1:], y.scales.flatten()[1:])


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-39])
@pytest.mark.parametrize("block", BLOCKS)
def test_zeros_and_tiny_values(block: Any, value: float) -> None:
    tx = optim.adamw8bit(0.1, weight_decay=0.0, block=block, min_size=0)
    p, g = {"x": w((64, 32), 1)}, {"x": w((64, 32), 1)}
    g["x"][:32] = value
    q, s = sharded(p, tx), tx.init(sharded(p, tx))
    for _ in range(3):
        q, s = optim.make_step(tx)(q, sharded(g, tx), s)
    new = unshard(q)["x"]
    assert new.isfinite().all()
    assert not torch.equal(new[32:], p["x"][32:])
    if value == 0:
        assert torch.equal(new[:32], p["x"][:32])
        assert not unshard(s[0].mu.codes)["x"][:32].any()
        assert not unshard(s[0].nu.codes)["x"][:32].any()
    assert all(x.isfinite().all() for x in optree.tree_leaves(s))


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_padding_stays_zero(value: float) -> None:
    tx = optim.adamw8bit(0.1, min_size=20)
    tree = {"a": torch.ones(70), "b": torch.ones(30), "c": torch.ones(3)}
    p = sharded(tree, tx)
    state = tx.init(p)
    g = sharded(optree.tree_map(lambda x: x * value, tree), tx)
    updates, _ = tx.update(g, state, p)
    p, state = optim.make_step(tx)(p, g, state)
    for t in (p, updates, *state[0].mu, *state[0].nu):
        for piece, x in zip(t.selection.pieces, t.tensors, strict=True):
            for a, b in piece.bucket.local_gaps(0, piece.start, piece.stop):
                assert not x[a:b].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_of_parameters(dtype: torch.dtype) -> None:
    tx = optim.adamw8bit(0.1, min_size=20)
    p = {"a": w((40, 40), 1).to(dtype), "b": w((5,), 1).to(dtype)}
    updates, s = tx.update(p, tx.init(p), p)
    assert {x.dtype for x in optree.tree_leaves(updates)} == {torch.float32}
    want = optim.apply_updates(p, updates)
    assert want["a"].dtype == dtype
    got, _ = optim.make_step(tx)(p, optree.tree_map(torch.clone, p), tx.init(p))
    assert equal(got, want)
    assert s[0].mu.codes["a"].dtype == torch.uint8


def test_bytes_of_state() -> None:
    tx = optim.adamw8bit(0.1)
    p = sharded({"w": torch.zeros(1024, 1024), "b": torch.zeros(1024)}, tx)
    held = sum(x.numel() * x.itemsize for x in optree.tree_leaves(tx.init(p)))
    assert held / (1024 * 1024 + 1024) <= 2.05
    assert "of optimizer state" in p.plan.summary(tx)


def test_the_plan_learns_the_blocks() -> None:
    tx = optim.adamw8bit(0.1)
    assert tx.blocks is not None
    assert tx.blocks("w", (64, 64), torch.float32) == (256, 256)
    assert tx.blocks("w", (64, 63), torch.float32) is None
    tiled = optim.adamw8bit(0.1, block=(32, 16))
    assert tiled.blocks is not None
    assert tiled.blocks("w", (8, 64, 64), torch.float32) == ((1, 32, 16), 1)
    assert tiled.blocks("w", (5000,), torch.float32) == (512, 512)


def test_parts_of_trees_and_odd_strides() -> None:
    tx = optim.adamw8bit(0.1, min_size=20)
    p, g = sharded(params(), tx), sharded(grads(1), tx)
    want, _ = optim.make_step(tx, donate=False)(p, g, tx.init(p))
    for key in ("a", "b", "e"):
        got, _ = optim.make_step(tx, donate=False)(p[key], g[key], tx.init(p[key]))
        assert equal(got, want[key])
    x = {"x": w((80, 64), 1)}
    want, _ = optim.make_step(tx)(optree.tree_map(torch.clone, x), x, tx.init(x))
    strided = {"x": w((80, 64), 1).t().contiguous().t()}
    got, _ = optim.make_step(tx)(strided, x, tx.init(strided))
    assert equal(got, want)


def test_refusals() -> None:
    tx = optim.adamw8bit(0.1)
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=r"adamw8bit can't train leaf 'a\.b'"):
            tx.init({"a": {"b": torch.zeros(3, dtype=dtype)}})
    for block in (0, -1, 2.0, (32,), (32, 0), (1, 2, 3), True):
        with pytest.raises(ValueError, match="block="):
            optim.adamw8bit(0.1, block=block)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_size"):
        optim.adamw8bit(0.1, min_size=-1)
    with pytest.raises(ValueError, match="eps=0"):
        optim.adamw8bit(0.1, eps=0)
    p = {"a": torch.zeros(64, 64)}
    with pytest.raises(ValueError, match="state of 'a'"):
        optim.adamw8bit(0.1, min_size=5000).update(p, tx.init(p), p)
    with pytest.raises(ValueError, match="grads"):
        tx.update({"a": torch.zeros(64, 65)}, tx.init(p), p)
