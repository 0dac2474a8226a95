"""Muon in one process: Newton-Schulz, patterns, scale rules, decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from optim import apply_updates, make_step, muon, newton_schulz
from optim.matrices import matrices_of
from optim.roots import balanced
from ragged import rules


def w(shape: tuple[int, ...], k: int) -> Tensor:
    n = int(torch.tensor(shape).prod())
    return (((37 * torch.arange(n) + 11 * k) % 101 - 50) / 50).view(shape)


def reference(g: Tensor) -> Tensor:
    """The plainest Newton-Schulz, in fp64."""
    x = g.double()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / max(float(torch.linalg.matrix_norm(x)), 1e-7)
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.T if tall else x


def direction(g: Tensor, **options: Any) -> Tensor:
    """The first step's direction without decay: what is subtracted at learning rate 1."""
    how = {"momentum": 0.0, "weight_decay": 0.0, "ns_dtype": torch.float32, **options}
    tx = muon(1.0, **how)
    p = {"w": torch.zeros_like(g)}
    return -tx.update({"w": g}, tx.init(p), p)[0]["w"]


@pytest.mark.parametrize(
    "g", [w((8, 4), 1), w((4, 8), 2), w((13, 7), 6), w((8, 3), 1), w((5, 5), 3), torch.ones(4, 4), 5 * torch.eye(4)]
)
def test_newton_schulz_equals_the_reference(g: Tensor) -> None:
    torch.testing.assert_close(newton_schulz(g[None])[0].double(), reference(g), atol=1e-4, rtol=0)
    torch.testing.assert_close(newton_schulz(g.double()[None])[0], reference(g), atol=1e-9, rtol=0)
    torch.testing.assert_close(newton_schulz(g.T[None])[0], newton_schulz(g[None])[0].T, atol=1e-5, rtol=0)


def test_named_values() -> None:
    """MU-01, MoonshotAI/Moonlight#27; MU-04, pytorch/pytorch#160213."""
    x = newton_schulz(w((8, 4), 1)[None])[0]
    assert x[0, 0].item() == pytest.approx(-0.256, abs=1e-4)
    assert x[7, 3].item() == pytest.approx(-0.328540, abs=1e-4)
    assert x.norm().item() == pytest.approx(1.906042, abs=1e-4)
    for g in (w((1, 8), 1), w((8, 1), 1)):
        torch.testing.assert_close(newton_schulz(g[None])[0], 0.696436 * g / g.norm(), atol=1e-5, rtol=0)
    torch.testing.assert_close(newton_schulz(torch.ones(1, 4, 4))[0], torch.full((4, 4), 0.174109), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-12, 1e12, 1e30, 3e38])
def test_any_scale_gives_the_same_direction(size: float) -> None:
    g = w((6, 4), 1)
    torch.testing.assert_close(newton_schulz((g * size)[None]), newton_schulz(g[None]), atol=2e-3, rtol=0)


def test_a_batch_is_its_matrices() -> None:
    g = torch.stack([w((4, 6), k) for k in range(3)])
    for i, x in enumerate(newton_schulz(g)):
        torch.testing.assert_close(x, newton_schulz(g[i : i + 1])[0])


def test_zero_gradients_leave_weights_alone() -> None:
    """MU-02, microsoft/dion#24."""
    tx, p = muon(0.1, weight_decay=0.0), {"w": torch.ones(6, 4)}
    state = tx.init(p)
    for _ in range(3):
        updates, state = tx.update({"w": torch.zeros(6, 4)}, state, p)
        assert torch.equal(updates["w"], torch.zeros(6, 4))
    updates, state = tx.update({"w": w((6, 4), 1)}, state, p)
    assert updates["w"].isfinite().all()
    assert updates["w"].abs().max() > 0.01


def test_convolutions_and_experts() -> None:
    """MU-05, KellerJordan/Muon#60: the scale of a flattened kernel; MU-07, pytorch/torchtitan#1584: one per expert."""
    g = w((12, 1, 3, 3), 3)
    x = direction(g, matrix="o i kh kw -> o (i kh kw)")
    assert 0.02 * x[0, 0, 0, 0].item() == pytest.approx(-0.001082, abs=1e-6)
    torch.testing.assert_close(x.view(12, 9).double(), reference(g.view(12, 9)) * (12 / 9) ** 0.5, atol=1e-4, rtol=0)
    e = w((3, 4, 6), 5)
    x = direction(e, matrix="e m n -> e m n")
    assert x[2, 3, 5].item() == pytest.approx(0.328398, abs=1e-4)
    for i in range(3):
        torch.testing.assert_close(x[i].double(), reference(e[i]), atol=1e-4, rtol=0)


def test_patterns_that_permute_and_sections() -> None:
    g = w((4, 3, 6), 2)
    x = direction(g, matrix="m h d -> h m d")
    for h in range(3):
        torch.testing.assert_close(x[:, h].double(), reference(g[:, h]), atol=1e-4, rtol=0)
    q = w((12, 4), 3)
    x = direction(q, split=(6, 3, 3), adjust_lr_fn="match_rms_adamw")
    for part, got in zip(q.split([6, 3, 3]), x.split([6, 3, 3]), strict=True):
        want = reference(part) * 0.2 * max(part.shape) ** 0.5
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=0)
    heads = direction(q, matrix=("(h d) m -> h d m", {"h": 3}))
    torch.testing.assert_close(heads[4:8].double(), reference(q[4:8]), atol=1e-4, rtol=0)


