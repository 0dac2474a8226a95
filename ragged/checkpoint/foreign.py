"""Folders of safetensors files that other programs wrote, with or without an index."""

from __future__ import annotations

import json
from pathlib import Path

from ragged.checkpoint.manifest import read_header
from ragged.checkpoint.safetensors import Place, parse

__all__ = ["foreign_places"]


def foreign_places(path: Path) -> dict[str, Place]:
    """Where the tensors of a folder, or of one file, lie.

    Raises:
      ValueError: there are none, an index that names a missing file or tensor, one name in two files; naming them.
    """
    if path.is_file():
        return _of([path])
    indices = sorted(path.glob("*.safetensors.index.json"))
    listed: dict[str, str] = {}
    for index in indices:
        try:
            listed |= {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors files: {error!r}") from None
    files = sorted({path / file for file in listed.values()} if listed else path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has neither a manifest of this library nor safetensors files")
    odd = next((file for file in files if file.parent != path or not file.is_file()), None)
    if odd is not None:
        raise ValueError(f"{indices[0] if indices else path} names {odd.name!r}, which is not in the folder")
    places = _of(files)
    lost = next((name for name, file in listed.items() if name not in places or places[name].file != file), None)
    if lost is not None:
        raise ValueError(f"{path}: the index has {lost!r} in {listed[lost]!r}, which lacks it")
    return places


def _of(files: list[Path]) -> dict[str, Place]:
    out: dict[str, Place] = {}
    for file in files:
        try:
            found = parse(file.name, read_header(file), file.stat().st_size)
        except ValueError as error:
            raise ValueError(f"{file.parent}/{error}") from None
        for name, place in found.items():
            if name in out:
                raise ValueError(f"{file.parent}: {name!r} is both in {out[name].file} and in {file.name}")
            out[name] = place
    return out
