"""What a loss function may do with gathered functions and sharded trees."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import gathered, value_and_grad
from ragged import P, ShardedTree, make_mesh, shard, tree_map, unshard
from tests.models import block, make_loss, make_params, tokens


def close(a: Any, b: Any) -> None:
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def equals_plain(loss: Any, params: ShardedTree) -> None:
    """Learning the order of collectives, and following it; every rank has the same data."""
    x = torch.linspace(-1, 1, 32).view(2, 16)
    want = value_and_grad(loss)(unshard(params), x)[1]
    f = value_and_grad(loss)
    for _ in range(5):
        close(unshard(f(params, x)[1]), want)


def nested() -> None:
    """A gathered function inside another: the inner unit's gradient is not lost."""
    params = make_params()
    inner = gathered(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))
    outer = gathered(lambda p, x, q: torch.tanh(inner(q, x @ p["w"]) @ p["w"] + p["b"]))

    def loss(p: Any, x: Tensor) -> Tensor:
        return outer(p["layers"][0], inner(p["layers"][2], x), p["layers"][1]).sum()

    equals_plain(loss, params)


@pytest.mark.parametrize("n", [1, 2])
def test_nested_gathered_functions(run: Any, n: int) -> None:
    run(n, nested)


def outputs_changed_in_place() -> None:
    params = make_params()
    flat = gathered(lambda p, x: (x @ p["w"]).view(-1))

    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            h = flat(layer, x)
            h.mul_(0.5)
            x = h.view(2, 16)
        return x.square().sum()

    equals_plain(loss, params)


def test_outputs_may_be_views_and_change_in_place(run: Any) -> None:
    run(2, outputs_changed_in_place)


def penalty() -> None:
    """A gradient inside the loss needs the parameters before backward begins."""
    params = make_params()
    body = gathered(block)

    def loss(p: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        h = body(p["layers"][0], x)
        for layer in p["layers"][1:]:
            h = body(layer, h)
        (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h.sum() + g.square().sum()

    equals_plain(loss, params)


def penalty_before_another_call() -> None:
    """The penalty's own gradient reads the first layer while backward has reached the second only."""
    params = make_params()

    def loss(p: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = gathered(block)(p["layers"][0], x)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        y = gathered(block)(p["layers"][1], y)
        return gathered(block)(p["layers"][2], y).square().mean() + g.square().mean()

    equals_plain(loss, params)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradient_penalty_before_another_call(run: Any, n: int) -> None:
    run(n, penalty_before_another_call)


@pytest.mark.parametrize("n", [1, 2])
def test_gradient_penalty(run: Any, n: int) -> None:
    run(n, penalty)


def many_trees() -> None:
    """One function for several trees, dtypes and argument positions; a failing rank among them."""
    params, x = make_params(), torch.ones(2, 16)
    f = value_and_grad(lambda p, x: gathered(block)(p, x).sum())
    half = tree_map(lambda t: t.bfloat16(), params)
    for _ in range(3):
        for layer in (params["layers"][0], params["layers"][3]):
            got = unshard(f(layer, x)[1])
            close(got, value_and_grad(lambda p, x: block(p, x).sum())(unshard(layer), x)[1])
        f(half["layers"][1], x.bfloat16())
    last = value_and_grad(lambda x, p: gathered(block)(p, x).sum(), argnums=-1)
    assert torch.equal(last(x, params["layers"][0])[1].tensors[0], f(params["layers"][0], x)[1].tensors[0])
    with pytest.raises(ValueError, match="start of a step"):
        f(params["layers"][dist.get_rank()], x)
    with pytest.raises(ValueError, match="start of a step"):
        f(params["layers"][0] if dist.get_rank() else half["layers"][0], x)

    def fails(p: Any, x: Tensor) -> Tensor:
        if broken:
            raise RuntimeError("no luck")
        return gathered(block)(p, x).sum()

    g, broken = value_and_grad(fails), False
    for _ in range(2):
        g(half["layers"][1], x.bfloat16())
    broken = dist.get_rank() == 0
    with pytest.raises((RuntimeError, ValueError), match="no luck"):
        g(half["layers"][1], x.bfloat16())
    f(params["layers"][0], x)


def test_one_function_for_several_trees_and_dtypes(run: Any) -> None:
    run(2, many_trees, timeout=30)


def replicated_directly() -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard({"a": torch.ones(4), "b": torch.ones(4)}, mesh, {"a": P(ragged="fsdp"), "b": None})
    with pytest.raises(ValueError, match="holds replicas"):
        value_and_grad(lambda p: p.leaf("b").sum() * (dist.get_rank() + 1))(params)
    half = value_and_grad(
        lambda p: gathered(lambda q: (q["b"] * (dist.get_rank() + 1)).sum())(tree_map(lambda x: 2 * x, p))
    )
    for _ in range(3):
        assert unshard(half(params)[1])["b"].tolist() == [3.0] * 4


def test_replicas_stay_equal(run: Any) -> None:
    run(2, replicated_directly)


def average() -> None:
    """A sharded tree can come back as aux, such as a running mean of the parameters."""
    params = make_params()
    f = value_and_grad(lambda p, t: (make_loss()(p, t), tree_map(lambda x: 0.5 * x, p)), has_aux=True)
    (_, ema), _ = f(params, tokens())
    value_and_grad(make_loss())(ema, tokens())


def test_sharded_trees_come_back_as_aux(run: Any) -> None:
    run(2, average)
