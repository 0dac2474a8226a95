"""Public failure reports of Muon on shards: each with the inputs and numbers it came with."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import optim
from fsdp import gathered, value_and_grad
from ragged import TENSOR, P, collectives, make_mesh, shard, tree_map, unshard
from ragged import partition as parted
from tests.unit.test_muon import reference, w

RAGGED = P(ragged="fsdp")


def mesh() -> DeviceMesh:
    return make_mesh((-1,), ("fsdp",), device_type="cpu")


def directions(tree: Any, spec: Any = RAGGED, rate: float = 1.0, **options: Any) -> Any:
    """The first step without momentum and decay, by `update` and in place: what is subtracted."""
    how = {"momentum": 0.0, "weight_decay": 0.0, "ns_dtype": torch.float32, **options}
    tx = optim.muon(rate, **how)
    grads = shard(tree, mesh(), spec)
    params = optree.tree_map(torch.zeros_like, grads)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert optree.tree_structure(updates) == optree.tree_structure(params)
    want = unshard(optree.tree_map(torch.neg, updates))
    moved, _ = optim.make_step(tx)(params, optree.tree_map(torch.clone, grads), tx.init(params))
    near(unshard(optree.tree_map(torch.neg, moved)), want, 1e-6)
    return want


def near(got: Any, want: Any, tolerance: float) -> None:
    """Leaves equal up to this. (`torch.testing` would import DTensor for it in every worker, which takes seconds.)"""
    for x, y in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        assert x.shape == y.shape
        assert torch.allclose(x.double(), y.double(), rtol=0, atol=tolerance), (x - y).abs().max()


def taller(x: Tensor) -> float:
    """The factor of the default scale rule."""
    return max(1.0, x.shape[0] / x.shape[1]) ** 0.5


def whole_matrices(n: int) -> None:
    x = directions({"g": w((8, 4), 1)})["g"] / 2**0.5
    near([x[0, 0], x[7, 3], x.norm()], list(torch.tensor([-0.256, -0.328540, 1.906042])), 1e-4)
    if n == 3:
        tree, rows = {"first": w((1, 11), 2), "g": w((13, 7), 6)}, P(ragged="fsdp", shares=(5, 5, 3))
        for spec in ({"first": RAGGED, "g": rows}, P(ragged="fsdp", block=1)):
            x = directions(tree, spec)["g"] / (13 / 7) ** 0.5
            near([x[0, 0], x[12, 6], x.norm()], list(torch.tensor([-0.067379, 0.067310, 2.279370])), 1e-4)
            near(x, reference(tree["g"]), 1e-4)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_matrices_are_orthogonalized_whole(run: Any, n: int) -> None:
    """MU-01, MoonshotAI/Moonlight#27, deepspeedai/DeepSpeed#7807: rows of a matrix by themselves."""
    run(n, whole_matrices, n)


def zero_gradients(donate: bool) -> None:
    start, zero = {"w": w((6, 4), 9)}, {"w": torch.zeros(6, 4)}
    params = shard(start, mesh(), RAGGED)
    tx = optim.muon(0.1, weight_decay=0.5, ns_dtype=torch.float32)
    state, step = tx.init(params), optim.make_step(tx, donate=donate)
    for k in range(3):
        params, state = step(params, shard(zero, params.plan), state)
        near(unshard(params), {"w": start["w"] * 0.95 ** (k + 1)}, 1e-6)
        assert not any(x.any() for x in state.mu.tensors)
    plain = optim.muon(0.1, weight_decay=0.0, ns_dtype=torch.float32)
    updates, _ = plain.update(shard(zero, params.plan), plain.init(params), params)
    assert not unshard(updates)["w"].any()
    before = unshard(params)["w"]
    params, state = step(params, shard({"w": w((6, 4), 1)}, params.plan), state)
    near(unshard(params)["w"], before * 0.95 - 0.1 * 1.5**0.5 * reference(w((6, 4), 1)), 1e-5)


@pytest.mark.parametrize("donate", [False, True])
def test_zero_gradients(run: Any, donate: bool) -> None:
    """MU-02, microsoft/dion#24: 0/0."""
    run(2, zero_gradients, donate)


