"""What every optimizer promises, on one process and on any mesh: one table of optimizers, one set of promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import optim
from optim import schedules
from ragged import P, ShardedTree, make_mesh, plan, shard, unshard
from ragged.mesh import Nowhere
from ragged.report import state_bytes
from ragged.selection import whole
from ragged.tree import sharded_trees

STEPS, HALF, FULL = 3, torch.bfloat16, torch.float32
RATE = schedules.linear_schedule(0.1, 0.02, 4)

# --- the optimizers, each with a tree it can train ---------------------------------------------


class Case(NamedTuple):
    """How to make an optimizer for a learning rate, and what it trains.

    Attributes:
      tolerance: between meshes and one process, relative to entries of about 1; 0 means bit by bit.
      fused: the same between the donated step and `update`.
      loose: tolerances of leaves that differ from these.
    """

    make: Callable[[Any], optim.GradientTransformation]
    tree: Any
    tolerance: float
    fused: float
    loose: Callable[[str], bool] = lambda path: False


# 0-d, zero-size and one-row leaves, None, two dtypes (so two buckets), a list of units
MATRICES: dict[str, Any] = {
    "half": ((16, 8), HALF),
    "layers": [{"w": ((13, 7), FULL), "wide": ((40, 72), FULL)}, {"w": ((8, 6), FULL), "none": None}],
    "row": ((1, 8), FULL),
    "void": ((3, 0), FULL),
    "zero": ((0, 8), FULL),
}
ANY: dict[str, Any] = {
    **MATRICES,
    "bias": ((700,), FULL),
    "dot": ((), FULL),
    "none": None,
    "short": ((5,), HALF),
    "stack": ((2, 33, 8), FULL),
}
FEW: dict[str, Any] = {"row": ((1, 8), FULL), "zero": ((0, 8), FULL)}  # most ranks have nothing at all


def label(path: str, leaf: Any) -> str:
    return "muon" if len(leaf.shape) == 2 and leaf.dtype == FULL and path != "void" else "bytes"


def not_vectors(path: str, leaf: Any) -> bool:
    return len(leaf.shape) > 1


def bytes_of(rate: Any, block: Any = 256) -> optim.GradientTransformation:
    return optim.adamw8bit(rate, weight_decay=0.1, mask=not_vectors, block=block, min_size=20)


def matrices_of(rate: Any) -> optim.GradientTransformation:
    return optim.muon(rate, ns_dtype=FULL)


CASES = {
    "adamw": Case(lambda rate: optim.adamw(rate, weight_decay=0.1, mask=not_vectors), ANY, 1e-6, 1e-6),
    "sgd": Case(lambda rate: optim.sgd(rate, 0.9), ANY, 1e-6, 0),
    "nesterov": Case(lambda rate: optim.sgd(rate, 0.9, nesterov=True), ANY, 1e-6, 0),
    "muon": Case(matrices_of, MATRICES, 1e-5, 1e-5),
    "adamw8bit": Case(bytes_of, ANY, 0, 0),
    "adamw8bit tiles": Case(lambda rate: bytes_of(rate, (32, 32)), ANY, 0, 0),
    "muon+adamw8bit": Case(
        lambda rate: optim.partition({"muon": matrices_of(rate), "bytes": bytes_of(rate)}, label), ANY, 0, 0,
        lambda path: ".muon." in path or path.startswith(("0.layers", "0.row")),
    ),
}  # fmt: skip

MESHES = [((1,), ("fsdp",)), ((2,), ("fsdp",)), ((3,), ("fsdp",)), ((4,), ("fsdp",)), ((2, 2), ("replica", "fsdp"))]

# --- small tools ---------------------------------------------------------------------------------


def is_leaf(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], torch.dtype)


def values(tree: Any, k: int) -> Any:
    """Fixed numbers of about 1, others in every leaf and for every k."""
    count = iter(range(k, 10_000, 17))

    def leaf(x: Any) -> Tensor:
        i = torch.arange(math.prod(x[0]))
        return (((37 * i + 11 * next(count)) % 101 - 50) / 50).to(x[1]).view(x[0])

    return optree.tree_map(leaf, tree, is_leaf=is_leaf)


def copied(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedTree)


def full(tree: Any) -> Any:
    return optree.tree_map(lambda x: unshard(x) if is_sharded(x) else x, tree, is_leaf=is_sharded)


def bitwise(a: Any, b: Any) -> None:
    assert optree.tree_structure(a) == optree.tree_structure(b)
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def close(case: Case, got: Any, want: Any, tolerance: float) -> None:
    """Full trees, of parameters or of states, leaf by leaf."""
    paths, leaves, _ = optree.tree_flatten_with_path(want)
    for path, x, y in zip(paths, optree.tree_leaves(got), leaves, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        place = ".".join(map(str, path))
        own = 1e-5 if case.loose(place) else tolerance
        if x.dtype == HALF and own:
            own = 2**-7  # a tiny difference may decide how a number is rounded, in each of the steps
        torch.testing.assert_close(x, y, rtol=own, atol=own, msg=lambda text, at=place: f"{at}: {text}")


def padding_is_zero(*trees: Any) -> None:
    for tree in sharded_trees(trees):
        comm = tree.plan.bound()
        for piece, x in zip(tree.selection.pieces, tree.tensors, strict=True):
            for a, b in piece.bucket.local_gaps(comm.rank(piece.bucket.ragged), piece.start, piece.stop):
                assert not x[a:b].any()


def same_kind(a: Any, b: Any) -> None:
    """Types of containers, plans, dtypes and shapes; not values."""
    assert optree.tree_structure(a) == optree.tree_structure(b)
    kinds = [[(x.dtype, x.shape) for x in optree.tree_leaves(tree)] for tree in (a, b)]
    assert kinds[0] == kinds[1]


def storage(*trees: Any) -> list[int]:
    return [x.data_ptr() for tree in sharded_trees(trees) for x in tree.tensors if x.numel()]


# --- the promises --------------------------------------------------------------------------------


def pure_steps(tx: Any, params: Any, grads: Sequence[Any]) -> tuple[Any, Any]:
    """Parameters and state after some steps by `update`, which leaves its inputs alone."""
    state = tx.init(params)
    for g in grads:
        inputs = params, g, state
        before = copied(inputs)
        updates, after = tx.update(g, state, params)
        bitwise(inputs, before)
        same_kind(after, state)
        assert optree.tree_structure(updates) == optree.tree_structure(params)
        padding_is_zero(params, updates, after)
        new = optim.apply_updates(params, updates)
        same_kind(new, params)
        bitwise(optim.make_step(tx, donate=False)(*inputs), (new, after))
        bitwise(inputs, before)
        params, state = new, after
    return params, state


def donated_steps(tx: Any, params: Any, grads: Sequence[Any]) -> tuple[Any, Any]:
    """The same by the donated step, which writes into what it is given and ends it."""
    state, step = tx.init(params), optim.make_step(tx)
    for g in grads:
        old, at = (params, copied(g), state), storage(params, state)
        before = copied((params, state))
        params, state = step(*old)
        assert storage(params, state) == at
        same_kind((params, state), before)
        padding_is_zero(params, state)
        for dead in sharded_trees(old):
            if dead.paths:  # a label or a threshold may leave nothing to give away
                with pytest.raises(ValueError, match="this tree was donated to an optimizer step"):
                    _ = dead.tensors
        for second in ((old[0], g, state), (params, old[1], state), (params, g, old[2])):
            with pytest.raises(ValueError, match="donated to an optimizer step"):
                step(*second)
    return params, state


def without_memory(tx: Any, params: ShardedTree) -> None:
    """`init` needs neither values nor processes: it says what the state will be."""
    there = replace(params.plan, comm=Nowhere(params.plan.axes), memo={})
    sizes = [(piece.bucket.bounds.size(0), piece.bucket.dtype) for piece in whole(there).pieces]
    tensors = [torch.empty(n, dtype=dtype, device="meta") for n, dtype in sizes]
    abstract, real = tx.init(ShardedTree(there, whole(there), tensors)), tx.init(params)
    assert {x.device.type for tree in sharded_trees(abstract) for x in tree.tensors} <= {"meta"}
    assert optree.tree_structure(abstract) == optree.tree_structure(real)
    assert [x.dtype for x in optree.tree_leaves(abstract)] == [x.dtype for x in optree.tree_leaves(real)]
    if all(k == 0 for k in params.rank.values()):
        same_kind(abstract, real)
    if dist.get_world_size() == 1:
        held = sum(x.numel() * x.itemsize for tree in sharded_trees(real) for x in tree.tensors)
        assert sum(state_bytes(params.plan, tx).values()) == held


def compare(case: Case, tree: Any, mesh: Any, tx: Any) -> None:
    """Sharded or not, by `update` or in place: the same parameters and states."""
    want = pure_steps(tx, values(tree, 0), [values(tree, k + 1) for k in range(STEPS)])
    made = plan(tree, mesh, P(ragged="fsdp"), units=["layers.*"] if "layers" in tree else (), optimizer=tx)
    params, *grads = [shard(values(tree, k), made) for k in range(STEPS + 1)]
    without_memory(tx, params)
    by_update = full(pure_steps(tx, params, grads))
    by_step = full(donated_steps(tx, copied(params), grads))
    close(case, by_update, want, case.tolerance)
    close(case, by_step, by_update, case.fused)
    assert optree.tree_structure(by_step) == optree.tree_structure(want)  # with None in its places


def contract(name: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> None:
    case, mesh = CASES[name], make_mesh(sizes, axes, device_type="cpu")
    compare(case, case.tree, mesh, case.make(RATE))
    compare(case, FEW, mesh, case.make(0.1))


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh[0])))
@pytest.mark.parametrize("name", CASES)
def test_contract(run: Any, name: str, mesh: Any) -> None:
    run(math.prod(mesh[0]), contract, name, *mesh)


# --- promises that need no ranks -----------------------------------------------------------------


def lone(tree: Any) -> ShardedTree:
    return shard(tree, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"))


@pytest.mark.parametrize("place", [copied, lone])
@pytest.mark.parametrize("name", CASES)
def test_leaves_that_cannot_be_trained_are_refused_by_path(name: str, place: Any) -> None:
    make = CASES[name].make
    for dtype in (torch.int64, torch.bool, torch.complex64):
        tree = place({"deep": {"n": torch.ones(4, 4, dtype=dtype)}, "w": torch.ones(4, 4)})
        if dtype == torch.complex64 and name in ("sgd", "nesterov"):
            make(0.1).init(tree)
            continue
        with pytest.raises(ValueError, match=rf"'deep\.n'.*{str(dtype).split('.')[1]}"):
            make(0.1).init(tree)


@pytest.mark.parametrize("place", [copied, lone])
@pytest.mark.parametrize("shape", [(), (5,), (0,), (2, 3, 4)])
def test_muon_refuses_what_is_no_matrix_by_path(shape: tuple[int, ...], place: Any) -> None:
    with pytest.raises(ValueError, match=r"leaf 'deep\.v' of shape .* is no matrix"):
        optim.muon(0.1).init(place({"deep": {"v": torch.ones(shape)}, "w": torch.ones(4, 4)}))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_schedule_is_asked_with_the_count_before_the_step(name: str, donate: bool) -> None:
    seen: set[int] = set()

    def constant(count: Tensor) -> float:
        seen.add(int(count))
        return 0.1

    ends = []
    for rate in (constant, 0.1):
        tx, params = CASES[name].make(rate), values(CASES[name].tree, 0)
        state, step = tx.init(params), optim.make_step(tx, donate=donate)
        for k in range(STEPS):
            params, state = step(params, values(CASES[name].tree, k + 1), state)
        ends.append(params)
    assert seen == set(range(STEPS))
    bitwise(*ends)


@pytest.mark.parametrize("name", CASES)
def test_plain_trees_without_memory(name: str) -> None:
    tx, params = CASES[name].make(RATE), values(CASES[name].tree, 0)
    abstract, real = tx.init(optree.tree_map(lambda x: x.to("meta"), params)), tx.init(params)
    same_kind(abstract, real)
    assert {x.device.type for x in optree.tree_leaves(abstract)} == {"meta"}
