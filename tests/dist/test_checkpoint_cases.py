"""Public failure reports of checkpoints: each with the inputs and numbers it came with."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

import optim
from ragged import P, ShardedTree, checkpoint, make_mesh, plan, rules, shard, unshard
from tests.dist.test_checkpoint_crash import full_disk, on_one
from tests.unit.test_muon import w

MESH = (-1,), ("fsdp",)


def drawn(shapes: Any, k: int, dtype: torch.dtype = torch.float32) -> Any:
    """Values for a tree of shapes, other ones for every leaf and k."""
    leaves, structure = optree.tree_flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return optree.tree_unflatten(structure, [w(shape, k + 7 * i).to(dtype) for i, shape in enumerate(leaves)])


def sharded(tree: Any, tx: Any = None, mesh: Any = MESH) -> ShardedTree:
    shape, axes = mesh
    return shard(tree, plan(tree, make_mesh(shape, axes, device_type="cpu"), P(ragged="fsdp"), optimizer=tx))


def trees_of(tx: Any, start: Any, place: Callable[[Any], Any] = lambda tree: tree) -> dict[str, Any]:
    """Parameters and a fresh state; the values of a tree are those of `start` where they matter at all."""
    params = place(optree.tree_map(torch.clone, start))
    return {"params": params, "opt": tx.init(params)}


def advanced(tx: Any, trees: Any, shapes: Any, steps: Sequence[int], donate: bool = True) -> dict[str, Any]:
    """The trees some steps later; the gradients of a step are the same on any number of ranks."""
    params, state, step = trees["params"], trees["opt"], optim.make_step(tx, donate=donate)
    for k in steps:
        grads = drawn(shapes, 20 + k, optree.tree_leaves(params)[0].dtype)
        params, state = step(params, shard(grads, params.plan) if isinstance(params, ShardedTree) else grads, state)
    return {"params": params, "opt": state}


def everything(trees: Any) -> Any:
    """Full tensors and counters, independent of the trees."""
    full = optree.tree_map(
        lambda x: unshard(x) if isinstance(x, ShardedTree) else x, trees, is_leaf=lambda x: isinstance(x, ShardedTree)
    )
    return optree.tree_map(torch.clone, full)


def same(a: Any, b: Any) -> bool:
    """Structures, dtypes and bits."""
    equal = optree.tree_map(lambda x, y: x.dtype == y.dtype and torch.equal(x, y), a, b)
    return bool(optree.tree_structure(a) == optree.tree_structure(b) and optree.tree_all(equal))


def near(a: Any, b: Any) -> None:
    """Equal up to 1e-6. (`torch.testing` would import DTensor for it in every worker, which takes a second.)"""
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert torch.allclose(x, y, rtol=1e-6, atol=1e-6), f"apart by {(x.double() - y.double()).abs().max():.1e}"


# --- moments, counters and names ---------------------------------------------------------------------------------

ODD = {"a": (13, 5), "b": (3,), "c": (1, 17)}
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda: optim.adamw(0.01),
    "muon": lambda: optim.partition(
        {"muon": optim.muon(0.02, ns_dtype=torch.float32), "adam": optim.adamw(0.01)},
        rules({"b": "adam", "**": "muon"}),
    ),
}


def begun(folder: str, kind: str) -> Any:
    tx = OPTIMIZERS[kind]()
    trees = advanced(tx, trees_of(tx, drawn(ODD, 1), lambda tree: sharded(tree, tx)), ODD, range(3))
    checkpoint.save(folder, trees)
    return everything(trees)


def resumed(folder: str, kind: str, want: Any) -> Any:
    tx = OPTIMIZERS[kind]()
    found = checkpoint.load(folder, trees_of(tx, drawn(ODD, 9), lambda tree: sharded(tree, tx)))
    assert same(everything(found), want)
    return everything(advanced(tx, found, ODD, range(3, 5)))


def straight(kind: str) -> Any:
    tx = OPTIMIZERS[kind]()
    return everything(advanced(tx, trees_of(tx, drawn(ODD, 1), lambda tree: sharded(tree, tx)), ODD, range(5)))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_come_back_on_any_number_of_ranks(run: Any, kind: str, tmp_path: Path) -> None:
    """CK-01, ServiceNow/Fast-LLM#436, pytorch/pytorch#91205: moments that don't load, or as zeros."""
    (want,) = run(1, straight, kind)
    saved = run(4, begun, str(tmp_path / "a"), kind)
    assert all(same(x, saved[0]) for x in saved)
    moments = [x for x in optree.tree_leaves(saved[0]["opt"]) if x.ndim]
    assert len(moments) == (6 if kind == "adam" else 4)
    assert all(x.any() for x in moments)
    assert {x.item() for x in optree.tree_leaves(saved[0]["opt"]) if not x.ndim} == {3}
    for ranks in (1, 2, 3, 8):
        for got in run(ranks, resumed, str(tmp_path / "a"), kind, saved[0]):
            near(got, want)


