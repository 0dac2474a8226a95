"""Indices of torch.distributed.checkpoint that are strict, hostile or damaged: read as data, and told by name."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from ragged import P, make_mesh, plan, shard
from ragged.checkpoint import export_dcp, import_dcp
from tests.dist.test_checkpoint_dcp import values

TREE = {"model": {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(2)}, "step": 3}
LIKE: dict[str, Any] = {"model": {"w": torch.zeros(4, 3), "b": torch.zeros(2)}, "step": 0}


def refused(folder: Path, like: Any = LIKE, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the callers look at the text
        import_dcp(folder, like, **options)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export_dcp(tmp_path, TREE)
    return tmp_path


def test_names_shapes_and_values_are_strict(folder: Path) -> None:
    wrong = {"model": {"w": torch.zeros(3, 4), "c": torch.zeros(2), "b": torch.zeros(2).half()}, "step": 0}
    text = refused(folder, wrong)
    assert "'model.w' has shape (4, 3) in the files, expected (3, 4)" in text
    assert "'model.c' is missing" in text
    assert "'model.b' is torch.float32, which does not fit into torch.float16" in text
    renamed = refused(folder, {"model": LIKE["model"], "n": 0}, rename={"n": "there"})
    assert "'n' ('there' in the files) is missing; 'step' is unexpected" in renamed
    with pytest.warns(UserWarning, match=r"load skipped 1 .*'model.b' is unexpected"):
        got = import_dcp(folder, {"model": {"w": torch.zeros(4, 3)}, "step": 0}, strict=False)
    assert torch.equal(got["model"]["w"], TREE["model"]["w"])  # type: ignore[index]
    moved = import_dcp(
        folder, {"v": LIKE["model"], "n": 0}, rename=lambda x: x.replace("v.", "model.").replace("n", "step")
    )
    assert moved["n"] == 3
    assert "no checkpoint" in refused(folder / "nowhere")


class Evil:
    """Whatever unpickles it calls something."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


def change(folder: Path, f: Callable[[Metadata], Any]) -> None:
    """Replace the index by a changed one."""
    index = folder / ".metadata"
    found = pickle.loads(index.read_bytes())
    changed = f(found)
    index.write_bytes(pickle.dumps(found if changed is None else changed))


@pytest.mark.parametrize(
    ("call", "args", "name"),
    [
        (os.system, ("touch {}",), "posix.system"),
        (os.mkdir, ("{}",), "posix.mkdir"),
        (eval, ("__import__('os').mkdir('{}')",), "builtins.eval"),
        (getattr, (os, "mkdir"), "builtins.getattr"),
        (torch.save, (1, "{}"), "torch.serialization.save"),
    ],
)
@pytest.mark.parametrize("place", ["whole", "planner", "name"])
def test_nothing_in_an_index_is_run(
    call: Any, args: tuple[Any, ...], name: str, place: str, folder: Path, tmp_path_factory: Any
) -> None:
    trap = tmp_path_factory.mktemp("trap") / "sprung"
    evil = Evil(call, *[x.format(trap) if isinstance(x, str) else x.__name__ if x is os else x for x in args])

    def spoil(metadata: Metadata) -> Any:
        if place == "whole":
            return evil
        if place == "planner":
            metadata.planner_data = evil
        else:
            metadata.state_dict_metadata[evil] = metadata.state_dict_metadata.pop("model.w")  # type: ignore[index]
        return None

    change(folder, spoil)
    text = refused(folder)
    assert f"{folder / '.metadata'} is damaged" in text
    assert name.split(".")[-1] in text
    assert not trap.exists()


@pytest.mark.parametrize(
    ("pickled", "name"),
    [
        (b"ctorch\nfrom_file\n(V{}\nI01\nI8\ntR.", "torch.from_file"),
        (b"ctorch\nos.mkdir\n(V{}\ntR.", "torch.os.mkdir"),
        (b"ctorch.serialization\nload\n(V{}\ntR.", "torch.serialization.load"),
        (b"ctorch.distributed.checkpoint.metadata\nos.mkdir\n(V{}\ntR.", "os.mkdir"),
        (b"(V{}\nios\nmkdir\n.", "os.mkdir"),
    ],
)
def test_nor_is_what_torch_has(pickled: bytes, name: str, folder: Path, tmp_path_factory: Any) -> None:
    trap = tmp_path_factory.mktemp("trap") / "sprung"
    (folder / ".metadata").write_bytes(pickled.replace(b"{}", str(trap).encode()))
    text = refused(folder)
    assert name in text
    assert "which no index needs" in text
    assert not trap.exists()


