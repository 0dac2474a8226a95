"""Meshes of several axes: which ranks see one batch, what must not be mixed up, and what fails together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import gathered, value_and_grad
from ragged import P, ShardedTree, make_mesh, plan, redistribute, shard, to_dtensor, tree_map, unshard
from tests.models import fallible

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


def nearly_equal_at_first() -> list[str]:
    """A head of zeros gives every batch the same first loss; the second step tells."""
    full = {"experts": torch.zeros(2, 3), "dense": torch.ones(3)}
    params = shard(full, make_mesh((1, 2), ("fsdp", "ep"), device_type="cpu"), SPEC)
    f, x = value_and_grad(loss), torch.full((3,), 1.0 + dist.get_rank())
    said = []
    for k in range(2):
        try:
            f(params, x)
            said.append("")
        except ValueError as error:
            said.append(str(error))
        params = shard({**full, "experts": torch.full((2, 3), float(k + 1))}, params.plan)
    return said


def test_batches_that_differ_later_are_refused_later(run: Any) -> None:
    for first, second in run(2, nearly_equal_at_first, timeout=30):
        assert first == ""
        assert "different losses, in this step" in second


def not_finite() -> None:
    params = tree()
    for bad in (float("nan"), float("inf")):
        value, _ = value_and_grad(loss)(params, torch.full((3,), bad))
        assert not value.isfinite()


def test_losses_that_are_not_finite_pass(run: Any) -> None:
    run(4, not_finite)


def partial_losses() -> None:
    """Axes in sum_axes are not compared: ranks along them may each have a part."""
    params = tree()
    x = torch.full((3,), 1.0 + dist.get_rank())
    f = value_and_grad(loss, sum_axes="ep")
    for _ in range(2):
        f(params, x)


def test_sum_axes_are_not_compared(run: Any) -> None:
    run(4, partial_losses)


def moved_inside() -> None:
    params = tree()

    def bad(move: Any) -> Any:
        return lambda p, x: loss(move(p), x)

    for move in (unshard, lambda p: redistribute(p, None)):
        with pytest.raises(ValueError, match="inside a differentiated function"):
            value_and_grad(bad(move))(params, torch.ones(3))
    value_and_grad(loss)(params, torch.ones(3))


def test_moves_inside_a_loss_are_refused(run: Any) -> None:
    run(4, moved_inside, timeout=30)


def crossed() -> str:
    """Buckets of one unit are ragged over axes that hold replicas of the other; a rank fails in backward."""
    mesh = make_mesh((2, 2), ("a", "b"), device_type="cpu")
    full = {"u": {"x": torch.ones(4096), "y": torch.ones(8192)}}
    params = shard(full, mesh, {"u": {"x": P(ragged="a"), "y": P(ragged="b")}})
    broken = False

    def product(p: Any, x: Tensor) -> Tensor:
        return fallible((p["x"].sum() + p["y"].sum()) * x, lambda at: broken and at == "backward")

    call = gathered(product)
    f = value_and_grad(lambda p, x: call(p["u"], x))
    for _ in range(2):
        _, grads = f(params, torch.ones(()))
    broken = dist.get_rank() == 2
    try:
        f(params, torch.ones(()))
        said = ""
    except (RuntimeError, ValueError) as error:
        said = str(error)
    broken = False
    again = f(params, torch.ones(()))[1]
    assert all(torch.equal(a, b) for a, b in zip(grads.tensors, again.tensors, strict=True))
    return said


def test_a_failing_rank_where_ragged_and_replica_axes_cross(run: Any) -> None:
    for said in run(4, crossed, timeout=30):
        assert "no luck" in said


def frozen_or_not() -> None:
    """Plans that differ in what is frozen are equal, but a tree keeps the one it was moved to."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    shapes = {"w": ((4, 2), torch.float32)}
    cold, hot = (plan(shapes, mesh, P(ragged="fsdp"), frozen=frozen) for frozen in (True, False))
    params = shard({"w": torch.ones(4, 2)}, mesh, P())
    redistribute(params, cold)
    _, grads = value_and_grad(gathered(lambda p, x: (p["w"] * x).sum()))(redistribute(params, hot), torch.tensor(3.0))
    assert torch.equal(unshard(grads)["w"], torch.full((4, 2), 3.0))


def test_moves_keep_what_is_frozen(run: Any) -> None:
    run(2, frozen_or_not)


def odd_memory() -> None:
    """Strided and conjugated local tensors are moved by value."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    x = torch.arange(10.0) * (1 + 2j)
    params = shard({"w": x}, mesh, P(ragged="fsdp"))
    for odd, want in (
        (tree_map(lambda t: torch.stack([t, -t], 1)[:, 0], params), x),
        (tree_map(torch.conj, params), x.conj()),
    ):
        assert torch.equal(unshard(odd)["w"], want)
        one = unshard(odd, dst=1)
        assert (dist.get_rank() == 1) == (one is not None)
        assert one is None or torch.equal(one["w"], want)
        assert torch.equal(to_dtensor(odd)["w"].full_tensor(), want)
        assert torch.equal(unshard(redistribute(odd, None))["w"], want)


def test_odd_memory(run: Any) -> None:
    run(2, odd_memory)


def other_functions() -> str:
    params = tree()
    try:
        redistribute(params, None) if dist.get_rank() == 1 else unshard(params)
        return ""
    except ValueError as error:
        return str(error)


def test_ranks_in_different_functions_all_raise(run: Any) -> None:
    for said in run(4, other_functions, timeout=30):
        assert "unshard" in said
        assert "redistribute" in said
