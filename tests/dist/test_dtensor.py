"""`to_dtensor` and `from_dtensor`: between ragged layouts and torch's placements, bit by bit."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ragged import ELEMENT, P, collectives, from_dtensor, make_mesh, partition, plan, shard, to_dtensor, unshard

MESHES = [(2, 2), (1, 4), (4, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64]


def mesh_of(*shape: int) -> DeviceMesh:
    return make_mesh(shape, ("fsdp", "tp"), device_type="cpu")


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(math.prod(shape)).view(shape) % 251).to(dtype)


def random_spec(rng: random.Random, shape: tuple[int, ...]) -> P:
    """Any composition of even and ragged axes that fits, tuples in the order of the mesh."""
    axes = ["fsdp", "tp"]
    dims: list[Any] = [None] * len(shape)
    for d, size in enumerate(shape):
        names = tuple(a for a in axes if rng.random() < 0.4)
        if names and size % 4 == 0:
            dims[d] = names
            axes = [a for a in axes if a not in names]
    ragged = tuple(a for a in axes if rng.random() < 0.6)
    return P(*dims, ragged=ragged, block=rng.choice([ELEMENT, 3])) if ragged else P(*dims)


def full_values(tree: Any, want: dict[str, torch.Tensor]) -> None:
    full = dict(zip(tree.paths, optree.tree_leaves(unshard(tree)), strict=True))
    assert full.keys() == want.keys()
    for path, x in want.items():
        assert torch.equal(full[path], x), path
    for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
        for a, b in piece.bucket.local_gaps(tree.plan.bound().rank(piece.bucket.ragged)):
            assert not tensor[a:b].any()


def round_trips(shape: tuple[int, int], seed: int) -> None:
    """Through ragged layouts: what torch makes of the DTensors is the oracle, in both directions."""
    rng, mesh = random.Random(seed), mesh_of(*shape)
    for _ in range(12):
        shapes = {name: tuple(rng.choice([1, 3, 4, 8, 5]) for _ in range(rng.randrange(4))) for name in "abcd"} | {
            "empty": (0, 4)
        }
        dtype = rng.choice(DTYPES)
        want = {name: values(s, dtype) for name, s in shapes.items()}
        trees = [
            shard(want, mesh, {name: random_spec(rng, s) for name, s in shapes.items()}, units=["a"]) for _ in range(2)
        ]
        mine, lent = to_dtensor(trees[0]), {t.untyped_storage().data_ptr() for t in trees[0].tensors}
        assert sorted(mine) == sorted(want)
        for name, x in mine.items():
            assert isinstance(x, DTensor)
            assert x.device_mesh == mesh
            assert not x.requires_grad
            torches = distribute_tensor(want[name], mesh, x.placements, src_data_rank=None)
            assert (x.shape, x.stride()) == (torches.shape, torches.stride())
            assert torch.equal(x.to_local(), torches.to_local()), (name, x.placements)
            if x.to_local().numel():
                assert x.to_local().untyped_storage().data_ptr() not in lent  # nothing is shared
        for tree in trees:
            back = from_dtensor(mine, tree.plan)
            assert back.plan is tree.plan
            assert all(torch.equal(a, b) for a, b in zip(back.tensors, tree.tensors, strict=True))
        part, _ = partition(trees[0], lambda path, _: path in "ac")
        assert optree.tree_structure(to_dtensor(part)) == part.selection.structure
        assert from_dtensor(to_dtensor(part), trees[1].plan).paths == part.paths


@pytest.mark.parametrize("shape", MESHES)
def test_round_trips_of_random_layouts(run: Any, shape: tuple[int, int]) -> None:
    run(4, round_trips, shape, 1, timeout=180)


def any_placements(shape: tuple[int, int]) -> None:
    """Uneven chunks, two axes on one dim, uneven on several dims at once, on meshes of other shapes and orders."""
    meshes = [mesh_of(*shape), init_device_mesh("cpu", (4,))]
    if shape == MESHES[0]:  # the rest is no other source for another target
        meshes += [
            init_device_mesh("cpu", (2, 2)),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "fsdp")),
            init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)),
        ]
    kinds = [Replicate(), Shard(0), Shard(1), Shard(-1)]
    for size in [(7, 5), (3, 2), (8, 4), (2, 9, 3), (1, 6)]:
        cases = [(mesh, places) for mesh in meshes for places in itertools.product(kinds, repeat=mesh.ndim)]
        want = {f"unit.{i}": values(size) + i for i in range(len(cases))}
        for spec in [P(ragged="fsdp"), P(ragged=("fsdp", "tp"), block=ELEMENT), None]:
            given = {
                path: distribute_tensor(x, mesh, placements, src_data_rank=None)
                for (path, x), (mesh, placements) in zip(want.items(), cases, strict=True)
            }
            layout = plan({"unit": list(want.values())}, meshes[0], spec)
            full_values(from_dtensor(given, layout), want)


@pytest.mark.parametrize("shape", MESHES)
def test_any_placements_on_any_mesh_of_the_ranks(run: Any, shape: tuple[int, int]) -> None:
    run(4, any_placements, shape, timeout=180)


def mixed_sources() -> None:
    """One call takes DTensors of three meshes and a plain tensor; keys may be dotted, as in a state dict."""
    mesh = mesh_of(2, 2)
    want = {name: values((6, 4)) + i for i, name in enumerate(["x.a", "x.b", "y.0", "y.1"])}
    layout = plan({"x": {"a": want["x.a"], "b": want["x.b"]}, "y": [want["y.0"], want["y.1"]]}, mesh, P(ragged="fsdp"))
    given = {
        "x.a": torch.nn.Parameter(distribute_tensor(want["x.a"], mesh, [Shard(0), Shard(1)], src_data_rank=None)),
        "x.b": distribute_tensor(want["x.b"], mesh["tp"], [Shard(0)], src_data_rank=None),
        "y.0": distribute_tensor(want["y.0"], init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None),
        "y.1": want["y.1"].t().contiguous().t(),
    }
    for _ in range(2):
        tree = from_dtensor(given, layout)
        assert tree.selection.structure == layout.structure
        full = unshard(tree)
        assert torch.equal(full["x"]["a"], want["x.a"])
        assert torch.equal(full["x"]["b"], want["x.b"])
        assert torch.equal(full["y"][0], want["y.0"])
        assert torch.equal(full["y"][1], want["y.1"])
    half = given["x.b"].to(torch.bfloat16)
    alone = from_dtensor({"x.b": half}, layout)  # its buffer need not be of the planned dtype
    assert alone.paths == ("x.b",)
    assert alone.tensors[0].dtype == torch.bfloat16


def test_leaves_from_several_meshes(run: Any) -> None:
    run(4, mixed_sources)


def strided() -> None:
    """What torch's own FSDP makes of tensor parallel parameters."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    module = torch.nn.Linear(6, 8)
    want = {name: x.detach().clone() for name, x in module.named_parameters()}
    fully_shard(parallelize_module(module, mesh["tp"], ColwiseParallel()), mesh=mesh["fsdp"])
    kinds = {type(p) for p in module.weight.placements}
    assert kinds != {Shard}
    full_values(from_dtensor(dict(module.named_parameters()), plan(want, mesh, P(ragged="tp"))), want)


