"""What `redistribute` moves: subtrees, parts, states of other dtypes, lazily changed tensors; and its price."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import optim
from ragged import (
    ELEMENT,
    TENSOR,
    P,
    ShardedTree,
    collectives,
    combine,
    make_mesh,
    partition,
    plan,
    redistribute,
    rules,
    shard,
    tree_map,
    unshard,
)

TREE = {
    "a": [torch.arange(24.0).view(6, 4), torch.arange(40.0).view(5, 8), torch.arange(9.0)],
    "b": {"x": torch.arange(35).to(torch.int16).view(7, 5), "none": None, "y": torch.tensor(2.5)},
    "c": (torch.arange(12.0).to(torch.bfloat16).view(2, 3, 2), torch.empty(0, 3)),
}
ROWS, ELEMENTS, WHOLE = P(ragged="fsdp"), P(ragged="fsdp", block=ELEMENT), P(ragged="fsdp", block=TENSOR)


def fsdp() -> DeviceMesh:
    return make_mesh((-1,), ("fsdp",), device_type="cpu")


def same(a: Any, b: Any) -> None:
    assert optree.tree_structure(a) == optree.tree_structure(b)
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def clean(tree: ShardedTree) -> None:
    """Padding is zero, also in pieces of buffers."""
    for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
        rank = tree.plan.bound().rank(piece.bucket.ragged)
        assert not any(tensor[a:b].any() for a, b in piece.bucket.local_gaps(rank, piece.start, piece.stop))


# --- parts of trees -------------------------------------------------------------------------


def parts() -> None:
    tree, other = shard(TREE, fsdp(), ROWS), plan(TREE, fsdp(), ELEMENTS, units=("**",), align=1)
    for to in (other, WHOLE, None):
        for part, want in (
            (tree["a"], TREE["a"]),
            (tree["a"][1], TREE["a"][1]),
            (tree["a"][1:], TREE["a"][1:]),
            (tree["b"], TREE["b"]),
            (tree["c"][1], TREE["c"][1]),
        ):
            moved = redistribute(part, to)
            same(unshard(moved), want)
            clean(moved)
            same(list(redistribute(moved, tree.plan).tensors), list(part.tensors))
        one, two = partition(tree, lambda path, leaf: path in ("a.1", "b.x", "c.1"))
        halves = [redistribute(part, to) for part in (one, two)]
        for half, part in zip(halves, (one, two), strict=True):
            same(unshard(half), unshard(part))
            clean(half)
        if isinstance(to, type(other)):
            same(unshard(combine(*halves)), TREE)
    some = redistribute(tree["a"], {"a": [None, WHOLE, ELEMENTS]})
    assert [some.plan.leaves[p].spec for p in ("a.0", "a.1", "a.2", "b.x")] == [P(), WHOLE, ELEMENTS, ROWS]
    by_rule = redistribute(tree["a"], rules({"a.1": None, "**": WHOLE}))
    assert [by_rule.plan.leaves[p].spec for p in by_rule.paths] == [WHOLE, P(), WHOLE]
    same(unshard(by_rule), TREE["a"])


@pytest.mark.parametrize("n", [1, 3, 4])
def test_parts_of_a_tree_move_alone(run: Any, n: int) -> None:
    run(n, parts)


def states() -> None:
    full = {k: v for k, v in TREE.items() if k != "b"}
    params = shard(full, fsdp(), ROWS)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    state = tx.init(params)
    _, state = tx.update(tree_map(lambda x: (x - 1).to(x.dtype), params), state, params)
    to = plan(full, fsdp(), WHOLE, align=8)
    is_tree = lambda x: isinstance(x, ShardedTree)  # noqa: E731
    moved = optree.tree_map(lambda x: redistribute(x, to) if is_tree(x) else x, state, is_leaf=is_tree)
    trees = [x for x in optree.tree_leaves(state, is_leaf=is_tree) if is_tree(x)]
    there = [x for x in optree.tree_leaves(moved, is_leaf=is_tree) if is_tree(x)]
    assert trees
    for old, new in zip(trees, there, strict=True):
        same(unshard(new), unshard(old))
        assert all(x.any() for x in optree.tree_leaves(unshard(new)) if x.numel())
        clean(new)
    for dtype in (torch.float64, torch.uint8, torch.float8_e5m2, torch.bool, torch.complex128):
        coded = tree_map(lambda x, dtype=dtype: x.to(dtype), params)
        new = redistribute(coded, to)
        assert {x.dtype for x in new.tensors} == {dtype}
        raw = [optree.tree_map(lambda x: x.view(torch.uint8), unshard(t)["a"]) for t in (new, coded)]
        same(*raw)
        clean(new)


@pytest.mark.parametrize("n", [2, 3])
def test_states_of_other_dtypes(run: Any, n: int) -> None:
    run(n, states)


def lazily_changed() -> None:
    full = {"z": torch.complex(torch.arange(10.0), torch.arange(10.0) + 1).view(5, 2), "w": torch.arange(12.0)}
    tree, to = shard(full, fsdp(), ROWS), P(ragged="fsdp", block=3)
    conjugated = optree.tree_map(lambda x: x.conj(), tree)
    same(unshard(redistribute(conjugated, to)), {k: v.conj().resolve_conj() for k, v in full.items()})
    imaginary = optree.tree_map(lambda x: x.conj().imag if x.is_complex() else x, tree)  # negative, and strided
    got = unshard(redistribute(imaginary, to))
    same(got, {"z": -full["z"].imag, "w": full["w"]})
    expanded = optree.tree_map(lambda x: x.new_zeros(()).expand(x.shape), tree)
    same(unshard(redistribute(expanded, to)), optree.tree_map(torch.zeros_like, full))
    asked = optree.tree_map(lambda x: x.clone().requires_grad_(), tree)
    assert not any(x.requires_grad for x in redistribute(asked, to).tensors)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_conjugated_and_strided_tensors(run: Any, n: int) -> None:
    run(n, lazily_changed)


def independent() -> None:
    tree = shard(TREE, fsdp(), ROWS)
    for to in (tree.plan, ROWS, ELEMENTS):
        moved = redistribute(tree, to)
        for tensor in moved.tensors:
            tensor.view(torch.uint8).fill_(1)
        same(unshard(tree), TREE)


def test_the_result_shares_no_storage(run: Any) -> None:
    run(2, independent)


# --- meshes ---------------------------------------------------------------------------------


def meshes() -> None:
    def mesh(table: Any) -> DeviceMesh:
        return DeviceMesh("cpu", torch.tensor(table), mesh_dim_names=("fsdp", "tp")[: torch.tensor(table).ndim])

    full = {"w": torch.arange(48.0).view(4, 12), "v": torch.arange(7).to(torch.float16), "s": torch.tensor(True)}
    both: dict[str, Any] = {"w": P("tp", ragged="fsdp"), "v": P(ragged=("tp", "fsdp")), "s": WHOLE}
    columns: dict[str, Any] = {"w": P(None, ("tp", "fsdp")), "v": None, "s": P(ragged="tp")}
    plans = [
        plan(full, mesh(table), spec)
        for table in ([0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 1, 2, 3]], [2, 0, 3, 1], [[3, 1], [0, 2]])
        for spec in (both, columns)
    ]
    trees = [shard(full, p) for p in plans]
    for i, tree in enumerate(trees):
        for j in range(i % 3, len(plans), 3):
            same(list(redistribute(tree, plans[j]).tensors), list(trees[j].tensors))
    now = trees[0]
    for p in (*plans[::-1], plans[0]):
        now = redistribute(now, p)
    same(list(now.tensors), list(trees[0].tensors))


def test_chains_across_meshes_of_the_same_ranks(run: Any) -> None:
    run(4, meshes)


def halves() -> None:
    """Two meshes of two ranks each, at the same time."""
    both = DeviceMesh("cpu", torch.tensor([[2, 1], [3, 0]]), mesh_dim_names=("row", "fsdp"))
    mine = tree_map_full(lambda x: x + 10 * (dist.get_rank() in (2, 1)))
    tree = shard(mine, both["fsdp"], ROWS)
    same(unshard(redistribute(tree, WHOLE)), mine)


def tree_map_full(f: Any) -> Any:
    return {"w": f(torch.arange(20.0).view(5, 4)), "v": f(torch.arange(3.0))}


def test_meshes_of_a_part_of_the_ranks(run: Any) -> None:
    run(4, halves)


# --- price ----------------------------------------------------------------------------------


def exchanges(tree: ShardedTree, to: Any) -> list[tuple[int, int]]:
    with collectives.record() as events:
        redistribute(tree, to)
    return [(event.sent, event.ranks) for event in events if event.kind == "exchange"]


def price() -> dict[str, list[tuple[int, int]]]:
    there = make_mesh((2, 2), ("fsdp", "tp"), device_type="cpu")
    full: dict[str, Tensor] = {f"w{i}": torch.zeros(16, 8) for i in range(6)}
    rows = shard(full, there, ROWS)
    mixed = shard(full, there, lambda path, leaf: ROWS if path < "w3" else P("tp"))
    both = shard(full, there, P("tp", ragged="fsdp"))
    return {
        "nothing changes": exchanges(rows, ROWS),
        "replicas to shards": exchanges(shard(full, there, None), P("tp", ragged="fsdp")),
        "rows to columns": exchanges(rows, P(None, "fsdp")),
        "rows cut further": exchanges(rows, P(ragged=("fsdp", "tp"), block=ELEMENT)),
        "two groups of axes": exchanges(mixed, None),
        "over both axes": exchanges(both, None),
        "tp stays": exchanges(both, P("tp")),
        "a root": exchanges(rows, P(ragged="fsdp", block=TENSOR, shares=(1, 0))),
    }


def test_one_exchange_per_group_of_axes_and_the_least_bytes(run: Any) -> None:
    got = run(4, price)
    size = 16 * 8 * 4

    def sent(case: str) -> list[int]:
        return [sum(n for n, _ in each[case]) for each in got]

    def groups(case: str) -> list[int]:
        (ranks,) = {tuple(n for _, n in each[case]) for each in got}
        return list(ranks)

    assert groups("nothing changes") == groups("replicas to shards") == []
    assert (groups("rows to columns"), sum(sent("rows to columns"))) == ([2], 4 * 6 * size // 4)
    assert len(groups("rows cut further")) <= 1
    assert (groups("two groups of axes"), sum(sent("two groups of axes"))) == ([2, 2], 4 * 6 * size // 2)
    assert (groups("over both axes"), sum(sent("over both axes"))) == ([4], 4 * 6 * size * 3 // 4)
    assert (groups("tp stays"), sum(sent("tp stays"))) == ([2], 4 * 6 * size // 4)
    assert (groups("a root"), sum(sent("a root"))) == ([2], 4 * 6 * size // 4)
    assert [n > 0 for n in sent("a root")] == [False, False, True, True]
