"""Gradients of sharded trees equal those of plain ones."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import fold, gathered, value_and_grad
from ragged import P, collectives, combine, make_mesh, partition, shard, tree_map, unshard
from ragged.ahead import AHEAD
from tests.models import block, make_loss, make_params, make_plan, tokens


def close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def mesh() -> Any:
    return make_mesh((-1,), ("fsdp",), device_type="cpu")


def equals_plain(tied: bool, op: str, options: dict[str, Any]) -> None:
    params = make_params(**options)
    full = unshard(params)
    want_loss, want = value_and_grad(make_loss(tied=tied))(full, tokens(share=False))
    f = value_and_grad(make_loss(tied=tied), op=op)
    scale = dist.get_world_size() if op == "sum" else 1
    for _ in range(3):  # learning the order, and following it
        loss, grads = f(params, tokens())
        close(loss / scale, want_loss)
        close(optree.tree_map(lambda x: x / scale, unshard(grads)), want)
        assert grads.plan is params.plan
    assert optree.tree_all(optree.tree_map(torch.equal, unshard(params), full))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_mean_gradients_equal_those_of_the_global_batch(run: Any, n: int, tied: bool) -> None:
    run(n, equals_plain, tied, "mean", {})


def test_sum(run: Any) -> None:
    run(3, equals_plain, False, "sum", {})


@pytest.mark.parametrize("options", [{"units": ["layers.*", "embed", "head"]}, {"align": 1}, {"frozen": False}])
def test_any_units_and_alignment(run: Any, options: dict[str, Any]) -> None:
    run(3, equals_plain, False, "mean", options)


def unused(use_any: bool) -> tuple[list[float], list[float]]:
    """Rank 0 uses a with gradient 4, rank 1 uses b with gradient 2: pytorch/pytorch#158719."""
    params = shard({"a": torch.ones(4), "b": torch.ones(4)}, mesh(), P(ragged="fsdp"))
    mine, factor = ("a", 4.0) if dist.get_rank() == 0 else ("b", 2.0)

    def loss(p: Any) -> Tensor:
        return gathered(lambda q: q[mine].sum() * factor if use_any else torch.tensor(1.0))(p)

    f = value_and_grad(loss)
    f(params)
    grads = unshard(f(params)[1])
    return grads["a"].tolist(), grads["b"].tolist()


def test_leaves_that_some_or_all_ranks_leave_out_get_zeros(run: Any) -> None:
    for a, b in run(2, unused, True):
        assert (a, b) == ([2.0] * 4, [1.0] * 4)
    for a, b in run(2, unused, False):
        assert (a, b) == ([0.0] * 4, [0.0] * 4)


def unreached() -> None:
    params = shard({"a": torch.ones(4), "b": torch.ones(4)}, mesh(), P(ragged="fsdp"))
    f = value_and_grad(lambda p: gathered(lambda a: a.sum())(p["a"]))
    for _ in range(3):
        grads = unshard(f(params)[1])
        assert grads["a"].tolist() == [1.0] * 4
        assert grads["b"].tolist() == [0.0] * 4


def test_units_that_no_rank_reaches_get_zeros(run: Any) -> None:
    run(2, unreached)


def frozen_tree() -> None:
    def where(path: str, _: Any) -> bool:
        return path.endswith(".b") or path == "embed"

    params = make_params(frozen=where)
    frozen, trained = partition(params, where)
    plain = make_loss()
    full = unshard(params)
    _, want = value_and_grad(plain)(full, tokens(share=False))
    f = value_and_grad(lambda a, b, t: plain(combine(a, b), t))
    for _ in range(3):
        _, grads = f(trained, frozen, tokens())
        assert grads.paths == trained.paths
        close(unshard(grads)["layers"][0]["w"], want["layers"][0]["w"])
        close(unshard(grads)["head"], want["head"])
        # buffers of their own: nothing was copied to bring the parts together
        whole = combine(trained, frozen)
        assert [t.data_ptr() for t in whole.tensors] == [t.data_ptr() for t in params.tensors]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_frozen_leaves_in_a_tree_of_their_own(run: Any, n: int) -> None:
    run(n, frozen_tree)


