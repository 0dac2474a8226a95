"""One batch in parts: gradients summed over micro-batches, whenever they are reduced."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import MixedPrecision, fold, gathered, microbatch, value_and_grad
from ragged import P, collectives, make_mesh, plan, shard, tree_map, unshard
from tests.dist.test_value_and_grad import close, mesh
from tests.models import LAYERS, block, make_loss, make_params, tokens

UNITS = LAYERS + 2
MIXED = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def flags(pattern: str) -> tuple[bool, ...]:
    return tuple(letter == "T" for letter in pattern)


def patterns(across: bool) -> None:
    """MP-07: rank r's micro-batches have gradients (r + 1) * {1, 10, 100}."""
    where = make_mesh((-1, 1) if across else (1, -1), ("replica", "fsdp"), device_type="cpu")
    params = shard({"w": torch.ones(5)}, where, P(ragged="fsdp"))
    x = torch.tensor([1.0, 10.0, 100.0]) * (dist.get_rank() + 1)
    for reshard, precision in ((True, None), (False, None), (True, MIXED), (False, MIXED)):
        call = gathered(lambda p, x: (p["w"] * x).sum(), reshard_after_forward=reshard)
        f = value_and_grad(call, precision=precision)
        for pattern in ("TFT", "FFT", "TTT", "TTF", "FFF"):
            for i, flag in enumerate(flags(pattern)):
                loss = f.accumulate(params, x[i], sync=flag, last=i == 2)
                assert loss.item() == 5 * 1.5 * 10**i
            grads = f.finish()
            assert set(unshard(grads)["w"].tolist()) == {166.5}
            assert grads.tensors[0].dtype == torch.float32
            loss, grads = microbatch(f, 3, sync=flags(pattern))(params, x)
            assert loss.item() == 5 * 55.5
            assert set(unshard(grads)["w"].tolist()) == {55.5}
    assert set(unshard(params)["w"].tolist()) == {1.0}


@pytest.mark.parametrize("across", [False, True])
def test_any_pattern_of_synchronisation_counts_each_part_once(run: Any, across: bool) -> None:
    run(2, patterns, across)


def used_locally() -> None:
    """One tensor is the gradient of both, and each sum is its own."""
    where = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard([{"w": torch.ones(6)}, {"w": torch.ones(6)}], where, P(ragged="fsdp"), units=["*"])
    f = value_and_grad(lambda p, x: ((p.tensors[0] + p.tensors[1]) * x).sum(), op="sum")
    for i in (1.0, 10.0):
        f.accumulate(params, torch.full_like(params.tensors[0], i))
    assert [x.tolist() for x in f.finish().tensors] == [[11.0] * len(x) for x in params.tensors]


@pytest.mark.parametrize("n", [1, 2])
def test_local_tensors_have_gradients_of_their_own(run: Any, n: int) -> None:
    run(n, used_locally)


def used_late() -> None:
    """MP-03: b in the second micro-batch only, c in none; in one unit with a, and in units of their own."""
    ones = {name: torch.ones(5) for name in "abc"}
    share = dist.get_rank() + 1.0
    mean = (dist.get_world_size() + 1) / 2
    for reshard in (True, False):
        call = gathered(lambda p, names: {k: p[k].sum() * share for k in names}, reshard_after_forward=reshard)

        def one(p: Any, names: str, call: Any = call) -> Tensor:
            return sum(call(p["u"], names).values())  # type: ignore[no-any-return]

        def own(p: Any, names: str, call: Any = call) -> Tensor:
            every = {k: call({k: p[k]}, k)[k] for k in "abc"}
            return sum((every[k] for k in names), start=torch.zeros(()))

        for loss, tree in ((one, {"u": ones}), (own, ones)):
            params, f = shard(tree, mesh(), P(ragged="fsdp")), value_and_grad(loss, precision=MIXED)
            for pattern in ("TT", "FT", "TF", "FF", "TT"):
                for names, sync in zip(("a", "ab"), flags(pattern), strict=True):
                    f.accumulate(params, names, sync=sync)
                grads = f.finish()
                assert {t.dtype for t in grads.tensors} == {torch.float32}
                got = unshard(grads)
                got = got.get("u", got)
                assert [set(got[k].tolist()) for k in "abc"] == [{2 * mean}, {mean}, {0.0}]


@pytest.mark.parametrize("n", [1, 2])
def test_a_parameter_first_used_in_the_last_micro_batch(run: Any, n: int) -> None:
    run(n, used_late)


