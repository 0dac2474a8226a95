"""Headers of safetensors files, good and broken."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from ragged.cli.headers import read_header
from ragged.cli.models import load_model

W = {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}
B = {"dtype": "F32", "shape": [], "data_offsets": [16, 20]}


def write(path: Path, header: Any, data: int = 20, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))
    return path


def test_shapes_and_dtypes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, "x.w": W, "x.b": B})
    assert read_header(path) == {"x.w": ((4, 2), torch.bfloat16), "x.b": ((), torch.float32)}
    assert load_model(str(path)) == read_header(path)


def test_dtype_option_leaves_integers_alone(tmp_path: Path) -> None:
    codes = {"dtype": "I8", "shape": [16], "data_offsets": [0, 16]}
    found = load_model(str(write(tmp_path / "a.safetensors", {"c": codes, "b": B})), torch.float16)
    assert found == {"c": ((16,), torch.int8), "b": ((), torch.float16)}


@pytest.mark.parametrize(
    ("header", "file", "message"),
    [
        (b"{]", {}, "header of .* is no JSON"),
        (b"[1]", {}, "holds a JSON list"),
        ({"w": W}, {"length": 2**63}, "cut short: it has .* bytes and gives 9,223,372,036,854,775,808"),
        ({"w": W}, {"length": 200_000_000}, "at most 100,000,000"),
        ({"w": W}, {"length": 1}, "no safetensors file"),
        ({"w": W}, {"data": 15}, r"'w' ends at byte 16 of the data, but the file is cut at 15"),
        ({"w": 3}, {}, "'w' has the entry 3"),
        ({"w": W | {"dtype": "F4"}}, {}, "'w' has dtype 'F4'; known are F64"),
        ({"w": W | {"dtype": None}}, {}, "has dtype None"),
        ({"w": W | {"shape": [-4, -2]}}, {}, "expected lists of sizes"),
        ({"w": W | {"shape": [4.0, 2]}}, {}, "expected lists of sizes"),
        ({"w": W | {"shape": "42"}}, {}, "expected lists of sizes"),
        ({"w": W | {"data_offsets": [0]}}, {}, "expected lists of sizes"),
        ({"w": W | {"data_offsets": [0, 8]}}, {}, r"has 16 bytes, but data_offsets \[0, 8\]"),
    ],
)
def test_broken_files(tmp_path: Path, header: Any, file: dict[str, int], message: str) -> None:
    path = write(tmp_path / "a.safetensors", header, **file)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(str(path))
    assert "a.safetensors" in str(caught.value)


def test_files_without_a_header_or_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x08\x00")
    with pytest.raises(ValueError, match="it has 2 bytes"):
        load_model(str(path))
    with pytest.raises(ValueError, match="holds no tensors"):
        load_model(str(write(path, {})))
    with pytest.raises(ValueError, match=r"'x\.\.w' has an empty component"):
        load_model(str(write(path, {"x..w": W})))


def index(folder: Path, weight_map: Any) -> str:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(path)


def test_an_index_names_the_files(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"w": W})
    write(tmp_path / "2.safetensors", {"b": B, "unused": W})
    path = index(tmp_path, {"b": "2.safetensors", "w": "1.safetensors"})
    assert load_model(path) == {"b": ((), torch.float32), "w": ((4, 2), torch.bfloat16)}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"w": "3.safetensors"}, "cannot read .*3.safetensors: No such file"),
        ({"v": "1.safetensors"}, "says that 1.safetensors holds 'v', but it does not"),
        ({"w": "../1.safetensors"}, "files are expected beside the index"),
        ({}, "has no 'weight_map' from tensor names to file names"),
        ({"w": 1}, "has no 'weight_map'"),
        (["w"], "has no 'weight_map'"),
    ],
)
def test_broken_indices(tmp_path: Path, weight_map: Any, message: str) -> None:
    write(tmp_path / "1.safetensors", {"w": W})
    with pytest.raises(ValueError, match=message):
        load_model(index(tmp_path, weight_map))
