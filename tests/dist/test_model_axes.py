"""An axis that cuts leaves evenly may mean one batch (tensor parallelism) or a batch per rank (expert parallelism)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import gathered, value_and_grad
from ragged import P, ShardedTree, make_mesh, shard, unshard

TREE = {"experts": torch.ones(2, 3), "dense": torch.arange(1.0, 4.0)}
SPEC = {"experts": P("ep", ragged="fsdp"), "dense": P(ragged="fsdp")}


@gathered
def loss(p: Any, x: Tensor) -> Tensor:
    return (p["experts"].sum(0) * p["dense"] * x).sum()


def tree() -> ShardedTree:
    return shard(TREE, make_mesh((2, 2), ("fsdp", "ep"), device_type="cpu"), SPEC)


def other_batches() -> str:
    params, x = tree(), torch.full((3,), 1.0 + dist.get_rank())
    try:
        value_and_grad(loss)(params, x)
        said = ""
    except ValueError as error:
        said = str(error)
    value, grads = value_and_grad(loss, data_axes=("fsdp", "ep"))(params, x)  # as the message says
    assert value.item() == 2.5 * 6
    torch.testing.assert_close(unshard(grads)["dense"], torch.full((3,), 2.5))
    return said


def test_a_batch_per_rank_along_a_model_axis_is_refused(run: Any) -> None:
    for said in run(4, other_batches, timeout=30):
        assert "ranks along ('ep',) returned different losses, from " in said
        assert "data_axes=('fsdp', 'ep',)" in said


def one_batch() -> None:
    params, x = tree(), torch.full((3,), 1.0 + dist.get_rank() // 2)
    for _ in range(2):
        value, grads = value_and_grad(loss)(params, x)
        assert value.item() == 1.5 * 6
        torch.testing.assert_close(unshard(grads)["dense"], torch.full((3,), 1.5))


def test_one_batch_along_a_model_axis_is_tensor_parallelism(run: Any) -> None:
    run(4, one_batch)


def one_rank_fails() -> None:
    def broken(p: Any, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("no luck")
        return loss(p, x)

    value_and_grad(broken)(tree(), torch.ones(3))


def test_a_failing_rank_stops_all(run: Any) -> None:
    errors = run(4, one_rank_fails, expect_error=True, timeout=30)
    assert all("no luck" in str(error) for error in errors)
