"""Cases from the field on modules: who uses which parameter, odd shapes, averages, lifetimes. Each on both ways."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import (
    ShardedLeaf,
    as_torch_optimizer,
    full_parameters,
    fully_shard,
    functionalize,
    parameter_trees,
    value_and_grad,
)
from optim import adamw, clip_by_global_norm, global_norm, make_step
from ragged import P, checkpoint, make_mesh, plan, shard, unshard
from ragged.tree import sharded_trees

Grads = dict[str, Any]
Loss = Callable[[Any], Tensor]
WAYS = ("functionalize", "fully_shard")


def mesh(*shape: int) -> Any:
    return make_mesh(shape or (-1,), ("replica", "fsdp")[-len(shape or (1,)) :], device_type="cpu")


def flat(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {prefix[:-1]: tree}
    return {k: v for name, sub in tree.items() for k, v in flat(sub, f"{prefix}{name}.").items()}


def gradients(way: str, module: nn.Module, loss: Loss, *shape: int, units: Any = ("*",), steps: int = 2) -> Grads:
    """Full gradients after a step whose order is known: of `loss(call)`, where `call` is the module."""
    if way == "fully_shard":
        sharded: Any = fully_shard(module, mesh=mesh(*shape), units=list(units))
        for _ in range(steps):
            sharded.zero_grad()
            out = loss(sharded)
            if out.requires_grad:
                out.backward()
        return {name: None if p.grad is None else p.grad.full_tensor() for name, p in sharded.named_parameters()}
    apply, full, buffers = functionalize(module)
    params = shard(full, mesh(*shape), P(ragged="fsdp"), units=list(units))
    f = value_and_grad(lambda p: loss(lambda *args: apply(p, buffers, *args)[0]))
    for _ in range(steps):
        _, grads = f(params)
    return flat(unshard(grads))


class Either(nn.Module):
    """One of two parameters, or none, each times a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
        for x in (self.a, self.b):
            nn.init.ones_(x.weight)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(a), self.b(b)


def used_by_some(way: str) -> Grads:
    """ST-01, pytorch/pytorch#158719: rank 0's loss uses a, rank 1's b."""
    rank, ones = dist.get_rank(), torch.ones(1, 4)
    return gradients(way, Either(), lambda call: (4 - 2 * rank) * call(ones, ones)[rank].sum())


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_some_ranks_use(run: Any, way: str) -> None:
    for grads in run(2, used_by_some, way):
        assert torch.equal(grads["a.weight"], torch.full((1, 4), 2.0))
        assert torch.equal(grads["b.weight"], torch.full((1, 4), 1.0))


def used_by_none() -> Grads:
    """ST-01's second step: no rank uses either."""
    return gradients("functionalize", Either(), lambda call: torch.zeros((), requires_grad=True) * 1)


def test_parameters_that_no_rank_uses(run: Any) -> None:
    for grads in run(2, used_by_none):
        assert all(not x.any() for x in grads.values())


