"""Tensors' bytes from and into files, and the steps that make a folder outlast a crash."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["CHUNK", "opened", "read_at", "sync_file", "sync_folder", "write_at", "write_file"]

CHUNK = 1 << 22  # bytes at a time: they are still in the cache when their checksum has been taken


def _memory(x: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    assert x.is_contiguous()
    assert x.device.type == "cpu"
    return memoryview((ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())).cast("B")


def write_at(fd: int, x: Tensor, start: int) -> None:
    """Write a contiguous CPU tensor's bytes at a place of a file."""
    left = _memory(x) if x.nbytes else memoryview(b"")
    while left:
        done = os.pwrite(fd, left[: 1 << 30], start)
        left, start = left[done:], start + done


def read_at(fd: int, x: Tensor, start: int) -> None:
    """Fill a contiguous CPU tensor with the bytes at a place of a file.

    Raises:
      EOFError: the file ends before.
    """
    left = _memory(x) if x.nbytes else memoryview(b"")
    while left:
        done = os.preadv(fd, [left[: 1 << 30]], start)
        if not done:
            raise EOFError("the file ends too early")
        left, start = left[done:], start + done


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor; errors name the file, as those of `os.write` and `os.fsync` don't by themselves."""
    fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o644)
    try:
        yield fd
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes, size: int | None = None) -> None:
    """A new file; `size`: with room up to so many bytes."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        write_at(fd, torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
        if size is not None:
            os.ftruncate(fd, size)


def sync_file(path: Path) -> None:
    """What was written to a file, by whichever process on this host, is on the disk when this returns."""
    with opened(path, os.O_RDONLY) as fd:
        os.fsync(fd)


def sync_folder(path: Path) -> None:
    """Make names in a folder last: a rename is on the disk when the folder is."""
    with opened(path, os.O_RDONLY) as fd, contextlib.suppress(OSError):  # some file systems can't
        os.fsync(fd)
