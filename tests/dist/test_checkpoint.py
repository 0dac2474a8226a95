"""Checkpoints from any layout into any other, bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch

import optim
from ragged import ELEMENT, TENSOR, P, ShardedTree, checkpoint, make_mesh, plan, reduce_scatter, rules, shard, unshard
from tests.pool import Pool

TREE = {
    "layers": [{"w": (13, 6), "b": (6,)}, {"w": (13, 6), "b": (6,)}],
    "e": (3, 8, 4),
    "z": (0, 8),
    "s": (),
    "n": None,
}
CONFIGS: dict[str, tuple[tuple[int, ...], tuple[str, ...], Any]] = {
    "rows": ((-1,), ("fsdp",), P(ragged="fsdp")),
    "elements": ((-1,), ("fsdp",), P(ragged="fsdp", block=ELEMENT)),
    "whole": ((-1,), ("fsdp",), P(ragged="fsdp", block=TENSOR)),
    "replicated": ((-1,), ("fsdp",), None),
    "hybrid": ((2, -1), ("replica", "fsdp"), P(ragged="fsdp")),
    "tensor": ((-1, 2), ("fsdp", "tp"), rules({"**.w": P(None, "tp", ragged="fsdp"), "e": P(None, "tp"), "**": None})),
    "expert": ((-1, 2), ("fsdp", "tp"), rules({"e": P(None, "tp", "fsdp"), "**": P(ragged=("tp", "fsdp"))})),
}


class State(NamedTuple):
    count: Any
    mu: Any


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def full(dtype: torch.dtype = torch.float32) -> Any:
    draw = torch.Generator().manual_seed(0)
    return optree.tree_map(lambda s: torch.randn(s, generator=draw).to(dtype), TREE, is_leaf=is_shape)


def made(config: str, dtype: torch.dtype) -> ShardedTree:
    shape, axes, spec = CONFIGS[config]
    return shard(full(dtype), plan(full(dtype), make_mesh(shape, axes, device_type="cpu"), spec, units=["layers.*"]))


def trees_of(config: str, zero: bool = False) -> dict[str, Any]:
    """Parameters and a state of several dtypes, with counters and values."""
    f = torch.zeros_like if zero else torch.clone
    params, half, codes = (made(config, d) for d in (torch.float32, torch.bfloat16, torch.uint8))
    state = (State(torch.tensor(0 if zero else 5), half), [State(torch.tensor(0 if zero else 6), codes)])
    trees = {"params": params, "opt": state, "step": 0 if zero else 7, "rate": 0.0 if zero else 0.1}
    return {**optree.tree_map(lambda x: f(x) if isinstance(x, torch.Tensor) else x, trees), "key": f(torch.ones(2))}


def written(folder: str) -> None:
    for config in CONFIGS:
        checkpoint.save(f"{folder}/{config}", trees_of(config))


def equal(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def read(folder: str, config: str) -> None:
    """Every checkpoint into a tree, and one of them into a plan."""
    want, zeros = trees_of(config), trees_of(config, zero=True)
    likes = [(name, zeros) for name in CONFIGS] + [(config, {**zeros, "params": want["params"].plan})]
    for name, like in likes:
        got = checkpoint.load(f"{folder}/{name}", like)
        assert optree.tree_structure(got) == optree.tree_structure(want)
        assert optree.tree_all(optree.tree_map(equal, got, want)), name
    assert optree.tree_all(optree.tree_map(equal, zeros, trees_of(config, zero=True)))  # what is like it is not written


def read_plain(folder: str) -> None:
    like = {**trees_of("rows", zero=True), "params": optree.tree_map(torch.zeros_like, full())}
    for name in CONFIGS:
        got = checkpoint.load(f"{folder}/{name}", like)
        assert optree.tree_all(optree.tree_map(torch.equal, got["params"], full()))


@pytest.fixture(scope="module")
def checkpoints(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each layout, written by four ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pool.run(4, written, str(folder))
    assert checkpoint.latest(folder) == folder / max(CONFIGS)
    return folder


@pytest.mark.parametrize("config", CONFIGS)
def test_any_layout_to_any_other(run: Any, checkpoints: Path, config: str) -> None:
    run(4, read, str(checkpoints), config)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_any_layout_to_other_ranks(run: Any, checkpoints: Path, ranks: int) -> None:
    run(ranks, read, str(checkpoints), "rows")


def test_any_layout_to_plain_tensors(run: Any, checkpoints: Path) -> None:
    run(1, read_plain, str(checkpoints))


def trained(folder: str | None, steps: tuple[int, int], config: str) -> Any:
    """Some steps of training, from a checkpoint or from the start, and save at the end."""
    labels = rules({"**.w": "muon", "e": "8bit", "**": "adamw"})
    tx = optim.partition(
        {
            "muon": optim.muon(0.1),
            "8bit": optim.adamw8bit(0.1, min_size=8, block=8),
            "adamw": optim.adamw(lambda count: 0.1 / (1 + count)),
        },
        labels,
    )
    shape, axes, spec = CONFIGS[config]
    layout = plan(full(), make_mesh(shape, axes, device_type="cpu"), spec, units=["layers.*"], optimizer=tx)
    params = shard(full(), layout)
    state = tx.init(params)
    first, last = steps
    if first:
        found = checkpoint.load(f"{folder}/step-{first}", {"params": layout, "opt": state, "step": 0})
        params, state = found["params"], found["opt"]
        assert found["step"] == first
    step = optim.make_step(tx)
    for k in range(first, last):
        grads = reduce_scatter(optree.tree_map(lambda x, k=k: (x * (k + 1)).cos(), full()), layout)
        params, state = step(params, grads, state)
    if folder and not first:
        checkpoint.save(f"{folder}/step-{last}", {"params": params, "opt": state, "step": last})
    return unshard(params)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_goes_on_on_other_ranks(run: Any, ranks: int, tmp_path: Path) -> None:
    """Fast-LLM#436, pytorch#91205: moments and counters come back too, on any number of ranks."""
    (want, *_) = run(ranks, trained, None, (0, 5), "rows")
    run(ranks, trained, str(tmp_path), (0, 3), "rows")
    for n in (1, 2, 3, 4, 8):
        (got, *_) = run(n, trained, str(tmp_path), (3, 5), "rows")
        for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
            if n == ranks:
                assert torch.equal(a, b)
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def doubled(folder: str) -> None:
    """Equal damage of two replicas must not add up to nothing, as a change of a word's top bit would."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    trees = {
        "cut": shard({"x": torch.ones(8)}, mesh, P(ragged="fsdp")),
        "kept": shard({"x": torch.ones(8)}, mesh, None),
    }
    checkpoint.save(folder, {**trees, "plain": torch.ones(8)})


def refused(folder: str, name: str) -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    trees = {
        "cut": shard({"x": torch.ones(8)}, mesh, P(ragged="fsdp")),
        "kept": shard({"x": torch.ones(8)}, mesh, None),
    }
    with pytest.raises(ValueError, match=rf"{name}\.safetensors is damaged: the checksum of"):
        checkpoint.load(folder, {**trees, "plain": torch.ones(8)})


def test_top_bits_count_on_every_replica(run: Any, tmp_path: Path) -> None:
    run(2, doubled, str(tmp_path / "a"))
    for name in ("cut", "kept", "plain"):
        file = tmp_path / "a" / f"{name}.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 0x80]))
        run(2, refused, str(tmp_path / "a"), name)
        file.write_bytes(whole)


def of_two_minds(folder: str, options: list[dict[str, Any]]) -> None:
    checkpoint.save(folder, {"x": torch.ones(2)}, **options[torch.distributed.get_rank()])


@pytest.mark.parametrize(
    "options", [[{"keep": 1}, {"keep": 2}], [{"async_": True}, {}], [{"file_size": 5}, {}], [{"keep": 0}, {}]]
)
def test_ranks_save_alike(run: Any, options: Any, tmp_path: Path) -> None:
    errors = run(2, of_two_minds, str(tmp_path / "a"), options, expect_error=True, timeout=20)
    assert all("the checkpoint to save" in str(e) or "keep=0" in str(e) for e in errors)
    assert not list(tmp_path.iterdir())
