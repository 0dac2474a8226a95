"""Checkpoints that were damaged after they were written: found, and named."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ragged import checkpoint
from tests.small_checkpoints import RANKS, on_one, same, trees_of


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
