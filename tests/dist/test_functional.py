"""`functionalize`: modules as pure functions of their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import functionalize, value_and_grad
from ragged import P, ShardedTree, collectives, combine, make_mesh, partition, plan, rules, shard, unshard
from ragged import checkpoint as checkpoint_folders
from tests.modules import MODELS, Net, llama, net, tokens


def counted(name: str) -> dict[str, int]:
    """Gathers and reduces of a later step."""
    make, units, options = MODELS[name]
    module, loss_of = make(**options)
    apply, full, buffers = functionalize(module)
    params = shard(full, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=units)
    f = value_and_grad(lambda params, batch: loss_of(apply(params, buffers, batch)[0], batch))
    for step in range(2):
        f(params, tokens(dist.get_rank(), dist.get_world_size(), step))
    with collectives.record() as events:
        f(params, tokens(dist.get_rank(), dist.get_world_size(), 2))
    kinds = [event.kind for event in events]
    return {kind: kinds.count(kind) for kind in ("all_gather", "reduce_scatter")}


def test_a_unit_is_gathered_twice_and_reduced_once(run: Any) -> None:
    """Llama: 4 layers, the ends and the head; the ends stay, as they are used around all that runs inside."""
    for name in ("llama", "llama, remat"):
        for counts in run(2, counted, name):
            assert counts["reduce_scatter"] == 6
            assert counts["all_gather"] <= 2 * 6


def loaded(folder: str) -> None:
    """From a folder that transformers wrote into shards; the module never has values here."""
    want, _ = llama()
    with torch.device("meta"):
        module, _ = llama()
    apply, full, _ = functionalize(module)
    _, _, buffers = functionalize(want)  # computed, not saved
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    layout = plan(full, mesh, P(ragged="fsdp"), units=["model.layers.*"])
    found = checkpoint_folders.load(folder, {"params": layout}, rename=lambda name: name.removeprefix("params."))
    batch = tokens(0, 1, 0)
    with torch.no_grad():
        got, _ = apply(found["params"], buffers, batch)
        assert torch.equal(got.logits, want(batch).logits)


def test_weights_that_transformers_wrote(run: Any, tmp_path: Path) -> None:
    module, _ = llama()
    module.save_pretrained(tmp_path / "whole")
    module.save_pretrained(tmp_path / "parts", max_shard_size="8KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for name in ("whole", "parts"):
        run(2, loaded, str(tmp_path / name))


def partly_trained() -> None:
    """Low-rank adapters beside frozen matrices: gradients and state for the adapters alone."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(4), requires_grad=False)
            self.a, self.b = nn.Parameter(torch.ones(4, 1)), nn.Parameter(torch.zeros(1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.w + self.a @ self.b)

    module = nn.Sequential(Lora(), nn.Tanh(), Lora())
    apply, full, buffers = functionalize(module)

    def frozen(path: str, leaf: Any) -> bool:
        return path.endswith("w")

    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard(full, plan(full, mesh, P(ragged="fsdp"), units=["*"], frozen=frozen))
    cold, warm = partition(params, frozen)

    def loss_fn(warm: Any, cold: Any, x: Tensor) -> Tensor:
        out, _ = apply((warm, cold), buffers, x)
        return (out - 1).square().mean()

    x = torch.arange(8.0).view(2, 4)
    loss, grads = value_and_grad(loss_fn)(warm, cold, x)
    module_loss = (module(x) - 1).square().mean()
    module_loss.backward()
    assert loss.item() == pytest.approx(module_loss.item())
    got = unshard(grads)
    for i in ("0", "2"):
        assert got[i]["w"] is None
        for name in ("a", "b"):
            torch.testing.assert_close(got[i][name], module.get_parameter(f"{i}.{name}").grad)
    assert isinstance(combine(cold, warm), ShardedTree)


def test_frozen_parameters_and_adapters(run: Any) -> None:
    run(2, partly_trained)


def test_modes_buffers_and_plain_trees() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    apply, params, buffers = functionalize(module)
    x = torch.randn(8, 4)
    calm = apply.eval()
    (a, same), (b, _) = calm(params, buffers, x), calm(params, buffers, x)
    assert torch.equal(a, b)
    assert torch.equal(a, module.eval()(x))
    assert same["1"]["num_batches_tracked"] == 0
    torch.manual_seed(0)
    out, after = apply(params, buffers, x)
    torch.manual_seed(0)
    assert torch.equal(out, module.train()(x))
    assert after["1"]["num_batches_tracked"] == 1
    assert buffers["1"]["num_batches_tracked"] == 1  # the module's own, which has run by now
    torch.testing.assert_close(after["1"]["running_mean"], module[1].running_mean)
    _, grads = value_and_grad(lambda p: apply(p, buffers, x)[0].sum())(params)
    assert grads["0"]["weight"].shape == (4, 4)


def test_another_run_before_backward() -> None:
    """A reference model without gradients, between a forward with checkpoints and its backward."""
    module, loss_of = net(remat=True)
    apply, params, buffers = functionalize(module)
    other = dict(functionalize(Net())[1])
    batch = tokens(0, 1, 0)
    before = value_and_grad(lambda p: loss_of(apply(p, buffers, batch)[0], batch))(params)

    def loss_fn(p: Any) -> Tensor:
        loss = loss_of(apply(p, buffers, batch)[0], batch)
        with torch.no_grad():
            apply(other, buffers, batch)
        return loss

    after = value_and_grad(loss_fn)(params)
    assert optree.tree_all(optree.tree_map(torch.equal, before, after))


def test_names_that_do_not_fit() -> None:
    apply, params, buffers = functionalize(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the module needs 'bias'"):
        apply({"weight": params["weight"]}, buffers, torch.ones(1, 2))
    with pytest.raises(ValueError, match="nothing called 'scale'"):
        apply({**params, "scale": torch.ones(1)}, buffers, torch.ones(1, 2))


def test_modules_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = nn.Linear(64, 64)
    apply, params, buffers = functionalize(module)
    assert params["weight"].is_meta
    values = {"weight": torch.eye(64), "bias": torch.zeros(64)}
    assert torch.equal(apply(values, buffers, torch.ones(1, 64))[0], torch.ones(1, 64))


class OwnCheckpoint(nn.Module):
    """It computes its own forward again, with a parameter of its own in it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(3) / 2)
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda x: self.inner(x @ self.w).tanh() @ self.w, x, use_reentrant=False)
        return out


def two_trees() -> None:
    """One apply, two trees, checkpoints in both runs, one loss: each recomputes with its own values."""
    torch.manual_seed(0)
    module = nn.Sequential(OwnCheckpoint(), OwnCheckpoint())
    apply, full, buffers = functionalize(module)
    other = optree.tree_map(lambda x: x * 1.5, full)
    x = torch.randn(2, 3)

    def loss_fn(a: Any, b: Any) -> Tensor:
        return apply(a, buffers, x)[0].sum() + apply(b, buffers, 2 * x)[0].square().sum()

    f = value_and_grad(loss_fn, argnums=(0, 1))
    want_loss, want = f(full, other)
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    trees = [shard(tree, mesh, P(ragged="fsdp"), units=["*"]) for tree in (full, other)]
    for _ in range(2):
        loss, grads = f(*trees)
        assert torch.allclose(loss, want_loss)
        for tree, wanted in zip(grads, want, strict=True):
            assert optree.tree_all(optree.tree_map(torch.allclose, unshard(tree), wanted))
    module.zero_grad()
    module(x).sum().backward()
    ones = value_and_grad(lambda p: apply(p, buffers, x)[0].sum())(full)[1]
    assert torch.allclose(ones["0"]["w"], module[0].w.grad)


def test_checkpoints_of_two_trees_in_one_loss(run: Any) -> None:
    run(2, two_trees)


def chosen() -> list[int]:
    """Policies by unit: gathers of a step with none, one, and both layers kept; and with the layers recomputed."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    out = []
    for options in (
        {},
        {"reshard_after_forward": rules({"0": False, "**": True})},
        {"reshard_after_forward": False},
        {"remat": True},
    ):
        apply, full, buffers = functionalize(module, **options)
        params = shard(full, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=["*"])
        f = value_and_grad(lambda p, apply=apply, buffers=buffers: apply(p, buffers, torch.ones(1, 3))[0].sum())
        f(params)
        f(params)
        with collectives.record() as events:
            f(params)
        out.append([e.kind for e in events].count("all_gather"))
    return out


def test_policies_by_unit(run: Any) -> None:
    assert run(2, chosen) == [[5, 4, 3, 5]] * 2
