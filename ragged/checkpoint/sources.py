"""What a load reads from: names with shapes and values, and a way to fill this rank's part of a tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ragged.checkpoint.checksums import MODULUS, checksum
from ragged.checkpoint.files import CHUNK, opened, read_at
from ragged.checkpoint.foreign import foreign_places
from ragged.checkpoint.holders import Holder
from ragged.checkpoint.manifest import MANIFEST, places_in, read_manifest
from ragged.checkpoint.safetensors import Place
from ragged.checkpoint.segments import segments
from ragged.paths import Shaped

__all__ = ["Source", "folder"]


class Source(NamedTuple):
    """Tensors and values by name.

    Attributes:
      checksums: of the tensors, where there are any; `file`: where a tensor lies, for messages.
      fill: `fill(name, holder, rank)` reads what a global rank holds of a tensor into its place, and returns the part
        that these bytes have in the checksum.
    """

    shapes: Mapping[str, Shaped]
    values: Mapping[str, Any]
    checksums: Mapping[str, int]
    file: Callable[[str], Path]
    fill: Callable[[str, Holder, int], int]


def folder(path: Path) -> Source:
    """A checkpoint of this library, or safetensors files of another program.

    Raises:
      ValueError: neither, or damaged, naming the file.
    """
    if (path / MANIFEST).exists() or not path.exists():
        manifest = read_manifest(path)
        places, values, checksums = places_in(path, manifest), manifest.values, manifest.checksums
    else:
        places, values, checksums = foreign_places(path), {}, {}

    def file(name: str) -> Path:
        return path / places[name].file if path.is_dir() else path

    def fill(name: str, holder: Holder, rank: int) -> int:
        with opened(file(name), os.O_RDONLY) as fd:
            try:
                return _read(fd, holder, places[name], rank)
            except EOFError:
                raise ValueError(f"{file(name)} was cut short, in {name!r}") from None

    shapes = {name: Shaped(place.shape, place.dtype) for name, place in places.items()}
    return Source(shapes, values, checksums, file, fill)


def _read(fd: int, holder: Holder, place: Place, rank: int) -> int:
    item, total, x = place.dtype.itemsize, 0, holder.tensor.view(-1)
    straight = x.dtype == place.dtype and x.device.type == "cpu"
    for there, here, size in segments(holder.held, holder.grid, rank):
        for a in range(0, size, CHUNK // item):
            b = min(a + CHUNK // item, size)
            target = x[here + a : here + b]
            raw = target if straight else torch.empty(b - a, dtype=place.dtype)
            read_at(fd, raw, place.start + (there + a) * item)
            total += checksum(raw.view(torch.uint8), (there + a) * item)
            if not straight:
                target.copy_(raw)
    return total % MODULUS
