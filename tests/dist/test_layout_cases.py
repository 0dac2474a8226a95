"""Layouts that went wrong in other systems, each with the numbers of the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

import optim
from ragged import TENSOR, P, ShardedTree, make_mesh, plan, redistribute, reduce_scatter, shard, tree_map, unshard


def mesh(sizes: tuple[int, ...] = (-1,), names: tuple[str, ...] = ("fsdp",)) -> DeviceMesh:
    return make_mesh(sizes, names, device_type="cpu")


def ar(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def same(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert torch.equal(a, b)


# --- places ---------------------------------------------------------------------------------


def boxes(
    sizes: tuple[int, ...], order: tuple[str, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, int], list[float]]:
    there = mesh(sizes, ("a", "b"))
    tree = redistribute(shard({"x": ar(shape)}, there, P()), P(ragged=order))
    leaf = tree.plan.leaves["x"]
    return leaf.span(tree.plan.bound().rank(order)), tree.leaf("x").tolist()


@pytest.mark.parametrize("shape", [(2,), (5, 3)])
@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_offsets_of_small_and_empty_shards(run: Any, sizes: Any, order: Any, shape: tuple[int, ...]) -> None:
    """RS-04, pytorch/pytorch#161368: wrong global offsets of shards on a mesh of two axes."""
    got = run(8, boxes, sizes, order, shape)
    size, end = torch.Size(shape).numel(), 0
    for (start, stop), values in sorted(got):
        assert values == list(range(start, stop))
        if stop > start:
            assert start == end
            end = stop
    assert end == size


def tensor_parallel_first() -> list[float]:
    there = mesh((2, 2), ("fsdp", "tp"))
    tree = shard({"x": ar((6,))}, there, P("tp", ragged="fsdp", shares=(2, 1)))
    for to in (None, P(ragged=("fsdp", "tp")), P("tp"), P("fsdp"), P(ragged=("tp", "fsdp"), shares=(1, 0, 2, 3))):
        moved = redistribute(tree, to)
        same(unshard(moved)["x"], ar((6,)))
        same(redistribute(moved, tree.plan).leaf("x"), tree.leaf("x"))
    same(redistribute(tree, None).leaf("x"), ar((6,)))
    return tree.leaf("x").tolist()


def test_even_cuts_come_before_ragged_ones(run: Any) -> None:
    """RS-05, pytorch/pytorch#163843: gathering in mesh order permuted the rows, and lost some."""
    assert run(4, tensor_parallel_first) == [[0, 1], [3, 4], [2], [5]]


def prefix_of_several_dims() -> int:
    spec = P(ragged="fsdp", block=(1, 1, None), shares=(1, 2))
    tree = redistribute(shard({"x": ar((6, 4, 8))}, mesh(), P(None, None, "fsdp")), spec)
    same(unshard(tree)["x"], ar((6, 4, 8)))
    return tree.leaf("x").numel()


def given_shares() -> int:
    tree = redistribute(shard({"x": ar((10, 4))}, mesh(), P(ragged="fsdp")), P(ragged="fsdp", shares=(2, 3, 0, 5)))
    same(unshard(tree)["x"], ar((10, 4)))
    return tree.leaf("x").numel()


def test_shares_with_zeros_and_prefixes_of_dims(run: Any) -> None:
    """RS-07, mindspore-ai/hyper-parallel#594 and pytorch/pytorch#169320."""
    assert run(4, given_shares) == [8, 12, 0, 20]
    assert run(2, prefix_of_several_dims) == [64, 128]


# --- sums -----------------------------------------------------------------------------------


