"""What goes wrong on one rank raises on all of them, before anything can hang."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import fold, gathered, value_and_grad
from fsdp.reducing import Reducer
from ragged import P, make_mesh, partition, rules, shard, unshard
from ragged.ahead import AHEAD
from tests.models import block, fallible, make_loss, make_params, tokens


def failing(steps_before: int, where: str) -> str:
    """Rank 1 fails in some step; returns what this rank's step raised, and trains on."""
    params = make_params()
    broken = False

    def layer(p: Any, x: Tensor) -> Tensor:
        return block(p, fallible(x, lambda at: broken and at == where))

    f = value_and_grad(make_loss(layer))
    for _ in range(steps_before):
        f(params, tokens())
    broken = dist.get_rank() == 1
    try:
        f(params, tokens())
    except (RuntimeError, ValueError) as error:
        said = str(error)
    broken = False
    want = value_and_grad(make_loss())(params, tokens())[0]
    for _ in range(2):
        assert torch.equal(f(params, tokens())[0], want)
    return said


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_failing_rank_stops_the_step_on_all(run: Any, steps_before: int, where: str) -> None:
    said = run(3, failing, steps_before, where, timeout=30)
    assert f"no luck in {where}" in said[1]
    for k in (0, 2):
        assert "rank 1" in said[k]
        assert f"no luck in {where}" in said[k]


def other_order(steps_before: int) -> str:
    params = make_params()
    turned = False

    def loss(p: Any, x: Tensor) -> Tensor:
        layers = list(p["layers"])
        return fold(gathered(block), layers[::-1] if turned else layers, x).sum()

    f, x = value_and_grad(loss), torch.ones(2, 16)
    for _ in range(steps_before):
        f(params, x)
    turned = dist.get_rank() == 2
    with pytest.raises(ValueError, match="layers") as caught:
        f(params, x)
    turned = False
    f(params, x)
    return str(caught.value)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_another_order_of_units_on_one_rank(run: Any, steps_before: int) -> None:
    for text in run(3, other_order, steps_before, timeout=30):
        assert "layers.0" in text
        assert "layers.3" in text


def changed_everywhere() -> str:
    params = make_params()
    f = value_and_grad(lambda p, x, n: fold(gathered(block), p["layers"][:n], x).sum())
    x = torch.ones(2, 16)
    f(params, x, 4)
    f(params, x, 4)
    with pytest.raises(ValueError, match="same order") as caught:
        f(params, x, 2)
    return str(caught.value)


def test_another_order_than_in_earlier_steps(run: Any) -> None:
    for text in run(2, changed_everywhere, timeout=30):
        assert "reduce of layers.1" in text or "gather of layers" in text


def misuse() -> None:
    params = make_params()
    x = torch.ones(2, 16)

    with pytest.raises(ValueError, match=r"lacks 'layers.0.b' of unit 'layers.0'.*units="):
        gathered(lambda p, x: x)(partition(params, lambda path, _: path.endswith("w"))[0]["layers"][0], x)
    with pytest.raises(ValueError, match="view of its parameters"), torch.no_grad():
        gathered(lambda p, x: p["w"][1:])(params["layers"][0], x)
    with pytest.raises(ValueError, match="only be differentiated inside value_and_grad"):
        gathered(block)(params["layers"][0], x.clone().requires_grad_())
    with pytest.raises(ValueError, match="one real number"):
        value_and_grad(lambda p, x: gathered(block)(p["layers"][0], x))(params, x)
    with pytest.raises(ValueError, match="as an argument"):
        value_and_grad(lambda p, x: gathered(lambda q, x: x)([p["layers"][0], params["layers"][1]], x))(params, x)
    with pytest.raises(ValueError, match="mix sharded trees and plain"):
        value_and_grad(lambda p: None)({"a": params, "b": torch.ones(1)})
    with pytest.raises(ValueError, match="axis 'data'"):
        value_and_grad(lambda p, x: x.sum(), data_axes="data")(params, x)
    kept: list[Any] = []
    value_and_grad(lambda p, x: kept.append(p) or gathered(block)(p["layers"][0], x).sum())(params, x)
    with pytest.raises(ValueError, match="used after it"):
        gathered(block)(kept[0]["layers"][0], x)
    mesh = params.plan.bound().mesh
    whole_numbers = shard({"n": torch.arange(4)}, mesh, P(ragged="fsdp"))
    with pytest.raises(ValueError, match=r"leaf 'n' of torch.int64"):
        value_and_grad(lambda p: torch.tensor(1.0))(whole_numbers)
    assert unshard(whole_numbers)["n"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("n", [1, 2])
def test_misuse_says_what_to_do(run: Any, n: int) -> None:
    run(n, misuse, timeout=30)


def meshes_differ() -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    other = make_mesh((2, -1), ("replica", "fsdp"), device_type="cpu")
    a = shard({"w": torch.ones(4)}, mesh, P(ragged="fsdp"))
    b = shard({"w": torch.ones(4)}, other, P(ragged="fsdp"))
    with pytest.raises(ValueError, match="different meshes"):
        value_and_grad(lambda p, q: torch.tensor(1.0))(a, b)


def test_one_mesh_per_step(run: Any) -> None:
    run(2, meshes_differ, timeout=30)


def another_order_without_grad(how: str) -> str:
    """Rank 1 evaluates layers in another order, or does something else altogether."""
    params, x = make_params(), torch.ones(2, 16)
    odd = dist.get_rank() == 1
    with torch.no_grad():
        want = fold(gathered(block), params["layers"], x)
        try:
            if how == "step" and odd:
                value_and_grad(make_loss())(params, tokens())
            elif how == "buffer":
                params.buffers[0 if odd else 1].gather()
            elif how == "reduce":
                full = params.buffers[1].gather()
                params.buffers[1].reduce(full, op="sum" if odd else "mean")
            else:
                layers = list(params["layers"])
                fold(gathered(block), layers[::-1] if odd else layers, x)
            said = ""
        except ValueError as error:
            said = str(error)
        assert torch.equal(fold(gathered(block), params["layers"], x), want)  # and all ranks go on together
    return said


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("order", ["gather of a bucket", "layers.0 of", "layers.3 of"]),
        ("step", ["gather of a bucket", "the start of a step"]),
        ("buffer", ["gather of a bucket", "bucket 0: rank 0 has head of", "rank 1 has embed of"]),
        ("reduce", ["reduce by mean of a bucket", "reduce by sum of a bucket"]),
    ],
)
def test_ranks_that_differ_outside_of_a_step_all_raise(run: Any, how: str, words: list[str]) -> None:
    for said in run(3, another_order_without_grad, how, timeout=30):
        assert all(word in said for word in words), said


