"""What stays full after forward, what is computed again: memory against messages, never other gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fsdp import fold, gathered, value_and_grad
from ragged import collectives, partition, unshard
from tests.models import LAYERS, D, block, make_params, tokens

POLICIES: dict[str, tuple[Any, int]] = {
    # reshard_after_forward in bytes or in layers, and how many layers stay full besides the one used last
    "True": (True, 0),
    "no bytes": (0, 0),
    "a byte less than a unit": ((1, -1), 0),
    "one unit": ((1, 0), 1),
    "two units and a half": ((2, 500), 2),
    "everything": ((LAYERS, 0), LAYERS - 1),
    "False": (False, LAYERS - 1),
}


def budget(of: Any, params: Any) -> Any:
    """Bytes of so many layers, and some."""
    if not isinstance(of, tuple):
        return of
    (bucket,) = {b.length: b for b in params.plan.buckets if b.unit.startswith("layers")}.values()
    return of[0] * bucket.length * 4 + of[1]


def layers_only(name: str, remat: bool) -> tuple[Any, ...]:
    """Messages of a step of the fold alone; which layers were full between forward and backward; gradients."""
    storages: dict[int, torch.UntypedStorage] = {}
    full: list[bool] = []

    def spy(p: Any, x: Tensor) -> Tensor:
        s = p["w"].untyped_storage()
        storages.setdefault(s._cdata, s)
        return block(p, x)

    params = make_params()
    body = gathered(spy, reshard_after_forward=budget(POLICIES[name][0], params), remat=remat)

    def loss(p: Any, x: Tensor) -> Tensor:
        y = fold(body, p["layers"], x).square().mean()
        full.extend(s.nbytes() > 0 for s in storages.values())
        return y  # type: ignore[no-any-return]

    f = value_and_grad(loss)
    x = torch.linspace(-1, 1, 2 * D).view(2, D)
    for _ in range(3):
        storages.clear()
        full.clear()
        with collectives.record() as events:
            value, grads = f(params, x)
    assert not any(s.nbytes() for s in storages.values())
    return Counter(e.kind for e in events), full, (value, *grads.tensors)


def all_policies() -> None:
    """Messages, what is full, and gradients, bit for bit, of all policies."""
    reference = None
    for name, (_, more) in POLICIES.items():
        for remat in (False, True):
            messages, full, result = layers_only(name, remat)
            # every layer once in forward, and again in backward unless it is still full
            assert messages == {"all_gather": 2 * LAYERS - (1 + more), "reduce_scatter": LAYERS, "all_reduce": 2}
            assert full == [False] * (LAYERS - 1 - more) + [True] * (1 + more), name
            reference = reference or result
            assert all(torch.equal(a, b) for a, b in zip(result, reference, strict=True))


def test_bytes_that_stay_save_gathers_and_change_no_gradient(run: Any) -> None:
    run(2, all_policies)


def mixed_sizes() -> list[str]:
    """Units that are full between forward and backward, of different sizes and budgets."""
    params, storages = make_params(), {}

    def spy(name: str, fn: Any) -> Any:
        def call(p: Any, *args: Any) -> Tensor:
            tensor = p if isinstance(p, Tensor) else p["w"]
            storages[name] = tensor.untyped_storage()
            return fn(p, *args)  # type: ignore[no-any-return]

        return call

    embed = gathered(spy("embed", lambda p, t: p[t]), reshard_after_forward=2**20)
    bodies = [gathered(spy(f"{i}", block), reshard_after_forward=i != 2) for i in range(LAYERS)]
    head = gathered(spy("head", lambda p, x: (x * p["norm"] @ p["w"]).sum()))
    seen: list[str] = []

    def loss(p: Any, t: Tensor) -> Tensor:
        x = embed(p["embed"], t)
        for body, layer in zip(bodies, p["layers"], strict=True):
            x = body(layer, x)
        y = head(p["head"], x)
        seen[:] = [name for name, s in storages.items() if s.nbytes()]
        return y  # type: ignore[no-any-return]

    f = value_and_grad(loss)
    for _ in range(2):
        f(params, tokens())
    assert not any(s.nbytes() for s in storages.values())
    return seen


def test_every_function_has_its_own_budget(run: Any) -> None:
    assert run(2, mixed_sizes) == [["embed", "2", "head"]] * 2


def noisy(p: Any, x: Tensor, scale: float = 1.0, *, shift: Tensor) -> Any:
    h = F.gelu(torch.tanh(x @ p["w"] + p["b"]) * scale)
    return {"x": x + F.dropout(h, 0.5) + shift, "note": "kept"}


def recomputed(sharded: bool) -> None:
    """Dropout, keywords, a dict of results: the same bits, fewer saved bytes, as many messages."""
    params: Any = make_params() if sharded else unshard(make_params())
    shift = torch.linspace(0, 1, D)
    found: dict[int, Any] = {}
    for remat in (False, True):
        saved: list[int] = []
        calls: list[bool] = []

        def layer(p: Any, x: Tensor, *args: Any, calls: list[bool] = calls, **kwargs: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            return noisy(p, x, *args, **kwargs)

        body = gathered(layer, remat=remat)

        def step(p: Any, v: dict[str, Tensor], body: Any = body) -> Any:
            return body(p, v["x"], 0.5, shift=shift)

        def pack(t: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(t.nbytes)
            return t

        def loss(p: Any, t: Tensor, step: Any = step, pack: Any = pack) -> Any:
            with saved_tensors_hooks(pack, lambda t: t):
                v = fold(step, p["layers"], {"x": gathered(lambda p, t: p[t])(p["embed"], t)})
                return v["x"].square().mean(), v["note"]

        f = value_and_grad(loss, has_aux=True)
        for seed in (0, 1):
            calls.clear()
            saved.clear()
            torch.manual_seed(seed)
            with collectives.record() as events:
                (value, note), grads = f(params, tokens(share=sharded))
            assert note == "kept"
            assert len(calls) == LAYERS * (1 + remat)
            result = [value, *optree.tree_leaves(grads), torch.rand(3)]  # generators go on alike, too
            want = found.setdefault(seed, (result, Counter(e.kind for e in events), sum(saved)))
            assert all(torch.equal(a, b) for a, b in zip(result, want[0], strict=True))
            assert Counter(e.kind for e in events) == want[1]
            assert sum(saved) < want[2] / 3 if remat else sum(saved) == want[2]
    with torch.no_grad():
        gathered(noisy, remat=True)(params["layers"][0], torch.ones(2, D), shift=shift)


@pytest.mark.parametrize(("n", "sharded"), [(1, True), (2, True), (1, False)])
def test_remat_saves_activations_and_keeps_every_bit(run: Any, n: int, sharded: bool) -> None:
    run(n, recomputed, sharded)


def frozen_units(by_plan: bool, reshard: bool, trained_below: bool) -> tuple[list[int], Counter[str], list[bool]]:
    """How many frozen layers are full while backward is inside each of them, from the last to the first."""

    def where(path: str, _: Any) -> bool:
        return path.startswith("layers") or (path == "embed" and not trained_below)

    params = make_params(frozen=where if by_plan else None)
    trained, rest = (params, None) if by_plan else partition(params, lambda path, leaf: not where(path, leaf))
    storages: dict[int, torch.UntypedStorage] = {}
    full: list[int] = []

    def count(s: torch.UntypedStorage) -> None:
        assert s.nbytes() > 0
        full.append(sum(s.nbytes() > 0 for s in storages.values()))

    def spy(p: Any, x: Tensor) -> Tensor:
        s = p["w"].untyped_storage()
        storages.setdefault(s._cdata, s)
        h = x @ p["w"] + p["b"]
        if h.requires_grad:
            h.register_hook(lambda g: count(s))
        return x + torch.tanh(h)

    body = gathered(spy, reshard_after_forward=reshard)

    def loss(p: Any, q: Any, t: Tensor) -> Tensor:
        q = q or p
        x = gathered(lambda p, t: p[t])((p if trained_below or by_plan else q)["embed"], t)
        x = fold(body, q["layers"], x)
        return gathered(lambda p, x: (x * p["norm"] @ p["w"]).square().mean())(p["head"], x)  # type: ignore[no-any-return]

    f = value_and_grad(loss)
    for _ in range(3):
        storages.clear()
        full.clear()
        with collectives.record() as events, mock.patch("ragged.ahead.AHEAD", 0):  # as for large layers
            _, grads = f(trained, rest, tokens())
    zero = [not t.any() for t, b in zip(grads.tensors, grads.plan.buckets, strict=False) if b.frozen]
    assert not any(s.nbytes() for s in storages.values())
    return list(full), Counter(e.kind for e in events), zero


@pytest.mark.parametrize("by_plan", [True, False])
def test_frozen_units_are_freed_as_backward_passes_them(run: Any, by_plan: bool) -> None:
    for full, messages, zero in run(2, frozen_units, by_plan, True, True):
        # each layer, and the one before it on its way; nothing before the first
        assert full == [2] * (LAYERS - 1) + [1]
        assert messages["all_gather"] == 2 * (LAYERS + 2) - 1
        assert messages["reduce_scatter"] == 2
        assert all(zero)
    for full, messages, _ in run(2, frozen_units, by_plan, False, True):
        assert full == list(range(LAYERS, 0, -1))
        assert messages["all_gather"] == LAYERS + 2 + 1  # the embedding comes again
    for full, messages, _ in run(2, frozen_units, by_plan, True, False):
        assert (full, messages["all_gather"], messages["reduce_scatter"]) == ([], LAYERS + 2, 1)  # backward ends above


def test_budgets_are_numbers_of_bytes() -> None:
    for wrong in (-1, 1.5, None, "all"):
        with pytest.raises(ValueError, match=r"expected True, False, or a number of bytes >= 0"):
            gathered(block, reshard_after_forward=wrong)  # type: ignore[arg-type]
