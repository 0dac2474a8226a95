"""Optimizers over sharded modules: torch's element-wise ones, clipping, and ours behind torch's interface."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import (
    as_torch_optimizer,
    full_parameters,
    fully_shard,
    functionalize,
    value_and_grad,
)
from optim import adamw, adamw8bit, chain, clip_by_global_norm, inject_hyperparams, make_step, muon, partition
from ragged import P, collectives, rules, shard, unshard
from tests.sharded_modules import batch, differ, loss_of, mesh, mine, model, sharded

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd, foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}


def with_torchs_optimizers() -> list[tuple[str, float, float]]:
    out = []
    for name, make in OPTIMIZERS.items():
        a, b = sharded(model()), model()
        ours, theirs = make(a.parameters()), make(b.parameters())
        apart = 0.0
        for step in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            loss_of(a, mine(batch(step))).backward()
            loss_of(b, batch(step)).backward()
            order = (2.0, 1.0, float("inf"))[step]
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05, norm_type=order) for m in (a, b)]
            assert type(norms[0]) is Tensor
            apart = max(apart, abs(norms[0].item() / norms[1].item() - 1))
            ours.step()
            theirs.step()
        out.append((name, differ(a, b), apart))
    return out


@pytest.mark.parametrize("ranks", [1, 3])
def test_torchs_elementwise_optimizers_and_clipping(run: Any, ranks: int) -> None:
    for rows in run(ranks, with_torchs_optimizers):
        for name, apart, norm in rows:
            assert apart < 2e-6, name
            assert norm < 1e-6, name


def refused() -> list[str]:
    said = []
    for make in (torch.optim.Muon, torch.optim.Adafactor):
        torch.manual_seed(0)
        a = sharded(nn.Sequential(nn.Linear(4, 4, bias=False)))
        optimizer = make(a.parameters())
        loss_of(a, torch.ones(2, 4)).backward()
        with pytest.raises(ValueError, match="as_torch_optimizer") as error:
            optimizer.step()
        said.append(str(error.value))
    leaf: Any = a[0].weight
    for bad in (lambda: leaf @ torch.ones(4), lambda: leaf[0], lambda: leaf.sum(), lambda: leaf + torch.ones(4, 4)):
        with pytest.raises(ValueError, match=r"0\.weight"):
            bad()
    for bad in (lambda: pickle.dumps(leaf), lambda: copy.deepcopy(a), lambda: fully_shard(a), lambda: a.half()):
        with pytest.raises(ValueError, match="shard"):
            bad()
    return said


def test_what_looks_beyond_single_elements_is_refused_and_points_to_ours(run: Any) -> None:
    for said in run(2, refused):
        assert all("'0.weight'" in text and "(4, 4)" in text for text in said)


def messages_of_clipping() -> list[str]:
    a = sharded(model())
    loss_of(a, mine(batch(0))).backward()
    with collectives.record() as events:
        torch.nn.utils.clip_grad_norm_(a.parameters(), 0.1)
    return [e.kind for e in events]


def test_clipping_takes_one_message(run: Any) -> None:
    assert run(2, messages_of_clipping) == [["all_reduce"]] * 2


def ours() -> float:
    """Our optimizers behind torch's interface, against the functional loop: the same bits."""
    tx = chain(
        clip_by_global_norm(0.5),
        partition(
            {"m": muon(0.02), "q": adamw8bit(1e-2, min_size=16), "a": adamw(1e-2)},
            rules({"0.weight": "m", "2.weight": "q", "**": "a"}),
        ),
    )
    a = sharded(model(), optimizer=tx)
    optimizer = as_torch_optimizer(tx, a)
    apply, full, buffers = functionalize(model())
    params = shard(full, mesh(), P(ragged="fsdp"), units=["*"], optimizer=tx)
    f = value_and_grad(lambda p, x: (apply(p, buffers, x)[0] - 1).square().mean())
    state, step_fn = tx.init(params), make_step(tx)
    for step in range(4):
        loss_of(a, mine(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        _, grads = f(params, mine(batch(step)))
        params, state = step_fn(params, grads, state)
    found, want = full_parameters(a), unshard(params)
    return max((found[f"{i}.{k}"] - x).abs().max().item() for i, part in want.items() for k, x in part.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_our_optimizers_behind_torchs_interface(run: Any, ranks: int) -> None:
    assert run(ranks, ours) == [0.0] * ranks


def scheduled() -> list[float]:
    a = sharded(model())
    optimizer = as_torch_optimizer(inject_hyperparams(adamw)(learning_rate=0.1), a)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen = []
    for step in range(3):
        loss_of(a, mine(batch(step))).backward()
        optimizer.step()
        seen.append(float(optimizer.opt_state.hyperparams["learning_rate"]))
        schedule.step()
    fresh = as_torch_optimizer(inject_hyperparams(adamw)(learning_rate=0.1), a)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.0125
    return seen


def test_torchs_schedulers_turn_the_rate(run: Any) -> None:
    assert run(2, scheduled) == [[0.1, 0.05, 0.025]] * 2
