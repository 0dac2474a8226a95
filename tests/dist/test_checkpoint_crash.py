"""Checkpoints in adversity: kills, a disk that is full on one rank, ranks that disagree."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ragged import checkpoint
from tests.programs import Ahead, execute
from tests.small_checkpoints import RANKS, intact, on_one, same, trees_of


def kills(folder: Path) -> str:
    command = ["-m", "tests.crash", "--kills", "4", "--seed", f"{os.getpid()}", "--dir", f"{folder}"]
    return execute(*command, timeout=300, quiet=False).stdout


AHEAD = [kills]


def test_kills(ahead: Ahead) -> None:
    """A few of what `python -m tests.crash` does often."""
    assert ahead(kills).startswith("4 kills of 3 ranks")


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
