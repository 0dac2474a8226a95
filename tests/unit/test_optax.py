"""A second oracle: optax's AdamW and Muon, where optax is installed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor

import optim
from optim import schedules
from ragged import P, ShardedTree, make_mesh, shard, unshard
from tests.unit.test_muon import w

optax = pytest.importorskip("optax")
contrib = pytest.importorskip("optax.contrib")
jnp = pytest.importorskip("jax.numpy")
jax = pytest.importorskip("jax")

STEPS = 10
MATRICES = {"square": (8, 8), "tall": (13, 7), "wide": (6, 16), "row": (1, 9)}
TREE = {**MATRICES, "bias": (17,), "scalar": (), "zero": (0, 3)}


@pytest.fixture(autouse=True)
def _precisely() -> Iterator[None]:
    """Scalars in fp64, trees in fp32: in fp32 optax's `1 - b2^t` is off by up to 3e-5 of itself at the first step."""
    jax.config.update("jax_enable_x64", True)
    with jax.default_matmul_precision("float32"):  # on some devices jax's default is less
        yield
    jax.config.update("jax_enable_x64", False)


def values(shapes: dict[str, tuple[int, ...]], k: int) -> dict[str, Tensor]:
    return {key: w(shape, k + i).float() for i, (key, shape) in enumerate(shapes.items())}


def theirs(tree: Any) -> Any:
    return {key: jnp.asarray(x.numpy()) for key, x in tree.items()}


