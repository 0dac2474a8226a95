"""Full parameters that stay after forward are freed there if backward can't read them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fsdp import fold, gathered, value_and_grad
from ragged import collectives, unshard
from tests.models import LAYERS, block, make_params, tokens

STEPS = 4


def embed(p: Any, t: Any, *_: Any) -> Any:
    return p[t]


def scaled(p: Any, t: Any, *_: Any) -> Any:
    return p[t] * p[0]


def caught(p: Any, t: Any, step: int, caught: list[Any]) -> Any:
    caught.append(p[:1])
    return p[t]


def sometimes(p: Any, t: Any, step: int, caught: list[Any]) -> Any:
    return p[t] * p[0] if step == 2 else p[t]


def on_rank_1(p: Any, t: Any, step: int, caught: list[Any]) -> Any:
    return p[t] * p[0] if dist.get_rank() == 1 else p[t]


def steps(fn: Callable[..., Any], inside: bool, around: bool) -> list[tuple[bool, Counter[str]]]:
    """Whether the memory of a kept first unit is gone before backward, and the collectives, step by step.

    Gradients have the bits of a run that gathers it again.
    """
    params = make_params()

    def run(reshard: bool) -> tuple[list[Any], list[tuple[bool, Counter[str]]]]:
        found, grads, storages, held = [], [], [], []

        def spy(p: Any, *args: Any) -> Any:
            storages[:] = [weakref.ref(p.untyped_storage())]
            return checkpoint(fn, p, *args, use_reentrant=False) if inside else fn(p, *args)

        first = gathered(spy, reshard_after_forward=reshard)

        def loss(params: Any, t: Any, step: int) -> Any:
            args = (params["embed"], t, step, held)
            x = checkpoint(first, *args, use_reentrant=False) if around else first(*args)
            y = fold(gathered(block), params["layers"], x)
            found.append(storages[0]() is None)
            held.clear()
            return y.sum()

        f = value_and_grad(loss)
        counts = []
        for step in range(STEPS):
            with collectives.record() as events:
                _, g = f(params, tokens(), step)
            grads.append(g)
            counts.append(Counter(e.kind for e in events if e.kind in ("all_gather", "reduce_scatter")))
        return grads, list(zip(found, counts, strict=True))

    kept, found = run(False)
    again, _ = run(True)
    for a, b in zip(optree.tree_leaves(kept), optree.tree_leaves(again), strict=True):
        assert torch.equal(a, b)
    return found


@pytest.mark.parametrize(
    ("fn", "inside", "around", "gone"),
    [
        (embed, False, False, [False, True, True, True]),  # the first step learns what comes
        (scaled, False, False, [False] * 4),
        (caught, False, False, [False] * 4),
        (sometimes, False, False, [False, True, False, True]),
        (embed, True, False, [False] * 4),
        (embed, False, True, [False] * 4),
    ],
)
def test_what_backward_cannot_read_is_freed(run: Any, fn: Any, inside: bool, around: bool, gone: list[bool]) -> None:
    for found in run(2, steps, fn, inside, around):
        assert [freed for freed, _ in found] == gone
        # it is gathered once all the same, and so is the last layer
        assert all(c == {"all_gather": 2 * LAYERS, "reduce_scatter": LAYERS + 1} for _, c in found)


def test_ranks_need_not_agree(run: Any) -> None:
    first, second, third = run(3, steps, on_rank_1, False, False)
    assert [freed for freed, _ in second] == [False] * 4
    assert [freed for freed, _ in first] == [freed for freed, _ in third] == [False, True, True, True]


def unlike_the_first_step(what: str) -> list[bool]:
    """Whether the memory of a kept embedding is gone before backward."""
    params, gone, held = make_params(), [], []

    def first(p: Any, x: Any) -> Any:
        held[:] = [weakref.ref(p.untyped_storage())]
        return x + p.sum()

    embed, layer = gathered(first, reshard_after_forward=False), gathered(block)

    def loss(params: Any, x: Any, penalty: bool) -> Any:
        y = fold(layer, params["layers"], embed(params["embed"], x))
        gone.append(held[0]() is None)
        if what == "a unit comes twice":  # so the order is learnt once more
            y = layer(params["layers"][0], y)
        if penalty:
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y.sum() + g.square().sum()
        return y.sum()

    f = value_and_grad(loss)
    x = torch.ones(4, 16, requires_grad=True)
    for step in range(5):
        penalty = what == "a late penalty" and step == 2
        found, _ = f(params, x, penalty)
        assert found.item() == pytest.approx(loss(unshard(params), x, penalty).item(), rel=1e-5)
        gone.pop()
    return gone


@pytest.mark.parametrize("what", ["a late penalty", "a unit comes twice"])
def test_steps_unlike_the_first(run: Any, what: str) -> None:
    for gone in run(2, unlike_the_first_step, what):
        assert gone == [False, True, True, True, True]
