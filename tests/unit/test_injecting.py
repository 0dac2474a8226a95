"""Hyperparameters in the state, and named chains."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import optim
from optim import schedules


def tree() -> dict[str, torch.Tensor]:
    return {"w": torch.linspace(-1, 1, 24).view(6, 4), "b": torch.linspace(1, 2, 6)}


def steps(tx: Any, n: int = 3, fused: bool = False) -> tuple[Any, Any]:
    p = tree()
    state = tx.init(p)
    for k in range(n):
        g = optree.tree_map(lambda x, k=k: (x + k).sin(), tree())
        if fused:
            p, state = optim.make_step(tx)(p, g, state)
        else:
            updates, state = tx.update(g, state, p)
            p = optim.apply_updates(p, updates)
    return p, state


def equal(a: Any, b: Any) -> bool:
    return bool(optree.tree_all(optree.tree_map(torch.equal, a, b)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("factory", [optim.adamw, optim.sgd, optim.adamw8bit])
def test_injected_numbers_give_the_same_bits(factory: Any, fused: bool) -> None:
    want, _ = steps(factory(0.1), fused=fused)
    got, state = steps(optim.inject_hyperparams(factory)(0.1), fused=fused)
    assert equal(got, want)
    assert state.count.item() == 3
    assert state.hyperparams["learning_rate"].item() == 0.1


def test_which_arguments_are_hyperparameters() -> None:
    tx = optim.inject_hyperparams(optim.adamw8bit)(1, mask=lambda path, leaf: path == "w")
    names = {"learning_rate", "b1", "b2", "eps", "weight_decay"}
    assert set(tx.init(tree()).hyperparams) == names
    tx = optim.inject_hyperparams(optim.adamw8bit, static_args=("b1", "eps"))(1)
    assert set(tx.init(tree()).hyperparams) == names - {"b1", "eps"}
    assert set(optim.inject_hyperparams(optim.sgd, "learning_rate")(0.1).init(tree()).hyperparams) == set()


def test_what_is_set_is_used_by_the_next_step() -> None:
    tx = optim.inject_hyperparams(optim.sgd)(0.1)
    p, g = tree(), optree.tree_map(torch.ones_like, tree())
    state = tx.init(p)
    for rate in (0.1, torch.tensor(0.5), 0.0):
        state.hyperparams["learning_rate"] = rate
        updates, state = tx.update(g, state, p)
        assert equal(updates, optree.tree_map(lambda x, r=rate: x * -float(r), g))
        assert state.hyperparams["learning_rate"].dtype == torch.float64  # states keep their dtypes


def test_schedules_are_asked_in_every_step() -> None:
    rate = schedules.linear_schedule(0.0, 1.0, 4)
    got, state = steps(optim.inject_hyperparams(optim.adamw)(rate))
    assert state.hyperparams["learning_rate"].item() == 0.5  # what the third step used
    want, _ = steps(optim.adamw(lambda count: rate(int(count))))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_injection_passes_what_plans_ask() -> None:
    tx = optim.inject_hyperparams(optim.adamw8bit)(0.1, block=128)
    assert tx.blocks is not None
    assert tx.blocks("w", (64, 128), torch.float32) == (128, 128)


def test_wrong_names() -> None:
    with pytest.raises(ValueError, match=r"static_args \['lr'\] are no arguments"):
        optim.inject_hyperparams(optim.sgd, "lr")
    tx = optim.inject_hyperparams(optim.sgd)(0.1)
    state = tx.init(tree())
    state.hyperparams["lr"] = 1.0
    with pytest.raises(ValueError, match=r"hyperparams \['lr'\]"):
        tx.update(tree(), state, tree())


@pytest.mark.parametrize("fused", [False, True])
def test_a_named_chain_is_a_chain(fused: bool) -> None:
    parts = {"clip": optim.clip_by_global_norm(1.0), "adam": optim.adamw(0.1)}
    want, states = steps(optim.chain(*parts.values()), fused=fused)
    got, named = steps(optim.named_chain(*parts.items()), fused=fused)
    assert equal(got, want)
    assert list(named) == ["clip", "adam"]
    assert equal(named["adam"], states[1])


def test_names_must_differ_and_fit() -> None:
    with pytest.raises(ValueError, match="not distinct"):
        optim.named_chain(("a", optim.sgd(0.1)), ("a", optim.sgd(0.1)))
    tx = optim.named_chain(("a", optim.sgd(0.1)))
    with pytest.raises(ValueError, match=r"named_chain of \['a'\] got a state of \['b'\]"):
        tx.update(tree(), {"b": ()}, tree())