def another_layout(how: str) -> str:
    """Ranks whose buckets have one name and one length, but other contents."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    odd = dist.get_rank() == 1
    if how == "bounds":
        x = {"w": torch.arange(32.0).view(4, 8)}
        trees = [shard(x, mesh, P(ragged="fsdp", shares=shares)) for shares in ((1, 3), (3, 1))]
    else:
        trees = [
            shard({"u": {"a": torch.ones(n), "b": torch.ones(192 - n)}}, mesh, P(ragged="fsdp")) for n in (64, 128)
        ]
    mine = trees[odd].buffers[0]
    good = trees[0].buffers[0].gather()
    try:
        if how == "out":
            trees[0].buffers[0].gather(torch.empty(3) if odd else None)
        elif how == "op":
            mine.reduce(good.clone(), op="average" if odd else "mean")
        elif how == "size":
            mine.reduce(good.clone()[: 3 if odd else None])
        else:
            mine.gather()
        said = ""
    except ValueError as error:
        said = str(error)
    assert torch.equal(trees[0].buffers[0].gather(), good)
    return said


@pytest.mark.parametrize(
    ("how", "word"),
    [("bounds", "(0, 8, 32)"), ("leaves", "u.a of shape (64,) at 0"), ("out", "needs out of shape"),
     ("op", "op='average'"), ("size", "needs shape (256,)")],
)  # fmt: skip
def test_buffers_of_other_layouts_never_mix(run: Any, how: str, word: str) -> None:
    said = run(2, another_layout, how, timeout=30)
    assert all(word in text for text in said), said


def reduces_in_flight(width: int) -> int:
    """The most of six trees with units of one name whose gradients were on their way at once."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    trees = [shard({"w": torch.ones(width) * i}, mesh, P(ragged="fsdp")) for i in range(6)]
    call = gathered(lambda p, x: (p["w"] * x).sum())
    most = 0

    def landed(self: Reducer) -> None:
        nonlocal most
        most = max(most, len(self._flying))
        land(self)

    land = Reducer._land_first
    with mock.patch.object(Reducer, "_land_first", landed):
        f = value_and_grad(lambda ts, x: sum(call(t, x) for t in ts))
        for _ in range(2):
            f(trees, torch.ones(width))
    return most


def test_reduces_of_different_trees_do_not_pile_up(run: Any) -> None:
    assert run(2, reduces_in_flight, AHEAD // 4) == [1, 1]
    assert run(2, reduces_in_flight, AHEAD // 16) == [4, 4]


def stale(steps: int) -> None:
    """A value beside the loss that got out of its step, differentiated after further steps took over the memory."""
    params = make_params()
    out: list[Tensor] = []

    def loss(p: Any, t: Tensor) -> Tensor:
        x = torch.ones(2, 16, requires_grad=True)
        out.append(gathered(block)(p["layers"][0], x).sum())
        return make_loss()(p, t)  # type: ignore[no-any-return]

    f = value_and_grad(loss)
    for _ in range(1 + steps):
        f(params, tokens())
    with pytest.raises(RuntimeError, match=r"storage of size 0|modified by an inplace operation"):
        out[0].backward()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_graph_that_outlives_its_step_finds_no_other_steps_parameters(run: Any, steps: int) -> None:
    run(2, stale, steps)


def fails_before_replicas_are_summed(where: str) -> str:
    """Rank 0 fails while small units are on their way to their replicas, and a large one is yet to be gathered."""
    mesh, widths = make_mesh((-1,), ("fsdp",), device_type="cpu"), [1024, 16, 16, 16]
    tree = {"layers": [{"w": torch.ones(1024, n), "b": torch.ones(1024)} for n in widths]}
    params = shard(tree, mesh, rules({"**.b": None, "**": P(ragged="fsdp")}), units=["layers.*"])
    layer = gathered(lambda p, x: (x @ p["w"] @ p["w"].t()) * p["b"] * 1e-3)
    steps = 0

    def loss(p: Any, x: Tensor) -> Tensor:
        fails = steps == 3 and dist.get_rank() == 0
        y = fold(layer, p["layers"], fallible(x, lambda at: fails and at == where))
        return fallible(y, lambda at: fails and at == where).sum()

    f = value_and_grad(loss)
    while steps < 3:
        f(params, torch.ones(2, 1024, requires_grad=True))
        steps += 1
    with pytest.raises((RuntimeError, ValueError)) as error:
        f(params, torch.ones(2, 1024, requires_grad=True))
    return str(error.value)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_fails_starts_the_sums_over_replicas_that_others_wait_for(run: Any, where: str) -> None:
    mine, other = run(2, fails_before_replicas_are_summed, where, timeout=30)
    assert mine == f"no luck in {where}"
    assert mine in other
