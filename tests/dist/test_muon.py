"""Muon on shards: the same on any mesh, matrices whole at balanced roots, two moves per unit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from optim import make_step, muon
from optim.matrices import cost, matrices_of
from optim.roots import route
from ragged import TENSOR, P, ShardedTree, collectives, make_mesh, plan, rules, shard, unshard
from tests.unit.test_muon import reference, w

PATTERNS = rules({"**.e": "e m n -> e m n", "**.k": "o i kh kw -> o (i kh kw)", "**.p": "m h d -> h m d", "**": None})
SPLIT = rules({"**.qkv": (6, 3, 3), "**": None})
SHAPES = {
    "layers": [
        {"w": (8, 4), "e": (4, 6, 4), "k": (6, 2, 3, 3), "qkv": (12, 8), "p": (4, 3, 6), "r": (1, 8)} for _ in range(3)
    ],
    "head": {"w": (13, 7), "z": (0, 4)},
}


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def near(a: Tensor, b: Tensor, atol: float, rtol: float = 0.0) -> None:
    """Equal up to this. (`torch.testing` would import DTensor for it in every worker, which takes seconds.)"""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert torch.allclose(a, b, atol=atol, rtol=rtol), f"apart by {(a.double() - b.double()).abs().max():.1e}"


def filled(k: int) -> Any:
    count = iter(range(k, 1000, 7))
    return optree.tree_map(lambda s: w(s, next(count)), SHAPES, is_leaf=is_shape)


def options(**more: Any) -> dict[str, Any]:
    return {"matrix": PATTERNS, "split": SPLIT, "ns_dtype": torch.float32, **more}


def trained(params: Any, grads: Any, steps: int = 3, **more: Any) -> tuple[Any, Any]:
    tx = muon(0.02, **options(**more))
    state, step = tx.init(params), make_step(tx, donate=False)
    fused = make_step(tx)
    copy = optree.tree_map(torch.clone, params)
    twin = tx.init(copy)
    for k in range(steps):
        params, state = step(params, grads(k), state)
        copy, twin = fused(copy, grads(k), twin)
    # the donated path is the same function
    for a, b in zip(optree.tree_leaves((params, state)), optree.tree_leaves((copy, twin)), strict=True):
        near(a, b, 1e-6, 1e-6)
    return params, state


def on_a_mesh(sizes: tuple[int, ...], names: tuple[str, ...], spec: Any) -> Any:
    mesh = make_mesh(sizes, names, device_type="cpu")
    made = plan(optree.tree_map(lambda s: (s, torch.float32), SHAPES, is_leaf=is_shape), mesh, spec, units=["layers.*"])
    params, state = trained(shard(filled(0), made), lambda k: shard(filled(k + 1), made))
    for piece, x in zip(params.selection.pieces, params.tensors, strict=True):
        for a, b in piece.bucket.local_gaps(made.bound().rank(piece.bucket.ragged)):
            assert not x[a:b].any()
    return unshard(params), unshard(state.mu)


RAGGED = P(ragged="fsdp")
TP = rules({"**.w": RAGGED, "**.e": P("tp", ragged="fsdp"), "**.qkv": P(None, "tp", ragged="fsdp"), "**": RAGGED})
MESHES: list[Any] = [
    ((1,), ("fsdp",), RAGGED),
    ((2,), ("fsdp",), RAGGED),
    ((3,), ("fsdp",), P(ragged="fsdp", block=1)),
    ((4,), ("fsdp",), RAGGED),
    ((4,), ("fsdp",), P(ragged="fsdp", block=TENSOR)),
    ((2, 2), ("replica", "fsdp"), RAGGED),
    ((2, 2), ("fsdp", "tp"), TP),
    ((4,), ("fsdp",), None),
]


@pytest.fixture(scope="module")
def plain() -> Any:
    params, state = trained(filled(0), lambda k: filled(k + 1))
    return params, state.mu


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m[1]}-{m[0]}")
def test_the_same_on_any_mesh(run: Any, plain: Any, mesh: Any) -> None:
    n = 1
    for size in mesh[0]:
        n *= size
    results = run(n, on_a_mesh, *mesh)
    for result in results:
        for a, b, first in zip(*map(optree.tree_leaves, (result, plain, results[0])), strict=True):
            near(a, b, 1e-5)
            assert torch.equal(a, first)


def counted(block: Any, replicas: int) -> tuple[Counter[str], int, list[int], tuple[int, ...]]:
    mesh = make_mesh((replicas, -1), ("replica", "fsdp"), device_type="cpu")
    shapes = {"layers": [{"a": ((32, 16), torch.float32), "b": ((16, 64), torch.float32)} for _ in range(4)]}
    made = plan(shapes, mesh, P(ragged="fsdp", block=block), units=["layers.*"])
    params = shard(optree.tree_map(lambda s: w(s[0], 1), shapes, is_leaf=is_shape), made)
    tx = muon(0.1, ns_dtype=torch.float32)
    state = tx.init(params)
    tx.update(params, state, params)
    with collectives.record() as events:
        tx.update(params, state, params)
    matrices = {p: matrices_of(p, f.shape, None, None) for p, f in made.leaves.items()}
    load = route(params, matrices).load
    return Counter(e.kind for e in events), sum(e.sent for e in events), made.buckets[0].bounds.sizes, load


def test_two_collectives_per_unit_and_balanced_roots(run: Any) -> None:
    results = run(4, counted, 1, 1)
    for kinds, _, _, load in results:
        assert kinds["exchange"] == 2 * 4
        assert max(load) <= 1.05 * sum(load) / 4
    # what leaves the shards comes back: nobody sends more than he holds or computes
    assert sum(sent for _, sent, _, _ in results) <= 2 * 4 * 4 * (32 * 16 + 16 * 64)


def test_whole_matrices_send_nothing(run: Any) -> None:
    for kinds, sent, _, _ in run(4, counted, TENSOR, 1):
        assert kinds["exchange"] == 0
        assert sent == 0 or set(kinds) <= {"all_reduce"}


def test_replicas_share_the_work(run: Any) -> None:
    for _, _, _, load in run(4, counted, 1, 2):
        assert len(load) == 4
        assert max(load) <= 1.1 * sum(load) / 4
        # only what lies whole on one shard is done by its replicas twice
        assert sum(load) <= 1.5 * 4 * (cost(32, 16) + cost(16, 64))


def many(count: int) -> None:
    """MU-09, KellerJordan/Muon#28: any number of matrices on any number of ranks."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    tree = [w((3, 4), k) for k in range(count)]
    params: ShardedTree = shard(tree, mesh, P(ragged="fsdp"), units=["*"])
    tx = muon(1.0, 0.0, weight_decay=0.0, ns_dtype=torch.float32)
    updates, _ = tx.update(params, tx.init(params), params)
    for g, u in zip(tree, unshard(updates), strict=True):
        near(-u.double(), reference(g), 1e-4)


@pytest.mark.parametrize(("n", "count"), [(8, 19), (4, 1), (8, 8)])
def test_any_number_of_matrices(run: Any, n: int, count: int) -> None:
    run(n, many, count)


def straddling() -> None:
    """MU-01: a matrix that lies across boundaries, behind another tensor; MU-11: one row."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    tree = {"a": {"first": w((1, 11), 2), "w": w((13, 7), 6), "row": w((1, 8), 1)}}
    params = shard(tree, mesh, P(ragged="fsdp", block=1))
    tx = muon(1.0, 0.0, weight_decay=0.0, ns_dtype=torch.float32)
    updates: dict[str, Tensor] = unshard(tx.update(params, tx.init(params), params)[0])["a"]
    x = -updates["w"] / (13 / 7) ** 0.5
    assert abs(x[0, 0].item() + 0.067379) < 1e-4
    assert abs(x[12, 6].item() - 0.067310) < 1e-4
    assert abs(x.norm().item() - 2.279370) < 1e-4
    g = tree["a"]["row"]
    near(-updates["row"], 0.696436 * g / g.norm(), 1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_matrices_across_boundaries(run: Any, n: int) -> None:
    run(n, straddling)
