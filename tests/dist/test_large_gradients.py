"""Gradients of large leaves are sent from where backward left them."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fsdp import MixedPrecision, gathered, value_and_grad
from ragged import P, collectives, make_mesh, plan, rules, shard, unshard
from ragged.layout import LARGE

F32 = torch.float32
WIDE = LARGE // 4  # elements of a leaf that is just large enough
SHAPES: dict[str, dict[str, Any]] = {
    "one": {"b": ((512, 512), F32)},
    "small before, between and after": {
        "a": ((3,), F32),
        "b": ((WIDE,), F32),
        "c": ((5, 2), F32),
        "d": ((2, WIDE), F32),
        "e": ((), F32),
    },
    "large ones only": {"a": ((WIDE + 1,), F32), "b": ((WIDE + 7,), F32), "c": ((3 * WIDE,), F32)},
    "nearly large": {"a": ((WIDE - 1,), F32), "b": ((WIDE, 1), F32)},
    "empty ones": {"a": ((0, 4), F32), "b": ((WIDE,), F32), "c": ((0,), F32)},
}


def values(shapes: Any, k: int) -> Any:
    """Numbers that differ from rank to rank and have sums that round."""
    draw = torch.Generator().manual_seed(k)
    return {name: torch.randn(shape, generator=draw) for name, (shape, _) in shapes.items()}


def as_the_plain_sum(name: str, block: Any, skip: str, dtype: Any) -> None:
    """Bitwise the mean, in rank order, of what each rank's own backward gives."""
    shapes, rank, n = SHAPES[name], dist.get_rank(), dist.get_world_size()
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    spec = rules({"b": P(ragged="fsdp", block=block), "**": P(ragged="fsdp")})
    full = values(shapes, 100)
    params = shard(full, plan(shapes, mesh, spec, units=["."]))

    @gathered
    def unit(p: Any, x: Any) -> Any:
        names = [k for k in p if not (k == skip and rank == 0)]  # one rank has no gradient of one leaf
        return sum((p[k] * p[k] * x[k].to(p[k].dtype)).sum() for k in names)

    f = value_and_grad(unit, precision=MixedPrecision(dtype) if dtype else None)
    for step in range(3):
        with collectives.record() as events:
            _, grads = f(params, values(shapes, 10 * step + rank))
        assert sum(e.kind == "reduce_scatter" for e in events) == 1
        got = unshard(grads)
        for k, p in full.items():
            wants: list[Any] = []
            for r in range(n):
                leaf = p.to(dtype or F32, copy=True).requires_grad_()
                if not (k == skip and r == 0):
                    (leaf * leaf * values(shapes, 10 * step + r)[k].to(leaf.dtype)).sum().backward()
                wants.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            total = wants[0].float()
            for want in wants[1:]:
                total = total + want.float()
            assert torch.equal(got[k], total / n), k


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_bitwise_as_one_buffer(run: Any, n: int, name: str) -> None:
    run(n, as_the_plain_sum, name, 1, "", None)