def two_parents(way: str) -> tuple[Grads, int]:
    """ST-03, pytorch/pytorch#179532: one module in two branches."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(4, 1, bias=False)
            nn.init.constant_(shared.weight, 3.0)
            self.left, self.right = nn.Sequential(shared), nn.Sequential(shared)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.left(x) + self.right(y)).sum()

    module = Branches()
    ones = torch.ones(1, 4)
    grads = gradients(way, module, lambda call: call(ones, 5 * ones))
    return grads, len(list(module.parameters()))


@pytest.mark.parametrize("way", WAYS)
def test_a_module_under_two_parents(run: Any, way: str) -> None:
    for grads, count in run(2, two_parents, way):
        assert count == 1
        (grad,) = grads.values()
        assert torch.equal(grad, torch.full((1, 4), 6.0))


class Odd(nn.Module):
    """ST-05, ST-07: a number, a matrix, and parameters without elements, first, last and between."""

    def __init__(self) -> None:
        super().__init__()
        self.z0 = nn.Parameter(torch.zeros(0, 8))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.z1 = nn.Parameter(torch.zeros(3, 0))
        self.w = nn.Parameter(torch.arange(8.0).view(4, 2) / 8)
        self.z2 = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.scale * (x @ self.w)).square().mean() + self.z0.sum() + (self.z1.T @ torch.ones(3, 1)).sum()
        return out


def odd_shapes(way: str, folder: str, begin: bool) -> dict[str, Tensor]:
    """Two steps of clipped Adam, saved; loaded on other ranks, and one more."""
    x = torch.ones(2, 4)
    tx = adamw(0.1)
    if way == "fully_shard":
        module = fully_shard(Odd(), mesh=mesh())
        optimizer = as_torch_optimizer(tx, module)
        if not begin:
            like = {"params": parameter_trees(module), "opt": optimizer.opt_state}
            found = checkpoint.load(folder, like)
            for old, new in zip(sharded_trees(like["params"]), sharded_trees(found["params"]), strict=True):
                for a, b in zip(old.tensors, new.tensors, strict=True):
                    a.copy_(b)
            optimizer.opt_state = found["opt"]
        for _ in range(2 if begin else 1):
            optimizer.zero_grad()
            module(x).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
        if begin:
            checkpoint.save(folder, {"params": parameter_trees(module), "opt": optimizer.opt_state})
        assert all(p.shape == q.shape for p, q in zip(module.parameters(), Odd().parameters(), strict=True))
        return full_parameters(module)
    apply, full, buffers = functionalize(Odd())
    params = shard(full, mesh(), P(ragged="fsdp"), units=["."])
    state, step = tx.init(params), make_step(tx)
    if not begin:
        found = checkpoint.load(folder, {"params": params, "opt": state})
        params, state = found["params"], found["opt"]
    f, clip = value_and_grad(lambda p: apply(p, buffers, x)[0]), clip_by_global_norm(0.5)
    for _ in range(2 if begin else 1):
        _, grads = f(params)
        grads, _ = clip.update(grads, clip.init(params), params)
        params, state = step(params, grads, state)
    if begin:
        checkpoint.save(folder, {"params": params, "opt": state})
    return flat(unshard(params))


@pytest.mark.parametrize("way", WAYS)
def test_numbers_and_empty_parameters(run: Any, way: str, tmp_path: Path) -> None:
    """ST-05, pytorch/pytorch#130810; ST-07, deepspeed#8467."""
    module = Odd()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=1e-4)
    for step in range(3):
        optimizer.zero_grad()
        module(torch.ones(2, 4)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        if step == 1:
            half = {k: v.detach().clone() for k, v in module.named_parameters()}
    want = dict(module.named_parameters())
    for ranks, begin, expected in ((3, True, half), (2, False, want), (1, False, want)):
        for found in run(ranks, odd_shapes, way, str(tmp_path / "saved"), begin):
            assert found.keys() == expected.keys()
            for name, x in found.items():
                assert x.shape == expected[name].shape
                assert torch.allclose(x, expected[name], rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 1)])
def test_a_tiny_parameter_on_one_rank(run: Any, way: str, shape: tuple[int, ...]) -> None:
    """ST-06, pytorch/pytorch#144045."""
    for grads in run(1, tiny, way, shape):
        assert all(torch.equal(x, torch.full(shape, 60000.0 if name == "p" else 30000.0)) for name, x in grads.items())


class Tiny(nn.Module):
    def __init__(self, shape: tuple[int, ...], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(shape))
        self.inner = inner

    def forward(self) -> Tensor:
        own: Tensor = 30000 * self.p.sum()
        return own if self.inner is None else own + self.inner() + 30000 * self.p.sum()


def tiny(way: str, shape: tuple[int, ...]) -> Grads:
    return gradients(way, Tiny(shape, Tiny(shape)), lambda call: call())


def average(way: str, *shape: int) -> Grads:
    """CM-01, pytorch/pytorch#162338; CM-02, #155903: rank r's gradient is r + 1."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(5, 3))

        def forward(self, factor: float) -> Tensor:
            return factor * (self.a.sum() + self.b.sum())

    rank = dist.get_rank()
    return gradients(way, Sums(), lambda call: call(rank + 1.0), *shape, units=["."])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4)])
def test_means_are_means(run: Any, way: str, shape: tuple[int, ...]) -> None:
    for grads in run(4, average, way, *shape):
        assert all(torch.equal(x, torch.full_like(x, 2.5)) for x in grads.values())


def without_values(way: str) -> str:
    """IN-03, NVIDIA/Megatron-LM#6799: memory without values."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="values") as error:
        if way == "fully_shard":
            fully_shard(module, mesh=mesh(), units=["*"]).to_empty(device="cpu")
            module[0].reset_parameters()
            module(torch.ones(1, 4))
        else:
            shard(functionalize(module)[1], mesh(), P(ragged="fsdp"))
    return str(error.value)


