"""Micro-batches that differ between ranks, or from each other: right gradients, or an error on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import fold, gathered, microbatch, value_and_grad
from ragged import P, shard, unshard
from tests.dist.test_value_and_grad import close, mesh
from tests.models import block, fallible, make_loss, make_params, tokens


def odd_here() -> bool:
    return dist.get_rank() == 1


def indivisible(steps_before: int) -> None:
    params, f = make_params(), microbatch(value_and_grad(make_loss()), 4)
    for _ in range(steps_before):
        f(params, tokens())
    f(params, tokens()[: 7 if odd_here() else None])


def sharded_batch() -> None:
    params = make_params()
    microbatch(value_and_grad(lambda p, q: make_loss()(p, tokens())), 2)(
        params, params if odd_here() else torch.ones(2)
    )


def positions() -> None:
    microbatch(value_and_grad(make_loss()), 2, batch_argnums=(2 if odd_here() else 1,))(make_params(), tokens())


def other_sync() -> None:
    f = value_and_grad(make_loss())
    f.accumulate(make_params(), tokens(), sync=odd_here())


def other_last() -> None:
    f = value_and_grad(make_loss(keep=True))
    for _ in range(2):
        f.accumulate(make_params(), tokens(), last=odd_here())


def other_trees(everywhere: bool) -> None:
    f, params, others = value_and_grad(make_loss()), make_params(), make_params(align=1)
    f.accumulate(params, tokens())
    f.accumulate(others if everywhere or odd_here() else params, tokens())


def fewer_parts() -> None:
    f, params = value_and_grad(make_loss()), make_params()
    f.accumulate(params, tokens(), sync=False)
    if not odd_here():
        f.accumulate(params, tokens(), sync=False)
    f.finish()


def left_over_here() -> None:
    """A unit that only one rank used was kept back on it."""
    params, call = make_params(), gathered(block, reshard_after_forward=False)
    f = value_and_grad(lambda p, x, n: fold(call, p["layers"][:n], x).sum())
    f.accumulate(params, torch.ones(2, 16), 4)
    f.accumulate(params, torch.ones(2, 16), 3 if odd_here() else 4, sync=False)
    f.finish()


@pytest.mark.parametrize(
    ("case", "args", "words"),
    [
        (indivisible, (0,), r"argument 1 of shape \(7,\) can't be cut into 4 equal parts"),
        (indivisible, (3,), r"argument 1 of shape \(7,\) can't be cut into 4 equal parts"),
        (sharded_batch, (), "argument 1 holds a sharded tree"),
        (positions, (), r"batch_argnums=\(2,\) must be positions among 2"),
        (other_sync, (), "micro-batch: rank 0 has"),
        (other_last, (), "micro-batch: rank 0 has"),
        (other_trees, (False,), "trees of one accumulation differ"),
        (other_trees, (True,), r"trees of one accumulation differ.*finish\(\)"),
        (fewer_parts, (), "differs between ranks"),
        (left_over_here, (), "rank"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_differs_on_one_rank_raises_on_all(run: Any, case: Any, args: Any, words: str) -> None:
    errors = run(2, case, *args, expect_error=True, timeout=30)
    assert {type(error) for error in errors} == {ValueError}
    assert any(re.search(words, str(error)) for error in errors), errors


def misuse() -> None:
    params, f = make_params(), value_and_grad(make_loss())
    with pytest.raises(ValueError, match=r"call accumulate\(params"):
        f.finish()
    f.accumulate(params, tokens())
    f.finish()
    with pytest.raises(ValueError, match="without gradients"):
        f.finish()
    for n, sync in ((0, "each"), (True, "each"), (2.0, "each"), (2, "never"), (2, (True,)), (2, (1, 0))):
        with pytest.raises(ValueError, match="n=" if sync == "each" else "sync="):
            microbatch(f, n, sync=sync)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="what value_and_grad returns, got function"):
        microbatch(make_loss(), 2)
    for where in ((), (5,), (-3,)):
        with pytest.raises(ValueError, match=r"batch_argnums=\("):
            microbatch(f, 2, batch_argnums=where)(params, tokens())
    with pytest.raises(ValueError, match=r"argument 1.a of shape \(\) can't be cut"):
        microbatch(value_and_grad(lambda p, b: p.sum()), 2)(torch.ones(2), {"a": torch.tensor(1.0)})


@pytest.mark.parametrize("n", [1, 2])
def test_misuse_says_what_to_do(run: Any, n: int) -> None:
    run(n, misuse)


def failing(keep: bool, where: str, steps_before: int) -> str:
    """Rank 1 fails in its second micro-batch; the next accumulation starts from nothing."""
    params, broken = make_params(), False

    def layer(p: Any, x: Tensor) -> Tensor:
        return block(p, fallible(x, lambda at: broken and at == where))

    f = value_and_grad(make_loss(layer, keep=keep))
    want = unshard(value_and_grad(make_loss())(params, tokens())[1])
    said = ""

    def pair(sync: bool) -> None:
        nonlocal broken
        f.accumulate(params, tokens(), sync=sync)
        broken = said == "" and odd_here() and i == steps_before
        f.accumulate(params, tokens(), sync=True, last=True)

    for i in range(steps_before + 3):
        sync = i % 2 == 0
        try:
            pair(sync)
            assert i != steps_before
        except (RuntimeError, ValueError) as error:
            said, broken = str(error), False
            with pytest.raises(ValueError, match="without gradients"):
                f.finish()
            pair(sync)
        half = f.finish()
        for x in half.tensors:
            x.div_(2)
        close(unshard(half), want)
    return said


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("keep", "steps_before"), [(False, 0), (True, 0), (False, 3), (True, 3), (True, 4)])
def test_an_error_ends_the_accumulation_on_all_ranks(run: Any, keep: bool, steps_before: int, where: str) -> None:
    said = run(2, failing, keep, where, steps_before, timeout=30)
    assert all(f"no luck in {where}" in text for text in said), said


def reached_here() -> None:
    """In each part the losses of other ranks reach other units; zeros fill in, and parts add up."""
    params, rank, x = make_params(), dist.get_rank(), torch.ones(2, 16)
    reach = [(0, 1, 2, 3), (rank,), (), (0, 3) if rank == 1 else (1, 2)]

    def loss(p: Any, x: Tensor, used: tuple[int, ...], call: Any = block) -> Tensor:
        values = [call(layer, x).sum() for layer in p["layers"]]
        return sum([values[i] for i in used], start=torch.zeros(()))

    full = unshard(params)["layers"]
    leaves = [{k: v.requires_grad_() for k, v in layer.items()} for layer in full]
    sum(loss({"layers": leaves}, x, used) for used in reach).backward()  # type: ignore[union-attr]
    want = [{k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in layer.items()} for layer in leaves]
    for layer in want:
        for grad in layer.values():
            dist.all_reduce(grad)
    for reshard in (True, False):
        call = gathered(block, reshard_after_forward=reshard)
        f = value_and_grad(lambda p, x, used: loss(p, x, used, call), op="sum")  # noqa: B023
        for pattern in ("TTTT", "FFFT", "FTFF", "FFFF", "FFTT"):
            for used, letter in zip(reach, pattern, strict=True):
                f.accumulate(params, x, used, sync=letter == "T")
            grads = unshard(f.finish())
            close(grads["layers"], want)
            assert not grads["embed"].any()


def test_losses_of_ranks_may_reach_different_units_in_each_part(run: Any) -> None:
    run(3, reached_here, timeout=30)


def alternating() -> None:
    """A plan made twice is one plan; trees of another form, and what another call left, never mix."""
    w, v = ({"w": torch.ones(n)} for n in (3, 1))
    sharded = shard(w, mesh(), P(ragged="fsdp"))
    call = gathered(lambda p, x: (p["w"] * x).sum())
    f = value_and_grad(lambda p, x: sum(call(q, x) for q in (p if isinstance(p, list) else [p])))
    x = torch.tensor([1.0, 3.0])
    f.accumulate(sharded, x[:1])
    f(sharded, 10 * x[:1])  # has nothing to do with it
    f.accumulate(shard(w, mesh(), P(ragged="fsdp")), x[1:])
    assert unshard(f.finish())["w"].tolist() == [4.0] * 3
    unlike = [(w, v), (v, w), (w | {"a": v}, w | {"b": v}), (w, sharded), (sharded, w), (sharded, [sharded])]
    for first, second in [*unlike, ([sharded] * 2, [sharded]), ([sharded], [sharded] * 2)]:
        f.accumulate(first, x[:1])
        with pytest.raises(ValueError, match=r"one accumulation differ.*finish\(\)"):
            f.accumulate(second, x[:1])
        with pytest.raises(ValueError, match="without gradients"):
            f.finish()


@pytest.mark.parametrize("n", [1, 2])
def test_unlike_trees_never_add_up(run: Any, n: int) -> None:
    run(n, alternating)


def left_before() -> list[float]:
    params = shard({"w": torch.ones(3)}, mesh(), P(ragged="fsdp"))
    f = value_and_grad(gathered(lambda p, x: (p["w"] * x).sum()))
    f.accumulate(params, torch.tensor([100.0]))
    try:
        grads = microbatch(f, 2)(params, torch.tensor([1.0, 3.0]))[1]
    except ValueError:
        return []
    return unshard(grads)["w"].tolist()  # type: ignore[no-any-return]


def test_what_was_accumulated_before_is_no_part_of_a_batch(run: Any) -> None:
    """Either refused or kept apart, never in the mean."""
    assert run(1, left_before)[0] in ([], [2.0] * 3)
