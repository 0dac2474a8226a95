"""`save`: every rank writes its own bytes into ordinary safetensors files, which one rename makes visible."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragged.agree import agree
from ragged.checkpoint.holders import Ranks, ranks_of
from ragged.checkpoint.jobs import Job, planned
from ragged.checkpoint.writing import begin, discard, publish, write

__all__ = ["Saving", "save"]


class Saving:
    """A save under way, or done. `wait` is collective, as `save` is: all ranks call it."""

    def __init__(self, job: Job, ranks: Ranks) -> None:
        self._job, self._ranks = job, ranks
        self._thread: threading.Thread | None = None
        self._wrote, self._abandoned = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._settled = False
        self._failure: BaseException | None = None

    @property
    def path(self) -> Path:
        return self._job.path

    def wait(self) -> Path:
        """Return once the checkpoint is complete, or raise on all ranks what any of them met.

        Raises:
          OSError: on the rank that couldn't write; ValueError: on the others, naming that rank and the cause.
        """
        if self._failure is not None:
            raise self._failure
        if not self._settled:
            self._settled = True
            if _flying and _flying[0] is self:
                _flying.clear()
            try:
                self._finish()
            except BaseException as error:
                self._failure = error
                self._abandoned.set()
                if self._thread is not None:
                    self._thread.join()  # so that it finds nothing of a later save at this path
                if self._job.rank == 0:
                    discard(self._job)
                raise
        return self.path

    def _finish(self) -> None:
        """What can't be done on one rank is learnt of before anybody waits for its files."""
        if self._thread is None:
            self._write()
        self._wrote.wait()
        agree(f"writing {self.path}", {}, self._ranks.group, self._error)
        if self._thread is None:
            self._publish()
        else:
            self._thread.join()
        agree(f"publishing {self.path}", {}, self._ranks.group, self._error)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"saving {self.path.name}")
        _flying.append(self)
        atexit.unregister(_last_words)
        atexit.register(_last_words)
        self._thread.start()

    def _run(self) -> None:
        self._write()
        self._publish()

    def _write(self) -> None:
        try:
            write(self._job)
        except Exception as error:
            self._error = error
        self._job = replace(self._job, held=())  # what was copied is not needed any more
        self._wrote.set()

    def _publish(self) -> None:
        try:
            if self._job.rank == 0 and self._error is None:
                publish(self._job, self._abandoned)
        except Exception as error:
            self._error = error


def _last_words() -> None:
    """A program that ends without waiting for its last save is told if it failed."""
    for saving in _flying:
        if saving._thread is not None:
            saving._thread.join()
            if saving._error is not None:
                print(f"saving {saving.path} failed: {saving._error}", file=sys.stderr)


# The save in flight, if one is: what the next save has to wait for is this process's business, not some tree's.
_flying: list[Saving] = []


def save(
    path: str | os.PathLike[str],
    trees: Mapping[str, Any],
    *,
    async_: bool = False,
    keep: int | None = None,
    file_size: int = 5 << 30,
) -> Saving:
    """Write trees as a checkpoint: a new folder of safetensors files with full tensors, and a manifest.

    Collective. All ranks write to one file system, each the bytes that it holds (replicas share theirs), at the
    places that follow from the tree alone. The folder is made beside its place and appears by one rename when
    everything is on the disk: a crash at any moment leaves what was there before.

    Args:
      path: of the folder; it must not exist.
      trees: by name: sharded trees, plain tensors (equal on all ranks), optimizer states, numbers, text.
      async_: copy the trees and return; a thread writes. A save waits for the one before it, and raises what
        that one met.
      keep: once this one is complete, remove all but the last so many checkpoints of the folder above, by the
        natural order of names, and what crashed saves left there.
      file_size: bytes, above which a tree's tensors get several files with the usual index.

    Returns:
      A `Saving`; its `wait()` returns the path.

    Raises:
      ValueError: on all ranks: the folder exists, trees or values that differ between ranks, a dtype that
        the format lacks, something that is no tensor or value. OSError: where this rank can't write; the
        other ranks raise a ValueError that names it.

    Example:
      >>> import tempfile, torch
      >>> from ragged import checkpoint
      >>> folder = tempfile.mkdtemp() + "/step-7"
      >>> checkpoint.save(folder, {"params": {"w": torch.ones(2, 3)}, "step": 7}).path.name
      'step-7'
      >>> checkpoint.load(folder, {"params": {"w": torch.zeros(2, 3)}, "step": 0})
      {'params': {'w': tensor([[1., 1., 1.],
              [1., 1., 1.]])}, 'step': 7}
    """
    while _flying:
        _flying[0].wait()
    ranks = ranks_of(trees)
    job = planned(Path(path).absolute(), trees, ranks, keep, file_size, async_)
    error = None
    try:
        if job.rank == 0:
            begin(job)
        if async_:
            job = job.apart()
    except Exception as problem:
        error = problem
    try:  # copied by now: no rank writes while others copy
        agree(f"starting to save {job.path}", {}, ranks.group, error)
    except Exception:
        if job.rank == 0:
            discard(job)
        raise
    saving = Saving(job, ranks)
    if async_:
        saving._start()
        return saving
    saving.wait()
    return saving
