"""Shard and gather back: values, shapes, dtypes, meshes, shares."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged import (
    ELEMENT,
    TENSOR,
    P,
    ShardedTree,
    combine,
    from_local,
    make_mesh,
    map_leaves,
    partition,
    plan,
    reduce_scatter,
    shard,
    tree_map,
    unshard,
)


def fsdp() -> DeviceMesh:
    return make_mesh((-1,), ("fsdp",), device_type="cpu")


def ar(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    size = 1
    for n in shape:
        size *= n
    return torch.arange(size).to(dtype).view(shape)


def raw(x: Tensor) -> Tensor:
    """The bits, to compare NaNs and narrow dtypes too."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def same(a: Any, b: Any) -> None:
    assert optree.tree_structure(a) == optree.tree_structure(b)
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert torch.equal(raw(x), raw(y))


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int16, torch.uint8, torch.int64,
    torch.bool, torch.complex64,
]  # fmt: skip


def many_leaves() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    tree: dict[str, Any] = {
        "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0, 8),
        "row": ar((1, 17)),
        "none": None,
        "list": [ar((13, 5)), ar((2,)), (ar((3, 2, 2)),)],
        "transposed": ar((4, 3)).t(),
        "strided": ar((10, 6))[::2, 1::2],
        "channels_last": ar((4, 3, 2, 2)).to(memory_format=torch.channels_last),
    }
    for dtype in DTYPES:
        bits = torch.randint(0, 256, (7 * 3 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        tree[str(dtype)] = (bits % 2).bool().view(7, 3) if dtype == torch.bool else bits.view(dtype).view(7, 3)
    return tree


def round_trip(spec: P | None, align: int) -> None:
    tree = many_leaves()
    p = plan(tree, fsdp(), spec, align=align)
    sharded = shard(tree, p)
    same(unshard(sharded), tree)
    for dst in range(dist.get_world_size()):
        there = unshard(sharded, dst=dst)
        if dist.get_rank() == dst:
            same(there, tree)
        else:
            assert there is None
    same(unshard(sharded["list"]), tree["list"])
    same(unshard(sharded["list"][1:]), tree["list"][1:])
    assert sharded["none"] is None
    for buffer in sharded.buffers:  # padding is zero
        for a, b in buffer.bucket.local_gaps(buffer.rank):
            assert not raw(buffer.tensor[a:b]).any()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("spec", [P(ragged="fsdp"), P(ragged="fsdp", block=TENSOR), P(ragged="fsdp", block=4), None])
def test_round_trips_are_bitwise(run: Any, n: int, spec: P | None) -> None:
    run(n, round_trip, spec, 64 if n % 2 else 1)


def even_and_ragged(names: tuple[str, ...], sizes: tuple[int, ...], spec: P, shape: tuple[int, ...]) -> list[float]:
    mesh = make_mesh(sizes, names, device_type="cpu")
    tree = {"x": ar(shape), "y": ar((9,))}
    sharded = shard(tree, mesh, {"x": spec, "y": P()})
    same(unshard(sharded), tree)
    out = unshard(sharded, dst=dist.get_world_size() - 1)
    assert (out is None) == (dist.get_rank() < dist.get_world_size() - 1)
    return sharded.leaf("x").tolist()


def test_tensor_parallel_first_then_ragged(run: Any) -> None:
    """pytorch/pytorch#129206: by (fsdp, tp) the locals are [0,1], [3,4], [2], [5]."""
    spec = P("tp", ragged="fsdp", shares=(2, 1))
    got = run(4, even_and_ragged, ("fsdp", "tp"), (2, 2), spec, (6,))
    assert got == [[0, 1], [3, 4], [2], [5]]


@pytest.mark.parametrize(
    ("names", "sizes", "spec", "shape"),
    [
        (("replica", "fsdp"), (2, 2), P(ragged="fsdp"), (5, 3)),
        (("a", "b"), (2, 4), P(ragged=("a", "b")), (5, 3)),
        (("a", "b"), (4, 2), P(ragged=("b", "a")), (2,)),
        (("fsdp", "tp"), (2, 2), P(None, "tp", ragged="fsdp", block=(2, 2)), (7, 4)),
        (("ep", "fsdp"), (2, 2), P("ep", ragged="fsdp", block=(1, None)), (4, 6)),
        (("x", "y", "z"), (2, 2, 2), P(("x", "z"), ragged="y"), (8, 3)),
        (("fsdp", "one"), (4, 1), P("one", ragged="fsdp"), (7,)),
        (("fsdp",), (4,), P(ragged=("fsdp", "missing")), (7,)),
        (("fsdp",), (4,), P("fsdp"), (8, 2)),
    ],
)
def test_meshes_of_several_axes(run: Any, names: Any, sizes: Any, spec: P, shape: Any) -> None:
    n = 1
    for size in sizes:
        n *= size
    run(n, even_and_ragged, names, sizes, spec, shape)


def other_rank_order() -> list[float]:
    mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("a", "b"))
    tree = {"x": ar((8, 3)), "y": ar((8,)), "z": ar((11,))}
    specs = {"x": P(ragged="b"), "y": P("b", ragged="a"), "z": P(ragged=("a", "b"))}
    sharded = shard(tree, mesh, specs)
    same(unshard(sharded), tree)
    same(unshard(tree_map(lambda x: x * 2, sharded)), optree.tree_map(lambda x: x * 2, tree))
    return sharded.leaf("z").tolist()


def test_meshes_whose_ranks_are_not_in_order(run: Any) -> None:
    got = run(4, other_rank_order)
    # coordinate order is 3, 1, 0, 2: one run of whole rows, in that order
    assert got[3] + got[1] + got[0] + got[2] == list(range(11))


def shares(shape: tuple[int, ...], spec: P) -> int:
    sharded = shard({"x": ar(shape)}, fsdp(), spec)
    same(unshard(sharded), {"x": ar(shape)})
    assert sharded.leaf("x").numel() == sharded.tensors[0].numel()
    return sharded.leaf("x").numel()


@pytest.mark.parametrize(
    ("shape", "spec", "want"),
    [
        ((5, 10), P(ragged="fsdp", shares=(2, 2, 1, 0)), [20, 20, 10, 0]),
        ((10, 4), P(ragged="fsdp", shares=(2, 3, 0, 5)), [8, 12, 0, 20]),
        ((6, 4, 8), P(ragged="fsdp", block=(1, 1, None), shares=(1, 2)), [64, 128]),
        ((3, 2), P(ragged="fsdp", block=TENSOR, shares=(0, 1, 0)), [0, 6, 0]),
        ((100, 8), P(ragged="fsdp", block=(32, None), shares=(1, 3)), [256, 544]),
    ],
)
def test_shares(run: Any, shape: Any, spec: P, want: list[int]) -> None:
    """pytorch/pytorch#103306, mindspore hyper-parallel#594."""
    assert run(len(want), shares, shape, spec) == want


def given_runs(declared: tuple[int, ...], rows: int) -> str:
    """pytorch/pytorch#144109: pieces of caller-chosen sizes."""
    rank = dist.get_rank()
    p = plan({"x": ((rows, 2), torch.float32)}, fsdp(), P(ragged="fsdp", shares=declared))
    piece = (torch.full((2 + rank, 2), float(rank)) + 0.1 * torch.arange(2 + rank)[:, None]).contiguous()
    try:
        tree = from_local({"x": piece}, p)
    except ValueError as error:
        return str(error)
    whole = torch.cat([torch.full((2 + r, 2), float(r)) + 0.1 * torch.arange(2 + r)[:, None] for r in range(4)])
    same(unshard(tree), {"x": whole})
    return ""


def test_runs_of_other_sizes_than_declared(run: Any) -> None:
    assert run(4, given_runs, (2, 3, 4, 5), 14) == [""] * 4
    said = run(4, given_runs, (4, 4, 4, 2), 14)
    assert all(text for text in said)
    assert "8 elements" in said[0]
    assert "has 4 of" in said[0]


def one_source() -> None:
    rank, mesh = dist.get_rank(), fsdp()
    tree = {"a": ar((4, 2)) + 100 * rank, "b": ar((3,)) + rank}
    same(unshard(shard(tree, mesh, P(ragged="fsdp"), src=1)), {"a": ar((4, 2)) + 100, "b": ar((3,)) + 1})
    empty = tree if rank == 0 else optree.tree_map(lambda x: x.to("meta"), tree)
    same(unshard(shard(empty, mesh, P(ragged="fsdp", block=ELEMENT), src=0)), {"a": ar((4, 2)), "b": ar((3,))})
    two = make_mesh((1, -1), ("tp", "fsdp"), device_type="cpu")
    same(unshard(shard(empty, two, P("tp", ragged="fsdp"), src=0)), {"a": ar((4, 2)), "b": ar((3,))})


def test_values_of_one_rank_win_with_src(run: Any) -> None:
    run(3, one_source)


def reduced(op: str, dtype: torch.dtype) -> list[Any]:
    """pytorch/pytorch#191580: contributions straight into an uneven layout."""
    rank, mesh = dist.get_rank(), fsdp()
    base = {"x": ar((7, 2), dtype), "y": ar((5, 3), dtype)}
    p = plan(base, mesh, {"x": P(ragged="fsdp", shares=(3, 0, 4)), "y": P(ragged="fsdp")})
    tree = reduce_scatter(optree.tree_map(lambda x: (rank + 1) * x, base), p, op)
    factor = 6 if op == "sum" else 2
    same(unshard(tree), optree.tree_map(lambda x: factor * x, base))
    return tree.leaf("x").tolist()


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_scatter(run: Any, op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        got = run(3, reduced, op, dtype)
        assert [len(x) for x in got] == [6, 0, 8]
    run(3, reduced, "sum", torch.int64)


def averages(sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    """pytorch/pytorch#162338, #155903: a mean is a mean on every mesh, equal on all replicas."""
    mesh = make_mesh(sizes, names, device_type="cpu")
    tree = {"a": torch.full((4,), dist.get_rank() + 1.0), "b": torch.full((5, 3), dist.get_rank() + 1.0)}
    p = plan(tree, mesh, P(ragged="fsdp"))
    mean = unshard(reduce_scatter(tree, p))
    same(mean, optree.tree_map(lambda x: torch.full_like(x, 2.5), tree))


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (4, 1), (1, 4)])
def test_the_mean_is_no_sum(run: Any, sizes: tuple[int, ...]) -> None:
    run(4, averages, sizes, ("fsdp",) if len(sizes) == 1 else ("replica", "fsdp"))


def one_unit(tree: Any) -> Any:
    return plan({"u": tree}, fsdp(), P(ragged="fsdp"))


def views_of_one_unit() -> None:
    """PL-07, NVIDIA/Megatron-LM#4835: zero-copy means one storage, at the planned offset."""
    tree = {"a": ar((3, 4)), "b": ar((5,)), "c": ar((2, 2, 2))}
    sharded = shard({"u": tree}, one_unit(tree))
    (buffer,) = sharded.buffers
    full = buffer.gather()
    views = buffer.views(full)
    for path, view in views.items():
        leaf = sharded.plan.leaves[path]
        assert view.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        assert view.storage_offset() == leaf.offset
        assert torch.equal(view, tree[path.removeprefix("u.")])
    out = torch.empty(buffer.bucket.length)
    assert buffer.gather(out) is out
    assert torch.equal(buffer.reduce(out.clone(), "mean"), buffer.tensor)
    with pytest.raises(ValueError, match="needs out of shape"):
        buffer.gather(torch.empty(3))
    assert torch.equal(buffer.leaf("u.a"), sharded.leaf("u.a"))
    out[sharded.plan.leaves["u.b"].offset] = 7
    assert buffer.views(out)["u.b"][0] == 7


@pytest.mark.parametrize("n", [1, 2, 3])
def test_leaves_are_views_of_the_global_buffer(run: Any, n: int) -> None:
    run(n, views_of_one_unit)


def parts() -> None:
    tree = {"u": {"a": ar((3, 4)), "b": ar((5,)), "c": ar((2, 2, 2))}, "v": [ar((6,)), None, ar((7, 2))]}
    sharded = shard(tree, fsdp(), P(ragged="fsdp"))
    one, two = partition(sharded, lambda path, _: path in ("u.b", "v.0"))
    assert unshard(one)["u"]["a"] is None
    same(unshard(one)["u"]["b"], tree["u"]["b"])
    joined = combine(one, two)
    assert [t.data_ptr() for t in joined.tensors] == [t.data_ptr() for t in sharded.tensors]
    same(unshard(joined), tree)
    doubled = combine(tree_map(lambda x: 2 * x, one), two)
    got = unshard(doubled)
    same(got["u"]["b"], 2 * tree["u"]["b"])
    same(got["u"]["c"], tree["u"]["c"])
    with pytest.raises(ValueError, match=r"both trees have leaf 'u\.b'"):
        combine(one, one)
    added = tree_map(lambda x: x + 1, sharded)
    same(unshard(added), optree.tree_map(lambda x: x + 1, tree))
    for buffer in added.buffers:
        for a, b in buffer.bucket.local_gaps(buffer.rank):
            assert not buffer.tensor[a:b].any()
    named = map_leaves(lambda x, y, info: x + y + len(info.shape), sharded, sharded, with_info=True)
    same(unshard(named)["u"]["c"], 2 * tree["u"]["c"] + 3)
    with pytest.raises(ValueError, match=r"returned 1 elements"):
        map_leaves(lambda x: torch.zeros(1), sharded)
    assert len(sharded["v"]) == 3
    assert [x if x is None else x.paths for x in sharded["v"]] == [("v.0",), None, ("v.2",)]
    with pytest.raises(KeyError):
        sharded["w"]
    with pytest.raises(IndexError):
        sharded["v"][3]


@pytest.mark.parametrize("n", [1, 3, 8])
def test_partition_combine_and_maps(run: Any, n: int) -> None:
    run(n, parts)


def one_row_block() -> tuple[int, ...]:
    sharded: ShardedTree = shard({"w": ar((100, 8))}, fsdp(), P(ragged="fsdp", block=(32, None)))
    same(unshard(sharded), {"w": ar((100, 8))})
    return tuple(stop - start for start, stop in sharded.plan.leaves["w"].runs)


def test_a_short_last_block_is_whole_on_one_rank(run: Any) -> None:
    got = run(8, one_row_block)[0]
    assert got.count(0) == 4
    assert sorted(n for n in got if n) == [32, 256, 256, 256]