def reduced_then_moved(op: str) -> None:
    there, rank = mesh(), dist.get_rank()
    p = plan({"x": ar((7, 2))}, there, P(ragged="fsdp", shares=(3, 0, 4)))
    tree = reduce_scatter({"x": (rank + 1) * ar((7, 2))}, p, op)
    factor = {"sum": 6, "mean": 2}[op]
    same(tree.leaf("x"), factor * ar((7, 2)).flatten()[[slice(6), slice(0), slice(6, 14)][rank]])
    root = redistribute(tree, P(ragged="fsdp", block=TENSOR, shares=(0, 1, 0)))
    same(root.leaf("x"), factor * ar((7, 2)).flatten()[: 14 if rank == 1 else 0])


def test_reduced_straight_into_unequal_shards(run: Any) -> None:
    """RS-09, pytorch/pytorch#191580: padding or chunk rules gave wrong rows."""
    for op in ("sum", "mean"):
        run(3, reduced_then_moved, op)


def pending_sums() -> None:
    there = mesh()
    pending = {"g": torch.full((4, 2), 8.0 + dist.get_rank())}
    p = plan(pending, there, P(ragged="fsdp"))
    with pytest.raises(ValueError, match=r"got a dict; .* by reduce_scatter"):
        redistribute(pending, p)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="values of leaf 'g'"):
        shard(pending, p)
    with pytest.raises(TypeError):
        P(partial="fsdp")  # type: ignore[call-arg]
    tree = shard({"g": torch.full((4, 2), 8.0)}, p)
    for to in (Partial(), Partial("avg"), [Partial("avg")], {"g": Partial()}, "sum"):
        with pytest.raises(ValueError, match=r"spec|tree"):
            redistribute(tree, to)
    with pytest.raises(ValueError, match="'avg'"):
        reduce_scatter(pending, p, "avg")
    same(unshard(reduce_scatter({"g": torch.full((4, 2), 8.0)}, p, "sum"))["g"], torch.full((4, 2), 32.0))


def test_a_pending_sum_is_no_layout(run: Any) -> None:
    """RS-10, pytorch/pytorch#172041: a pending sum became a pending average without a word, off by the ranks."""
    run(4, pending_sums)


def means(sizes: tuple[int, ...]) -> list[float]:
    there, mine = mesh(sizes, ("replica", "fsdp")), dist.get_rank() + 1.0
    tree = {"a": torch.full((4,), mine), "b": torch.full((5, 3), mine), "c": torch.full((7,), mine)}
    shares = (*[0] * (sizes[1] - 1), 1)
    specs = {"a": P(ragged="fsdp"), "b": P(), "c": P(ragged="fsdp", block=TENSOR, shares=shares)}
    reduced = reduce_scatter(tree, plan(tree, there, specs))
    for value in unshard(reduced).values():
        same(value, torch.full_like(value, 2.5))
    return [x for tensor in reduced.tensors for x in tensor.tolist()]


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (1, 4)])
def test_a_mean_is_divided_once(run: Any, sizes: tuple[int, ...]) -> None:
    """CM-01 and CM-02, pytorch/pytorch#162338 and #155903: a sum for a mean, or divided by the wrong count."""
    got = run(4, means, sizes)
    for rank in range(4):
        assert got[rank] == got[rank % sizes[1]], "replicas are equal"


def beside_tensor_parallel() -> None:
    there, rank = mesh((2, 2), ("fsdp", "tp")), dist.get_rank()
    tree = {"w": torch.full((4, 3), rank + 1.0), "norm": torch.full((5,), rank + 1.0)}
    shapes = {"w": ((8, 3), torch.float32), "norm": ((5,), torch.float32)}
    p = plan(shapes, there, {"w": P("tp", ragged="fsdp"), "norm": P(ragged="fsdp")})
    mean = unshard(reduce_scatter(tree, p))
    same(mean["w"], torch.tensor([2.0, 3.0]).repeat_interleave(4)[:, None].expand(8, 3))  # (1+3)/2 and (2+4)/2
    same(mean["norm"], torch.full((5,), 2.5))


def test_tensor_parallel_parts_are_averaged_over_their_own_ranks(run: Any) -> None:
    """CM-02: a part of a matrix that only half of the ranks contribute to isn't divided by all."""
    run(4, beside_tensor_parallel)


