"""The index of a folder that `torch.distributed.checkpoint` wrote. It is a pickle, and nothing in it is run."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch

from ragged.moves.boxes import Box, intersect
from ragged.paths import Shaped

__all__ = ["INDEX", "Index", "Piece", "Pieced", "Stored", "read_index"]

INDEX = ".metadata"

# All that torch names in an index, besides dtypes. Each becomes a record of what it was made from.
_RECORDS: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        [
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ]
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(["_StorageInfo"]),
    "torch.serialization": frozenset(["_get_layout"]),
    "pathlib": frozenset(["PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"]),
    "pathlib._local": frozenset(["PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"]),
}
_BUILTIN: Mapping[tuple[str, str], type] = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


class Stored(NamedTuple):
    """Bytes of a file of the folder."""

    file: str
    start: int
    length: int


class Piece(NamedTuple):
    """A box of a tensor, and where it is stored. A 0-d tensor counts as 1-d of one element."""

    box: Box
    stored: Stored


class Pieced(NamedTuple):
    """A tensor as pieces that make it up, each element in one of them."""

    shaped: Shaped
    pieces: tuple[Piece, ...]


class Index(NamedTuple):
    """Tensors and values by name."""

    tensors: Mapping[str, Pieced]
    values: Mapping[str, Stored]


def read_index(path: Path) -> Index:
    """What a folder holds, checked against the sizes of its files.

    Raises:
      ValueError: there is no index, or it is damaged or names anything but torch's own records, naming that; pieces
        that don't make up their tensor; a file that is missing, cut short or outside of the folder.
    """
    where = path / INDEX
    try:
        raw = where.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        apart = "; each rank saved for itself, with use_collectives=False" if any(path.glob(f"__*{INDEX}")) else ""
        raise ValueError(f"{path} is no checkpoint of torch.distributed.checkpoint: it has no {INDEX}{apart}") from None
    try:
        found = _index(_Unpickler(io.BytesIO(raw)).load())
    except Exception as error:  # a pickle that is damaged fails in any way
        text = f"{error}" if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{where} is damaged, or not what torch.distributed.checkpoint writes: {text}") from None
    sizes: dict[str, int] = {}
    stored = [(name, piece.stored) for name, x in found.tensors.items() for piece in x.pieces]
    for name, (file, start, length) in (*stored, *found.values.items()):
        if file not in sizes:
            if not (path / file).is_file():
                raise ValueError(f"{path / file}, which holds {name!r}, is missing")
            sizes[file] = (path / file).stat().st_size
        if start + length > sizes[file]:
            raise ValueError(f"{path / file} was cut short, in {name!r}")
    return found


class _Record:
    """What stands for an object of torch's: what it was called with, and its state."""

    args: Any = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes records, tuples, dicts and dtypes. A pickle may set attributes of classes, so it gets its own."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._kinds: dict[str, type] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        if name in _RECORDS.get(module, ()):
            return self._kinds.setdefault(name, type(name, (_Record,), {}))
        if (module, name) in _BUILTIN:
            return _BUILTIN[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None  # getattr might import things
        if isinstance(dtype, torch.dtype):
            return dtype
        raise ValueError(f"it names {f'{module}.{name}'!r}, which no index needs, and which was not called")


def _state(x: Any, kind: str) -> dict[str, Any]:
    """The fields of a record."""
    if isinstance(x, _Record) and type(x).__name__ == kind and isinstance(x.state, dict):
        return x.state
    raise ValueError(f"expected a {kind}, found {x!r:.80}")


def _items(x: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(x, dict):
        return x.items()
    raise ValueError(f"expected a dict, found {x!r:.80}")


def _name(x: Any) -> str:
    if isinstance(x, str):
        return x
    raise ValueError(f"expected a name, found {x!r:.80}")


def _size(x: Any) -> int:
    if type(x) is int and x >= 0:
        return x
    raise ValueError(f"expected a size, found {x!r:.80}")


def _sizes(x: Any) -> tuple[int, ...]:
    if isinstance(x, (tuple, list)):
        return tuple(map(_size, x))
    raise ValueError(f"expected sizes, found {x!r:.80}")


def _index(metadata: Any) -> Index:
    fields = _state(metadata, "Metadata")
    stored: dict[tuple[str, tuple[int, ...] | None], Stored] = {}
    for key, info in _items(fields["storage_data"]):
        where = _state(key, "MetadataIndex")
        name, offset = _name(where["fqn"]), where.get("offset")
        stored[name, None if offset is None else _sizes(offset)] = _stored(name, _state(info, "_StorageInfo"))
    tensors, values = {}, {}
    for key, record in _items(fields["state_dict_metadata"]):
        name = _name(key)
        if isinstance(record, _Record) and type(record).__name__ == "BytesStorageMetadata":
            if (name, None) not in stored:
                raise ValueError(f"it doesn't say where {name!r} is stored")
            values[name] = stored[name, None]
        else:
            tensors[name] = _pieced(name, _state(record, "TensorStorageMetadata"), stored)
    return Index(tensors, values)


def _stored(name: str, info: Mapping[str, Any]) -> Stored:
    file = _name(info["relative_path"])
    if PurePath(file).is_absolute() or ".." in PurePath(file).parts or not PurePath(file).parts:
        raise ValueError(f"{name!r} is said to be stored in {file!r}, outside of the folder")
    if info.get("transform_descriptors") is not None:
        raise ValueError(
            f"{name!r} was stored through the extensions {info['transform_descriptors']!r:.80}, which only torch can "
            "undo; save without them"
        )
    return Stored(file, _size(info["offset"]), _size(info["length"]))


def _pieced(
    name: str, fields: Mapping[str, Any], stored: Mapping[tuple[str, tuple[int, ...] | None], Stored]
) -> Pieced:
    dtype, layout, *_ = fields["properties"].state
    if not isinstance(dtype, torch.dtype) or layout.args != ("torch.strided",):
        raise ValueError(f"{name!r} is no dense tensor, but {dtype!r:.80} of layout {layout.args!r:.80}")
    shape = _sizes(fields["size"])
    found: dict[Box, Piece] = {}
    for chunk in fields["chunks"]:
        of = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(of["offsets"]), _sizes(of["sizes"])
        box = tuple((o, o + n) for o, n in zip(offsets, sizes, strict=True))
        if len(box) != len(shape) or any(hi > n for (_, hi), n in zip(box, shape, strict=True)):
            raise ValueError(f"a piece of {name!r} lies outside of its shape {shape}: {sizes} at {offsets}")
        if 0 in sizes:
            continue
        if (name, offsets) not in stored:
            raise ValueError(f"it doesn't say where the piece of {name!r} at {offsets} is stored")
        full = box or ((0, 1),)
        found[full] = Piece(full, stored[name, offsets])
    filled = sum(math.prod(hi - lo for lo, hi in box) for box in found)
    if filled != math.prod(shape) or not _disjoint(list(found)):
        raise ValueError(f"the pieces of {name!r} don't make up its shape {shape}")
    return Pieced(Shaped(shape, dtype), tuple(found.values()))


def _disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two boxes overlap, by a sweep along the dim with the most cuts."""
    if len(boxes) < 2:
        return True
    dim = max(range(len(boxes[0])), key=lambda d: len({box[d][0] for box in boxes}))
    near: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        near = [other for other in near if other[dim][1] > box[dim][0]]
        if any(intersect(box, other) for other in near):
            return False
        near.append(box)
    return True
