"""adamw8bit on several ranks: the same codes, scales and updates, bit by bit, on any mesh."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import optim
from ragged import P, make_mesh, plan, redistribute, shard, unshard

SHAPES: dict[str, tuple[int, ...]] = {
    "bias": (700,),
    "edge": (65, 48),
    "expert": (4, 40, 32),
    "norm": (9,),
    "one": (1, 4),
    "w": (128, 64),
}


def w(shape: tuple[int, ...], k: int) -> Tensor:
    i = torch.arange(math.prod(shape), dtype=torch.int64)
    return (((37 * i + 11 * k) % 101 - 50) / 50).float().view(shape)


def values(k: int, shapes: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    return {path: w(shape, k).to(dtype) for path, shape in (SHAPES if shapes is None else shapes).items()}


def transformation(block: Any, min_size: int = 20) -> Any:
    return optim.adamw8bit(
        lambda count: 0.1 / (count + 1),
        weight_decay=0.1,
        mask=lambda path, x: x.ndim > 1,
        block=block,
        min_size=min_size,
    )


def bits(tree: Any) -> Any:
    """Bits, in a form that ranks can send: NaNs too."""
    return optree.tree_map(lambda x: x.contiguous().view(torch.uint8).numpy().tobytes() if x.ndim else x.item(), tree)


def trained(sizes: Any, names: Any, spec: Any, block: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Updates, parameters, codes and scales after some steps, as full tensors."""
    mesh = make_mesh(sizes, names, device_type="cpu")
    tx = transformation(block)
    p = shard(values(1, dtype=dtype), plan(values(1, dtype=dtype), mesh, spec, optimizer=tx))
    state, seen = tx.init(p), []
    for k in range(2):
        g = shard(optree.tree_map(lambda x, k=k: (x * 3 + k).cos(), values(k, dtype=dtype)), p.plan)
        updates, _ = tx.update(g, state, p)
        seen.append(unshard(updates))
        p, state = optim.make_step(tx)(p, g, state)
    for tree in (p, *state[0].mu, *state[0].nu):
        for piece, x in zip(tree.selection.pieces, tree.tensors, strict=True):
            rank = tree.plan.bound().rank(piece.bucket.ragged)
            for a, b in piece.bucket.local_gaps(rank, piece.start, piece.stop):
                assert not x[a:b].any()
    return bits((seen, unshard(p), [unshard(x) for x in (*state[0].mu, *state[0].nu)]))


