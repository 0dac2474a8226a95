"""Mixed precision: the dtypes that functions see, that gradients travel in, and that masters keep."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import MixedPrecision, fold, gathered, value_and_grad
from fsdp.precision import as_precision
from optim import make_step, sgd
from ragged import P, collectives, init, make_mesh, plan, random, rules, shard, unshard
from tests.dist.test_value_and_grad import mesh
from tests.models import SHAPES, block, cross_entropy, make_loss, make_params, tokens

B, H, S, L = torch.bfloat16, torch.float16, torch.float32, torch.float64
INT, COMPLEX = torch.int64, torch.complex64
MIXED = MixedPrecision(B, reduce_dtype=S)


class FSDP2(NamedTuple):
    """The fields of torch's policy, without its import, which takes every worker seconds."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


def test_policies_of_torch_are_accepted() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for args in ((), (B, S), (B, S, S, False), (None, None, H, True)):
        assert as_precision(MixedPrecisionPolicy(*args)) == as_precision(FSDP2(*args)) == MixedPrecision(*args)
    with pytest.raises(ValueError, match=r"precision='bf16': expected a MixedPrecision"):
        gathered(block, precision="bf16")
    for wrong in (INT, COMPLEX, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=r"MixedPrecision\(reduce_dtype=torch\."):
            MixedPrecision(B, wrong)


EVERYTHING: dict[str, Tensor] = {
    "w": torch.arange(12.0).view(4, 3),
    "half": torch.ones(5, dtype=B),
    "double": torch.ones(3, dtype=L),
    "frozen": torch.ones(7),
    "count": torch.arange(4),
    "phase": torch.ones(2, dtype=COMPLEX),
}
KEPT = {"w": S, "half": B, "double": L, "frozen": S, "count": INT, "phase": COMPLEX}