def test_an_index_can_not_change_the_library(folder: Path) -> None:
    """A pickle's state may hold attributes for slots, which are set on whatever it belongs to, classes too."""
    good = (folder / ".metadata").read_bytes()
    target = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    for name in (b"__setstate__", b"__init__", b"__new__"):
        (folder / ".metadata").write_bytes(target + b"(N(V" + name + b"\nctorch\nSize\ndtb.")
        assert "damaged" in refused(folder)
    (folder / ".metadata").write_bytes(good)
    assert import_dcp(folder, LIKE)["step"] == 3


def test_values_are_not_unpickled_either(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    export_dcp(tmp_path / "b", {"x": 1, "y": 2})
    with (tmp_path / "b" / "__0_0.distcp").open("ab") as file:
        start = file.tell()
        torch.save(Evil(os.mkdir, str(trap)), file)
        end = file.tell()

    def spoil(metadata: Metadata) -> None:
        info = next(info for key, info in metadata.storage_data.items() if key.fqn == "x")
        info.offset, info.length = start, end - start

    change(tmp_path / "b", spoil)
    assert "'x' is damaged, or more than a tensor or plain value" in refused(tmp_path / "b", {"x": 0, "y": 0})
    assert not trap.exists()
    with pytest.warns(UserWarning, match="'x' is unexpected"):
        assert import_dcp(tmp_path / "b", {"y": 0}, strict=False) == {"y": 2}


def without_a_piece(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].chunks.clear()  # type: ignore[union-attr]


def twice(metadata: Metadata) -> None:
    half = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    more = ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([2, 3]))
    metadata.state_dict_metadata["model.w"].chunks[:] = [half, more]  # type: ignore[union-attr]
    for key in list(metadata.storage_data):
        if key.fqn == "model.w":
            metadata.storage_data[type(key)("model.w", (1, 0))] = metadata.storage_data[key]


def outside(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].chunks[0].sizes = torch.Size([5, 3])  # type: ignore[union-attr]


def elsewhere(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../a"


def extended(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def unstored(metadata: Metadata) -> None:
    metadata.storage_data.clear()


def sparse(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].properties.layout = torch.sparse_coo  # type: ignore[union-attr]


def another_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].properties.dtype = torch.int32  # type: ignore[union-attr]


def no_archive(metadata: Metadata) -> None:
    for key, info in metadata.storage_data.items():
        info.offset += key.fqn == "model.w"
        info.length -= key.fqn == "model.w"


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (without_a_piece, "the pieces of 'model.w' don't make up its shape (4, 3)"),
        (twice, "the pieces of 'model.w' don't make up its shape (4, 3)"),
        (outside, "a piece of 'model.w' lies outside of its shape (4, 3)"),
        (elsewhere, "'../a', outside of the folder"),
        (extended, "the extensions ['zstd']"),
        (unstored, "doesn't say where"),
        (sparse, "'model.w' is no dense tensor"),
        (another_dtype, "a piece of 'model.w' is (4, 3) torch.float32, (4, 3) torch.int32 in the index"),
        (no_archive, "'model.w' was not written by torch.save"),
    ],
)
def test_an_index_that_is_not_what_torch_writes(folder: Path, spoil: Any, text: str) -> None:
    change(folder, spoil)
    like = optree.tree_map(lambda x: x.int() if isinstance(x, Tensor) else x, LIKE) if spoil is another_dtype else LIKE
    like = {**like, "model": {**like["model"], "b": LIKE["model"]["b"]}}
    assert text in refused(folder, like)
    index = (folder / ".metadata").read_bytes()
    for size in range(0, len(index), 37):
        (folder / ".metadata").write_bytes(index[:size])
        assert "is damaged" in refused(folder)


def test_files_that_were_cut_short_are_named(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    text = refused(folder)
    assert f"{file} was cut short, in 'model." in text
    file.unlink()
    assert f"{file}, which holds" in refused(folder)


def one_piece_is_damaged(folder: str) -> None:
    """Of a tensor that one rank alone reads: all learn of it."""
    tree = {"w": values((4, 2), 1)}
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    model = shard(tree, plan(tree, mesh, P(ragged="fsdp"), align=1))
    export_dcp(folder, {"model": model})
    if dist.get_rank() == 1:
        file = Path(folder) / "__1_0.distcp"
        raw = file.read_bytes()
        file.write_bytes(raw.replace(b"PK", b"KP"))
    dist.barrier()
    with pytest.raises(ValueError, match=r"__1_0\.distcp: 'model\.w' was not written by torch\.save") as caught:
        import_dcp(folder, {"model": model})
    assert ("rank 1 failed" in str(caught.value)) is (dist.get_rank() == 0)  # which didn't read it
    with pytest.raises(ValueError, match=r"'model\.v' is missing"):
        import_dcp(folder, {"model": shard({"v": tree["w"]}, mesh, P(ragged="fsdp"))})


def test_all_ranks_learn_of_a_damaged_piece(run: Any, tmp_path: Path) -> None:
    run(2, one_piece_is_damaged, str(tmp_path), timeout=30)
