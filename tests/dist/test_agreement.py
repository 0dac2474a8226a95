"""Ranks that disagree all raise, and say on what; nobody hangs or aborts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ragged import P, make_mesh, plan, rules, shard


def sharding(case: str) -> str:
    rank, mesh = dist.get_rank(), make_mesh((-1,), ("fsdp",), device_type="cpu")
    tree: dict[str, Any] = {"a": torch.ones(3, 4), "b": torch.zeros(5)}
    spec: Any = P(ragged="fsdp")
    units: list[str] = []
    if rank == 1:
        match case:
            case "extra leaf":
                tree["z"] = torch.ones(3)
            case "shape":
                tree["a"] = torch.ones(3, 3)
            case "dtype":
                tree["b"] = torch.zeros(5, dtype=torch.float64)
            case "values":
                tree["b"] = torch.tensor([0.0, 0, 0, 0, 1])
            case "permuted values":
                tree["a"] = tree["a"].clone()
                tree["a"][0, 0], tree["a"][2, 3] = 2.0, 0.0
            case "spec":
                spec = P(ragged="fsdp", block=2)
            case "rule":
                spec = rules({"a": spec})
            case "units":
                units = ["a", "b"]
            case "not a tensor":
                tree["b"] = "text"
            case "meta":
                tree["b"] = torch.zeros(5, device="meta")
            case "twice":
                tree["b"] = tree["c"] = torch.zeros(5)
    if case == "units":
        tree = {"u": tree}
        units = ["u.a"] if rank == 1 else ["u"]
    with pytest.raises(ValueError, match=r".") as caught:
        shard(tree, mesh, spec, units=units)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("extra leaf", ["'z'", "rank 1", "nothing"]),
        ("shape", ["'a'", "(3, 4)", "(3, 3)", "rank 1"]),
        ("dtype", ["'b'", "float32", "float64", "rank 1"]),
        ("values", ["values of leaf 'b'", "rank 1"]),
        ("permuted values", ["values of leaf 'a'", "rank 1"]),
        ("spec", ["spec", "rank 1"]),
        ("rule", ["'b'"]),
        ("units", ["unit", "rank 1"]),
        ("not a tensor", ["'b'", "str"]),
        ("meta", ["'b'", "meta"]),
        ("twice", ["'c'", "same tensor"]),
    ],
)
def test_all_ranks_name_the_difference(run: Any, case: str, words: list[str]) -> None:
    """deepspeedai/DeepSpeed#5799."""
    for text in run(3, sharding, case, timeout=10):
        for word in words:
            assert word in text, text


def meshes(case: str) -> str:
    tree = {"a": torch.ones(6, 4)}
    with pytest.raises(ValueError, match=r".") as caught:
        match case:
            case "too large":
                make_mesh((4,), ("fsdp",), device_type="cpu")
            case "names":
                make_mesh((2, 1), ("a", "a"), device_type="cpu")
            case "repeated rank":
                mesh = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("fsdp",))
                mesh.mesh[1] = 0
                plan(tree, mesh, P(ragged="fsdp"))
            case "no names":
                plan(tree, DeviceMesh("cpu", torch.tensor([0, 1])), P(ragged="fsdp"))
            case "axes swapped":
                names = ("x", "y") if dist.get_rank() == 0 else ("y", "x")
                shard(tree, make_mesh((2, 1), names, device_type="cpu"), P(ragged="x"))
            case "two dims":
                shard(tree, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(None, None, "fsdp"))
            case "no mesh":
                shard(tree, {"fsdp": 2}, P(ragged="fsdp"))  # type: ignore[arg-type]
            case "unbound":
                shard(tree, plan(tree, {"fsdp": 2}, P(ragged="fsdp")))
            case "other mesh":
                other = make_mesh((-1,), ("data",), device_type="cpu")
                shard(tree, plan(tree, {"fsdp": 2}, P(ragged="fsdp")), other)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("too large", "4"),
        ("names", "distinct"),
        ("repeated rank", "twice"),
        ("no names", "names"),
        ("axes swapped", "mesh"),
        ("two dims", "2 dims"),
        ("no mesh", "DeviceMesh"),
        ("unbound", "bind"),
        ("other mesh", "data"),
    ],
)
def test_meshes_that_do_not_fit(run: Any, case: str, word: str) -> None:
    """pytorch/pytorch#191472, #161776."""
    for text in run(2, meshes, case, timeout=20):
        assert word in text, text