def cast_to(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {k: dtype if d.is_floating_point else d for k, d in KEPT.items()}


POLICIES: list[tuple[Any, dict[str, torch.dtype], torch.dtype, torch.dtype]] = [
    # policy; dtypes of full parameters, of the fp32 input, of the result
    (None, KEPT, S, S),
    (MixedPrecision(), KEPT, S, S),
    (MixedPrecision(B), cast_to(B), B, B),
    (MixedPrecision(H, S), cast_to(H), H, H),
    (MixedPrecision(B, S, output_dtype=S), cast_to(B), B, S),
    (MixedPrecision(B, output_dtype=L, cast_forward_inputs=False), cast_to(B), S, L),
    (MixedPrecision(None, B), KEPT, S, S),
    (MixedPrecision(L, S), cast_to(L), L, L),
    (FSDP2(B, S, S), cast_to(B), B, S),
]


def dtypes(policy: Any, want: Any, whose: str, sharded: bool) -> None:
    """One unit of all kinds of leaves, differentiated under a policy of the step or of the function."""
    full, at_input, at_output = want
    learnt: Any = ("w", "half", "double", "phase")

    def fn(p: dict[str, Tensor], x: Tensor, *, more: dict[str, Tensor]) -> Any:
        assert {k: v.dtype for k, v in p.items()} == full
        assert (x.dtype, more["float"].dtype) == (at_input, at_input)
        assert (more["int"].dtype, more["complex"].dtype) == (INT, COMPLEX)
        assert torch.equal(p["count"], torch.arange(4))
        total = sum(p[k].abs().sum().to(x.dtype) for k in learnt) * x.sum()
        return {"y": [total], "count": more["int"] + 1, "complex": more["complex"] * 2}

    def loss(p: Any, q: Any, x: Tensor) -> Tensor:
        p = p | q if isinstance(p, dict) else p
        more = {"float": x.clone(), "int": torch.arange(2), "complex": torch.ones(1, dtype=COMPLEX)}
        out = gathered(fn, precision=policy if whose == "function" else None)(p, x, more=more)
        assert (out["y"][0].dtype, out["count"].dtype, out["complex"].dtype) == (at_output, INT, COMPLEX)
        return out["y"][0]  # type: ignore[no-any-return]

    f = value_and_grad(loss, precision=policy if whose == "step" else None)
    tree: Any = {k: EVERYTHING[k] for k in learnt}
    rest: Any = {k: EVERYTHING[k] for k in ("frozen", "count")}
    if sharded:
        layout = plan({"u": EVERYTHING}, mesh(), P(ragged="fsdp"), frozen=lambda path, _: path[2:] in rest)
        tree, rest = shard({"u": EVERYTHING}, layout)["u"], None
    for _ in range(2):
        loss_value, grads = f(tree, rest, torch.ones(2))
        assert loss_value.dtype == at_output
        whole = unshard(grads) if sharded else grads
        assert {k: v.dtype for k, v in whole.items()} == {k: KEPT[k] for k in whole}
        assert whole["w"].tolist() == [[0.0] + [2.0] * 2] + [[2.0] * 3] * 3  # d|w| is 0 at 0
        assert not any(whole[k].any() for k in whole if k not in learnt)


def all_dtypes(sharded: bool) -> None:
    for policy, *want in POLICIES:
        for whose in ("step", "function") if sharded else ("function",):
            dtypes(policy, want, whose, sharded)


@pytest.mark.parametrize(("n", "sharded"), [(1, True), (2, True), (1, False)])
def test_policies_decide_the_dtypes_of_parameters_inputs_and_outputs(run: Any, n: int, sharded: bool) -> None:
    run(n, all_dtypes, sharded)


def views_of_one_buffer() -> None:
    params = make_params(frozen=lambda path, _: path.endswith(".b"))
    layout, x = params.plan, torch.ones(2, 16)

    def check(p: Any, x: Tensor) -> Tensor:
        for name, full in p.items():
            leaf = layout.leaves[f"layers.1.{name}"]
            storage = full.untyped_storage()
            assert (full.dtype, full.is_contiguous()) == (B, True)
            assert storage.nbytes() == layout.buckets[leaf.bucket].length * B.itemsize
            assert full.data_ptr() == storage.data_ptr() + leaf.offset * B.itemsize
        return block(p, x)

    call = gathered(check, precision=MIXED)
    with torch.no_grad():
        call(params["layers"][1], x)
    f = value_and_grad(lambda p, x: call(p["layers"][1], x).sum())
    for _ in range(3):
        f(params, x)


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_is_cast_on_the_way_out_of_the_gather_buffer(run: Any, n: int) -> None:
    run(n, views_of_one_buffer)


def bytes_sent(*policies: MixedPrecision) -> list[tuple[int, ...]]:
    """Of gathers and of reductions."""
    params, out = make_params(), []
    for policy in policies:
        f = value_and_grad(make_loss(), precision=policy)
        f(params, tokens())
        with collectives.record() as events:
            f(params, tokens())
        out.append(tuple(sum(e.sent for e in events if e.kind == kind) for kind in ("all_gather", "reduce_scatter")))
    return out


def test_bytes_follow_the_dtypes(run: Any) -> None:
    table = [(MixedPrecision(B), 2, 2), (MIXED, 2, 1), (MixedPrecision(None, B), 1, 2), (MixedPrecision(H, B), 2, 2)]
    for (gathers, reductions), *found in run(2, bytes_sent, MixedPrecision(), *(policy for policy, _, _ in table)):
        assert found == [(gathers // a, reductions // b) for _, a, b in table]


def same_bits_as_plain(reshard: bool) -> None:
    params = make_params()
    for policy in (MIXED, MixedPrecision(B), MixedPrecision(B, S, S), MixedPrecision(L)):
        call = gathered(lambda p, x: torch.tanh(x @ p["w"] + p["b"]), precision=policy, reshard_after_forward=reshard)
        f = value_and_grad(lambda p, x: call(p["layers"][0], x).float().square().mean())  # noqa: B023
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
        want_loss, want = f(unshard(params), x)
        for _ in range(2):
            loss, grads = f(params, x)
            assert torch.equal(loss, want_loss)
            for a, b in zip(optree.tree_leaves(unshard(grads)), optree.tree_leaves(want), strict=True):
                assert torch.equal(a, b)
                assert a.dtype == b.dtype


def test_on_one_rank_sharded_and_plain_trees_give_the_same_bits(run: Any) -> None:
    for reshard in (True, False):
        run(1, same_bits_as_plain, reshard)


def two_precisions(where: str) -> None:
    params, x = make_params(), torch.ones(2, 16)
    low, high = gathered(block, precision=MIXED), gathered(block)

    def loss(p: Any, x: Tensor) -> Tensor:
        first, second = (low, high) if where == "all" else (high, high)
        if where == "one rank" and dist.get_rank() == 1:
            first = second = low
        y = first(p["layers"][0], x)
        return second(p["layers"][0], y.float()).float().sum()

    value_and_grad(loss)(params, x)


@pytest.mark.parametrize(("where", "words"), [("all", "one precision"), ("one rank", "bfloat16")])
def test_one_unit_has_one_precision_in_a_step(run: Any, where: str, words: str) -> None:
    for error in run(2, two_precisions, where, expect_error=True, timeout=30):
        assert isinstance(error, ValueError)
        assert "layers.0" in str(error)
        assert words in str(error)


def train(*shapes: tuple[int, ...]) -> list[tuple[list[float], Tensor, Tensor]]:
    return [train_on(shape) for shape in shapes]


def train_on(shape: tuple[int, ...]) -> tuple[list[float], Tensor, Tensor]:
    """Losses, and full parameters before and after."""
    axes = ("replica", "fsdp")[-len(shape) :]
    layout = plan(SHAPES, make_mesh(shape, axes, device_type="cpu"), P(ragged="fsdp"), units=["layers.*"])
    params = init(layout, rules({"**.norm": random.ones, "**": random.normal(0.3)}), seed=3)
    embed, body = gathered(lambda p, t: p[t]), gathered(block)
    head = gathered(lambda p, x, t: cross_entropy(((x * p["norm"]) @ p["w"]).float(), t))
    loss_fn = lambda p, t: head(p["head"], fold(body, p["layers"], embed(p["embed"], t)), t)  # noqa: E731
    tx, f = sgd(0.1), value_and_grad(loss_fn, precision=MIXED)
    state, step = tx.init(params), make_step(tx)
    before, losses = flat(params), []
    for _ in range(5):
        loss, grads = f(params, tokens())
        params, state = step(params, grads, state)
        losses.append(loss.item())
    return losses, before, flat(params)


def flat(params: Any) -> Tensor:
    return torch.cat([x.flatten() for x in optree.tree_leaves(unshard(params))])


def test_training_is_the_same_on_any_mesh_within_rounding_of_bf16(run: Any) -> None:
    ((losses, before, after),) = run(1, train, (1,))[0]
    for found in (*run(2, train, (2,)), *run(4, train, (4,), (2, 2))):
        for other, _, params in found:
            assert other == pytest.approx(losses, rel=2**-9)
            assert (params - after).norm() < 2**-8 * (after - before).norm()