def computed_trees() -> None:
    """Gathers of trees that were computed inside the loss: cast, shifted, mixed by partition."""
    params = make_params()
    full, plain = unshard(params), make_loss()
    one, two = partition(params, lambda path, _: path.endswith("w"))
    cases: list[tuple[Any, Any, Any]] = [
        (lambda p, t: plain(tree_map(lambda x: 2 * x, p), t), (params,), lambda x: 2 * x),
        (lambda a, b, t: plain(combine(a, b), t), (one, two), lambda x: x),
    ]
    for loss, args, change in cases:
        leaves = optree.tree_map(lambda x: x.clone().requires_grad_(), full)
        plain(optree.tree_map(change, leaves), tokens(share=False)).backward()
        f = value_and_grad(loss)
        for _ in range(3):
            _, grads = f(*args, tokens())
            for path, got in zip(grads.paths, optree.tree_leaves(unshard(grads)), strict=True):
                want = dict(zip(params.paths, optree.tree_leaves(leaves), strict=True))[path].grad
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [1, 3])
def test_gradients_flow_through_computed_trees(run: Any, n: int) -> None:
    run(n, computed_trees)


def auxiliary() -> None:
    params = make_params()
    plain = make_loss()

    def loss(p: Any, t: Tensor, scale: float) -> Any:
        value = plain(p, t)
        return value * scale, {"tokens": t.sum(), "loss": value, "note": "kept"}

    f = value_and_grad(loss, has_aux=True)
    (value, aux), grads = f(params, tokens(), scale=2.0)
    assert aux["note"] == "kept"
    assert not aux["loss"].requires_grad
    assert isinstance(grads.plan.fingerprint, str)
    two = value_and_grad(lambda x, p, t: plain(p, t), argnums=(1,))
    _, (grads_of_p,) = two(None, params, tokens())
    close(tree_map(lambda x: 2 * x, grads_of_p).tensors, grads.tensors)
    close(value, 2 * two(None, params, tokens())[0])


def test_aux_keywords_and_argnums(run: Any) -> None:
    run(2, auxiliary)


def half() -> None:
    """bf16 parameters: gradients are summed in fp32 and come back in bf16."""
    params = tree_map(lambda x: x.bfloat16(), make_params())
    f = value_and_grad(lambda p, t: make_loss()(p, t).float())
    loss, grads = f(params, tokens())
    assert {t.dtype for t in grads.tensors} == {torch.bfloat16}
    exact = value_and_grad(make_loss())(make_params(), tokens())[0]
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0.02)


def test_bf16_parameters(run: Any) -> None:
    run(3, half)


def padding_of_gradients() -> int:
    _, grads = value_and_grad(make_loss())(make_params(), tokens())
    comm = grads.plan.bound()
    gaps = 0
    for buffer in grads.buffers:
        for a, b in buffer.bucket.local_gaps(comm.rank(buffer.bucket.ragged)):
            assert not buffer.tensor[a:b].any()
            gaps += b - a
    return gaps


@pytest.mark.parametrize("n", [1, 4])
def test_padding_of_gradients_is_zero(run: Any, n: int) -> None:
    assert sum(run(n, padding_of_gradients)) > 0


def without_grad() -> None:
    params = make_params()
    loss = make_loss()
    full = unshard(params)
    with torch.no_grad():
        close(loss(params, tokens()), loss(full, tokens()))
    embed = gathered(lambda p, t: p[t])
    close(embed(params["embed"], tokens()), full["embed"][tokens()])  # nothing to differentiate


def test_without_grad_it_just_computes(run: Any) -> None:
    run(2, without_grad)


def planned_sizes() -> list[int]:
    return [b.shard for b in make_plan().buckets]


