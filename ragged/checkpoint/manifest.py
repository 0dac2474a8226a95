"""What is beside the tensors of a checkpoint: values, checksums, plans; and whether a folder is a complete one."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ragged.checkpoint.safetensors import CODES, DTYPES, LONGEST, Place, parse
from ragged.paths import Shaped, natural_key

__all__ = [
    "MANIFEST",
    "Manifest",
    "Metadata",
    "checkpoints",
    "latest",
    "metadata",
    "places_in",
    "read_header",
    "read_manifest",
]

MANIFEST = "manifest.json"
_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """A checkpoint but for the tensors' bytes.

    Attributes:
      values: numbers, texts, truth values and counters by name.
      checksums: by tensor name, see `ragged.checkpoint.checksums`.
      files: sizes in bytes by file name.
      headers: digests of the files' headers by file name.
      plans: texts of `Plan.to_json` by the name of the tree that has the plan.
    """

    values: Mapping[str, Any]
    checksums: Mapping[str, int]
    files: Mapping[str, int]
    headers: Mapping[str, str]
    plans: Mapping[str, str] = field(repr=False)

    def to_json(self) -> str:
        first: dict[str, str] = {}  # trees that share a plan: the first has the text
        for name, text in self.plans.items():
            first.setdefault(text, name)
        body = {
            "values": {name: _value_out(value) for name, value in self.values.items()},
            "checksums": {name: f"{value:016x}" for name, value in self.checksums.items()},
            "files": dict(self.files),
            "headers": dict(self.headers),
            "plans": {name: json.loads(text) for name, text in self.plans.items() if first[text] == name},
            "shared_plans": {name: first[text] for name, text in self.plans.items() if first[text] != name},
        }
        return json.dumps({"ragged": _VERSION, "digest": _digest(body), **body}, separators=(",", ":"))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
      ValueError: there is none, or it was damaged, naming the file.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_bytes())
        body = {key: data[key] for key in ("values", "checksums", "files", "headers", "plans", "shared_plans")}
        version, digest = data["ragged"], data["digest"]
    except FileNotFoundError:
        raise ValueError(f"{folder} is no complete checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None
    if version != _VERSION:
        raise ValueError(f"{path}: format version {version!r}, this library reads {_VERSION}")
    if digest != _digest(body):
        raise ValueError(f"{path} is damaged: its digest doesn't match")
    plans = {name: json.dumps(plan) for name, plan in body["plans"].items()}
    return Manifest(
        {name: _value_in(value) for name, value in body["values"].items()},
        {name: int(text, 16) for name, text in body["checksums"].items()},
        body["files"],
        body["headers"],
        plans | {name: plans[first] for name, first in body["shared_plans"].items()},
    )


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _value_out(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"dtype": CODES[value.dtype], "value": _value_out(value.item())}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}  # JSON has no such numbers
    return value


def _value_in(value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value:
        return torch.tensor(_value_in(value["value"]), dtype=DTYPES[value["dtype"]])
    return float(value["float"]) if isinstance(value, dict) else value


def places_in(folder: Path, manifest: Manifest) -> dict[str, Place]:
    """Where every tensor of a checkpoint lies.

    Raises:
      ValueError: a file that is missing, of another size, or whose header was changed, naming it.
    """
    found: dict[str, Place] = {}
    for name, size in manifest.files.items():
        path = folder / name
        try:
            actual = path.stat().st_size
            if actual != size:
                raise ValueError(f"{path} is damaged: {actual} bytes, the manifest has {size}; the file was cut short")
            start = read_header(path)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        if hashlib.sha256(start).hexdigest() != manifest.headers[name]:
            raise ValueError(f"{path} is damaged: its header was changed")
        found |= parse(name, start, size)
    return found


def read_header(path: Path) -> bytes:
    """The first bytes of a safetensors file: the header and its length."""
    with path.open("rb") as file:
        start = file.read(8)
        return start + file.read(min(int.from_bytes(start, "little"), LONGEST))


def complete(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that was finished: its manifest is sound, its files have their sizes."""
    try:
        sizes = read_manifest(folder).files
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (ValueError, OSError):
        return False


def checkpoints(directory: Path) -> Iterator[Path]:
    """Complete checkpoints in a directory, the latest first; the natural order of their names decides."""
    try:
        folders = [p for p in directory.iterdir() if p.is_dir() and not p.name.startswith(".")]
    except FileNotFoundError:
        return
    yield from (p for p in sorted(folders, key=lambda p: natural_key(p.name), reverse=True) if complete(p))


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The last complete checkpoint in a directory by the natural order of names, so `step-10` is later than `step-9`.

    What a crash left unfinished, or what lost a file or some bytes of its length since, is passed over.

    Example:
      >>> from ragged import checkpoint
      >>> checkpoint.latest("no such directory") is None
      True
    """
    return next(checkpoints(Path(directory)), None)


@dataclass(frozen=True)
class Metadata:
    """What a checkpoint holds.

    Attributes:
      values: numbers, texts, truth values and counters by name.
      tensors: global shapes and dtypes by name; `files`: the file of each.
      plans: the layouts that were saved, by the name of their tree, for `Plan.from_json`.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, Shaped]
    files: Mapping[str, str]
    plans: Mapping[str, str] = field(repr=False)


def metadata(path: str | os.PathLike[str]) -> Metadata:
    """What a checkpoint holds; no tensor is read, no process group is needed.

    Raises:
      ValueError: not a complete checkpoint, or damaged, naming the file.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    places = places_in(folder, manifest)
    return Metadata(
        manifest.values,
        {name: Shaped(p.shape, p.dtype) for name, p in places.items()},
        {name: p.file for name, p in places.items()},
        manifest.plans,
    )