@pytest.mark.parametrize(("way", "name"), [("functionalize", "0.bias"), ("fully_shard", "1.bias")])
def test_parameters_without_values_are_named(run: Any, way: str, name: str) -> None:
    for said in run(2, without_values, way):
        assert name in said


def other_values(way: str) -> str:
    """IN-05, pytorch/pytorch#88838: ranks start from other values."""
    module = nn.Linear(2, 4, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.arange(8.0).view(4, 2) + 100 * dist.get_rank())
    with pytest.raises(ValueError, match="differs between ranks") as error:
        if way == "fully_shard":
            fully_shard(module, mesh=mesh())
        else:
            shard(functionalize(module)[1], mesh(), P(ragged="fsdp"))
    return str(error.value)


@pytest.mark.parametrize("way", WAYS)
def test_values_that_differ_between_ranks(run: Any, way: str) -> None:
    for said in run(2, other_values, way):
        assert "weight" in said


def alive() -> tuple[int, int]:
    """Tensors, and bytes of their storages."""
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter, ShardedLeaf)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return len(tensors), sum(storages.values())


def counted(way: str, collector: bool) -> list[tuple[int, int]]:
    """IN-06, pytorch/pytorch#149100: after 10 and 50 steps, with the whole state read out every 5."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    x, tx = torch.ones(2, 4), adamw(1e-3)
    gc.collect()
    if not collector:
        gc.disable()
    try:
        if way == "fully_shard":
            sharded: Any = fully_shard(module, mesh=mesh(), units=["*"])
            optimizer = torch.optim.AdamW(sharded.parameters())
        else:
            apply, full, buffers = functionalize(module)
            params = shard(full, mesh(), P(ragged="fsdp"), units=["*"])
            state, step_fn = tx.init(params), make_step(tx)
            f = value_and_grad(lambda p: apply(p, buffers, x)[0].square().mean())
        out = []
        for step in range(1, 51):
            if way == "fully_shard":
                optimizer.zero_grad()
                sharded(x).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
                optimizer.step()
                _ = sharded.state_dict() if step % 5 == 0 else None
            else:
                _, grads = f(params)
                global_norm(grads)
                params, state = step_fn(params, grads, state)
                _ = unshard(params) if step % 5 == 0 else None
            _ = None
            if step in (10, 50):
                out.append(alive())
        return out
    finally:
        gc.enable()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("collector", [False, True])
def test_nothing_grows_from_step_to_step(run: Any, way: str, collector: bool) -> None:
    for early, late in run(2, counted, way, collector):
        assert early == late


def from_meta(how: str) -> dict[str, Tensor]:
    """IN-01, Automodel#2939: bounds from the global fan-in, equal on any number of ranks."""
    with torch.device("meta"):
        module = nn.ModuleDict({"a": nn.Linear(6, 13, bias=False), "b": nn.Linear(32, 64, bias=False)})
    if how == "in place":
        sharded: Any = fully_shard(module, mesh=mesh(), units=["*"])
        sharded.to_empty(device="cpu")
        torch.manual_seed(0)
        for name in ("a", "b"):
            sharded[name].reset_parameters()
        return full_parameters(sharded)
    from fsdp import init_module

    layout = plan(functionalize(module)[1], mesh(), P(ragged="fsdp"), units=["*"])
    return flat(unshard(init_module(module, layout, seed=0)[0]))


def test_initial_values_do_not_depend_on_the_ranks(run: Any) -> None:
    torch.manual_seed(0)
    want = {name: nn.Linear(*sizes, bias=False).weight for name, sizes in (("a", (6, 13)), ("b", (32, 64)))}
    for how in ("in place", "functions"):
        for ranks in (1, 2, 3, 8):
            for found in run(ranks, from_meta, how):
                assert all(torch.equal(found[f"{name}.weight"], x) for name, x in want.items())
