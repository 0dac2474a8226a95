"""Pictures as text: equal units drawn once, colours; and what text and SVG share."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged import ELEMENT, TENSOR, P, Plan, init, make_mesh, plan, random, visualize
from ragged.picture_parts import OTHERS, columns, families, ink, pieces, starred

F32, BF16 = torch.float32, torch.bfloat16
RAGGED = P(ragged="fsdp")


def layered(layers: int, ranks: int = 2, last: int = 8) -> Plan:
    """Layers of equal layout but for the last, whose bias may be larger."""
    tree = {
        "embed": ((100, 8), F32),
        "layers": [{"w": ((96, 8), BF16), "b": ((8 if i < layers - 1 else last,), F32)} for i in range(layers)],
    }
    return plan(tree, {"fsdp": ranks}, RAGGED, units=["layers.*"])


def plain(text: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", text)


def titles(text: str) -> list[str]:
    return [drawing.split("  ")[0] for drawing in text.split("\n\n")]


# --- units ----------------------------------------------------------------------------------


def test_equal_units_are_drawn_once() -> None:
    text = visualize(layered(32))
    assert titles(text) == ["embed", "layers.0 .. layers.31 (32x)", "layers.0#1 .. layers.31#1 (32x)"]
    assert "layers.0.w" in text
    assert "layers.1.w" not in text


def test_units_that_differ_are_drawn_each() -> None:
    expected = ["embed", "layers.0 .. layers.2 (3x)", "layers.0#1 .. layers.2#1 (3x)", "layers.3", "layers.3#1"]
    assert titles(visualize(layered(4, last=800))) == expected


def test_units_of_other_names_are_drawn_each() -> None:
    p = plan(dict.fromkeys(("wq", "wk", "w1", "w2"), ((16, 8), F32)), {"fsdp": 2}, RAGGED)
    assert titles(visualize(p)) == ["w1 .. w2 (2x)", "wk", "wq"]


def test_a_part_of_a_tree_shows_the_buckets_it_lies_in() -> None:
    mesh = make_mesh((1,), ("fsdp",), device_type="cpu")
    shapes = {"layers": [{"w": ((4, 4), F32)} for _ in range(3)], "head": ((4,), F32)}
    tree = init(plan(shapes, mesh, RAGGED, units=["layers.*"]), random.zeros, seed=0)
    assert titles(visualize(tree)) == ["head", "layers.0 .. layers.2 (3x)"]
    assert titles(visualize(tree["layers"][1])) == ["layers.1"]
    assert "layers.1.w" in visualize(tree["layers"][1], format="svg")


# --- colours --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_change_no_character() -> None:
    p = layered(3, ranks=40)
    text = visualize(p, color=True)
    assert "\x1b[" in text
    assert plain(text) == visualize(p, color=False) == visualize(p)
    (bar,) = [line for line in text.split("\n\n")[0].splitlines() if "(filled)" in line]
    assert re.search("\x1b\\[38;5;\\d+m█", bar)


def test_a_leaf_has_its_colour_in_its_row_and_in_the_bar() -> None:
    text = visualize(plan({"m": {"a": ((32, 8), F32), "b": ((16, 16), F32)}}, {"fsdp": 2}, RAGGED), color=True)
    marks = [set(re.findall("\x1b\\[(38;5;\\d+)m", line)) for line in text.splitlines()]
    _, _, a, b, _, bar = marks
    assert (len(a), len(b)) == (1, 1)
    assert a != b
    assert bar == a | b


@pytest.mark.parametrize(
    ("terminal", "no_color", "rich", "colored"),
    [
        (True, "", True, True),
        (False, "", True, False),
        (True, "1", True, False),
        (True, "", False, False),
    ],
)
def test_colours_on_terminals(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, no_color: str, rich: bool, colored: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("NO_COLOR", no_color)
    if not rich:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ("\x1b[" in visualize(layered(1))) == colored


def test_colours_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match='color=True needs the package "rich"'):
        visualize(layered(1), color=True)


# --- parts ----------------------------------------------------------------------------------


def leaves(*paths: str) -> Any:
    p = plan({path: ((i + 1, 8), F32) for i, path in enumerate(paths)}, {}, None)
    return [p.leaves[path] for path in paths]


@pytest.mark.parametrize(
    ("paths", "most", "labels"),
    [
        (("x.0.w1", "x.1.w1", "x.w2"), 3, ["x.0.w1", "x.1.w1", "x.w2"]),
        (("x.0.w1", "x.1.w1", "x.w2"), 2, ["x.*.w1", "x.w2"]),
        (("e1.w1", "e2.w1", "e1.w2", "e2.w2"), 2, ["e*.w1", "e*.w2"]),
        (("w1", "w2", "v1"), 2, ["w*", "v*"]),
        (("a", "b", "c", "d"), 3, ["c", "d", OTHERS]),
        ((), 3, []),
    ],
)
def test_families(paths: tuple[str, ...], most: int, labels: list[str]) -> None:
    found = families(leaves(*paths), most)
    assert [f.label for f in found] == labels
    assert len({f.color for f in found}) == len(found)
    assert sorted(leaf.path for f in found for leaf in f.leaves) == sorted(paths)


def test_families_have_colours_apart_and_the_largest_the_first() -> None:
    many = families(leaves(*(f"{chr(97 + i)}" for i in range(21))), 21)
    assert len({f.color for f in many}) == 21
    assert {ink(f.color) for f in many} == {"#000000", "#ffffff"}
    assert families(leaves("a", "b"), 21)[1].color == many[-1].color


def test_starred() -> None:
    assert starred("layers.3.experts.12.w1") == "layers.*.experts.*.w1"


@pytest.mark.parametrize(("ranks", "most", "groups"), [(1, 4, 1), (4, 4, 4), (5, 4, 3), (10240, 64, 64)])
def test_columns(ranks: int, most: int, groups: int) -> None:
    found = columns(ranks, most)
    assert len(found) == groups <= most
    assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])]
    assert found[-1][1] == ranks


SHAPES = st.lists(st.lists(st.integers(0, 24), max_size=2).map(tuple), min_size=1, max_size=6)
SPECS = st.sampled_from([RAGGED, P(ragged="fsdp", block=ELEMENT), P(ragged="fsdp", block=TENSOR)])


@settings(max_examples=60, deadline=None)
@given(SHAPES, SPECS, st.integers(1, 20), st.integers(1, 8))
def test_pieces_are_the_spans_and_the_gaps(shapes: Any, spec: P, ranks: int, most: int) -> None:
    p = plan({"m": {f"x{i}": (shape, F32) for i, shape in enumerate(shapes)}}, {"fsdp": ranks}, spec)
    for bucket in p.buckets:
        for (a, b), held in zip(columns(ranks, most), pieces(bucket, columns(ranks, most)), strict=True):
            ends = [bucket.bounds(a), *(piece.stop for piece in held)]
            assert [piece.start for piece in held] == ends[:-1]
            assert ends[-1] == bucket.bounds(b)
            runs = {q.leaf.path: (q.start - q.leaf.offset, q.stop - q.leaf.offset) for q in held if q.leaf is not None}
            spans = {f.path: (f.span(a)[0], f.span(b - 1)[1]) for f in bucket.leaves}
            assert runs == {path: span for path, span in spans.items() if span[0] < span[1]}


def test_shares_leave_columns_of_their_own_size() -> None:
    p = plan({"w": ((10, 8), F32)}, {"fsdp": 3}, P(ragged="fsdp", shares=(2, 0, 3)))
    held = pieces(p.buckets[0], columns(3, 16))
    assert [[q.stop - q.start for q in column] for column in held] == [[32], [], [48]]
