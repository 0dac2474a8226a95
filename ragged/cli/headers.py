"""Names, shapes and dtypes of the tensors in safetensors files, from their headers alone.

A file starts with the length of its header, eight bytes, lowest first; the header is JSON, with an entry
`{"dtype", "shape", "data_offsets"}` per tensor. An index beside several files says which tensor is in which.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch

__all__ = ["Tensors", "parse_json", "read_header", "read_index"]

Tensors: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]

MOST_HEADER = 100_000_000  # bytes; the format's own limit

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ValueError: no JSON, or another value than an object.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{source} holds a JSON {type(found).__name__}, expected an object")
    return found


def read_header(path: Path) -> Tensors:
    """Shape and dtype of each tensor of one file, without reading any data.

    Raises:
      ValueError: no such file, a header length that can't be, a header that is no JSON or whose entries
        don't describe tensors, or a file that ends before its data do.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length < 2 or length > min(MOST_HEADER, size - 8):
                raise ValueError(
                    f"{path} is no safetensors file, or is cut short: it has {size:,} bytes and gives "
                    f"{length:,} as the length of its header (at most {MOST_HEADER:,})"
                )
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    entries = parse_json(text, f"the header of {path}")
    entries.pop("__metadata__", None)
    return {name: _tensor(entry, f"{path}: tensor {name!r}", size - 8 - length) for name, entry in entries.items()}


def _tensor(entry: Any, about: str, available: int) -> tuple[tuple[int, ...], torch.dtype]:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{about} has the entry {entry!r}, expected dtype, shape and data_offsets")
    name, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{about} has dtype {name!r}; known are {', '.join(_DTYPES)}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{about} has shape {shape!r} and data_offsets {offsets!r}, expected lists of sizes")
    nbytes = math.prod(shape) * _DTYPES[name].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"{about} of shape {shape} {name} has {nbytes:,} bytes, but data_offsets {offsets}")
    if offsets[1] > available:
        raise ValueError(f"{about} ends at byte {offsets[1]:,} of the data, but the file is cut at {available:,}")
    return tuple(shape), _DTYPES[name]


def _is_sizes(x: Any) -> TypeGuard[list[int]]:
    return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)


def read_index(path: Path, index: Mapping[str, Any]) -> Tensors:
    """Shape and dtype of each tensor that an index names, from the headers of the files beside it.

    Args:
      path: of the index.
      index: its content.

    Raises:
      ValueError: no map from tensor to file, a file outside the index's folder, a file or a tensor that is
        missing, or as in `read_header`.
    """
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(p, str) for p in places.values()):
        raise ValueError(f"{path} has no 'weight_map' from tensor names to file names")
    files: dict[str, Tensors] = {}
    for place in dict.fromkeys(places.values()):
        if Path(place).name != place:
            raise ValueError(f"{path} names the file {place!r}; files are expected beside the index")
        files[place] = read_header(path.parent / place)
    for name, place in places.items():
        if name not in files[place]:
            raise ValueError(f"{path} says that {place} holds {name!r}, but it does not")
    return {name: files[place][name] for name, place in places.items()}