def orientations() -> None:
    g = w((8, 3), 1)
    tree = {"g": g, "t": g.t().contiguous(), "row": w((1, 8), 1), "column": w((8, 1), 1)}
    tree |= {"ones": torch.ones(4, 4), "eye": 5 * torch.eye(4)}
    got = {key: x / taller(x) for key, x in directions(tree).items()}
    near(got["t"], got["g"].t(), 1e-5)
    near(got["g"], reference(g), 1e-4)
    for key in ("row", "column"):
        near(got[key], 0.696436 * tree[key] / tree[key].norm(), 1e-5)
    near(got["ones"], torch.full((4, 4), 0.174109), 1e-5)
    near(got["eye"], 0.765439 * torch.eye(4), 1e-5)


def test_tall_and_wide(run: Any) -> None:
    """MU-04, kozistr/pytorch_optimizer#408, pytorch/pytorch#160213."""
    run(2, orientations)


def kernels() -> None:
    g = w((12, 1, 3, 3), 3)
    x = directions({"k": g}, rate=0.02, matrix="o i kh kw -> o (i kh kw)")["k"]
    assert x[0, 0, 0, 0].item() == pytest.approx(-0.001082, abs=1e-6)
    near(x.view(12, 9), 0.02 * 1.154701 * reference(g.view(12, 9)), 1e-5)


def test_the_step_of_a_kernel(run: Any) -> None:
    """MU-05, KellerJordan/Muon#60, ultralytics/ultralytics#25846: a scale from the kernel's height and width."""
    run(2, kernels)