def test_parameters_of_fully_shard_over_tensor_parallelism(run: Any) -> None:
    run(4, strided)


def what_travels() -> None:
    """Only elements that change owner, and none between two layouts that say the same."""
    mesh = mesh_of(2, 2)
    w = values((8, 4))
    x = distribute_tensor(w, mesh, [Shard(0), Replicate()], src_data_rank=None)
    for spec, moved in [(P("fsdp"), 0), (P(ragged="fsdp"), 0), (P(ragged=("fsdp", "tp")), 0), (P("tp"), 8), (P(), 16)]:
        layout = plan({"w": w}, mesh, spec, align=1)
        with collectives.record() as events:
            tree = from_dtensor({"w": x}, layout)
        assert len([e for e in events if e.kind == "exchange"]) <= 1
        sent = torch.tensor(sum(e.sent for e in events if e.kind == "exchange"))
        dist.all_reduce(sent)
        assert sent.item() == 4 * moved * w.itemsize, spec
        with collectives.record() as events:
            to_dtensor(tree)
        # the ragged axes are gathered, and nothing else
        assert bool(sum(e.sent for e in events if e.kind == "exchange")) == bool(spec.ragged)


def test_what_travels(run: Any) -> None:
    run(4, what_travels)


def descending(cut: bool) -> None:
    mesh = DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("fsdp", "tp"))
    want = {"w": values((8, 4))}
    tree = shard(want, mesh, P("fsdp") if cut else P("tp", ragged="fsdp", block=ELEMENT))
    mine = to_dtensor(tree)
    assert torch.equal(mine["w"].full_tensor(), want["w"])
    full_values(from_dtensor(mine, tree.plan), want)


