"""Checkpoints in one process: names, files, what is refused and why."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch

import optim
from ragged import P, checkpoint, make_mesh, plan, rules, shard
from ragged.checkpoint.names import named
from ragged.checkpoint.safetensors import CODES, header, parse
from ragged.paths import Shaped
from tests.programs import Ahead, execute

PARAMS = {"layers": [{"w": torch.arange(24.0).view(6, 4), "b": torch.ones(4)}], "s": torch.tensor(2.0), "n": None}


class Pair(NamedTuple):
    left: Any
    right: Any


def names(trees: Any) -> list[str]:
    return [e.name for e in named(trees).entries]


def test_names_do_not_tell_how_transformations_are_nested() -> None:
    floats = {"w": torch.ones(4, 4), "b": torch.ones(4)}
    adam = optim.adamw(0.1)
    want = {"opt.ScaleByAdamState.count", "opt.b.mu", "opt.w.mu", "opt.b.nu", "opt.w.nu"}
    labels = {"w": "a", "b": "b"}
    for tx in (
        adam,
        optim.chain(optim.clip_by_global_norm(1.0), adam),
        optim.chain(optim.chain(optim.identity(), adam)),
        optim.named_chain(("clip", optim.clip_by_global_norm(1.0)), ("adam", adam)),
        optim.masked(adam, True),
    ):
        assert set(names({"opt": tx.init(floats)})) == want
    skipping = set(names({"opt": optim.apply_if_finite(adam).init(floats)}))
    assert skipping == want | {"opt.ApplyIfFiniteState.total_notfinite"}
    both = names({"opt": optim.partition({"a": adam, "b": adam}, labels).init(floats)})
    assert set(both) == want | {"opt.ScaleByAdamState.count#1"}
    twice = names({"opt": optim.chain(adam, adam).init(floats)})
    assert {"opt.w.mu", "opt.w.mu#1"} <= set(twice)


def test_names_of_other_trees() -> None:
    x = torch.ones(2)
    assert names({"params": PARAMS}) == ["params.layers.0.b", "params.layers.0.w", "params.s"]
    assert names({"key": x, "step": 1}) == ["key", "step"]
    assert names({"ema": Pair({"w": x}, [x])}) == ["ema.w.left", "ema.0.right"]
    with pytest.raises(ValueError, match=r"two leaves are called 'p\.a\.b'"):
        named({"p": {"a.b": x, "a": {"b": x}}})
    with pytest.raises(ValueError, match=r"'p\.f' is a function"):
        named({"p": {"f": names}})
    with pytest.raises(ValueError, match="expected trees by name"):
        named([x])


@pytest.mark.parametrize("dtype", CODES)
def test_dtypes_bitwise(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (7, 3, dtype.itemsize), dtype=torch.uint8)
    x = raw.view(dtype)[..., 0]
    checkpoint.save(tmp_path / "a", {"p": {"x": x, "t": x.t(), "e": x[:0]}})
    got = checkpoint.load(
        tmp_path / "a", {"p": {k: torch.zeros_like(v) for k, v in (("x", x), ("t", x.t()), ("e", x[:0]))}}
    )
    for key, want in (("x", x), ("t", x.t())):
        assert torch.equal(got["p"][key].contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    assert got["p"]["e"].shape == (0, 3)


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = {"a": 7, "b": 0.1, "c": True, "d": "text", "e": math.inf, "f": -0.0, "g": [1, {"h": 2.5}], "none": None}
    checkpoint.save(tmp_path / "a", {"v": values, "nan": math.nan})
    got = checkpoint.load(tmp_path / "a", {"v": optree.tree_map(lambda x: type(x)(), values), "nan": 0.0})
    assert got["v"] == values
    assert type(got["v"]["c"]) is bool
    assert math.isnan(got["nan"])
    found = checkpoint.metadata(tmp_path / "a")
    assert found.values["v.g.1.h"] == 2.5
    assert not found.tensors


def test_metadata_needs_no_process_group(tmp_path: Path) -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard(PARAMS, plan(PARAMS, mesh, P(ragged="fsdp")))
    checkpoint.save(tmp_path / "a", {"params": params, "opt": optim.adamw(0.1).init(params), "step": 3})
    found = checkpoint.metadata(tmp_path / "a")
    assert found.tensors["opt.layers.0.w.nu"] == Shaped((6, 4), torch.float32)
    assert found.files["params.s"] == "params.safetensors"
    assert found.values == {"step": 3, "opt.ScaleByAdamState.count": torch.tensor(0)}
    for name in ("params", "opt"):
        assert type(params.plan).from_json(found.plans[name], like=PARAMS) == params.plan


def test_files_split_at_a_size_have_the_usual_index(tmp_path: Path) -> None:
    tree = {f"w{i}": torch.full((10,), float(i)) for i in range(12)}
    checkpoint.save(tmp_path / "a", {"p": tree, "q": {"x": torch.ones(3)}}, file_size=100)
    index = json.loads((tmp_path / "a" / "p.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 480
    assert sorted(set(index["weight_map"].values())) == [f"p-{k:05d}-of-00006.safetensors" for k in range(1, 7)]
    assert (tmp_path / "a" / "q.safetensors").exists()
    got = checkpoint.load(tmp_path / "a", {"p": optree.tree_map(torch.zeros_like, tree), "q": {"x": torch.zeros(3)}})
    assert optree.tree_all(optree.tree_map(torch.equal, got["p"], tree))


def test_other_programs_folders(tmp_path: Path) -> None:
    """Safetensors files without our manifest: one file, a folder of them, an index."""
    w, v = torch.arange(6.0).view(2, 3), torch.arange(3, dtype=torch.bfloat16)
    for file, tensors in (("a.safetensors", {"model.w": w}), ("b.safetensors", {"model.v": v})):
        start, _ = header(file, {k: Shaped(tuple(x.shape), x.dtype) for k, x in tensors.items()}, {})
        body = b"".join(bytes(x.view(torch.uint8).flatten().tolist()) for x in tensors.values())
        (tmp_path / file).write_bytes(start + body)
    like = {"params": {"w": torch.zeros(2, 3), "v": torch.zeros(3)}}

    def theirs(name: str) -> str:
        return name.replace("params", "model")

    got = checkpoint.load(tmp_path, like, rename=theirs)["params"]
    assert torch.equal(got["w"], w)
    assert torch.equal(got["v"], v.float())
    assert got["v"].dtype == torch.float32  # bf16 fits into fp32
    got = checkpoint.load(tmp_path / "a.safetensors", {"x": torch.zeros(2, 3)}, rename={"x": "model.w"})
    assert torch.equal(got["x"], w)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.w": "a.safetensors", "model.v": "b.safetensors"}}))
    assert torch.equal(checkpoint.load(tmp_path, like, rename=theirs)["params"]["w"], w)
    for table, message in (
        ({"model.w": "b.safetensors"}, r"the index has 'model\.w' in 'b\.safetensors', which lacks it"),
        ({"model.w": "c.safetensors"}, r"names 'c\.safetensors', which is not in the folder"),
        ({"model.w": "../a.safetensors"}, r"names 'a\.safetensors', which is not in the folder"),
        (3, "is no index"),
    ):
        index.write_text(json.dumps({"weight_map": table}))
        with pytest.raises(ValueError, match=message):
            checkpoint.load(tmp_path, like, rename=theirs)
    with pytest.raises(ValueError, match=r"calls 'params\.v' and 'params\.w' both 'same'"):
        checkpoint.load(tmp_path / "a.safetensors", like, rename=lambda name: "same")


def test_what_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    """pytorch#148252 and #126881: nothing is changed, nothing is passed over in silence."""
    tree = {"a": torch.ones(4, 3), "b": torch.ones(2), "d": torch.ones(2), "i": torch.ones(2).int()}
    checkpoint.save(tmp_path / "x", {"p": tree, "step": 3})
    like: Any = {"p": {"a": torch.zeros(3, 4), "c": torch.zeros(2), "d": torch.zeros(2).half(), "i": torch.zeros(2)}}
    with pytest.raises(ValueError, match="does not fit") as caught:
        checkpoint.load(tmp_path / "x", like)
    for part in (
        "'p.a' has shape (4, 3) in the files, expected (3, 4)",
        "'p.c' is missing",
        "'p.d' is torch.float32, which does not fit into torch.float16",
        "'p.i' is torch.int32, which does not fit into torch.float32",
        "'p.b' is unexpected",
        "'step' is unexpected",
    ):
        assert part in str(caught.value)
    with pytest.warns(UserWarning, match=r"skipped 6 of .*'p\.c' is missing"):
        got = checkpoint.load(tmp_path / "x", {**like, "p": {**like["p"], "b2": None}}, strict=False)
    assert optree.tree_all(optree.tree_map(torch.equal, got["p"], {**like["p"], "b2": None}))
    assert got["p"]["c"] is not like["p"]["c"]  # a new tree all the same