@pytest.mark.parametrize(
    ("block", "skip", "dtype"),
    [(WIDE // 2, "", None), (1, "b", None), (1, "a", None), (1, "", torch.bfloat16), (WIDE, "d", torch.bfloat16)],
)
def test_blocks_missing_gradients_and_precision(run: Any, block: int, skip: str, dtype: Any) -> None:
    run(3, as_the_plain_sum, "small before, between and after", block, skip, dtype)


def copies() -> tuple[list[Any], int]:
    """The shapes that a step copies, joins or clones, and the size of a rank's shard."""
    shapes = {"w": ((1024, 512), F32), "b": ((512,), F32)}
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard(values(shapes, 1), plan(shapes, mesh, P(ragged="fsdp"), units=["."]))
    f = value_and_grad(gathered(lambda p, x: (x @ p["w"] + p["b"]).square().mean()))
    x = torch.ones(4, 1024)
    for _ in range(2):
        f(params, x)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        f(params, x)
    names = ("aten::copy_", "aten::cat", "aten::clone")
    return [e.input_shapes[0] for e in prof.events() if e.name in names], params.tensors[0].numel()


def test_the_profiler_sees_no_copy_of_a_large_gradient(run: Any) -> None:
    for found, shard_size in run(2, copies):
        large = [shape for shape in found if shape and shape[0] > 512]
        assert [512] in found  # the small one is copied
        assert large == [[shard_size]]  # and the rank's own shard, to its place in the gather buffer


class _Workspace(torch.autograd.Function):
    """x + w.sum(), with a gradient of w in memory that the next backward writes to again."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, space: Any) -> Any:
        ctx.space = space
        return x + w.sum()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g, ctx.space.fill_(g.item()), None


class _Lender(torch.autograd.Function):
    """x * w.sum(), whose backward returns a saved parameter as the gradient of another."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, v: Any) -> Any:
        ctx.save_for_backward(v)
        return x + w.sum() + v.sum()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (v,) = ctx.saved_tensors
        return g, v, torch.ones_like(v)


def overwritten() -> None:
    shapes = [{"w": ((512, 512), F32)}] * 3
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard([values(s, 1) for s in shapes], plan(shapes, mesh, P(ragged="fsdp"), units=["*"]))
    space = torch.empty(512, 512)
    layer = gathered(lambda p, x: _Workspace.apply(x, p["w"], space))  # type: ignore[no-untyped-call]

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = layer(p, x)
        return x.sum()

    value_and_grad(loss)(params, torch.zeros(1, requires_grad=True))


def test_a_gradient_that_is_overwritten_on_its_way_raises(run: Any) -> None:
    for error in run(2, overwritten, expect_error=True):
        assert "changed in place after backward returned it" in str(error)


def lent() -> None:
    shapes = {"w": ((512, 512), F32), "v": ((512, 512), F32)}
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    full = values(shapes, 1)
    params = shard(full, plan(shapes, mesh, P(ragged="fsdp"), units=["."]))
    f = value_and_grad(gathered(lambda p, x: _Lender.apply(x, p["w"], p["v"]).sum()))  # type: ignore[no-untyped-call]
    for _ in range(3):
        _, grads = f(params, torch.zeros(1))
        got = optree.tree_map(torch.clone, unshard(grads))
        assert torch.equal(got["w"], full["v"])
        assert torch.equal(got["v"], torch.ones(512, 512))


def test_a_gradient_that_is_a_parameter(run: Any) -> None:
    run(2, lent)


class _Unversioned(torch.autograd.Function):
    """w.sum(), with a gradient that was computed in inference mode."""

    @staticmethod
    def forward(ctx: Any, w: Any) -> Any:
        ctx.shape = w.shape
        return w.sum()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        with torch.inference_mode():
            return torch.ones(ctx.shape) * 2


def added(p: Any, x: Any) -> Any:
    """Autograd has one tensor for the gradients of both, and the hook changes it when the one is on its way."""
    y = x.tanh()
    y.register_hook(lambda g: g.clamp_(-0.5, 0.5))
    return (y + p["w"]).square().sum()


KINDS: dict[str, tuple[torch.dtype, Any]] = {
    "lazily conjugate": (torch.complex64, lambda p, x: torch.view_as_real(p["w"].conj() * (1 + 2j)).sum()),
    "computed in inference mode": (F32, lambda p, x: _Unversioned.apply(p["w"])),  # type: ignore[no-untyped-call]
    "shared with an activation": (F32, added),
    "transposed": (F32, lambda p, x: (p["w"].t() * x).sum()),
    "expanded": (F32, lambda p, x: p["w"].sum()),
}


def of_kind(kind: str) -> None:
    dtype, loss = KINDS[kind]
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    full = {"w": torch.randn(512, 512, dtype=dtype, generator=torch.Generator().manual_seed(0))}
    params = shard(full, mesh, P(ragged="fsdp"))
    x = torch.arange(512.0 * 512).view(512, 512).requires_grad_()
    f = value_and_grad(gathered(loss))
    plain = {"w": full["w"].clone().requires_grad_()}
    loss(plain, x).backward()
    for _ in range(3):
        assert torch.equal(unshard(f(params, x)[1])["w"], plain["w"].grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2])
def test_gradients_of_any_kind(run: Any, n: int, kind: str) -> None:
    run(n, of_kind, kind)
