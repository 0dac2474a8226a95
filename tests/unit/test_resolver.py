"""One resolver for all that is said per leaf: patterns, prefix trees, callables, single values."""

from __future__ import annotations

import random
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import optree
import pytest

from ragged.paths import flatten, natural_key
from ragged.resolver import Pattern, match_prefix, matches, resolve, rules

TREE = {"embed": 1, "layers": [{"b": 2, "w": 3}, {"b": 4, "w": 5}], "skip": None}
PATHS = ["embed", "layers.0.b", "layers.0.w", "layers.1.b", "layers.1.w"]


def is_label(x: Any) -> bool:
    return isinstance(x, str)


def labels(value: Any, tree: Any = TREE) -> list[Any]:
    return resolve(value, tree, what="label", is_value=is_label)


@pytest.fixture
def error() -> Callable[..., str]:
    """The message with which a value is refused: short, whatever it has to name."""

    def of(value: Any, tree: Any = TREE) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # the caller looks at the text
            labels(value, tree)
        assert len(str(caught.value)) < 500
        return str(caught.value)

    return of


# --- patterns -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "whole", "prefix"),
    [
        ("a.b", "a.b", True, "a.b"),
        ("a", "a.b", False, "a"),
        ("a.b", "a", False, None),
        ("a", "ab", False, None),
        ("*", "a", True, "a"),
        ("*", "a.b", False, "a"),
        ("*.*", "a", False, None),
        ("layers.*", "layers.10.w", False, "layers.10"),
        ("layers.*.w", "layers.10.w", True, "layers.10.w"),
        ("layers.*.w", "layers.10.mlp.w", False, None),
        ("w*", "wq", True, "wq"),
        ("*q*", "wqkv", True, "wqkv"),
        ("w*", "w.q", False, "w"),
        ("**", "", True, ""),
        ("**", "a", True, "a"),
        ("**", "a.b.c", True, "a.b.c"),
        ("**.w", "w", True, "w"),
        ("**.w", "a.b.w", True, "a.b.w"),
        ("**.w", "a.bw", False, None),
        ("**.w", "a.w.c", False, "a.w"),
        ("a.**.w", "a.w", True, "a.w"),
        ("a.**.w", "a.b.c.w", True, "a.b.c.w"),
        ("a.**.w", "b.a.w", False, None),
        ("**.mlp.**", "x.mlp.w", True, "x.mlp.w"),
        ("**.mlp.**", "mlp", True, "mlp"),
        ("a+", "a+", True, "a+"),
        ("a+", "aa", False, None),
        ("[ab]", "a", False, None),
        ("a.?", "a.b", False, None),
        (re.compile("w$"), "a.w", True, "a.w"),
        (re.compile("^a"), "b.a", False, None),
        (re.compile(r"layers\.\d+"), "layers.10.w", True, "layers.10"),
        (re.compile(r"layers\.\d+\."), "layers.10.w", True, "layers.10"),
        (re.compile(r"ayers\.1"), "layers.10.w", True, "layers.10"),
        (re.compile(r"\.mlp"), "a.mlp.w", True, "a.mlp"),
        (re.compile(""), "a.b", True, "a"),
    ],
)
def test_patterns(pattern: Pattern, path: str, whole: bool, prefix: str | None) -> None:
    assert matches(pattern, path) == whole
    assert match_prefix(pattern, path) == prefix


def matches_plainly(pattern: list[str], path: list[str]) -> bool:
    """Globs over components by trying both readings of every `**`."""
    if not pattern or not path:
        return not path and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return matches_plainly(pattern[1:], path) or matches_plainly(pattern, path[1:])
    return pattern[0] in ("*", path[0]) and matches_plainly(pattern[1:], path[1:])


def test_globs_on_random_paths() -> None:
    rng = random.Random(0)
    hits = 0
    for _ in range(4000):
        pattern = [rng.choice(["a", "b", "*", "**"]) for _ in range(rng.randint(1, 4))]
        path = [rng.choice("ab") for _ in range(rng.randint(1, 4))]
        expected = matches_plainly(pattern, path)
        assert matches(".".join(pattern), ".".join(path)) == expected, (pattern, path)
        prefixes = [path[:n] for n in range(len(path) + 1) if matches_plainly(pattern, path[:n])]
        longest = ".".join(prefixes[-1]) if prefixes else None
        assert match_prefix(".".join(pattern), ".".join(path)) == longest, (pattern, path)
        hits += expected
    assert 500 < hits < 3500


# --- rules ----------------------------------------------------------------------------------


def test_the_first_rule_that_matches_wins() -> None:
    assert labels(rules({"**.w": "W", re.compile("^layers"): "L", "**": "rest"})) == ["rest", "L", "W", "L", "W"]
    assert labels(rules({"layers.1.**": "1", "**.w": "W", "**": "rest"})) == ["rest", "rest", "W", "1", "1"]
    assert labels(rules({"**.w": "W", "layers.1.**": "1", "**": "rest"})) == ["rest", "rest", "W", "1", "W"]


def test_a_shadowed_rule_that_matches_is_no_mistake() -> None:
    assert labels(rules({"**": "all", "embed": "E"})) == ["all"] * 5


def test_a_leaf_that_no_rule_matches(error: Callable[..., str]) -> None:
    text = error(rules({"layers.0.*": "a", "**.w": "b"}))
    assert "no label for leaf 'embed'" in text
    assert "'**.w'" in text
    many = rules({f"**.b{'*' * n}": "b" for n in range(200)})
    assert "no label for leaf 'lonely'" in error(many, {"b": 1, "lonely": 2})