def test_wider_dtypes_take_narrower_ones(tmp_path: Path) -> None:
    x = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    checkpoint.save(tmp_path / "x", {"a": x, "b": torch.tensor([3], dtype=torch.int16), "step": 2})
    got = checkpoint.load(
        tmp_path / "x", {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(1).long(), "step": 0}
    )
    assert got["a"].tolist() == [1.5, -2.0]
    assert (got["b"].dtype, got["b"].item()) == (torch.int64, 3)


def test_a_folder_is_written_once(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "x", {"a": torch.ones(1)})
    with pytest.raises(ValueError, match="exists; save each checkpoint into a folder of its own"):
        checkpoint.save(tmp_path / "x", {"a": torch.zeros(1)})
    assert checkpoint.load(tmp_path / "x", {"a": torch.zeros(1)})["a"].item() == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_latest_and_keep(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10):
        checkpoint.save(tmp_path / f"step-{step}", {"a": torch.ones(1), "step": step}, keep=3)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-2", "step-9"]
    (tmp_path / "step-11").mkdir()  # no checkpoint
    (tmp_path / ".step-12.partial").mkdir()
    os.truncate(tmp_path / "step-10" / "a.safetensors", 10)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-9"
    checkpoint.save(tmp_path / "step-13", {"a": torch.ones(1), "step": 13}, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-10",
        "step-11",
        "step-13",
    ]  # what is no checkpoint stays
    assert checkpoint.latest(tmp_path / "none") is None
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(tmp_path / "y", {"a": 1}, keep=0)


