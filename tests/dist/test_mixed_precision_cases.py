"""Named cases of mixed precision: masters that keep small updates, sums and moments in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import MixedPrecision, gathered, value_and_grad
from optim import adamw, make_step, sgd
from ragged import P, shard, unshard
from tests.dist.test_value_and_grad import mesh

B, S, L = torch.bfloat16, torch.float32, torch.float64
MIXED = MixedPrecision(B, reduce_dtype=S)


def masters(dtype: torch.dtype) -> tuple[float, float]:
    """MP-01: what the master is after a hundred steps of -6e-4, and what its bf16 copy is."""
    params = shard({"w": torch.ones(3, dtype=dtype)}, mesh(), P(ragged="fsdp"))
    seen: list[float] = []

    def loss(p: Any) -> Tensor:
        seen.append(p["w"][2].item())
        return p["w"].sum()  # type: ignore[no-any-return]

    tx, f = sgd(6e-4), value_and_grad(gathered(loss), precision=MIXED)
    state, step = tx.init(params), make_step(tx)
    for _ in range(100):
        params, state = step(params, f(params)[1], state)
    f(params)
    return unshard(params)["w"][2].item(), seen[-1]


@pytest.mark.parametrize("dtype", [S, L])
def test_small_updates_reach_the_masters_of_bf16_computation(run: Any, dtype: torch.dtype) -> None:
    want = torch.ones((), dtype=dtype)
    for _ in range(100):
        want = want - 6e-4  # in fp32 each of these is rounded up, by 2e-8: 0.940002
    for master, copy in run(2, masters, dtype):
        assert master == want.item()
        assert master == pytest.approx(0.94, rel=0, abs=1e-6 if dtype == L else 2e-6)
        assert copy == 0.94140625


def gradient_of_unequal_ranks(frozen_first: str) -> list[tuple[torch.dtype, set[float]]]:
    """MP-02, and MP-04: the same unit when nothing of it was trained in its first step."""
    w, other = (shard({"w": torch.ones(5)}, mesh(), P(ragged="fsdp")) for _ in range(2))
    factor = 256.0 if dist.get_rank() == 0 else 1.0
    call = gathered(lambda p: (p["w"] * factor).sum())
    f = value_and_grad(lambda p, q: call(p) + call(q), precision=MIXED)
    if frozen_first == "argument":
        f(other, w)
    elif frozen_first == "no grad":
        with torch.no_grad():
            gathered(lambda p: p["w"].sum(), precision=MIXED)(w)
    grads = [f(w, other)[1] for _ in range(2)]
    return [(g.tensors[0].dtype, set(unshard(g)["w"].tolist())) for g in grads]


@pytest.mark.parametrize("frozen_first", ["", "argument", "no grad"])
def test_gradients_of_bf16_computation_are_summed_in_fp32(run: Any, frozen_first: str) -> None:
    for found in run(8, gradient_of_unequal_ranks, frozen_first):
        assert found == [(S, {32.875})] * 2


def adam_moments() -> None:
    """MP-05, for equal gradients g in closed form."""
    g, n = 2**-8, 300
    params = shard({"w": torch.ones(3, 2)}, mesh(), P(ragged="fsdp"))
    f = value_and_grad(gathered(lambda p: (p["w"] * g).sum()), precision=MIXED)
    tx = adamw(1e-3, weight_decay=0.0)
    state, step = tx.init(params), make_step(tx)
    for _ in range(n):
        params, state = step(params, f(params)[1], state)
        assert {x.dtype for tree in (params, state[0].mu, state[0].nu) for x in tree.tensors} == {S}
    got = [set(unshard(tree)["w"].flatten().tolist()) for tree in (state[0].nu, state[0].mu, params)]
    want = [(1 - 0.999**n) * g**2, (1 - 0.9**n) * g, 1 - n * 1e-3 * g / (g + 1e-8)]
    for (value,), exact in zip(got, want, strict=True):
        assert value == pytest.approx(exact, rel=1e-5, abs=0)


def test_adam_keeps_fp32_moments(run: Any) -> None:
    run(2, adam_moments)
