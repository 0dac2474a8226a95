"""Dotted paths, and the order that people expect of them."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from typing import Any

import pytest
import torch

from ragged.paths import flatten, is_shaped, natural_key, shaped


def test_paths_are_dotted_and_none_is_structure() -> None:
    tree = {"layers": [{"wq": 1, "wk": 2}, {"wq": 3, "skip": None}], "norm": (4, [])}
    paths, leaves, structure = flatten(tree, None)
    assert dict(zip(paths, leaves, strict=True)) == {
        "layers.0.wk": 2,
        "layers.0.wq": 1,
        "layers.1.wq": 3,
        "norm.0": 4,
    }
    assert structure.num_leaves == 4
    assert flatten(torch.ones(2))[0] == [""]
    assert flatten(None)[0] == []


@pytest.mark.parametrize("tree", [{"a.b": 1, "a": {"b": 2}}, {1: 1, "1": 2}])
def test_two_leaves_of_one_path_are_refused(tree: Any) -> None:
    twice = "a.b" if "a.b" in tree else "1"
    if twice == "1":
        tree = OrderedDict(tree)
    with pytest.raises(ValueError, match=f"the path '{twice}'; rename"):
        flatten(tree, None)


def test_pairs_of_shape_and_dtype_are_leaves() -> None:
    pair = ((3, 4), torch.float32)
    assert is_shaped(pair)
    assert not is_shaped(((3, 4), "float32"))
    assert not is_shaped([(3, 4), torch.float32])
    assert flatten({"a": pair, "b": (pair, pair)})[0] == ["a", "b.0", "b.1"]
    assert shaped("a", torch.ones(2, 3, dtype=torch.int8, device="meta")) == ((2, 3), torch.int8)
    assert shaped("a", (torch.Size([2]), torch.bool)) == ((2,), torch.bool)
    with pytest.raises(ValueError, match="leaf 'a' is a float"):
        shaped("a", 2.0)


def test_numbers_count() -> None:
    ordered = ["2", "10", "a", "a.1", "a.2", "a.2.x", "a.10", "a2", "a10", "a10b2", "a10b10", "b"]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert sorted(shuffled, key=natural_key) == ordered


def test_the_order_is_total() -> None:
    """Paths that differ never tie: otherwise the order would be that of insertion."""
    paths = ["a.1", "a.01", "a.001", "a", "a.²", "a.x²", "a.1²", "a.٣", "a.3", "", "a.-1", "A.1"]
    for p, q in itertools.combinations(paths, 2):
        assert natural_key(p) != natural_key(q)
    want = sorted(paths, key=natural_key)
    for _ in range(20):
        random.shuffle(paths)
        assert sorted(paths, key=natural_key) == want