def test_async_saves_what_was_there(tmp_path: Path) -> None:
    x = torch.ones(1000)
    saving = checkpoint.save(tmp_path / "a", {"x": x}, async_=True)
    x.zero_()
    second = checkpoint.save(tmp_path / "b", {"x": x}, async_=True)  # waits for the first
    assert checkpoint.load(tmp_path / "a", {"x": x})["x"].sum() == 1000
    assert saving.wait() == tmp_path / "a"
    assert second.wait() == second.wait() == tmp_path / "b"
    assert checkpoint.load(tmp_path / "b", {"x": x})["x"].sum() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:5], "no safetensors file, or cut short"),
        (lambda s: b"\xff" * 8 + s[8:], "no safetensors file, or cut short"),
        (lambda s: s.replace(b"F32", b"F99"), "header is damaged"),
        (lambda s: s.replace(b"[0,8]", b"[0,9]"), "header is damaged"),
        (lambda s: s.replace(b"[8,20]", b"[9,21]"), "a tensor begins at byte"),
        (lambda s: s.replace(b"{", b"x", 1), "header is damaged"),
    ],
)
def test_damaged_headers(change: Any, message: str) -> None:
    start, places = header("f", {"a": Shaped((2,), torch.float32), "b": Shaped((3,), torch.float32)}, {"k": "v"})
    assert parse("f", start, len(start) + 20) == places
    with pytest.raises(ValueError, match=message) as caught:
        parse("f", change(start), len(start) + 20)
    assert "f: " in str(caught.value)
    with pytest.raises(ValueError, match="cut short or changed"):
        parse("f", start, len(start) + 19)