def unequal_amounts(counts: tuple[int, ...]) -> list[float]:
    there, rank = mesh(), dist.get_rank()
    mine = torch.cat([torch.full((n,), 10.0 * (rank + 1) + j) for j, n in enumerate(counts)])
    p = plan({"x": mine}, there, P(ragged="fsdp", shares=counts))
    tree = reduce_scatter({"x": mine}, p, "sum")
    turned = redistribute(tree, P(ragged="fsdp", shares=counts[::-1]))
    same(unshard(turned)["x"], unshard(tree)["x"])
    assert turned.leaf("x").numel() == counts[::-1][rank]
    return tree.leaf("x").tolist()


def test_unequal_amounts_some_of_them_zero(run: Any) -> None:
    """CM-08, NVIDIA/Megatron-LM#6587."""
    assert run(3, unequal_amounts, (5, 0, 3)) == [[60.0] * 5, [], [66.0] * 3]
    assert run(4, unequal_amounts, (0, 0, 0, 6)) == [[], [], [], [112.0] * 6]


# --- roots ----------------------------------------------------------------------------------


def orthogonalized(g: Tensor) -> Tensor:
    x = g.double() / g.double().norm().clamp(min=1e-7)
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x


def matrix(row: int) -> Tensor:
    return (((37 * torch.arange(16) + 11 * row) % 101 - 50) / 50).double().view(4, 4)


def at_the_root(tree: ShardedTree, to_root: P) -> tuple[ShardedTree, bool]:
    """Move to the root, compute there, move back."""
    there = redistribute(tree, to_root)
    held = there.leaf("g").numel()
    done = tree_map(lambda x: orthogonalized(x.view(4, 4)).view(-1) if x.numel() else x, there)
    return redistribute(done, tree.plan), held == 16


def rows_of_a_mesh() -> tuple[bool, bool]:
    both = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("row", "col"))
    row = dist.get_rank() // 2
    mine, spec = {"g": matrix(row)}, P(ragged="col", block=TENSOR, shares=(0, 1))
    moved, computed = at_the_root(shard(mine, both["col"], P(ragged="col")), spec)
    same(unshard(moved)["g"], orthogonalized(matrix(row)))
    all_rows = {"g": torch.stack([matrix(0), matrix(1)])}
    tree = shard(all_rows, both, P("row", ragged="col", block=4))
    moved, also = at_the_root(tree, P("row", ragged="col", block=TENSOR, shares=(0, 1)))
    same(unshard(moved)["g"], torch.stack([orthogonalized(matrix(0)), orthogonalized(matrix(1))]))
    return computed, also


def test_roots_within_the_rows_of_a_mesh(run: Any) -> None:
    """CM-06, vllm-project/vllm-omni#6264: a position in the group taken for a global rank, or the reverse."""
    assert run(4, rows_of_a_mesh) == [(False, False), (True, True), (False, False), (True, True)]


# --- norms ----------------------------------------------------------------------------------


def norms() -> None:
    there = mesh((2, 2), ("a", "b"))
    tree = {"w": torch.full((9, 4), 0.5), "b": torch.full((16,), 1.0)}
    grads = shard(tree, there, {"w": P(ragged="b"), "b": None})
    for w in (P(ragged=("b", "a")), P(None, "a"), P(None, ("a", "b")), P(None, "b", ragged="a"), None):
        for b in (None, P("a"), P("b", ragged="a"), P(ragged="a", block=TENSOR)):
            moved = redistribute(grads, {"w": w, "b": b})
            assert optim.global_norm(moved).item() == pytest.approx(5.0)
            assert optim.global_norm(moved["b"]).item() == pytest.approx(4.0)


def test_every_element_counts_once_in_any_layout(run: Any) -> None:
    """GC-02, NVIDIA-NeMo/RL#3788: replicated gradients were counted once per rank."""
    run(4, norms)