RAGGED = P(ragged="fsdp")
CUT = {"bias": RAGGED, "edge": RAGGED, "expert": P("tp", ragged="fsdp"), "norm": RAGGED, "one": None}
MESHES = [
    ((2,), ("fsdp",), RAGGED),
    ((3,), ("fsdp",), RAGGED),
    ((4,), ("fsdp",), RAGGED),
    ((2, 2), ("replica", "fsdp"), RAGGED),
    ((2, 2), ("fsdp", "tp"), {**CUT, "w": P("tp", ragged="fsdp")}),
    ((2, 2), ("fsdp", "tp"), {**CUT, "w": P(None, "tp", ragged="fsdp")}),
    ((2,), ("fsdp",), None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [32, (32, 32), 256])
def test_the_same_bits_on_any_mesh(run: Any, block: Any, dtype: torch.dtype) -> None:
    (want,) = run(1, trained, (1,), ("fsdp",), RAGGED, block, dtype)
    for sizes, names, spec in MESHES:
        if block == 256 and isinstance(spec, dict) and spec["w"].dims[0] == ():
            continue  # half rows of 32 elements
        for got in run(math.prod(sizes), trained, sizes, names, spec, block, dtype):
            assert got == want, (sizes, names, spec)


def refused_cuts() -> None:
    mesh = make_mesh((2,), ("fsdp",), device_type="cpu")
    tree = {"w": torch.zeros(72, 80)}
    for tx in (optim.adamw8bit(0.1), optim.adamw8bit(0.1, block=(32, 32))):
        with pytest.raises(ValueError, match=r"cuts leaf 'w' of shape \(72, 80\).*optimizer=tx"):
            tx.init(shard(tree, mesh, RAGGED))
        tx.init(shard(tree, plan(tree, mesh, RAGGED, optimizer=tx)))
    with pytest.raises(ValueError, match=r"even cut of leaf 'w' .* use block=32"):
        optim.adamw8bit(0.1).init(shard({"w": torch.zeros(96, 64)}, mesh, P(None, "fsdp")))
    with pytest.raises(ValueError, match=r"even cut of leaf 'w' .* ragged="):
        optim.adamw8bit(0.1, block=(32, 32)).init(shard({"w": torch.zeros(96, 64)}, mesh, P("fsdp")))


def test_cuts_through_blocks_are_refused(run: Any) -> None:
    run(2, refused_cuts)


def threshold(sizes: Any, names: Any) -> Any:
    """Quantized or not by the global size, whatever the mesh or the units."""
    mesh, tx = make_mesh(sizes, names, device_type="cpu"), optim.adamw8bit(0.1)
    out = []
    for units in ((), ["*"]):
        tree = {"big": w((6, 1024), 1), **{f"p{i}": w((1024,), i) for i in range(4)}}
        p = shard(tree, plan(tree, mesh, RAGGED, units=units, optimizer=tx))
        state = tx.init(p)
        for k in range(2):
            p, state = optim.make_step(tx)(p, shard({n: w(x.shape, k) for n, x in tree.items()}, p.plan), state)
        assert state[0].mu.codes.paths == ("big",)
        assert state[0].mu.small.paths == ("p0", "p1", "p2", "p3")
        out.append(bits(unshard(p)))
    assert out[0] == out[1]
    return out[0]


def test_the_threshold_is_global(run: Any) -> None:
    (want,) = run(1, threshold, (1,), ("fsdp",))
    for sizes, names in (((2, 1), ("replica", "fsdp")), ((1, 2), ("replica", "fsdp")), ((1, 4), ("replica", "fsdp"))):
        assert all(got == want for got in run(math.prod(sizes), threshold, sizes, names))


def short_blocks() -> Any:
    out = []
    for shape, block in (((13, 10), 16), ((9, 5), 128)):
        tx = optim.adamw8bit(0.1, block=block, min_size=0)
        tree = {"x": w(shape, 1)}
        p = shard(tree, plan(tree, make_mesh((-1,), ("fsdp",), device_type="cpu"), RAGGED, optimizer=tx, align=1))
        state = tx.init(p)
        for k in (2, 3):
            p, state = optim.make_step(tx)(p, shard({"x": w(shape, k)}, p.plan), state)
        out.append(bits([unshard(x) for x in (p, *state[0].mu, *state[0].nu)]))
    return out


def test_short_last_blocks(run: Any) -> None:
    (want,) = run(1, short_blocks)
    for n in (2, 3, 4):
        assert all(got == want for got in run(n, short_blocks))


def one_bad_block(value: float) -> None:
    """A non-finite gradient shows in its tile on every rank, and nowhere else; tiny ones do no harm."""
    mesh, tx = make_mesh((-1,), ("fsdp",), device_type="cpu"), optim.adamw8bit(0.1, block=(32, 32), min_size=0)
    results = []
    for bad in (False, True):
        g = w((64, 32), 3)
        if bad and value == 1e-39:
            g[:32] = value
        elif bad:
            g[0, 0] = value
        p = shard({"x": w((64, 32), 1)}, plan({"x": g}, mesh, RAGGED, optimizer=tx))
        state = tx.init(p)
        for _ in range(3):
            p, state = optim.make_step(tx)(p, shard({"x": g}, p.plan, src=0), state)
        results.append([unshard(x)["x"] for x in (p, state[0].mu.codes, state[0].nu.codes)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean[32:], dirty[32:])
    assert bool(results[1][0][:32].isfinite().all()) is (value == 1e-39)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e-39])
def test_bad_values_stay_in_their_block(run: Any, value: float) -> None:
    run(2, one_bad_block, value)


def empty_last(order: str) -> Any:
    """Ranks whose last leaves are empty do their first ones all the same."""
    shapes = {"a": (8, 4), "b": (1, 4)} if order == "ab" else {"a": (1, 4), "b": (8, 4)}
    tx = optim.adamw8bit(0.1, block=4, min_size=8)
    tree = values(1, shapes)
    p = shard(tree, plan(tree, make_mesh((-1,), ("fsdp",), device_type="cpu"), RAGGED, optimizer=tx, align=1))
    state = tx.init(p)
    for k in (1, 2):
        p, state = optim.make_step(tx)(p, shard(values(k + 1, shapes), p.plan), state)
    new = unshard(p)
    assert all((new[k] != tree[k]).any(dim=1).all() for k in tree)
    return bits(new)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_empty_shards(run: Any, order: str) -> None:
    (want,) = run(1, empty_last, order)
    assert all(got == want for got in run(4, empty_last, order))


def moved(block: Any) -> None:
    """State moves to another layout, and the next step has the same bits."""
    tx = transformation(block)
    lone = make_mesh((-1,), ("fsdp",), device_type="cpu")
    both = make_mesh((2, -1), ("replica", "fsdp"), device_type="cpu")
    ends = []
    for move in (False, True):
        p = shard(values(1), plan(values(1), lone, RAGGED, optimizer=tx))
        state = tx.init(p)
        p, state = optim.make_step(tx)(p, shard(values(2), p.plan), state)
        if move:
            p = redistribute(p, plan(values(1), both, RAGGED, units=["*"], optimizer=tx))
            state = optree.tree_map(
                lambda x, like: x if isinstance(x, Tensor) else redistribute(x, like.plan),
                state,
                tx.init(p),
                is_leaf=lambda x: hasattr(x, "plan"),
            )
        p, state = optim.make_step(tx)(p, shard(values(3), p.plan), state)
        ends.append(bits([unshard(x) for x in (p, *state[0].mu, *state[0].nu)]))
    assert ends[0] == ends[1]
    assert dist.get_world_size() == 4


@pytest.mark.parametrize("block", [64, (32, 32)])
def test_state_moves_to_another_layout(run: Any, block: Any) -> None:
    run(4, moved, block)
