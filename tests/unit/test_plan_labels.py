"""`plan(optimizer=)` keeps the leaves of one label together."""

from __future__ import annotations

import pytest
import torch

import optim
from ragged import P, Plan, plan, rules

LABELS = rules({"**.w*": "matrix", "**": "rest"})
TREE = {
    f"layer{i}": {k: ((48, 64) if k[0] == "w" else (64,), torch.float32) for k in ("b1", "w1", "b2", "w2", "b3", "w3")}
    for i in range(3)
}


def tx(labels: object = LABELS) -> optim.GradientTransformation:
    return optim.partition({"matrix": optim.muon(0.1), "rest": optim.adamw8bit(0.1, min_size=16, block=16)}, labels)


def intervals(p: Plan, label: str) -> list[int]:
    """How often a label begins, per bucket."""
    out = []
    for b in p.buckets:
        flags = [leaf.label == label for leaf in b.leaves]
        out.append(sum(flag and not (i and flags[i - 1]) for i, flag in enumerate(flags)))
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("spec", [P(ragged="fsdp"), P(ragged="fsdp", block=96)])
def test_a_label_is_one_interval_per_bucket(ranks: int, spec: P) -> None:
    for optimizer in (
        tx(),
        optim.chain(optim.clip_by_global_norm(1.0), tx()),
        optim.named_chain(("clip", optim.clip_by_global_norm(1.0)), ("last", tx())),
        optim.apply_if_finite(tx()),
        optim.inject_hyperparams(lambda rate: tx())(0.1),
    ):
        p = plan(TREE, {"fsdp": ranks}, spec, units=["*"], optimizer=optimizer)
        assert max(intervals(p, "matrix")) == max(intervals(p, "rest")) == 1
        assert {leaf.label for leaf in p.leaves.values()} == {"matrix", "rest"}
    alone = plan(TREE, {"fsdp": ranks}, spec, units=["*"])
    assert {leaf.label for leaf in alone.leaves.values()} == {""}


def test_nested_labels() -> None:
    inner = optim.partition({"a": optim.sgd(0.1), "b": optim.adamw(0.1)}, rules({"**.b1": "a", "**": "b"}))
    nested = optim.partition({"matrix": optim.sgd(0.1), "rest": inner}, LABELS)
    p = plan(TREE, {"fsdp": 2}, P(ragged="fsdp"), units=["*"], optimizer=nested)
    labels = [[leaf.label for leaf in b.leaves] for b in p.buckets]
    for found in labels:
        assert sorted(set(found)) == ["('rest', 'a')", "('rest', 'b')", "matrix"]
        assert len(set(found)) == sum(a != b for a, b in zip(found, [None, *found], strict=False))


def test_labels_are_part_of_the_text_of_a_plan() -> None:
    p = plan(TREE, {"fsdp": 2}, P(ragged="fsdp"), units=["*"], optimizer=tx())
    again = Plan.from_json(p.to_json(), like=TREE)
    assert [leaf.label for leaf in again.leaves.values()] == [leaf.label for leaf in p.leaves.values()]


def test_only_leaves_that_train_are_asked_about() -> None:
    tree = {"w": ((64, 64), torch.float32), "steps": ((64, 64), torch.int64), "old": ((64, 64), torch.float32)}
    only = optim.partition({"m": optim.adamw8bit(0.1)}, {"w": "m"})
    p = plan(tree, {"fsdp": 2}, P(ragged="fsdp"), optimizer=only, frozen={"w": False, "steps": False, "old": True})
    assert [(leaf.label, len(leaf.requests)) for leaf in p.leaves.values()] == [("", 1), ("", 1), ("m", 2)]


def test_a_leaf_without_a_label() -> None:
    with pytest.raises(ValueError, match=r"no label for leaf 'layer0\.b1'"):
        plan(TREE, {"fsdp": 2}, P(ragged="fsdp"), optimizer=tx(rules({"**.w*": "matrix"})))
