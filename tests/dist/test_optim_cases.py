"""Public failure reports of optimizers on shards: each with the inputs and numbers it came with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import optree
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import optim
from optim.codes import decode_root, decode_signed
from ragged import P, ShardedTree, collectives, combine, make_mesh, plan, shard, unshard
from ragged import partition as parted
from tests.unit.test_muon import reference, w

RAGGED = P(ragged="fsdp")


def mesh() -> DeviceMesh:
    return make_mesh((-1,), ("fsdp",), device_type="cpu")


def sharded(tree: Any, tx: Any = None) -> ShardedTree:
    return shard(tree, plan(tree, mesh(), RAGGED, optimizer=tx))


def copied(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


# --- AdamW and its 8-bit form --------------------------------------------------------------------


def first_step(decay: float, want: float) -> None:
    for tx in (optim.adamw(1e-3, weight_decay=decay), optim.adamw8bit(1e-3, weight_decay=decay, min_size=0)):
        params = sharded({"p": torch.ones(1000)}, tx)
        grads = sharded({"p": torch.full((1000,), 0.5)}, tx)
        state = tx.init(params)
        assert torch.equal(unshard(params)["p"], torch.ones(1000))
        assert state[0].count == 0
        updates, _ = tx.update(grads, state, params)
        new, after = optim.make_step(tx)(copied(params), grads, state)
        assert after[0].count == 1
        for got in (optim.apply_updates(params, updates), new):
            torch.testing.assert_close(unshard(got)["p"], torch.full((1000,), want), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("decay", "want"), [(0.0, 0.999), (0.1, 0.9989)])
def test_the_first_step_is_the_first(run: Any, decay: float, want: float) -> None:
    """CK-05, NVIDIA/Megatron-LM#5976: state made by a dummy step, which counts and decays."""
    run(2, first_step, decay, want)


def zero_tile(value: float, donate: bool) -> None:
    tx = optim.adamw8bit(1e-3, weight_decay=0.0, block=(32, 32), min_size=0)
    start, grads = {"x": w((64, 32), 1).float()}, {"x": w((64, 32), 2).float()}
    grads["x"][:32] = value
    params = sharded(start, tx)
    state, step = tx.init(params), optim.make_step(tx, donate=donate)
    for _ in range(3):
        params, state = step(params, shard(grads, params.plan), state)
    new = unshard(params)["x"]
    assert new.isfinite().all()
    assert (new[32:] != start["x"][32:])[grads["x"][32:] != 0].all()
    for moment, decode in ((state[0].mu, decode_signed), (state[0].nu, decode_root)):
        codes, scales = unshard(moment.codes)["x"], unshard(moment.scales)["x"]
        assert scales.shape == (2, 1)
        assert scales.isfinite().all()
        buffers = torch.empty(32, 32), torch.empty(32, 32)
        values = decode(codes[:32], scales[:1], *buffers[: 2 if decode is decode_signed else 1])
        assert values.isfinite().all()
        assert value != 0 or not values.any()
    if value == 0:
        assert torch.equal(new[:32], start["x"][:32])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e-38])
def test_a_block_of_zeros(run: Any, value: float, donate: bool) -> None:
    """Q8-01, pytorch/ao#4713, THUDM/slime#2256: 0/0 with a scale of zero."""
    run(2, zero_tile, value, donate)


def outlier() -> None:
    tx = optim.adamw8bit(1e-3, block=(32, 32))
    ends = []
    for value in (None, 1e4):
        grads = {"x": w((64, 64), 1).float()}
        if value is not None:
            grads["x"][0, 0] = value
        params = sharded({"x": w((64, 64), 2).float()}, tx)
        assert [x.numel() for x in params.tensors] == [2048]  # two tiles on each rank
        state = tx.init(params)
        for _ in range(2):
            params, state = optim.make_step(tx)(params, shard(grads, params.plan), state)
        ends.append([unshard(x)["x"] for x in (*state[0].mu[:2], *state[0].nu[:2])])
    far = torch.ones(64, 64, dtype=torch.bool)
    far[:32, :32] = False
    for x, y in zip(*ends, strict=True):
        where = far if x.shape == far.shape else torch.tensor([[False, True], [True, True]])
        assert torch.equal(x[where], y[where])
        assert not torch.equal(x[~where], y[~where])


def test_an_outlier_stays_in_its_tile(run: Any) -> None:
    """Q8-05, pytorch/ao#927; arXiv 2110.02861: scales that aren't local."""
    run(2, outlier)


# --- trees and labels ----------------------------------------------------------------------------