def three_steps(folder: str) -> tuple[Any, Any]:
    """After three steps, and after a fourth."""
    tx = optim.adamw(0.01)
    trees = advanced(tx, trees_of(tx, drawn(ODD, 1), sharded), ODD, range(3))
    checkpoint.save(folder, trees)
    return everything(trees), everything(advanced(tx, trees, ODD, [3]))


def from_nothing(folder: str, third: Any, fourth: Any) -> None:
    tx = optim.adamw(0.01)
    fresh = trees_of(tx, drawn(ODD, 9), sharded)
    assert not any(x.any() for x in optree.tree_leaves(fresh["opt"]))
    found = checkpoint.load(folder, fresh)
    assert same(everything(found), third)
    assert found["opt"][0].count.item() == 3
    assert all(x.any() for x in optree.tree_leaves(everything(found["opt"][0])))
    assert same(everything(advanced(tx, found, ODD, [3])), fourth)


def in_new_process(rank: int, ranks: int, store: str, fn: Callable[..., None], *args: Any) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        fn(*args)
    finally:
        dist.destroy_process_group()


def test_a_fresh_optimizer_in_new_processes(run: Any, tmp_path: Path) -> None:
    """CK-03, KempnerInstitute/KempnerForge#115: no state yet, so no place for moments, which are dropped."""
    folder, store = str(tmp_path / "a"), str(tmp_path / "store")
    (third, fourth), other = run(2, three_steps, folder)
    assert same((third, fourth), other)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        args = 2, store, from_nothing, folder, third, fourth
        for future in [processes.submit(in_new_process, rank, *args) for rank in range(2)]:
            future.result(timeout=60)


def mismatched(folder: str) -> list[str]:
    checkpoint.save(folder, {"params": sharded(drawn({"a": (4, 3), "b": (5,)}, 1))})
    said = []
    for shapes in ({"a": (4, 3), "c": (5,)}, {"a": (3, 4), "b": (5,)}):
        for place in (sharded, lambda tree: tree):
            target = place(drawn(shapes, 9))
            with pytest.raises(ValueError) as error:  # noqa: PT011  # the words are looked at below
                checkpoint.load(folder, {"params": target})
            assert same(everything(target), drawn(shapes, 9))
            said.append(str(error.value))
    return said


def test_missing_unexpected_and_of_another_shape(run: Any, tmp_path: Path) -> None:
    """CK-08, pytorch/pytorch#148252 and #126881: missing keys raise late, extra ones not at all."""
    first, second = run(2, mismatched, str(tmp_path / "a"))
    assert first == second
    for names, shapes in zip(first[:2], first[2:], strict=True):
        assert "'params.b' is unexpected" in names
        assert "'params.c' is missing" in names
        assert "'params.a' has shape (4, 3) in the files, expected (3, 4)" in shapes


# --- Muon --------------------------------------------------------------------------------------------------------

FIVE = {f"m{k}": (4, 4) for k in range(5)}


def muon() -> Any:
    return optim.muon(0.02, ns_dtype=torch.float32)


