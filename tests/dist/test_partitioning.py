"""One transformation per label: the same as each by itself on its leaves, on any mesh, without more collectives."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import optree
import pytest
import torch

from fsdp import gathered, value_and_grad
from optim import adamw, add_decayed_weights, chain, freeze, make_step, masked, muon, partition, sgd
from ragged import TENSOR, P, ShardedTree, collectives, make_mesh, plan, rules, shard, unshard

SHAPES: dict[str, Any] = {
    "layers": [{"w": (8, 6), "b": (6,), "v": (6, 6), "n": None} for _ in range(2)],
    "head": (6, 5),
}
LABELS = rules({"**.w": "muon", "**.v": "muon", "head": "sgd", "**": "adam"})


def filled(k: float) -> Any:
    return optree.tree_map(
        lambda s: torch.linspace(-1, 1, int(torch.tensor(s).prod())).view(s).sin() * k,
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def make_tx() -> Any:
    mine = {"muon": muon(0.1, ns_dtype=torch.float32), "adam": adamw(0.01), "sgd": sgd(0.1, 0.9)}
    return chain(add_decayed_weights(0.01), partition(mine, LABELS))


def trained(params: Any, make: Any, tx: Any, donate: bool) -> tuple[Any, Any]:
    state, step = tx.init(params), make_step(tx, donate=donate)
    for k in range(3):
        params, state = step(params, make(0.5 + k), state)
    return params, state


def on_ranks(spec: Any) -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    full = optree.tree_map(lambda s: (s, torch.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    made = plan(full, mesh, spec, units=["layers.*"], optimizer=make_tx())
    want, _ = trained(filled(1.0), filled, make_tx(), donate=False)
    for donate in (False, True):
        params, state = trained(shard(filled(1.0), made), lambda k: shard(filled(k), made), make_tx(), donate)
        for a, b in zip(optree.tree_leaves(unshard(params)), optree.tree_leaves(want), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert params["layers"][0]["n"] is None
        inner = state[1].inner_states["muon"].mu
        assert isinstance(inner, ShardedTree)
        assert sorted(inner.paths) == ["layers.0.v", "layers.0.w", "layers.1.v", "layers.1.w"]
        for piece, x in zip(params.selection.pieces, params.tensors, strict=True):
            for a, b in piece.bucket.local_gaps(made.bound().rank(piece.bucket.ragged)):
                assert not x[a:b].any()


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("spec", [P(ragged="fsdp"), P(ragged="fsdp", block=TENSOR)], ids=str)
def test_equals_one_process(run: Any, n: int, spec: P) -> None:
    run(n, on_ranks, spec)


def donated() -> None:
    """The fast path writes into the parameters' own storage, and the old trees are dead."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard(filled(1.0), mesh, P(ragged="fsdp"), units=["layers.*"])
    tx = partition({"a": adamw(0.1), "b": sgd(0.1)}, rules({"**.w": "a", "**": "b"}))
    before = [x.data_ptr() for x in params.tensors]
    old, state = params, tx.init(params)
    grads = shard(filled(2.0), params.plan)
    params, state = make_step(tx)(params, grads, state)
    assert [x.data_ptr() for x in params.tensors] == before
    with pytest.raises(ValueError, match="donated"):
        _ = old.tensors
    make_step(tx)(params, shard(filled(2.0), params.plan), state)


@pytest.mark.parametrize("n", [1, 2])
def test_donation(run: Any, n: int) -> None:
    run(n, donated)


def labels_cost_nothing() -> list[Counter[str]]:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    full = {"a": torch.ones(8, 4), "b": torch.ones(8, 4), "c": torch.ones(4)}
    out = []
    for tx in (adamw(0.1), partition({"x": adamw(0.1), "y": sgd(0.1)}, {"u": {"a": "x", "b": "y", "c": "x"}})):
        params = shard({"u": full}, mesh, P(ragged="fsdp"))["u"]
        loss = gathered(lambda p: sum((x * x).sum() for x in p.values()))
        f, state, step = value_and_grad(loss), tx.init(params), make_step(tx, donate=False)
        f(params)
        with collectives.record() as events:
            _, grads = f(params)
            step(params, grads, state)
        out.append(Counter(e.kind for e in events))
    return out


def test_labels_add_no_collective(run: Any) -> None:
    for one, two in run(2, labels_cost_nothing):
        assert one == two


def refused() -> str:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard({"a": torch.ones(4), "b": torch.ones(4)}, mesh, P(ragged="fsdp"))
    said = []
    with collectives.record() as events:
        for labels in ({"a": "x"}, {"a": "x", "b": "mouon"}, lambda path, leaf: "mouon"):
            with pytest.raises(ValueError, match=r"leaf '[ab]'") as error:
                partition({"x": adamw(0.1), "muon": muon(0.1)}, labels).init(params)
            said.append(str(error.value))
    assert not events
    assert all(len(text) < 500 for text in said)
    return said[2]


def test_missing_and_unknown_labels(run: Any) -> None:
    """TR-05, google/brax#480."""
    for said in run(2, refused):
        assert "'mouon'" in said
        assert "'muon'" in said


def test_masks_nest_and_come_in_any_mapping() -> None:
    """TR-02, google-deepmind/optax#271."""
    params = {"x": {"w": torch.ones(3, 2), "b": torch.ones(2)}}
    grads = optree.tree_map(lambda p: p * 0.5, params)
    inner = chain(masked(adamw(0.1, weight_decay=0.0), {"x": {"w": True, "b": False}}), add_decayed_weights(0.1))
    mask = OrderedDict(x=OrderedDict(b=False, w=True))
    tx = masked(inner, mask)
    updates, _ = tx.update(grads, tx.init(params), params)
    alone = adamw(0.1, weight_decay=0.0)
    want, _ = alone.update(grads["x"]["w"], alone.init(params["x"]["w"]), params["x"]["w"])
    torch.testing.assert_close(updates["x"]["w"], want + 0.1)
    assert torch.equal(updates["x"]["b"], grads["x"]["b"])


def test_freeze() -> None:
    params = {"w": torch.ones(2), "b": torch.ones(2)}
    tx = chain(sgd(1.0), freeze({"w": True, "b": False}))
    new, _ = make_step(tx)(params, optree.tree_map(torch.ones_like, params), tx.init(params))
    assert new["w"].tolist() == [1.0, 1.0]
    assert new["b"].tolist() == [0.0, 0.0]