def test_one_rank_of_a_plan_holds_what_it_says(run: Any) -> None:
    (sizes,) = run(1, planned_sizes)
    assert all(n % 64 == 0 for n in sizes)


def unreached_here(case: str) -> None:
    """Ranks whose losses reach different units: all keep one order, and zeros fill in."""
    params, rank = make_params(), dist.get_rank()
    plain = make_loss()

    def loss(p: Any, t: Tensor) -> Tensor:
        value = plain(p, t)
        if case == "no loss" and rank == 1:
            return torch.tensor(0.0)
        if case == "constant" and rank == 0:
            return value.detach()
        return value

    def through(p: Any, x: Tensor) -> Tensor:
        y = block(p, x)
        return x if case == "layer" and rank == 1 else y

    def layers(p: Any, t: Tensor) -> Tensor:
        x = gathered(lambda q, t: q[t])(p["embed"], t)
        for i, layer in enumerate(p["layers"]):
            x = gathered(through if i in (1, 2) else block)(layer, x)
        return x.sum()

    f = value_and_grad(layers if case == "layer" else loss, op="sum")
    full = optree.tree_map(lambda x: x.requires_grad_(), unshard(params))
    local = (layers if case == "layer" else loss)(full, tokens())
    if local.requires_grad:
        local.backward()
    for _ in range(3):
        _, grads = f(params, tokens())
        for got, x in zip(optree.tree_leaves(unshard(grads)), optree.tree_leaves(full), strict=True):
            want = torch.zeros_like(x) if x.grad is None else x.grad.clone()
            dist.all_reduce(want)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", ["no loss", "constant", "layer"])
def test_ranks_whose_losses_reach_different_units(run: Any, case: str) -> None:
    run(3, unreached_here, case, timeout=30)


def prefetching(steps: int, width: int) -> list[int]:
    """How many gathers had been launched when each layer's function ran, in forward and without gradients."""
    launched: list[int] = []
    full = {"layers": [{"w": torch.ones(width)} for _ in range(4)]}
    params = shard(full, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=["layers.*"])

    def spy(p: Any, x: Tensor) -> Tensor:
        launched.append(sum(e.kind == "all_gather" for e in events))
        return x * p["w"].mean()

    f = value_and_grad(lambda p, x: fold(gathered(spy), p["layers"], x).sum())
    for _ in range(steps):
        launched.clear()
        with collectives.record() as events:
            f(params, torch.ones(2))
    with torch.no_grad(), collectives.record() as events:
        launched.append(-1)
        fold(gathered(spy), params["layers"], torch.ones(2))
    return launched


@pytest.mark.parametrize("steps", [1, 3])
def test_the_next_layer_is_on_its_way_when_a_layer_runs(run: Any, steps: int) -> None:
    for launched in run(2, prefetching, steps, AHEAD // 4):
        assert launched == [2, 3, 4, 4, -1, 2, 3, 4, 4]


def test_small_layers_run_further_ahead_once_their_order_is_known(run: Any) -> None:
    for launched in run(2, prefetching, 3, AHEAD // 8):
        assert launched == [3, 4, 4, 4, -1, 2, 3, 4, 4]


def renormed() -> None:
    """Changed in place by the function itself, as `nn.Embedding(max_norm=)` does."""
    table = torch.full((4, 3), 5.0)
    params = shard({"t": table}, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"))
    embed = gathered(lambda p, t: torch.nn.functional.embedding(t, p["t"], max_norm=1.0).sum())
    loss, grads = value_and_grad(embed)(params, torch.tensor([0, 2, 2]))
    assert loss.item() == pytest.approx(3 * 3**0.5, rel=1e-5)
    assert unshard(grads)["t"].tolist() == [[1.0] * 3, [0.0] * 3, [2.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("n", [1, 2])
def test_a_function_may_change_its_parameters(run: Any, n: int) -> None:
    run(n, renormed)
