"""The safetensors format: headers as text and back. Pure: bytes in, places out.

A file is eight bytes (the header's length, little-endian), the header (JSON: dtype, shape and offsets by name), and
the tensors' bytes, row-major, one after the other without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragged.paths import Shaped

__all__ = ["CODES", "DTYPES", "LONGEST", "Place", "header", "parse"]

CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
LONGEST = 1 << 30  # bytes of a header that are still believed


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: its file's name, shape and dtype, first byte in the file."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header(file: str, tensors: Mapping[str, Shaped], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Place]]:
    """The first bytes of a file, and where its tensors go behind them.

    Wide dtypes come first, so that every tensor starts at a multiple of its item's size.

    Raises:
      ValueError: a dtype that the format doesn't have, by name.

    Example:
      >>> import torch
      >>> start, places = header("w", {"w": Shaped((2, 3), torch.float32)}, {})
      >>> len(start) % 8, places["w"].start == len(start), parse("w", start, len(start) + 24) == places
      (0, True, True)
    """
    for name, (shape, dtype) in tensors.items():
        if dtype not in CODES:
            raise ValueError(f"{name!r} of shape {shape}: safetensors files have no {dtype}; save it in another dtype")
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        shape, dtype = tensors[name]
        stop = at + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    places = {name: Place(file, *tensors[name], len(start) + table[name]["data_offsets"][0]) for name in order}
    return start, places


def parse(file: str, start: bytes, size: int) -> dict[str, Place]:
    """Where the tensors of a file lie.

    Args:
      file: its name, for messages and places; `start`: its first bytes, the whole header at least.
      size: of the whole file, in bytes.

    Raises:
      ValueError: not such a file, or one that was cut short, naming it.
    """
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > LONGEST or 8 + length > size:
        raise ValueError(f"{file}: no safetensors file, or cut short: {size} bytes, of which the header is {length}")
    try:
        table = json.loads(start[8 : 8 + length])
        table.pop("__metadata__", None)
        found = {name: _place(file, entry, 8 + length) for name, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: the header is damaged: {error!r}") from None
    _check_tiling(file, list(found.values()), 8 + length, size)
    return found


def _place(file: str, entry: Mapping[str, Any], base: int) -> Place:
    first, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(n) is not int or n < 0 for n in (*shape, first, stop)):
        raise ValueError(f"shape {shape}, offsets {first}, {stop}")
    place = Place(file, shape, DTYPES[entry["dtype"]], base + first)
    if place.nbytes != stop - first:
        raise ValueError(f"shape {shape} of {entry['dtype']} in {stop - first} bytes")
    return place


def _check_tiling(file: str, places: Sequence[Place], base: int, size: int) -> None:
    """The tensors fill the file: whatever else is there was not written by a sound program."""
    at = base
    for place in sorted(places, key=lambda p: (p.start, p.nbytes)):
        if place.start != at:
            raise ValueError(f"{file}: the header is damaged: a tensor begins at byte {place.start}, expected {at}")
        at += place.nbytes
    if at != size:
        raise ValueError(f"{file}: {size} bytes where the header promises {at}; the file was cut short or changed")
