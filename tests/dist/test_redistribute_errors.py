"""Whatever ranks disagree on and whatever can't be moved, all ranks raise, none hangs, and the next move works."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ragged import ELEMENT, P, make_mesh, plan, redistribute, shard, tree_map, unshard

FULL = {"w": torch.arange(15.0).view(5, 3), "v": torch.arange(7.0), "n": torch.arange(6)}
TREE = {"u": FULL}
ROWS, ELEMENTS = P(ragged="fsdp"), P(ragged="fsdp", block=ELEMENT)


def attempt(case: str) -> str:
    """What this rank is told; rank 1 is the one that differs."""
    there = make_mesh((-1,), ("fsdp",), device_type="cpu")
    tree, odd = shard(TREE, there, ROWS), dist.get_rank() == 1
    turned = DeviceMesh("cpu", torch.tensor([2, 1, 0]), mesh_dim_names=("fsdp",))
    elements = plan(TREE, there, ELEMENTS)
    less = {"u": {k: v for k, v in FULL.items() if k != "v"}}
    other = {"u": {**FULL, "w": torch.zeros(3, 5)}}
    floats = plan({"u": {k: (v.shape, torch.float32) for k, v in FULL.items()}}, there, ELEMENTS)
    tries: dict[str, Any] = {
        "spec": lambda: redistribute(tree, ELEMENTS if odd else None),
        "plan": lambda: redistribute(tree, elements if odd else tree.plan),
        "plan or spec": lambda: redistribute(tree, elements if odd else None),
        "rank order": lambda: redistribute(tree, elements.bind(turned) if odd else elements),
        "bad spec here": lambda: redistribute(tree, P("fsdp") if odd else ELEMENTS),
        "no spec here": lambda: redistribute(tree, 7 if odd else ELEMENTS),
        "leaves": lambda: redistribute(tree["u"]["w"] if odd else tree, elements),
        "dtypes": lambda: redistribute(tree_map(lambda x: x.double(), tree) if odd else tree, elements),
        "source": lambda: redistribute(redistribute(tree, ELEMENTS), ROWS) if odd else redistribute(tree, ROWS),
        "bad spec": lambda: redistribute(tree, P("fsdp")),
        "missing leaf": lambda: redistribute(tree, plan(less, there, ROWS)),
        "other shape": lambda: redistribute(tree, plan(other, there, ROWS)),
        "axis sizes": lambda: redistribute(tree, plan(TREE, {"fsdp": 4}, ROWS)),
        "two dtypes": lambda: redistribute(tree, floats),
        "full tensors": lambda: redistribute(TREE, elements),  # type: ignore[arg-type]
    }
    start = time.monotonic()
    try:
        tries[case]()
    except ValueError as error:
        said = str(error)
    else:
        said = ""
    assert time.monotonic() - start < 10
    again = unshard(redistribute(redistribute(tree, ELEMENTS), elements.bind(turned)))
    assert all(torch.equal(again["u"][k], v) for k, v in FULL.items())
    return said


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("spec", ["redistribute differs between ranks", "new layout", "rank 1"]),
        ("plan", ["new layout", "rank 1"]),
        ("plan or spec", ["new layout", "rank 1"]),
        ("rank order", ["new mesh", "rank 1", "(2, 1, 0)"]),
        ("bad spec here", ["leaf 'u.v' of shape (7,)", "does not divide"]),
        ("no spec here", ["7"]),
        ("leaves", ["leaves", "rank 1 has ('u.w',)"]),
        ("dtypes", ["dtypes", "rank 1", "float64"]),
        ("bad spec", ["leaf 'u.v' of shape (7,)", "use ragged="]),
        ("missing leaf", ["leaf 'u.v' of shape (7,) is not in it"]),
        ("other shape", ["leaf 'u.w' of shape (5, 3) has shape (3, 5)"]),
        ("axis sizes", ["{'fsdp': 4}", "{'fsdp': 3}"]),
        ("two dtypes", ["share a buffer", "int64", "float32"]),
        ("full tensors", ["got a dict", "reduce_scatter"]),
    ],
)
def test_all_ranks_refuse(run: Any, case: str, words: list[str]) -> None:
    for rank, said in enumerate(run(3, attempt, case, timeout=30)):
        assert all(word in said for word in words), f"rank {rank}: {said!r}"


def test_one_rank_that_moved_first_is_refused(run: Any) -> None:
    assert all(run(3, attempt, "source", timeout=30))


def other_ranks() -> str:
    pair = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("fsdp",))
    there = make_mesh((-1,), ("fsdp",), device_type="cpu")
    if dist.get_rank() == 2:
        return ""
    with pytest.raises(ValueError, match="one set of ranks") as caught:
        redistribute(shard(TREE, pair, ROWS), plan(TREE, there, ROWS))
    return str(caught.value)


def test_moves_stay_within_a_set_of_ranks(run: Any) -> None:
    assert all("for ranks [0, 1, 2], the tree lies on [0, 1]" in said for said in run(3, other_ranks)[:2])