def in_bf16(x: Tensor) -> Tensor:
    """Every rounding as in torch.optim.Muon, which normalises in bf16 too."""
    (y,) = x
    tall = y.shape[0] > y.shape[1]
    y = y.T if tall else y
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(5):
        s = y @ y.T
        y = torch.addmm(y, torch.addmm(s, s, s, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return (y.T if tall else y)[None]


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(16, 4), (4, 16), (8, 8)])
def test_equals_torch(rule: str, nesterov: bool, shape: tuple[int, int]) -> None:
    p = w(shape, 9)
    theirs = torch.nn.Parameter(p.clone())
    opt = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=rule)
    tx = muon(0.02, nesterov=nesterov, adjust_lr_fn=rule, ns=in_bf16, ns_dtype=torch.bfloat16)
    params, step = {"w": p.clone()}, make_step(tx)
    state = tx.init(params)
    for k in (1, 2, 3):
        theirs.grad = w(shape, k)
        opt.step()
        params, state = step(params, {"w": w(shape, k)}, state)
    # the factor of the step is rounded to bf16 with the direction
    assert (params["w"] - theirs).abs().max() < 0.02 * 3 * 2**-8
    assert state.count == 3


def test_three_steps_by_value() -> None:
    """MU-16, microsoft/dion#113."""
    tx = muon(0.02, ns_dtype=torch.float32)
    p = {"w": w((16, 4), 9)}
    state = tx.init(p)
    for k in (1, 2, 3):
        updates, state = tx.update({"w": w((16, 4), k)}, state, p)
        p = apply_updates(p, updates)
    assert p["w"][0, 0].item() == pytest.approx(1.006773, abs=1e-5)
    assert p["w"][15, 3].item() == pytest.approx(-0.856879, abs=1e-5)


@pytest.mark.parametrize(("rate", "decay", "want"), [(0.1, 0.5, 1.9), (0.01, 10.0, 1.8)])
def test_decay_reaches_the_weight(rate: float, decay: float, want: float) -> None:
    """MU-17, tinygrad/tinygrad#17709; update and step alike."""
    tx, p = muon(rate, weight_decay=decay), {"w": torch.full((4, 4), 2.0)}
    grads = {"w": torch.zeros(4, 4)}
    assert torch.allclose(apply_updates(p, tx.update(grads, tx.init(p), p)[0])["w"], torch.tensor(want))
    assert torch.allclose(make_step(tx)(p, grads, tx.init(p))[0]["w"], torch.tensor(want))


def test_schedules_see_the_count_before_the_step() -> None:
    tx, p = muon(lambda count: 0.1 * count, weight_decay=0.0), {"w": torch.zeros(4, 4)}
    updates, state = tx.update({"w": torch.eye(4)}, tx.init(p), p)
    assert torch.equal(updates["w"], torch.zeros(4, 4))
    assert tx.update({"w": torch.eye(4)}, state, p)[0]["w"].abs().max() > 0.05


@pytest.mark.parametrize(
    ("tree", "options", "words"),
    [
        ({"b": torch.ones(4)}, {}, ["'b'", "(4,)", "is no matrix", "einops pattern"]),
        ({"e": torch.ones(2, 3, 4)}, {}, ["'e'", "(2, 3, 4)", "e m n -> e m n"]),
        ({"w": torch.ones(4, 4, dtype=torch.int32)}, {}, ["'w'", "int32"]),
        ({"w": torch.ones(4, 4, dtype=torch.complex64)}, {}, ["'w'", "complex64"]),
        ({"w": torch.ones(4, 4)}, {"matrix": "a b c -> a b c"}, ["'w'", "a b c -> a b c"]),
        ({"w": torch.ones(4, 4)}, {"matrix": "a b -> (a b)"}, ["'w'", "leaves 1 axes"]),
        ({"w": torch.ones(4, 4)}, {"split": (1, 2)}, ["'w'", "(1, 2)", "4 rows"]),
        ({"w": torch.ones(4, 4)}, {"matrix": rules({"v": None, "**": None})}, ["'v'", "matches no leaf"]),
    ],
)
def test_refusals(tree: Any, options: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the words are looked at below
        muon(0.1, **options).init(tree)
    assert [word for word in words if word not in str(error.value)] == [], error.value


@pytest.mark.parametrize("options", [{"adjust_lr_fn": "no"}, {"roots": "no"}, {"momentum": 1.0}])
def test_options(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        muon(0.1, **options)


def test_zero_size_and_none() -> None:
    tx, p = muon(0.1), {"w": torch.ones(0, 4), "n": None, "v": torch.ones(2, 2)}
    updates, _ = tx.update(p, tx.init(p), p)
    assert updates["w"].shape == (0, 4)
    assert updates["n"] is None


def test_roots_are_balanced() -> None:
    costs = [7, 1, 3, 3, 5, 2, 2, 9, 4, 4]
    at = balanced(costs, 4)
    load = [sum(c for c, k in zip(costs, at, strict=True) if k == r) for r in range(4)]
    assert max(load) == 10
    assert sum(load) == sum(costs)
    assert balanced([1, 1], 2, [5, 0]) == [1, 1]
    assert balanced([], 3) == []


def test_runs_of_a_stack() -> None:
    how = matrices_of("w", (2, 6, 4), "e m n -> e m n", (4, 2))
    assert list(how.runs()) == [(0, 4, 4), (16, 2, 4), (24, 4, 4), (40, 2, 4)]
    assert not matrices_of("w", (2, 6, 4), "e m n -> m e n", None).in_place