@optree.register_pytree_node_class(namespace=optree.registry.__GLOBAL_NAMESPACE)
class Layer(Mapping[str, Any]):
    """A mapping of its own kind that is a tree, and can be called as modules can."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __call__(self, *args: Any) -> NoReturn:
        raise AssertionError("a tree was called")

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def tree_flatten(self) -> tuple[list[Any], tuple[str, ...], tuple[str, ...]]:
        return list(self.entries.values()), tuple(self.entries), tuple(self.entries)

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], children: Iterator[Any]) -> Layer:
        return cls(**dict(zip(keys, children, strict=True)))


def none_at_root_and_leaf(donate: bool) -> None:
    full = {"a": w((4, 4), 1).float(), "b": w((4,), 2).float(), "c": None}
    start = optree.tree_map(torch.ones_like, full)
    how = {"weight_decay": 0.0, "ns_dtype": torch.float32}
    # None for all, and None for a leaf, both mean the default rule, by which b is no matrix
    for matrix in (None, {"a": "m n -> m n", "b": None, "c": None}):
        with pytest.raises(ValueError, match=r"leaf 'b' .* is no matrix"):
            optim.muon(0.1, matrix=matrix, **how).init(sharded(start))
    tx = optim.muon(0.1, matrix=None, **how)

    def check(new: Any, mu: ShardedTree) -> None:
        assert mu.paths == ("a",)
        got = unshard(new)
        assert optree.tree_structure(got) == optree.tree_structure(full)
        torch.testing.assert_close(got["a"], start["a"] - 0.1 * reference(full["a"]).float(), atol=1e-5, rtol=0)
        assert torch.equal(got["b"], start["b"])

    # b is skipped by a label ...
    both = optim.partition({"muon": tx, "skip": optim.set_to_zero()}, {"a": "muon", "b": "skip", "c": None})
    params = sharded(start)
    new, state = optim.make_step(both, donate=donate)(params, sharded(full), both.init(params))
    check(new, state.inner_states["muon"].mu)
    # ... or by a None in its place, in parameters and gradients
    (params, rest), grads = (parted(sharded(tree), lambda path, leaf: path == "a") for tree in (start, full))
    updates, _ = tx.update(grads[0], tx.init(params), params)
    new, state = optim.make_step(tx, donate=donate)(params, grads[0], tx.init(params))
    for tree in (updates, new, state.mu):
        assert list(tree.keys()) == ["a", "b", "c"]
        assert (tree["b"], tree["c"]) == (None, None)
    check(combine(new, copied(rest)), state.mu)


@pytest.mark.parametrize("donate", [False, True])
def test_none_at_the_root_and_at_a_leaf(run: Any, donate: bool) -> None:
    """TR-01, google-deepmind/optax#1537."""
    run(2, none_at_root_and_leaf, donate)


def nested_masks(kind: Any) -> None:
    start, slope = ({"x": {"w": w((3, 2), k).float(), "b": w((2,), k + 1).float()}} for k in (1, 3))
    adam = optim.adamw(0.1, weight_decay=0.0)
    inner = optim.chain(
        optim.masked(adam, kind(x=kind(w=True, b=False))), optim.add_decayed_weights(0.1, kind(x=kind(b=False, w=True)))
    )
    tx = optim.masked(inner, kind(x=kind(b=True, w=True)))
    alone, _ = adam.update(slope["x"]["w"], adam.init(start["x"]["w"]), start["x"]["w"])
    want = {"w": start["x"]["w"] + alone + 0.1 * start["x"]["w"], "b": start["x"]["b"] + slope["x"]["b"]}
    for place in (copied, sharded):
        params, grads = place(start), place(slope)
        updates, state = tx.update(grads, tx.init(params), params)
        moved, after = optim.make_step(tx)(copied(params), copied(grads), tx.init(params))
        assert optree.tree_structure(state) == optree.tree_structure(after)
        for new in (optim.apply_updates(params, updates), moved):
            got = unshard(new) if place is sharded else new
            assert optree.tree_structure(got) == optree.tree_structure(start)
            for key in want:
                torch.testing.assert_close(got["x"][key], want[key], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", [dict, OrderedDict, Layer])
def test_masks_inside_masks(run: Any, kind: Any) -> None:
    """TR-02, google-deepmind/optax#271 and #160: masks in masks, and in another mapping type."""
    run(2, nested_masks, kind)


def callable_containers() -> None:
    start = Layer(w=torch.ones(8, 8), inner=Layer(b=torch.ones(8), t=torch.ones(64, 32)))
    labels = Layer(w="muon", inner=Layer(b="adam", t="bytes"))
    mine = {
        "adam": optim.adamw(0.1, mask=Layer(inner=Layer(b=False))),
        "bytes": optim.adamw8bit(0.1, min_size=0, mask=Layer(inner=Layer(t=True))),
        "muon": optim.muon(0.1, matrix=Layer(w="m n -> m n"), split=Layer(w=(4, 4))),
    }
    tx = optim.partition(mine, labels)
    for place in (copied, lambda tree: sharded(tree, tx)):
        params = place(start)
        state = tx.init(params)
        for donate in (False, True):
            before = optree.tree_structure(state)
            new, after = optim.make_step(tx, donate=donate)(copied(params), place(start), state)
            assert optree.tree_structure(after) == before
            got = unshard(new) if isinstance(new, ShardedTree) else new
            assert isinstance(got, Layer)
            assert isinstance(got["inner"], Layer)
            assert all((x != 1).all() for x in optree.tree_leaves(got))
            state = tx.init(params)


def test_containers_that_can_be_called(run: Any) -> None:
    """TR-03, patrick-kidger/equinox#193: a tree of labels taken for a function of the tree."""
    run(2, callable_containers)


def wrong_labels() -> list[str]:
    params, said = sharded({"a": torch.ones(4, 4), "b": torch.ones(4)}), []
    known = {"muon": optim.muon(0.1), "adam": optim.adamw(0.1)}
    with collectives.record() as events:
        for labels in ({"a": "muon"}, {"a": "mouon", "b": "adam"}):
            with pytest.raises(ValueError) as error:  # noqa: PT011  # the words are looked at below
                optim.partition(known, labels).init(params)
            said.append(str(error.value))
    assert not events
    return said


def test_missing_and_unknown_labels(run: Any) -> None:
    """TR-05, google/brax#480: an unreadable dump."""
    first, second = run(2, wrong_labels)
    assert first == second
    assert all(len(text) < 500 for text in first)
    assert [word for word in ("'b'", "label") if word not in first[0]] == []
    assert [word for word in ("'a'", "'mouon'", "'muon'", "'adam'") if word not in first[1]] == []
