"""Checkpoints in adversity: kills, damaged files, disks that are full on one rank, files with code in them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ragged import P, checkpoint, make_mesh, plan, shard
from tests.programs import Ahead, execute

RANKS = 3


def full(k: int = 0) -> dict[str, Any]:
    """Some 100 KB, of which every rank has a third."""
    w = torch.arange(256 * 64, dtype=torch.float32).view(256, 64) + k
    return {"w": w, "v": [(w[:37, :5] + 1).bfloat16(), torch.full((), 7.0)], "i": torch.arange(300) + k}


def trees_of(k: int = 0, note: str = "") -> dict[str, Any]:
    tree = full(k)
    sharded = shard(tree, plan(tree, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp")))
    return {"params": sharded, "opt": [sharded["v"], torch.arange(5)], "step": k, "rate": 0.1, "note": note}


def same(a: Any, b: Any) -> bool:
    equal = optree.tree_map(lambda x, y: torch.equal(x, y) if isinstance(x, Tensor) else x == y, a, b)
    return bool(optree.tree_all(equal))


def intact(folder: str, k: int) -> None:
    """The checkpoint of step k is the last one, whole, and nothing else is in its directory."""
    assert checkpoint.latest(folder) == Path(folder) / f"step-{k}"
    assert same(checkpoint.load(f"{folder}/step-{k}", trees_of(-1)), trees_of(k))
    assert os.listdir(folder) == [f"step-{k}"]


# ---------------------------------------------------------------------------------------------------------- kills


def kills(folder: Path) -> str:
    command = ["-m", "tests.crash", "--kills", "4", "--seed", f"{os.getpid()}", "--dir", f"{folder}"]
    return execute(*command, timeout=300, quiet=False).stdout


AHEAD = [kills]


def test_kills(ahead: Ahead) -> None:
    """A few of what `python -m tests.crash` does often."""
    assert ahead(kills).startswith("4 kills of 3 ranks")


# --------------------------------------------------------------------------------------------------------- damage


def on_one(change: Callable[[], Any]) -> None:
    """Rank 0 does something to files while the others wait."""
    if dist.get_rank() == 0:
        change()
    dist.barrier()


@contextlib.contextmanager
def changed(path: Path, change: Callable[[bytearray], Any]) -> Iterator[None]:
    """Other bytes in a file, for a while."""
    before = path.read_bytes()
    data = bytearray(before)
    change(data)
    dist.barrier()
    on_one(lambda: path.write_bytes(data))
    yield
    dist.barrier()
    on_one(lambda: path.write_bytes(before))


def flip(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at % len(data)] ^= 1 << (at % 8)

    return change


def refused(folder: Path, file: str) -> None:
    with pytest.raises(ValueError, match=re.escape(str(folder / file))):
        checkpoint.load(folder, trees_of(-1))


def damaged(directory: str) -> None:
    parent = Path(directory)
    checkpoint.save(parent / "step-1", trees_of(1))
    folder = checkpoint.save(parent / "step-2", trees_of(2), file_size=1 << 16).wait()
    files = sorted(p.name for p in folder.iterdir() if not p.name.endswith(".index.json"))  # for other programs only
    assert len(files) == 4
    for file in files:
        path, size = folder / file, (folder / file).stat().st_size
        for change in (bytearray.pop, lambda data: data.extend(b"\0"), bytearray.clear):
            with changed(path, change):
                refused(folder, file)
                with pytest.raises(ValueError, match=re.escape(str(path))):
                    checkpoint.metadata(folder)
                assert checkpoint.latest(parent) == parent / "step-1"
        begin = 0 if file == "manifest.json" else 8 + int.from_bytes(path.read_bytes()[:8], "little")
        head = [0, 7, 8, begin // 2, begin - 1] if begin else [*range(0, size, size // 10), size - 1]
        for at in head:
            with changed(path, flip(at)):
                refused(folder, file)
                with pytest.raises(ValueError, match=re.escape(str(path))):
                    checkpoint.metadata(folder)
                assert checkpoint.latest(parent) == parent / ("step-2" if begin else "step-1")
        for at in [begin, (begin + size) // 2, size - 1] if begin else []:
            with changed(path, flip(at)):
                refused(folder, file)
                assert checkpoint.metadata(folder).values["step"] == 2  # no tensor is read for it
    assert same(checkpoint.load(folder, trees_of(-1)), trees_of(2))


def test_damage_is_found_and_named(run: Any, tmp_path: Path) -> None:
    run(RANKS, damaged, str(tmp_path))


def lost_and_found(directory: str) -> None:
    parent = Path(directory)
    checkpoint.save(parent / "step-1", trees_of(1))
    folder = checkpoint.save(parent / "step-2", trees_of(2)).wait()
    on_one(lambda: [(folder / name).write_bytes(b"nothing of value") for name in ("x.safetensors", "y.bin", ".hidden")])
    on_one(lambda: ((folder / "inner").mkdir(), (parent / "step-9").mkdir(), (parent / "step-10").write_text("?")))
    assert same(checkpoint.load(folder, trees_of(-1)), trees_of(2))
    assert checkpoint.latest(parent) == folder
    assert set(checkpoint.metadata(folder).files.values()) == {"opt.safetensors", "params.safetensors"}
    dist.barrier()
    for file in ("opt.safetensors", "manifest.json"):
        on_one((folder / file).unlink)
        with pytest.raises(ValueError, match="opt.safetensors" if file.startswith("opt") else "x.safetensors"):
            checkpoint.load(folder, trees_of(-1))
        with pytest.raises(ValueError, match=f"{re.escape(str(folder))}.*{file}"):
            checkpoint.metadata(folder)
        assert checkpoint.latest(parent) == parent / "step-1"
        dist.barrier()


def test_missing_and_extra_files(run: Any, tmp_path: Path) -> None:
    run(RANKS, lost_and_found, str(tmp_path))


# ------------------------------------------------------------------------------------- a rank that can't write


@contextlib.contextmanager
def full_disk(rank: int, limit: int) -> Iterator[None]:
    """No file of a rank grows beyond some bytes."""
    mine, (soft, hard) = dist.get_rank() == rank, resource.getrlimit(resource.RLIMIT_FSIZE)
    if mine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        if mine:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def cannot_write(folder: str, rank: int, limit: int, file: str, how: str) -> None:
    """`how`: a save, an asynchronous one and a wait, an asynchronous one and the next save."""
    checkpoint.save(f"{folder}/step-1", trees_of(1))
    note, begun = "x" * 200_000 if file == "manifest.json" else "", time.monotonic()
    match = re.escape(file) if dist.get_rank() == rank else f"rank {rank} failed: .*{re.escape(file)}"
    kind: Any = OSError if dist.get_rank() == rank else ValueError
    saving = None
    with full_disk(rank, limit), pytest.raises(kind, match=match):
        saving = checkpoint.save(f"{folder}/step-2", trees_of(2, note), async_=how != "save")
        if how == "wait":
            saving.wait()
        else:
            checkpoint.save(f"{folder}/step-3", trees_of(3))
    assert time.monotonic() - begun < 10
    if saving is not None:
        with pytest.raises((OSError, ValueError), match=file):
            saving.wait()  # it is not complete, whoever has been told before
    dist.barrier()
    intact(folder, 1)
    dist.barrier()
    checkpoint.save(f"{folder}/step-2", trees_of(2), keep=1)
    intact(folder, 2)


FAILURES = [
    (1, 4096, "params.safetensors"),
    (2, 4096, "params.safetensors"),
    (0, 4096, "params.safetensors"),  # rank 0 makes the files
    (1, 0, "params.safetensors"),  # not even word of it
    (0, 120_000, "manifest.json"),
]


@pytest.mark.parametrize("how", ["save", "wait", "next"])
@pytest.mark.parametrize(("rank", "limit", "file"), FAILURES)
def test_one_rank_cannot_write(run: Any, rank: int, limit: int, file: str, how: str, tmp_path: Path) -> None:
    run(RANKS, cannot_write, str(tmp_path), rank, limit, file, how, timeout=20)


def blocked(folder: str) -> None:
    on_one(lambda: (Path(folder) / ".step-2.partial").write_text("a file where the folder should be"))
    message = r"step-2\.partial" if dist.get_rank() == 0 else r"rank 0 failed: .*step-2\.partial"
    with pytest.raises((OSError, ValueError), match=message):
        checkpoint.save(f"{folder}/step-2", trees_of(2))
    dist.barrier()


def test_something_in_the_way(run: Any, tmp_path: Path) -> None:
    run(RANKS, blocked, str(tmp_path), timeout=20)


class State(NamedTuple):
    count: Any
    mu: Any


def overwritten(folder: str) -> None:
    """What was saved is what was there when `save` returned."""
    trees = {**trees_of(1), "opt": State(torch.tensor(5), trees_of(1)["params"]), "key": torch.arange(40)}
    saving = checkpoint.save(f"{folder}/step-1", trees, async_=True)
    for x in optree.tree_leaves(trees):
        if isinstance(x, Tensor):
            x.fill_(9)
    saving.wait()
    want = {**trees_of(1), "opt": State(torch.tensor(5), trees_of(1)["params"]), "key": torch.arange(40)}
    zero = optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, want)
    assert same(checkpoint.load(f"{folder}/step-1", zero), want)


def test_saved_trees_may_be_overwritten_at_once(run: Any, tmp_path: Path) -> None:
    run(RANKS, overwritten, str(tmp_path))


def refused_saves(folder: str) -> None:
    checkpoint.save(f"{folder}/step-1", trees_of(1))
    for async_ in (False, True):
        with pytest.raises(ValueError, match=r"step-1 exists; save each checkpoint into a folder of its own"):
            checkpoint.save(f"{folder}/step-1", trees_of(2), async_=async_)
        with pytest.raises(ValueError, match=r"the path: rank 0 has .*step-0, rank 1 has .*step-1"):
            checkpoint.save(f"{folder}/step-{dist.get_rank()}", trees_of(2), async_=async_)
        with pytest.raises(ValueError, match=r"value 'step': rank 0 has 0, rank 1 has 1"):
            checkpoint.save(f"{folder}/step-5", {**trees_of(2), "step": dist.get_rank()}, async_=async_)
        with pytest.raises(ValueError, match=r"tensor 'x'"):
            checkpoint.save(f"{folder}/step-5", {"x": torch.full((2,), float(dist.get_rank()))}, async_=async_)
        dist.barrier()
        intact(folder, 1)
        dist.barrier()
    with pytest.raises(ValueError, match=r"the path: rank 0 has .*"):
        checkpoint.load(
            f"{folder}/step-1" if dist.get_rank() else f"{folder}/../{Path(folder).name}/step-1", trees_of()
        )


def test_what_ranks_must_agree_on(run: Any, tmp_path: Path) -> None:
    run(RANKS, refused_saves, str(tmp_path))


# ----------------------------------------------------------------------------------------------- what is not ours


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def lured(folder: str, marker: str) -> None:
    trees = trees_of(1)
    for path in (folder, f"{folder}/.."):  # one of ours, and one without a manifest
        for like in (trees, {"params": trees["params"].plan}):
            with contextlib.suppress(ValueError):
                checkpoint.load(path, like)
        with contextlib.suppress(ValueError):
            checkpoint.metadata(path)
        checkpoint.latest(path)
    assert same(checkpoint.load(folder, trees_of(-1)), trees)
    assert not os.path.exists(marker)


def test_nothing_is_executed(run: Any, tmp_path: Path) -> None:
    marker, folder = tmp_path / "executed", tmp_path / "all" / "step-1"
    evil = pickle.dumps(Evil(str(marker)))
    pickle.loads(evil).close()
    assert marker.exists()
    marker.unlink()
    run(RANKS, saved, str(folder))
    for place in (folder, folder.parent):
        for name in ("pytorch_model.bin", ".metadata", "__0_0.distcp", "optimizer.pt", "manifest.pkl", "data.pkl"):
            (place / name).write_bytes(evil)
    run(RANKS, lured, str(folder), str(marker))
    for name in ("manifest.json", "model.safetensors", "model.safetensors.index.json"):
        (folder.parent / name).write_bytes(evil)
        run(1, refused_as_data, str(folder.parent), name, str(marker))
        (folder.parent / name).unlink()


def refused_as_data(folder: str, name: str, marker: str) -> None:
    with pytest.raises(ValueError, match=name):
        checkpoint.load(folder, trees_of())
    assert not os.path.exists(marker)


def saved(folder: str, **options: Any) -> None:
    trees = trees_of(1)
    checkpoint.save(folder, {**trees, "more": kinds()}, **options) if options else checkpoint.save(folder, trees)


def kinds() -> dict[str, Tensor]:
    """Leaves of many dtypes and shapes."""
    names = ["float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "bool", "complex64"]
    x = torch.arange(12).view(3, 4)
    made = {name: x.to(getattr(torch, name)) for name in names}
    return {**made, "empty": torch.zeros(0, 3), "s": torch.tensor(4)}


@pytest.mark.parametrize("file_size", [5 << 30, 1 << 15])
def test_the_safetensors_library_reads_our_files(run: Any, tmp_path: Path, file_size: int) -> None:
    library = pytest.importorskip("safetensors.torch")
    run(RANKS, saved, str(tmp_path / "a"), file_size=file_size)
    want = {f"more.{name}": x for name, x in kinds().items()} | {"opt.1": torch.arange(5)}
    leaves = full(1)
    want |= {"params.i": leaves["i"], "params.w": leaves["w"]}
    want |= {f"{tree}.v.{k}": x for tree in ("params", "opt.0") for k, x in enumerate(leaves["v"])}
    found: dict[str, Tensor] = {}
    for file in (tmp_path / "a").glob("*.safetensors"):
        found |= library.load_file(file)
    assert found.keys() == want.keys()
    assert all(x.dtype == want[name].dtype and torch.equal(x, want[name]) for name, x in found.items())
    index = tmp_path / "a" / "params.safetensors.index.json"
    assert index.exists() is (file_size == 1 << 15)
    if index.exists():
        table = json.loads(index.read_bytes())
        assert set(table["weight_map"]) == {name for name in want if name.startswith("params.")}
        assert table["metadata"]["total_size"] == sum(want[name].nbytes for name in table["weight_map"])
        assert all(name in library.load_file(tmp_path / "a" / file) for name, file in table["weight_map"].items())


def read_theirs(folder: str) -> None:
    want = full(3)
    got = checkpoint.load(folder, {"params": trees_of(0)["params"]})
    assert same(got["params"], trees_of(3)["params"])
    with pytest.raises(ValueError, match=r"'params\.w' has shape"):
        checkpoint.load(folder, {"params": {**want, "w": want["w"].T.contiguous()}})


def test_we_read_files_of_the_safetensors_library(run: Any, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tree = full(3)
    flat = {"params.w": tree["w"], "params.v.0": tree["v"][0], "params.v.1": tree["v"][1], "params.i": tree["i"]}
    library.save_file(flat, tmp_path / "model.safetensors", metadata={"format": "pt"})
    run(RANKS, read_theirs, str(tmp_path))