def test_axes_whose_ranks_descend(run: Any) -> None:
    """Torch joins parts in the order of ranks there, not in that of coordinates."""
    run(4, descending, False)
    for error in run(4, descending, True, expect_error=True):
        assert "ranks don't ascend along axis 'fsdp'" in str(error)


def wrong_inputs(case: str) -> None:
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    w = values((8, 4))
    layout = plan({"w": w}, mesh, P(ragged="fsdp"))
    good = distribute_tensor(w, mesh, [Shard(0), Replicate()], src_data_rank=None)
    if case == "partial":
        partial = DTensor.from_local(w, mesh, [Replicate(), Partial()], run_check=False)
        from_dtensor({"w": partial}, layout)
    if case == "one rank":
        from_dtensor({"w": good if rank else w}, layout)
    if case == "placements":
        from_dtensor(
            {"w": good if rank else distribute_tensor(w, mesh, [Shard(1), Replicate()], src_data_rank=None)}, layout
        )
    if case == "path":
        from_dtensor({"v": good}, layout)
    if case == "shape":
        from_dtensor({"w": good if rank else w[:4]}, layout)
    if case == "local part":
        from_dtensor(
            {"w": DTensor.from_local(w, mesh, [Shard(0), Replicate()], run_check=False, shape=(8, 4), stride=(4, 1))},
            layout,
        )
    if case == "dtypes":
        pair = plan({"x": {"v": w, "w": w}}, mesh, P(ragged="fsdp"))
        from_dtensor({"x": {"v": good, "w": good.to(torch.bfloat16)}}, pair)
    if case == "no tensor":
        from_dtensor({"w": 3 if rank else good}, layout)
    if case == "descending":
        reverse = DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("x",))
        from_dtensor({"w": DTensor.from_local(w[:2], reverse, [Shard(0)], run_check=False)}, layout)
    if case == "order":
        to_dtensor(shard({"w": w}, mesh, P(("tp", "fsdp"))))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("partial", "leaf 'w' of shape .*still to be reduced.*redistribute"),
        (
            "one rank",
            "differs between ranks: leaf 'w': rank 0 has torch.float32, no DTensor, rank 1 has torch.float32, ",
        ),
        ("placements", "differs between ranks: leaf 'w'"),
        ("path", "no leaf 'v'"),
        ("shape", r"leaf 'w' has shape \(4, 4\), in the plan \(8, 4\)"),
        ("local part", r"leaf 'w' .*local part of shape \(8, 4\).*mean \(4, 4\)"),
        ("dtypes", "leaves 'x.v' and 'x.w' share a buffer"),
        ("no tensor", "leaf 'w' is no tensor with values, but 3"),
        ("descending", "leaf 'w' of shape .* ranks don't ascend along axis 'x'"),
        ("order", r"leaf 'w' .*P\(\('tp', 'fsdp'\)\).*\('fsdp', 'tp'\)"),
    ],
)
def test_all_ranks_raise(run: Any, case: str, message: str) -> None:
    for error in run(4, wrong_inputs, case, expect_error=True):
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=message):
            raise error


def other_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "fsdp"))
    w = values((8, 4))
    x = distribute_tensor(w, mesh["replica"], [Shard(0)], src_data_rank=None)
    layout = plan({"w": w}, mesh["fsdp"], P(ragged="fsdp"))
    from_dtensor({"w": x}, layout)


def test_a_mesh_of_other_ranks(run: Any) -> None:
    for error in run(4, other_ranks, expect_error=True):
        assert isinstance(error, ValueError)
        assert "leaf 'w' of shape (8, 4): a mesh of the ranks" in str(error)