def test_dtypes_that_files_lack(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'p\.c' of shape \(2,\): safetensors files have no torch.complex128"):
        checkpoint.save(tmp_path / "x", {"p": {"c": torch.zeros(2, dtype=torch.complex128)}})
    assert not list(tmp_path.iterdir())


def test_state_of_a_partition_over_containers(tmp_path: Path) -> None:
    params = OrderedDict(w=torch.randn(64, 8), b=torch.randn(8))
    tx = optim.partition({"m": optim.muon(0.1), "a": optim.adamw8bit(0.1, min_size=1)}, rules({"w": "m", "b": "a"}))
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(params, state, params)
    checkpoint.save(tmp_path / "x", {"opt": state})
    got = checkpoint.load(tmp_path / "x", {"opt": tx.init(params)})["opt"]
    assert optree.tree_structure(got) == optree.tree_structure(state)
    assert optree.tree_all(optree.tree_map(torch.equal, got, state))


def test_counters_of_other_programs_and_names_that_cross(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "x", {"t": {"step": torch.tensor(4.0), "half": torch.tensor(0.5)}, "a": 1, "b": 2})
    names = {"opt.ScaleByScheduleState.count": "t.step", "n": "t.step", "a": "b", "b": "a", "half": "t.half"}
    like: dict[str, Any] = {"opt": optim.ScaleByScheduleState(torch.zeros((), dtype=torch.int32)), "a": 0, "b": 0}
    got = checkpoint.load(tmp_path / "x", {**like, "half": 0.0}, rename=names)
    assert (got["opt"].count.dtype, got["opt"].count.item()) == (torch.int32, 4)
    assert (got["a"], got["b"], got["half"]) == (2, 1, 0.5)
    del names["n"]
    names["opt.ScaleByScheduleState.count"] = "t.half"
    with pytest.raises(ValueError, match=r"count' is 0\.5 in the files, which does not fit into torch\.int32"):
        checkpoint.load(tmp_path / "x", {"opt": like["opt"], "a": 0, "b": 0, "s": 0}, rename={**names, "s": "t.step"})
    with pytest.warns(UserWarning, match="'b' is unexpected"):
        got = checkpoint.load(tmp_path / "x", {"b": 0}, rename={"b": "a"}, strict=False)
    assert got == {"b": 1}
    with pytest.raises(ValueError, match=r"'a' is 1 in the files, expected something like 'text'"):
        checkpoint.load(tmp_path / "x", {"a": "text", "b": 0, "t": {"step": 0, "half": 0.0}})


def test_names_that_can_not_be_files(tmp_path: Path) -> None:
    for name in ("../x", "a/b", "a.b"):
        with pytest.raises(ValueError, match="can't be a file"):
            checkpoint.save(tmp_path / "y", {name: torch.ones(1)})
    assert not list(tmp_path.iterdir())
    checkpoint.save(tmp_path / "y", {"state-of-art": torch.ones(1)})
    assert sorted(p.name for p in (tmp_path / "y").iterdir()) == ["manifest.json", "state-of-art.safetensors"]


def test_numbers_keep_their_digits_and_counters_leave_the_meta_device(tmp_path: Path) -> None:
    tx = optim.inject_hyperparams(optim.adamw)(0.1)
    params = {"w": torch.ones(2)}
    state = tx.init(params)
    state.hyperparams["learning_rate"] = 0.3
    checkpoint.save(tmp_path / "x", {"opt": state})
    like = optree.tree_map(lambda x: x.to("meta"), tx.init(params))
    got = checkpoint.load(tmp_path / "x", {"opt": like})["opt"]
    assert got.hyperparams["learning_rate"].item() == 0.3
    assert got.count.item() == 0
    assert got.inner_state[0].count.device.type == "cpu"


def last_save(folder: Path) -> str:
    """Nobody waits for it, and its folder vanishes while the thread still writes."""
    program = f"""
import shutil, torch
from ragged import checkpoint
checkpoint.save({str(folder / "x")!r}, {{"x": torch.ones(1 << 25)}}, async_=True)
shutil.rmtree({str(folder / ".x.partial")!r})
"""
    said = execute("-c", program, quiet=False).stderr
    assert f"saving {folder / 'x'} failed: " in said
    assert not (folder / "x").exists()
    return said


AHEAD = [last_save]


def test_a_failed_last_save_is_told_at_the_end(ahead: Ahead) -> None:
    assert ahead(last_save)
