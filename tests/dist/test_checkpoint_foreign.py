"""Checkpoints and other programs: files with code in them, and the safetensors library."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ragged import checkpoint
from tests.small_checkpoints import RANKS, full, same, trees_of


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