def five_begun(folder: str) -> Any:
    tx = muon()
    trees = advanced(tx, trees_of(tx, drawn(FIVE, 1), lambda tree: sharded(tree, tx)), FIVE, range(3))
    checkpoint.save(folder, trees)
    return everything(trees)


def five_resumed(folder: str) -> tuple[Any, Any]:
    tx = muon()
    found = checkpoint.load(folder, trees_of(tx, drawn(FIVE, 9), lambda tree: sharded(tree, tx)))
    return everything(found), everything(advanced(tx, found, FIVE, range(3, 5)))


def test_momentum_of_every_matrix(run: Any, tmp_path: Path) -> None:
    """MU-14, KellerJordan/Muon#46: only the owner of a matrix has its momentum, and rank 0 saves its own."""
    tx = muon()
    third = advanced(tx, trees_of(tx, drawn(FIVE, 1)), FIVE, range(3), donate=False)
    fifth = advanced(tx, third, FIVE, range(3, 5), donate=False)
    saved = run(4, five_begun, str(tmp_path / "a"))
    assert all(same(x, saved[0]) for x in saved)
    for found, end in run(2, five_resumed, str(tmp_path / "a")):
        assert same(found, saved[0])
        assert all(x.any() for x in found["opt"].mu.values())
        near(found["opt"].mu, third["opt"].mu)
        near(end, fifth)


# --- one rank fails ----------------------------------------------------------------------------------------------

TALL = {"w": (384, 8)}


def contents(folder: str) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def unwritable(folder: str) -> None:
    params = sharded(drawn(TALL, 1))
    checkpoint.save(f"{folder}/step-1", {"params": params})
    before, begun = contents(folder), time.monotonic()
    mine = dist.get_rank() == 1
    file = re.escape(".step-2.partial/params.safetensors")
    with full_disk(1, 0), pytest.raises(OSError if mine else ValueError, match=file if mine else f"rank 1 .*{file}"):
        checkpoint.save(f"{folder}/step-2", {"params": sharded(drawn(TALL, 2))})
    assert time.monotonic() - begun < 10
    dist.barrier()
    assert contents(folder) == before
    assert checkpoint.latest(folder) == Path(folder, "step-1")
    dist.barrier()


def cut_short(folder: str) -> None:
    params = sharded(drawn(TALL, 2))
    path = Path(
        checkpoint.save(f"{folder}/step-2", {"params": params, "opt": [params["w"]]}).wait(), "params.safetensors"
    )
    if dist.get_rank() == 2:  # the last byte of the file is a byte of rank 2
        assert params.tensors[0].numpy().tobytes()[-99:] == path.read_bytes()[-99:]
    dist.barrier()
    on_one(lambda: os.truncate(path, path.stat().st_size - 1))
    for manifest in (True, False):  # without it, it is a folder of files as other programs write them
        if not manifest:
            on_one((path.parent / "manifest.json").unlink)
        for strict in (True, False):
            target, begun = {"params": sharded(drawn(TALL, 3)), "opt": [sharded(drawn(TALL, 3))["w"]]}, time.monotonic()
            with pytest.raises(ValueError, match=f"{re.escape(str(path))}.* cut short"):
                checkpoint.load(path.parent, target, strict=strict)
            assert time.monotonic() - begun < 10
            assert same(everything(target), {"params": drawn(TALL, 3), "opt": [drawn(TALL, 3)["w"]]})
        assert checkpoint.latest(folder) == Path(folder, "step-1")
        dist.barrier()
    found = checkpoint.load(f"{folder}/step-1", {"params": sharded(drawn(TALL, 3))})
    assert same(unshard(found["params"]), drawn(TALL, 1))


def test_one_rank_fails(run: Any, tmp_path: Path) -> None:
    """CK-12, pytorch/pytorch#122529 and #77091: the others wait, or hide the cause. Root may write everywhere, so
    rank 1 may write files of no byte instead; a piece that is cut short is noticed by all ranks."""
    run(3, unwritable, str(tmp_path), timeout=30)
    run(3, cut_short, str(tmp_path), timeout=30)
