"""Training goes on from a checkpoint: on other ranks and meshes, nested otherwise, with other numbers and dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist

import optim
from ragged import checkpoint, rules
from tests.dist.test_checkpoint_cases import advanced, drawn, everything, near, same, sharded, trees_of
from tests.pool import Pool

# --- five steps, and three and two -------------------------------------------------------------------------------

MATRICES = {"e": (1, 17), "layers": [{"o": (16, 4), "q": (12, 10)}, {"o": (16, 4), "q": (12, 10)}]}
MIXED = {"e": (24, 8), "layers": [{"b": (6,), "w": (13, 6)}, {"b": (6,), "w": (13, 6)}], "s": ()}
MESHES = {
    **{f"{n}": (n, ((-1,), ("fsdp",))) for n in (1, 2, 3, 4, 8)},
    "2 x 2": (4, ((2, 2), ("replica", "fsdp"))),
}


def falling(count: Any) -> Any:
    return 0.01 / (1 + count)


def three_kinds() -> optim.GradientTransformation:
    """A partition of all."""
    kinds = {
        "bytes": optim.adamw8bit(falling, block=(4, 4), min_size=8),
        "matrices": optim.muon(0.02, ns_dtype=torch.float32),
        "rest": optim.adamw(falling),
    }
    return optim.partition(kinds, rules({"**.w": "matrices", "e": "bytes", "**": "rest"}))


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adamw": (MIXED, lambda: optim.adamw(falling)),
    "muon": (MATRICES, lambda: optim.muon(0.02, ns_dtype=torch.float32)),
    "adamw8bit, flat": (MIXED, lambda: optim.adamw8bit(falling, block=8, min_size=8)),
    "adamw8bit, tiles": (MIXED, lambda: optim.adamw8bit(falling, block=(4, 4), min_size=8)),
    "partition": (MIXED, three_kinds),
}


class Run(NamedTuple):
    """What the saved trees were, and the parameters of five straight steps."""

    saved: Any
    straight: Any


def made(kind: str, mesh: str | None, k: int) -> tuple[Any, dict[str, Any]]:
    """Optimizer and trees; plain ones without a mesh."""
    shapes, make = OPTIMIZERS[kind]
    tx = make()
    return tx, trees_of(tx, drawn(shapes, k), lambda x: x if mesh is None else sharded(x, tx, MESHES[mesh][1]))


def on(tx: Any, trees: Any, steps: range) -> dict[str, Any]:
    """Some steps with gradients that are multiples of the parameters: every rank has its part of them already."""
    params, state, step = trees["params"], trees["opt"], optim.make_step(tx)
    for k in steps:
        grads = optree.tree_map(lambda p, k=k: p * (1 - 0.3 * k), params)
        params, state = step(params, grads, state)
    return {"params": params, "opt": state}


def straight(folder: str, kind: str, mesh: str | None) -> Run:
    tx, trees = made(kind, mesh, 1)
    trees = on(tx, trees, range(3))
    checkpoint.save(f"{folder}/{kind}", {**trees, "step": 3})
    saved = everything(trees)
    return Run(saved, everything(on(tx, trees, range(3, 5))["params"]))


def gone_on(folder: str, kind: str, mesh: str | None, wants: dict[str, Run]) -> None:
    """From checkpoints of several meshes."""
    tx, trees = made(kind, mesh, 9)
    for source, want in wants.items():
        found = checkpoint.load(f"{folder}/{source}/{kind}", {**trees, "step": 0})
        assert found.pop("step") == 3
        assert same(everything(found), want.saved)  # codes, scales and counters among them
        end = everything(on(tx, found, range(3, 5))["params"])
        if source == mesh:
            assert same(end, want.straight)
        near(end, want.straight)


def all_straight(folder: str, mesh: str) -> dict[str, Run]:
    return {kind: straight(f"{folder}/{mesh}", kind, mesh) for kind in OPTIMIZERS}


def all_gone_on(folder: str, mesh: str, wants: dict[str, dict[str, Run]]) -> None:
    for kind, runs in wants.items():
        gone_on(folder, kind, mesh, runs)


def sources(mesh: str, k: int) -> list[str]:
    """Where the k-th optimizer's checkpoints come from: in all, every mesh loads from every mesh."""
    names, twins = list(MESHES), {"4": "2 x 2", "2 x 2": "4"}
    return list(dict.fromkeys([mesh, names[(names.index(mesh) + 1 + k) % len(names)], twins.get(mesh, mesh)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def runs(pool: Pool, folder: str) -> dict[str, dict[str, Run]]:
    """By mesh and optimizer."""
    return {mesh: pool.run(n, all_straight, folder, mesh)[0] for mesh, (n, _) in MESHES.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_training_goes_on(run: Any, folder: str, runs: dict[str, dict[str, Run]], mesh: str) -> None:
    """As if nothing had been: bitwise on the same mesh, closely on others, from shards into replicas and back too."""
    wants = {kind: {s: runs[s][kind] for s in sources(mesh, k)} for k, kind in enumerate(OPTIMIZERS)}
    run(MESHES[mesh][0], all_gone_on, folder, mesh, wants)
    for kind in OPTIMIZERS:
        near(runs[mesh][kind].straight, runs["1"][kind].straight)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_process_without_a_mesh(run: Any, folder: str, runs: dict[str, dict[str, Run]], kind: str) -> None:
    """From shards into plain tensors and back."""
    assert not dist.is_initialized()
    gone_on(folder, kind, None, {"3": runs["3"][kind]})
    mine = straight(f"{folder}/plain", kind, None)
    near(mine.straight, runs["3"][kind].straight)
    assert not dist.is_initialized()
    run(3, gone_on, folder, kind, "3", {"plain": mine})


# --- what comes from the code, and what from the files -----------------------------------------------------------

NESTED: dict[str, Any] = {
    "alone": lambda tx: tx,
    "clipped": lambda tx: optim.chain(optim.clip_by_global_norm(1e9), tx),
    "deep": lambda tx: optim.chain(optim.chain(optim.chain(tx), optim.identity()), optim.scale(1.0)),
    "named": lambda tx: optim.named_chain(("clip", optim.clip_by_global_norm(1e9)), ("adam", tx)),
    "masked": lambda tx: optim.masked(tx, True),
    "labelled": lambda tx: optim.partition({"mu": tx, "nothing": optim.set_to_zero()}, rules({"**": "mu"})),
}


def renested(folder: str) -> None:
    def fresh(how: str, k: int) -> tuple[Any, dict[str, Any]]:
        tx = NESTED[how](optim.adamw(falling))
        return tx, trees_of(tx, drawn(MIXED, k), sharded)

    def numbers(trees: Any) -> list[Any]:
        return [*optree.tree_leaves(everything(trees))]

    wants = {}
    for how in NESTED:
        tx, trees = fresh(how, 1)
        trees = advanced(tx, trees, MIXED, range(2))
        checkpoint.save(f"{folder}/{how}", trees)
        wants[how] = numbers(trees), numbers(advanced(tx, trees, MIXED, [2]))
    for saved in NESTED:
        for loaded in NESTED:
            if "alone" not in (saved, loaded):
                continue
            tx, trees = fresh(loaded, 9)
            found = checkpoint.load(f"{folder}/{saved}", trees)
            assert same(numbers(found), wants[saved][0])
            near(numbers(advanced(tx, found, MIXED, [2])), wants[saved][1])


def test_other_nesting(run: Any, tmp_path: Path) -> None:
    """Names don't tell how transformations were chained, masked or labelled."""
    run(2, renested, str(tmp_path))


PAIRS: dict[str, tuple[Any, Any, Any]] = {
    "rate": (MIXED, lambda: optim.adamw(0.01), lambda: optim.adamw(0.1, 0.8, 0.99, 1e-4, weight_decay=0.3)),
    "schedule": (MIXED, lambda: optim.adamw(falling), lambda: optim.adamw(lambda count: 0.1 * (count + 1))),
    "muon": (MATRICES, lambda: optim.muon(0.02), lambda: optim.muon(lambda count: 0.1 * (count + 1), 0.8)),
    "bytes": (
        MIXED,
        lambda: optim.adamw8bit(falling, block=8, min_size=8),
        lambda: optim.adamw8bit(lambda count: 0.1 * (count + 1), 0.8, weight_decay=0.3, block=8, min_size=8),
    ),
}


def renumbered(folder: str) -> None:
    for name, (shapes, before, after) in PAIRS.items():
        old, new = before(), after()
        trees = advanced(old, trees_of(old, drawn(shapes, 1), lambda x, tx=old: sharded(x, tx)), shapes, range(3))
        path = checkpoint.save(f"{folder}/{name}", trees).wait()
        values = checkpoint.metadata(path).values
        assert all(key.endswith("State.count") and value == 3 for key, value in values.items())
        assert len(values) == (1 if name in ("rate", "muon") else 2)
        found = checkpoint.load(path, trees_of(new, drawn(shapes, 9), lambda x, tx=new: sharded(x, tx)))
        ends = [everything(advanced(tx, trees, shapes, [3], donate=False)) for tx in (old, new)]
        assert same(everything(advanced(new, found, shapes, [3], donate=False)), ends[1])
        assert not same(*ends)


def test_numbers_come_from_the_code_and_counters_from_the_files(run: Any, tmp_path: Path) -> None:
    """Another learning rate than the one that was trained with; a new schedule goes on from the old count."""
    run(2, renumbered, str(tmp_path))


# --- dtypes of states --------------------------------------------------------------------------------------------


def half_momentum(folder: str, donate: bool) -> None:
    shapes, tx = {"v": (5, 7), "w": (16, 8)}, optim.muon(0.02)

    def fresh(k: int) -> dict[str, Any]:
        return trees_of(tx, drawn(shapes, k, torch.bfloat16), lambda tree: sharded(tree, tx))

    trees = advanced(tx, fresh(1), shapes, range(2), donate)
    checkpoint.save(folder, trees)
    momentum = everything(trees["opt"].mu)
    assert all(x.dtype == torch.bfloat16 and x.any() for x in optree.tree_leaves(momentum))
    found = checkpoint.load(folder, fresh(9))
    assert same(everything(found["opt"].mu), momentum)
    want = everything(advanced(tx, trees, shapes, [2], donate))
    assert same(everything(advanced(tx, found, shapes, [2], donate)), want)


@pytest.mark.parametrize("donate", [False, True])
def test_momentum_in_16_bits(run: Any, donate: bool, tmp_path: Path) -> None:
    """CK-10, deepspeedai/DeepSpeed#7746: bf16 momentum comes back as fp32, or not at all."""
    run(2, half_momentum, str(tmp_path / "a"), donate)


def one_byte_states(folder: str, shapes: Any, dtype: torch.dtype, block: Any) -> None:
    """Full and sharded states into sharded and full ones."""
    tx = optim.adamw8bit(0.01, block=block, min_size=0)

    def fresh(k: int, place: Any) -> dict[str, Any]:
        return trees_of(tx, drawn(shapes, k, dtype), place)

    places = [lambda tree: sharded(tree, tx), lambda tree: tree]
    trees = advanced(tx, fresh(1, places[0]), shapes, range(2))
    full = everything(trees)
    for moment in (full["opt"][0].mu, full["opt"][0].nu):
        assert all(x.any() for x in optree.tree_leaves(moment))
        assert not optree.tree_leaves(moment.small)
        for kind, trees_dtype in ((moment.codes, torch.uint8), (moment.scales, torch.float32)):
            assert {x.dtype for x in optree.tree_leaves(kind)} == {trees_dtype}
        assert {k: tuple(x.shape) for k, x in moment.codes.items()} == shapes
    assert {x.dtype for x in optree.tree_leaves(full["params"])} == {dtype}
    checkpoint.save(f"{folder}/sharded", trees, file_size=1 << 12)
    checkpoint.save(f"{folder}/full", full)
    assert len(list(Path(folder, "sharded").glob("opt-*"))) > 1
    want = everything(advanced(tx, trees, shapes, [2]))
    for name in ("sharded", "full"):
        for place in places:
            found = checkpoint.load(f"{folder}/{name}", fresh(9, place))
            assert same(everything(found), full)
            assert same(everything(advanced(tx, found, shapes, [2])), want)


@pytest.mark.parametrize("block", [256, (32, 32)], ids=str)
def test_states_of_one_byte(run: Any, block: Any, tmp_path: Path) -> None:
    """Q8-09, bitsandbytes#89, axolotl#2744: codes and scales taken for tensors shaped like the weight."""
    run(2, one_byte_states, str(tmp_path), {"x": (64, 32), "y": (7,)}, torch.float32, block)


@pytest.mark.parametrize("block", [256, (32, 32)], ids=str)
def test_several_dtypes_per_leaf(run: Any, block: Any, tmp_path: Path) -> None:
    """Q8-10, bitsandbytes#1732: one dtype assumed for weights, codes and scales."""
    run(2, one_byte_states, str(tmp_path), {"x": (64, 32)}, torch.bfloat16, block)