@pytest.mark.parametrize("pattern", ["layer.*", "embed.*", "", re.compile("wq")])
def test_a_rule_that_matches_no_leaf(pattern: Pattern, error: Callable[..., str]) -> None:
    name = pattern if isinstance(pattern, str) else pattern.pattern
    assert f"label rule {name!r} matches no leaf" in error(rules({pattern: "a", "**": "b"}))
    assert f"label rule {name!r} matches no leaf" in error(rules({"**": "b", pattern: "a"}))


def test_patterns_are_text_or_regex() -> None:
    with pytest.raises(ValueError, match="pattern 3 is neither"):
        rules({3: "a"})  # type: ignore[dict-item]


# --- single values, callables, prefix trees -------------------------------------------------


def test_one_value_and_callables() -> None:
    assert labels("x") == ["x"] * 5
    assert labels(lambda path, leaf: f"{path}={leaf}") == [f"{p}={i}" for i, p in enumerate(PATHS, 1)]
    assert labels("x", {}) == []
    assert labels("x", 7) == ["x"]
    assert labels(rules({"**": "x"}), 7) == ["x"]


class Pair(NamedTuple):
    first: Any
    second: Any


def test_prefix_trees() -> None:
    assert labels({"embed": "E", "layers": "L"}) == ["E", *"LLLL"]
    assert labels({"embed": "E", "layers": ["0", {"w": "w", "b": "b"}]}) == ["E", "0", "0", "b", "w"]
    assert labels(Pair("a", ["b", "c"]), Pair({"x": 1, "y": 2}, [3, 4])) == ["a", "a", "b", "c"]


def test_mappings_of_other_types() -> None:
    """As in google-deepmind/optax#271: a mask in another mapping type than the parameters."""
    table = [("layers", OrderedDict([("0", "0"), ("1", OrderedDict([("w", "w"), ("b", "b")]))])), ("embed", "E")]
    for kind in (OrderedDict, dict, lambda t: defaultdict(str, t)):
        assert labels(kind(table)) == ["E", "0", "0", "b", "w"]
    swapped = OrderedDict([("layers", OrderedDict([("w", 1), ("b", 2)])), ("embed", 3)])
    assert flatten(swapped)[0] == ["layers.w", "layers.b", "embed"]
    assert labels({"embed": "E", "layers": {"b": "b", "w": "w"}}, swapped) == ["w", "b", "E"]


def test_none_is_structure() -> None:
    same = optree.tree_map(str, TREE)
    assert same["skip"] is None
    assert labels(same) == list("12345")
    assert labels({"embed": "E", "layers": "L", "skip": "S", "more": None}, {**TREE, "skip": 6})[-1] == "S"
    maybe = resolve({"embed": None, "layers": "L"}, TREE, what="label", is_value=lambda x: x is None or is_label(x))
    assert maybe == [None, *"LLLL"]


def test_missing_and_surplus_entries(error: Callable[..., str]) -> None:
    assert "no label for leaf 'layers.1.b'" in error({"embed": "E", "layers": ["0"]})
    assert "no label for leaf 'embed'" in error({"embed": None, "layers": "L"})
    assert "no label for leaf 'embed'" in error({"embed": {"deeper": "E"}, "layers": "L"})
    assert "entry 'layers.2' that matches no leaf" in error({"embed": "E", "layers": ["0", "1", "2"]})
    assert "entry 'emebd' that matches no leaf" in error({"emebd": "E", **dict.fromkeys(TREE, "x")})
    assert "entry 'layers.0' is 3, not a label" in error({"embed": "E", "layers": [3, "1"]})
    assert "entry 'embed'" in error({"embed": bytes(10_000), "layers": "L"})


@optree.register_pytree_node_class(namespace=optree.registry.__GLOBAL_NAMESPACE)  # as users do
class Callable_(dict[str, Any]):
    """A module: a container of parameters that can also be called."""

    def __call__(self, *args: Any) -> NoReturn:
        raise AssertionError("a tree was called")

    def tree_flatten(self) -> tuple[list[Any], tuple[str, ...], tuple[str, ...]]:
        return list(self.values()), tuple(self), tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], children: Iterator[Any]) -> Callable_:
        return cls(zip(keys, children, strict=True))


def test_a_container_that_can_be_called_is_a_container(error: Callable[..., str]) -> None:
    """patrick-kidger/equinox#193: a label tree was taken for a function of the tree."""
    tree = Callable_(w=1, inner=Callable_(b=2))
    assert labels(Callable_(w="W", inner=Callable_(b="B")), tree) == ["W", "B"]
    assert labels(Callable_(w="W", inner="I"), tree) == ["W", "I"]
    assert labels({"w": "W", "inner": "I"}, tree) == ["W", "I"]
    assert labels(lambda path, leaf: path, tree) == ["w", "inner.b"]
    assert "no label for leaf 'inner.b'" in error(Callable_(w="W"), tree)


# --- paths ----------------------------------------------------------------------------------


def test_two_leaves_of_one_path(error: Callable[..., str]) -> None:
    assert "the path 'a.b'" in error("x", {"a.b": 1, "a": {"b": 2}})


def test_natural_order() -> None:
    ordered = ["a", "a.2", "a.10", "a.b", "a2", "a10", "a10.x", "layers.01.w", "layers.1.b", "layers.2", "layers.10"]
    shuffled = ordered[::-1]
    random.Random(1).shuffle(shuffled)
    assert sorted(shuffled, key=natural_key) == ordered


def test_natural_order_is_total() -> None:
    """Equal keys would leave the order to the insertion order of a mapping."""
    paths = ["l.1", "l.01", "l.001", "l1", "l01", "²", "2", "٢", "02", "", "a", "a.", "a..b"]
    assert len({natural_key(p) for p in paths}) == len(paths)
    backwards = paths[::-1]
    assert sorted(paths, key=natural_key) == sorted(backwards, key=natural_key)