def plain(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def sharded(tree: Any) -> ShardedTree:
    return shard(tree, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"))


def full(tree: Any) -> Any:
    return unshard(tree) if isinstance(tree, ShardedTree) else tree


def close(got: Any, want: Any, tolerance: float) -> None:
    for key, x in full(got).items():
        torch.testing.assert_close(x, torch.from_numpy(np.array(want[key])), rtol=tolerance, atol=tolerance)


@functools.cache
def reference(kind: str, name: str) -> tuple[Any, Any]:
    """optax's parameters and state after all steps; compiled once per case."""
    shapes, other = (TREE, ADAM[name][1]) if kind == "adamw" else (MATRICES, their_muon(name))
    params = theirs(values(shapes, 0))
    state, update = other.init(params), jax.jit(other.update)
    for k in range(1, STEPS + 1):
        updates, state = update(theirs(values(shapes, 7 * k)), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def matrices_only(tree: Any) -> Any:
    return {key: x.ndim >= 2 for key, x in tree.items()}


RATE = schedules.warmup_cosine_decay_schedule(0.02, 0.1, 3, 8, 0.01)
THEIR_RATE = optax.warmup_cosine_decay_schedule(0.02, 0.1, 3, 8, 0.01)
ADAM: dict[str, tuple[Any, Any]] = {
    "defaults": (optim.adamw(0.1), optax.adamw(0.1)),
    "decay": (optim.adamw(0.1, weight_decay=0.2), optax.adamw(0.1, weight_decay=0.2)),
    "numbers": (optim.adamw(0.03, 0.8, 0.95, 1e-3), optax.adamw(0.03, 0.8, 0.95, 1e-3)),
    "mask": (
        optim.adamw(0.1, weight_decay=0.2, mask=lambda path, leaf: len(leaf.shape) >= 2),
        optax.adamw(0.1, weight_decay=0.2, mask=matrices_only),
    ),
    "schedule": (optim.adamw(RATE, weight_decay=0.2), optax.adamw(THEIR_RATE, weight_decay=0.2)),
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("place", [plain, sharded])
@pytest.mark.parametrize("name", ADAM)
def test_adamw(name: str, place: Any, donate: bool) -> None:
    tx, params = ADAM[name][0], place(values(TREE, 0))
    state, step = tx.init(params), optim.make_step(tx, donate=donate)
    for k in range(1, STEPS + 1):
        params, state = step(params, place(values(TREE, 7 * k)), state)
    wanted, (adam, *_) = reference("adamw", name)
    close(params, wanted, 1e-6)
    close(state[0].mu, adam.mu, 1e-6)
    close(state[0].nu, adam.nu, 1e-6)
    assert int(state[0].count) == int(adam.count) == STEPS


def flipped(tree: Any) -> Any:
    """optax multiplies from the left, `x @ W`: for its factors of the step our rows are its outputs."""
    return optree.tree_map(lambda x: contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0), tree)


MUON: dict[str, tuple[Any, Any, Any]] = {
    "original": ({}, {}, 0.02),
    "match_rms_adamw": ({"adjust_lr_fn": "match_rms_adamw"}, {"consistent_rms": 0.2}, 0.02),
    "decay": ({"weight_decay": 0.5}, {"weight_decay": 0.5}, 0.1),
    "mask": (
        {"weight_decay": 0.5, "mask": lambda path, leaf: path != "tall"},
        {"weight_decay": 0.5, "weight_decay_mask": lambda tree: {key: key != "tall" for key in tree}},
        0.1,
    ),
    "schedule": ({}, {}, (RATE, THEIR_RATE)),
}


def their_muon(name: str) -> Any:
    _, more, rates = MUON[name]
    rate = rates[1] if isinstance(rates, tuple) else rates
    return contrib.muon(rate, beta=0.9, nesterov=False, muon_weight_dimension_numbers=flipped, **more)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("place", [plain, sharded])
@pytest.mark.parametrize("name", MUON)
def test_muon(name: str, place: Any, donate: bool) -> None:
    """Without Nesterov, where optax's correction of bias is a factor, which the norm takes out again.

    Five iterations take a small singular value up by 3.4445^5 = 485, and so the rounding of fp32 to 485 * 6e-8 =
    3e-5 of a direction of size 1: directions agree to 1e-4, parameters to that times the learning rates.
    """
    more, _, rates = MUON[name]
    rate = rates[0] if isinstance(rates, tuple) else rates
    tx = optim.muon(rate, 0.9, nesterov=False, ns_dtype=torch.float32, **{"weight_decay": 0.0, **more})
    params = place(values(MATRICES, 0))
    state, step = tx.init(params), optim.make_step(tx, donate=donate)
    for k in range(1, STEPS + 1):
        params, state = step(params, place(values(MATRICES, 7 * k)), state)
    wanted, their_state = reference("muon", name)
    moved = sum(float(rate(k)) for k in range(STEPS)) if callable(rate) else rate * STEPS
    close(state.mu, their_state.inner_states["muon"].inner_state[0].mu, 1e-6)
    close(params, wanted, 1e-4 * moved)


@pytest.mark.parametrize("place", [plain, sharded])
@pytest.mark.parametrize("nesterov", [False, True])
def test_directions_of_muon(place: Any, nesterov: bool) -> None:
    """The orthogonalized momentum itself, once optax's correction of bias has died out: 0.5^25 is less than fp32 sees.

    Before, with Nesterov, optax weighs momentum and gradient otherwise than torch.optim.Muon and we do.
    """
    tx = optim.muon(1.0, 0.5, nesterov=nesterov, weight_decay=0.0, ns_dtype=torch.float32)
    other = contrib.scale_by_muon(beta=0.5, nesterov=nesterov, weight_dimension_numbers=flipped)
    params = place(values(MATRICES, 0))
    state, their_state, update = tx.init(params), other.init(theirs(values(MATRICES, 0))), jax.jit(other.update)
    for k in range(1, 27):
        updates, state = tx.update(place(values(MATRICES, 7 * k)), state, params)
        wanted, their_state = update(theirs(values(MATRICES, 7 * k)), their_state)
    close(state.mu, their_state.mu, 1e-6)
    factors = {key: max(1.0, rows / cols) ** 0.5 for key, (rows, cols) in MATRICES.items()}
    close({key: -x / factors[key] for key, x in full(updates).items()}, wanted, 1e-4)
