"""The recipes of docs/parallelism.md, as they stand, on four ranks; and the two of them that are easy to get wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from examples.train_moe import enter, groups, leave
from fsdp import gathered, value_and_grad
from ragged import P, collectives, make_mesh, shard, unshard

PAGE = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
RECIPES = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def execute(program: str) -> None:
    exec(compile(program, "docs/parallelism.md", "exec"), {"__name__": "recipe"})


@pytest.mark.parametrize("recipe", [pytest.param(text, id=title) for title, text in RECIPES])
def test_recipes(run: Any, recipe: str) -> None:
    run(4, execute, recipe)


def test_every_recipe_is_found() -> None:
    assert len(RECIPES) == PAGE.count("```python") == PAGE.count("\n## ") == 5


def valid_tokens(shape: tuple[int, int], axes: tuple[str, str], valid: tuple[int, ...]) -> None:
    """Ranks along tp have the same tokens; one gradient is of a leaf cut along the second axis, one of a replica."""
    mesh = make_mesh(shape, axes, device_type="cpu")
    data = tuple(a for a in axes if a != "tp")
    full = {"w": torch.eye(4), "b": torch.ones(4)}
    params = shard(full, mesh, {"w": P(ragged=data), "b": P(ragged="fsdp") if "tp" in axes else None})
    comm = params.plan.bound()
    k = comm.rank(data)

    @gathered
    def loss_fn(p: Any, x: Tensor, count: Tensor) -> Tensor:
        targets = torch.zeros(len(x), dtype=torch.int64)
        return F.cross_entropy(x @ p["w"] + p["b"], targets, reduction="sum") / count

    x = torch.arange(sum(valid) * 4.0).cos().view(-1, 4).split(valid)
    count = collectives.all_reduce(torch.tensor(valid[k]), comm.group(data)).wait()
    f = value_and_grad(loss_fn, op="sum", data_axes=data)
    want_loss, want = value_and_grad(loss_fn)(full, torch.cat(x), torch.tensor(sum(valid)))
    for _ in range(2):
        loss, grads = f(params, x[k], count)
        torch.testing.assert_close((loss, unshard(grads)), (want_loss, want))


@pytest.mark.parametrize(
    ("shape", "axes", "valid"),
    [
        ((4, 1), ("fsdp", "ep"), (5, 0, 1, 2)),
        ((2, 2), ("fsdp", "ep"), (5, 0, 1, 2)),
        ((2, 2), ("replica", "fsdp"), (0, 0, 0, 3)),
        ((2, 2), ("fsdp", "tp"), (1, 6)),
    ],
    ids=str,
)
def test_unequal_numbers_of_valid_tokens(run: Any, shape: Any, axes: Any, valid: Any) -> None:
    run(4, valid_tokens, shape, axes, valid)


def some_ranks() -> None:
    """A mesh of two processes of four, not in the order of their ranks."""
    mesh = DeviceMesh("cpu", [2, 0], mesh_dim_names=("fsdp",))
    rank, w = dist.get_rank(), {"w": torch.arange(6.0)}
    if rank in (0, 2):
        params = shard(w, mesh, P(ragged="fsdp", block=3, shares=(1, 1)))
        assert params.leaf("w").tolist() == ([3, 4, 5] if rank == 0 else [0, 1, 2])
        _, grads = value_and_grad(gathered(lambda p: (p["w"] * rank).sum()))(params)
        assert unshard(grads)["w"].tolist() == [1.0] * 6
    else:
        with pytest.raises(ValueError, match="is not in the mesh"):
            shard(w, mesh, P(ragged="fsdp"))


def test_a_mesh_of_some_ranks(run: Any) -> None:
    run(4, some_ranks)


def model_axis(cut: P, replicated: P | None) -> None:
    """Data rank r scales the loss by r + 1; ranks along tp have two rows of a matrix each, and all of a norm."""
    mesh = make_mesh((2, 2), ("fsdp", "tp"), device_type="cpu")
    params = shard({"w": torch.ones(4, 3), "norm": torch.ones(3)}, mesh, {"w": cut, "norm": replicated})
    at, scale = groups(params.plan), torch.arange(1.0, 5).view(2, 2)[mesh.get_local_rank("tp")]

    @gathered
    def loss_fn(p: Any) -> Tensor:
        part = p["w"] @ enter(p["norm"], at.tp) @ scale
        return leave(part, at.tp) * (at.data.rank + 1)

    f = value_and_grad(loss_fn)
    for _ in range(2):
        loss, grads = f(params)
        assert loss.item() == 1.5 * 30
        found = {path: x.tolist() for path, x in unshard(grads).items()}
        assert found == {"w": [[1.5 * n] * 3 for n in (1, 2, 3, 4)], "norm": [15.0] * 3}


@pytest.mark.parametrize("replicated", [P(ragged="fsdp"), None], ids=str)
def test_gradients_are_not_divided_by_tp(run: Any, replicated: P | None) -> None:
    run(4, model_axis, P("tp", ragged="fsdp"), replicated)
