"""Trees that a loss computes from sharded ones: their gradients arrive wherever they are used, and in one order."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

from fsdp import gathered, value_and_grad
from ragged import P, make_mesh, shard, unshard

linear = gathered(lambda p, x: x @ p["w"])
USED = {"everywhere": (0, 1, 2), "on the first rank": (0,), "on the last rank": (2,), "nowhere": ()}


def setup(axes: tuple[str, ...], sizes: tuple[int, ...], names: tuple[str, ...] = ("a", "b")) -> Any:
    mesh = make_mesh(sizes, axes, device_type="cpu")
    draw = torch.Generator().manual_seed(0)
    full = {k: {"w": torch.randn(48, 48, generator=draw) / 8} for k in names}
    return full, shard(full, mesh, P(ragged="fsdp"), units=["*"])


def batches(n: int) -> list[torch.Tensor]:
    return [torch.randn(4, 48, generator=torch.Generator().manual_seed(k)) for k in range(n)]


def expected(full: Any, ranks: tuple[int, ...], n: int, times: int) -> dict[str, torch.Tensor]:
    """By plain torch: the mean over ranks."""
    p = optree.tree_map(lambda x: x.clone().requires_grad_(), full)
    total = torch.zeros(())
    for k, x in enumerate(batches(n)):
        z = x @ (p["b"]["w"] * 2) @ p["a"]["w"]
        total = total + ((z.sin().sum() if k in ranks else 0) + (x @ p["a"]["w"]).cos().sum()) / n
    grads = torch.autograd.grad(total, [p["a"]["w"], p["b"]["w"]], allow_unused=True)
    zero = torch.zeros(48, 48)
    return {k: zero if g is None else times * g for k, g in zip("ab", grads, strict=True)}


def reached(sizes: tuple[int, ...], used: str, sync: bool | None, keep: bool) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    ranks = tuple(k for k in range(n) if k in USED[used])
    full, params = setup(("fsdp",) if len(sizes) == 1 else ("rep", "fsdp"), sizes)
    kept = gathered(lambda p, x: x @ p["w"], reshard_after_forward=not keep)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        twice = optree.tree_map(lambda t: t * 2, p["b"])
        z = linear(p["a"], kept(twice, x))
        return (z.sin().sum() if rank in ranks else 0) + linear(p["a"], x).cos().sum()

    f = value_and_grad(loss)
    for _ in range(3):
        if sync is None:
            _, grads = f(params, batches(n)[rank])
        else:
            for _ in range(2):
                f.accumulate(params, batches(n)[rank], sync=sync)
            grads = f.finish()
        got, want = unshard(grads), expected(full, ranks, n, 1 if sync is None else 2)
        for k in "ab":
            torch.testing.assert_close(got[k]["w"], want[k], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize(("n", "sizes"), [(1, (1,)), (3, (3,)), (4, (2, 2))])
def test_on_ranks_whose_loss_does_not_reach_them(run: Any, used: str, n: int, sizes: tuple[int, ...]) -> None:
    run(n, reached, sizes, used, None, False)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("used", ["everywhere", "on the first rank", "nowhere"])
def test_in_micro_batches(run: Any, used: str, sync: bool) -> None:
    run(3, reached, (3,), used, sync, False)


def test_kept_after_forward(run: Any) -> None:
    run(3, reached, (3,), "on the first rank", None, True)


def one_fails(name: str) -> None:
    _, params = setup(("rep", "fsdp"), (2, 1), names=("a", name))
    x, rank, bad = batches(2)[0], dist.get_rank(), False

    def loss(p: Any) -> torch.Tensor:
        if bad and rank == 1:
            raise RuntimeError("no luck")
        return linear(p[name], linear(p["a"], x)).sum()

    f = value_and_grad(loss)
    for bad in (False, False, True, False):  # read by the loss
        if not bad:
            f(params)
            continue
        with pytest.raises((ValueError, RuntimeError), match="no luck"):
            f(params)


def test_units_may_have_any_name_when_a_rank_fails(run: Any) -> None:
    """One that begins like the name of a computed tree's bucket is reduced over replicas like any other."""
    run(2, one_fails, "derived")


class _Swap(torch.autograd.Function):
    """(a * b).sum(), whose backward returns the other unit's parameters themselves."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        return (a * b).sum()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        a, b = ctx.saved_tensors
        return b, a


def swapped(side: int) -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    full = {k: {"w": torch.full((side, side), x)} for k, x in (("a", 2.0), ("b", 3.0))}
    params = shard(full, mesh, P(ragged="fsdp"), units=["*"])
    f = value_and_grad(gathered(lambda p: _Swap.apply(p["a"]["w"], p["b"]["w"])))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="lies on another unit's parameters"):
        f(params)


@pytest.mark.parametrize("side", [4, 1024])
def test_a_gradient_on_the_parameters_of_another_unit_raises(run: Any, side: int) -> None:
    run(2, swapped, side)