def experts() -> None:
    e = w((3, 4, 6), 5)
    x = directions({"e": e}, matrix="e m n -> e m n")["e"]
    assert x[2, 3, 5].item() == pytest.approx(0.328398, abs=1e-4)
    near(x, torch.stack([reference(one) for one in e]), 1e-4)
    apart = directions(list(e.unbind()))
    near(x, torch.stack(apart), 1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_one_matrix_per_expert(run: Any, n: int) -> None:
    """MU-07, pytorch/torchtitan#1584, pytorch/pytorch#190597."""
    run(n, experts)


def no_matrices() -> None:
    params = shard({"none": None, "some": {}, "empty": torch.zeros(0, 4)}, mesh(), RAGGED)
    tx = optim.muon(1.0)
    for tree in (params, {}, parted(params, lambda path, leaf: False)[0]):
        state = tx.init(tree)
        with collectives.record() as events:
            updates, state = tx.update(tree, state, tree)
            new, state = optim.make_step(tx)(tree, optree.tree_map(torch.clone, tree), state)
        assert "exchange" not in {e.kind for e in events}
        assert optree.tree_structure(updates) == optree.tree_structure(new)
        assert state.count == 2
    unshard(new)


def test_no_matrices_at_all(run: Any) -> None:
    """MU-09, KellerJordan/Muon#28: as many as none; the other counts are in test_muon.py."""
    run(2, no_matrices)


def one_row() -> None:
    g = w((1, 8), 1)
    near(directions({"w": g})["w"], 0.696436 * g / g.norm(), 1e-5)
    params = shard({"w": g}, mesh(), RAGGED)
    tx = optim.muon(1.0, weight_decay=0.0, ns_dtype=torch.float32)
    new, _ = optim.make_step(tx, donate=False)(params, params, tx.init(params))
    assert new.plan is params.plan
    assert [x.shape for x in new.tensors] == [x.shape for x in params.tensors]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_one_row(run: Any, n: int) -> None:
    """MU-11, vllm-project/speculators#821."""
    run(n, one_row)


def micro_batches(donate: bool) -> None:
    batches = [{"w": w((4, 4), 1)}, {"w": 3 * w((4, 4), 7)}]
    params = shard({"w": torch.zeros(4, 4)}, mesh(), RAGGED)
    f = value_and_grad(gathered(lambda p, x: (p["w"] * x["w"]).sum()))
    grads = tree_map(torch.add, *(f(params, x)[1] for x in batches))
    tx = optim.muon(1.0, 0.0, weight_decay=0.0, ns_dtype=torch.float32)
    params, state = optim.make_step(tx, donate=donate)(params, grads, tx.init(params))
    x = -unshard(params)["w"]
    assert x[0, 0].item() == pytest.approx(0.370742, abs=1e-4)
    near(x, reference(batches[0]["w"] + batches[1]["w"]), 1e-4)
    assert state.count == 1
    near(unshard(state.mu)["w"], batches[0]["w"] + batches[1]["w"], 1e-6)


@pytest.mark.parametrize("donate", [False, True])
def test_micro_batches_make_one_step(run: Any, donate: bool) -> None:
    """MU-13, deepspeedai/DeepSpeed#8443: orthogonalized once per micro-batch."""
    run(2, micro_batches, donate)


def three_steps(donate: bool) -> None:
    params = shard({"w": w((16, 4), 9)}, mesh(), RAGGED)
    theirs = torch.nn.Parameter(w((16, 4), 9))
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
    tx = optim.muon(0.02, weight_decay=0.1, momentum=0.95, ns_dtype=torch.float32)
    state, step = tx.init(params), optim.make_step(tx, donate=donate)
    for k in (1, 2, 3):
        theirs.grad = w((16, 4), k)
        other.step()
        params, state = step(params, shard({"w": w((16, 4), k)}, params.plan), state)
    x = unshard(params)["w"]
    assert x[0, 0].item() == pytest.approx(1.006773, abs=1e-5)
    assert x[15, 3].item() == pytest.approx(-0.856879, abs=1e-5)
    near(x, theirs.detach(), 1e-3)


@pytest.mark.parametrize("donate", [False, True])
def test_the_scale_of_the_whole_matrix(run: Any, donate: bool) -> None:
    """MU-16, microsoft/dion#113, MoonshotAI/Moonlight#31: a step size from the shard's shape."""
    run(4, three_steps, donate)


def decay(rate: float, much: float, want: float) -> None:
    params = shard({"w": torch.full((4, 4), 2.0)}, mesh(), RAGGED)
    grads = optree.tree_map(torch.zeros_like, params)
    tx = optim.muon(rate, weight_decay=much)
    updates, _ = tx.update(grads, tx.init(params), params)
    near(unshard(optim.apply_updates(params, updates))["w"], torch.full((4, 4), want), 1e-6)
    near(unshard(optim.make_step(tx)(params, grads, tx.init(params))[0])["w"], torch.full((4, 4), want), 1e-6)


@pytest.mark.parametrize("numbers", [(0.1, 0.5, 1.9), (0.01, 10.0, 1.8)])
def test_decay_reaches_the_weight(run: Any, numbers: tuple[float, float, float]) -> None:
    """MU-17, tinygrad/tinygrad#17709."""
    run(2, decay, *numbers)


def rows_of_a_mesh() -> list[list[tuple[int, ...]]]:
    """Shapes of the stacks that this rank orthogonalizes, per layout."""
    both = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("row", "col"))
    row, seen = dist.get_rank() // 2, []
    halves, second = P(ragged="col", shares=(1, 1)), P(ragged="col", block=TENSOR, shares=(0, 1))
    larger = {"a": w((4, 6), 7)}  # dearest first, so the first member has it and the second one the 4x4
    for tree, spec in (({"g": w((4, 4), row)}, second), ({**larger, "g": w((4, 4), row)}, halves)):
        shapes: list[tuple[int, ...]] = []

        def ns(x: Tensor, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
            shapes.append(tuple(x.shape))
            return optim.newton_schulz(x)

        grads = shard(tree, both["col"], spec)
        tx = optim.muon(1.0, 0.0, weight_decay=0.0, ns_dtype=torch.float32, ns=ns)
        updates, _ = tx.update(grads, tx.init(grads), grads)
        near(-unshard(updates)["g"], reference(w((4, 4), row)), 1e-4)
        seen.append(shapes)
    return seen


def test_roots_within_the_rows_of_a_mesh(run: Any) -> None:
    """CM-06, vllm-project/vllm-omni#6264, pytorch/PiPPy#421: a position in the group taken for a global rank."""
    first, second = [[], [(1, 4, 6)]], [[(1, 4, 4)], [(1, 4, 4)]]
    assert run(4, rows_of_a_mesh) == [first, second, first, second]