def equals_whole(sharded: bool) -> None:
    """One, two and four parts against the whole batch, in all forms of arguments."""
    params: Any = make_params() if sharded else unshard(make_params())
    base = {keep: make_loss(keep=keep, tied=keep) for keep in (False, True)}
    t = tokens(share=sharded)
    for keep, op in ((False, "mean"), (True, "mean"), (False, "sum")):

        def loss(p: Any, t: Tensor, keep: bool = keep, op: str = op) -> Tensor:
            return base[keep](p, t) * (len(t) if op == "sum" else 1)  # type: ignore[no-any-return]

        f = value_and_grad(loss, op=op)
        want_loss, want = f(params, t)
        for n, sync in ((1, "each"), (2, "each"), (4, "last"), (4, (True, False, True, False))):
            got_loss, grads = microbatch(f, n, sync=sync)(params, t)
            close(got_loss, want_loss)
            close(unshard(grads) if sharded else grads, unshard(want) if sharded else want)

    def several(scale: Any, p: Any, batch: Any, *, more: float) -> Any:
        t, rest = batch["t"], batch["rest"][0]
        assert len(t) == len(rest["x"]) == len(scale["s"])
        value = base[False](p, t) * rest["x"].mean() * scale["s"].mean() * more
        return value, {"t": t, "n": len(t), "same": batch["same"]}

    f = value_and_grad(several, argnums=1, has_aux=True)
    # the values of x and s are equal, so that a product of means is the mean of products
    batch = {"t": t, "rest": [{"x": torch.full((len(t), 2), 3.0), "none": None}], "same": "text"}
    scale = {"s": torch.full((len(t),), 0.5)}
    (want_loss, aux), want = f(scale, params, batch, more=2.0)
    (got_loss, parts), grads = microbatch(f, 4, batch_argnums=(0, -1))(scale, params, batch, more=2.0)
    close(got_loss, want_loss)
    close(unshard(grads) if sharded else grads, unshard(want) if sharded else want)
    assert torch.equal(torch.cat([part["t"] for part in parts]), aux["t"])
    assert [(part["n"], part["same"]) for part in parts] == [(len(t) // 4, "text")] * 4


@pytest.mark.parametrize(("n", "sharded"), [(1, True), (3, True), (1, False)])
def test_parts_give_what_the_whole_batch_gives(run: Any, n: int, sharded: bool) -> None:
    run(n, equals_whole, sharded)


def counts(n: int, sync: Any) -> list[Counter[str]]:
    params, out = make_params(), []
    for reshard in RESHARD:
        embed, body = (gathered(fn, reshard_after_forward=reshard) for fn in (lambda p, t: p[t], block))
        head = gathered(lambda p, x: (x * p["norm"] @ p["w"]).mean(), reshard_after_forward=reshard)

        def loss(p: Any, t: Tensor, embed: Any = embed, body: Any = body, head: Any = head) -> Tensor:
            return head(p["head"], fold(body, p["layers"], embed(p["embed"], t)))  # type: ignore[no-any-return]

        f = microbatch(value_and_grad(loss), n, sync=sync)
        f(params, tokens())
        with collectives.record() as events:
            f(params, tokens())
        out.append(Counter(e.kind for e in events))
    return out


RESHARD = (True, 0, 2**30, False)


@pytest.mark.parametrize(
    ("n", "sync", "reduces"),
    [(1, "each", 1), (3, "each", 3), (3, "last", 1), (3, (True, False, True), 2), (2, (False,) * 2, 1)],
)
def test_messages_per_step(run: Any, n: int, sync: Any, reduces: int) -> None:
    """Two gathers of a unit in each part (the last is full when backward begins), one, or one for all parts."""
    gathers = [n * (2 * UNITS - 1), n * (2 * UNITS - 1), n * UNITS, UNITS]
    for steps in run(2, counts, n, sync):
        for found, want in zip(steps, gathers, strict=True):
            # twice in each part: same trees? the loss, and did anybody fail? And if some is left: is it the same?
            small = {"all_reduce": 2 * n + (sync == (False,) * 2)}
            assert found == {"all_gather": want, "reduce_scatter": reduces * UNITS} | small


def freed_at_the_end() -> list[list[int]]:
    """Bytes of the full storages after each micro-batch of a function that keeps its parameters."""
    storages: dict[int, torch.UntypedStorage] = {}
    out: list[list[int]] = []

    def spy(p: Any, x: Tensor) -> Tensor:
        s = p["w"].untyped_storage()
        storages[s._cdata] = s
        return block(p, x)

    params = make_params()
    body = gathered(spy, reshard_after_forward=False)
    f = value_and_grad(lambda p, x: fold(body, p["layers"], x).sum())
    for _ in range(2):
        storages.clear()
        for i in range(3):
            f.accumulate(params, torch.ones(2, 16), sync=i != 1, last=i == 2)
            out.append([s.nbytes() > 0 for s in storages.values()])
        f.finish()
    return out


def test_parameters_that_stay_are_freed_after_the_last_part(run: Any) -> None:
    for seen in run(2, freed_at_the_end):
        assert seen == [[True] * LAYERS, [True] * LAYERS, [False] * LAYERS] * 2


def changed_between(donate: bool) -> None:
    """Parameters written to between micro-batches are gathered anew."""
    params = shard({"w": torch.ones(4)}, mesh(), P(ragged="fsdp"))
    f = value_and_grad(gathered(lambda p: p["w"].square().sum(), reshard_after_forward=False))
    for _ in range(2):
        start = unshard(params)["w"][0].item()
        f.accumulate(params)
        if donate:
            params.tensors[0].mul_(3)
            later = params
        else:
            later = tree_map(lambda x: x * 3, params)
        f.accumulate(later, last=True)
        assert set(unshard(f.finish())["w"].tolist()) == {2 * start + 6 * start}


def test_parameters_that_change_between_micro_batches(run: Any) -> None:
    for donate in (True, False):
        run(2, changed_between, donate)


def frozen_numbers() -> None:
    """Integer leaves are frozen; the mean over parts leaves their zeros alone."""
    tree = {"u": {"w": torch.ones(3), "ids": torch.arange(4), "flag": torch.ones(2, dtype=torch.bool)}}
    layout = plan(tree, mesh(), P(ragged="fsdp"), frozen=lambda path, _: path != "u.w")
    params = shard(tree, layout)
    f = value_and_grad(gathered(lambda p, x: (p["u"]["w"] * x).sum() + p["u"]["ids"].sum()))
    loss, grads = microbatch(f, 2)(params, torch.tensor([1.0, 3.0]))
    assert loss.item() == 3 * 2 + 6
    got = unshard(grads)["u"]
    assert (got["w"].tolist(), got["ids"].tolist(), got["flag"].tolist()) == ([2.0] * 3, [0] * 4, [False] * 2)
    assert (got["ids"].dtype, got["flag"].dtype) == (torch.int64, torch.bool)


def test_frozen_integer_leaves(run: Any) -> None:
    run(2, frozen_numbers)
