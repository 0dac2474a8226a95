"""A checkpoint on its way to the disk: a folder beside its place, every rank's bytes, and the rename."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragged.checkpoint.checksums import MODULUS, checksum
from ragged.checkpoint.files import CHUNK, opened, sync_file, sync_folder, write_at, write_file
from ragged.checkpoint.holders import Holder
from ragged.checkpoint.jobs import Job
from ragged.checkpoint.manifest import MANIFEST, Manifest, checkpoints
from ragged.checkpoint.safetensors import Place
from ragged.checkpoint.segments import Segment
from ragged.collectives import plain

__all__ = ["begin", "discard", "publish", "write"]

_PATIENCE = 60.0  # seconds that a finished program's rank 0 still waits for what other ranks write


def begin(job: Job) -> None:
    """Rank 0: a fresh folder beside the place, with files of their final sizes and headers."""
    if job.path.exists() or job.path.is_symlink():
        raise ValueError(f"{job.path} exists; save each checkpoint into a folder of its own, or remove it first")
    shutil.rmtree(job.folder, ignore_errors=True)  # what a killed save left
    try:
        job.folder.mkdir(parents=True)
        for file, start in job.headers.items():
            write_file(job.folder / file, start, job.size(file))
        for file, text in job.indices.items():
            write_file(job.folder / file, text.encode())
    except BaseException:
        discard(job)
        raise


def discard(job: Job) -> None:
    """Remove what was begun."""
    shutil.rmtree(job.folder, ignore_errors=True)


def _report(job: Job, rank: int) -> Path:
    return job.folder / f".rank-{rank}.json"


def write(job: Job) -> None:
    """Write what is this rank's to write, and report to rank 0: checksums, or what went wrong."""
    sums: dict[str, int] = {}
    try:
        by_file: dict[str, list[Holder]] = {}
        for holder in job.held:
            by_file.setdefault(job.places[holder.name].file, []).append(holder)
        for file, held in by_file.items():
            with opened(job.folder / file, os.O_WRONLY) as fd:
                for holder in held:
                    sums[holder.name] = _write_tensor(fd, holder.tensor, job.own(holder), job.places[holder.name])
                os.fsync(fd)
    except Exception as error:
        with contextlib.suppress(OSError):  # where not even this can be written, `Saving.wait` tells the others
            _tell(job, f"{error}", {})
        raise
    _tell(job, None, sums)


def _tell(job: Job, error: str | None, sums: dict[str, int]) -> None:
    report = _report(job, job.rank)
    beside = report.with_suffix(".new")
    beside.unlink(missing_ok=True)
    write_file(beside, json.dumps({"error": error, "sums": {name: f"{s:x}" for name, s in sums.items()}}).encode())
    beside.rename(report)  # whoever sees it sees it whole


def _write_tensor(fd: int, x: Tensor, own: Sequence[Segment], place: Place) -> int:
    total, item = 0, place.dtype.itemsize
    x = plain(x.detach()).view(-1)
    for there, here, size in own:
        for a in range(0, size, CHUNK // item):
            b = min(a + CHUNK // item, size)
            piece = x[here + a : here + b].cpu().view(torch.uint8)
            at = (there + a) * item
            total += checksum(piece, at)
            write_at(fd, piece, place.start + at)
    return total % MODULUS


def publish(job: Job, abandoned: threading.Event) -> None:
    """Rank 0: wait for the others, write the manifest, and make the checkpoint visible.

    Nothing happens if a rank reports that it failed, or once the save is `abandoned`.
    """
    sums = dict.fromkeys(job.places, 0)
    for rank in range(job.ranks):
        report = _awaited(job, rank, abandoned)
        if report is None or report["error"] is not None:
            return
        for name, text in report["sums"].items():
            sums[name] += int(text, 16)
        _report(job, rank).unlink()
    texts = {plan: plan.to_json() for plan in set(job.plans.values())}
    manifest = Manifest(
        job.values,
        {name: total % MODULUS for name, total in sums.items()},
        {file: job.size(file) for file in job.headers},
        {file: hashlib.sha256(start).hexdigest() for file, start in job.headers.items()},
        {tree: texts[plan] for tree, plan in job.plans.items()},
    )
    write_file(job.folder / MANIFEST, manifest.to_json().encode())
    for file in (*job.headers, *job.indices, MANIFEST):
        sync_file(job.folder / file)
    sync_folder(job.folder)
    job.folder.rename(job.path)
    sync_folder(job.path.parent)
    if job.keep is not None:
        _removed(job)


def _awaited(job: Job, rank: int, abandoned: threading.Event) -> dict[str, Any] | None:
    """A rank's report; ranks on other hosts may be seen late."""
    pause, ended = 1e-3, None
    while not abandoned.is_set():
        try:
            found: dict[str, Any] = json.loads(_report(job, rank).read_bytes())
            return found
        except FileNotFoundError:
            pass
        if not threading.main_thread().is_alive():
            if getattr(sys, "last_value", None) is not None:
                return None  # the program ended by an error, and so will the other ranks
            ended = ended or time.monotonic()
            if time.monotonic() - ended > _PATIENCE:
                raise TimeoutError(f"rank {rank} did not report on {job.path}") from None
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return None


def _removed(job: Job) -> None:
    """Old checkpoints beside this one, and what killed saves left; each vanishes by a rename before it is deleted."""
    assert job.keep is not None
    parent = job.path.parent
    for old in list(checkpoints(parent))[job.keep :]:
        if old != job.path:
            gone = parent / f".{old.name}.removed"
            shutil.rmtree(gone, ignore_errors=True)
            old.rename(gone)
    for left in parent.iterdir():
        if left.name.startswith(".") and left.suffix in (".partial", ".removed") and left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
