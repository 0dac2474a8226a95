"""Pictures as SVG: valid documents whose rectangles are the layout, to scale."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from ragged import ELEMENT, TENSOR, P, Plan, plan, rules, visualize

F32, BF16 = torch.float32, torch.bfloat16
RAGGED = P(ragged="fsdp")
SVG = "{http://www.w3.org/2000/svg}"
MODELS = json.loads((Path(__file__).parents[1] / "data" / "planner" / "models.json").read_text())


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str

    @property
    def elements(self) -> int:
        """What the tooltip says: `[start, stop)` of a run, or a number of elements."""
        span = re.search(r"\[([\d,]+), ([\d,]+)\)", self.title)
        if span:
            start, stop = (int(n.replace(",", "")) for n in span.groups())
            return stop - start
        (count,) = re.findall(r"([\d,]+) elements", self.title)
        return int(count.replace(",", ""))


def parse(svg: str) -> tuple[ElementTree.Element, list[Rect]]:
    root = ElementTree.fromstring(svg)
    rects = []
    for node in root.iter(f"{SVG}rect"):
        title = node.find(f"{SVG}title")
        if title is not None:
            place = (float(node.attrib[name]) for name in ("x", "y", "width", "height"))
            rects.append(Rect(*place, node.attrib["fill"], title.text or ""))
    return root, rects


def stacks(rects: list[Rect]) -> Iterator[list[Rect]]:
    """Columns: rectangles in document order that share x; charts are more than 50 units apart."""
    column: list[Rect] = []
    for rect in rects:
        if column and (rect.x != column[-1].x or not 0 <= rect.y - column[-1].y - column[-1].height + 1e-6 < 50):
            yield column
            column = []
        column.append(rect)
    if column:
        yield column


def check(p: Plan) -> tuple[ElementTree.Element, list[Rect]]:
    """All rectangles lie in the document, columns are stacked without gaps, areas are elements."""
    svg = visualize(p, format="svg")
    root, rects = parse(svg)
    width, height = (float(n) for n in root.attrib["viewBox"].split()[2:])
    for r in rects:
        assert 0 <= r.x <= r.x + r.width <= width
        assert 0 <= r.y <= r.y + r.height <= height
        assert r.width > 0
    for column in stacks(rects):
        for above, below in pairwise(column):
            assert above.y + above.height == pytest.approx(below.y, abs=1e-6)
            assert above.width == below.width
        total, tall = sum(r.elements for r in column), sum(r.height for r in column)
        for r in column:
            assert r.height == pytest.approx(tall * r.elements / total, abs=0.021)
    for a, b in pairwise(sorted(rects, key=lambda r: (r.y, r.x))):
        assert a.y != b.y or min(a.height, b.height) == 0 or a.x + a.width <= b.x
    for node in root.iter():
        assert node.tag != f"{SVG}script"
        assert not any("href" in name or name.startswith("on") for name in node.attrib)
    return root, rects


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def readme_layer(ranks: int = 4) -> Plan:
    shapes = {"norm": (512,), "qkv": (512, 1536), "out": (512, 512), "up": (512, 2048), "down": (2048, 512)}
    spec = rules({"**.norm": RAGGED, "**": P(ragged="fsdp", block=(32, 32))})
    return plan({"layer": {name: (shape, BF16) for name, shape in shapes.items()}}, {"fsdp": ranks}, spec)


def model(name: str, ranks: int) -> Plan:
    """Three layers of each kind of a published model, blocks of 32 rows."""
    tree: dict[str, Any] = {}
    for kind, bucket in MODELS[name].items():
        layer = {path.replace("e", "experts.", 1) if path[1:2].isdigit() else path: (tuple(shape), BF16)
                 for path, shape in bucket["leaves"]}  # fmt: skip
        tree[kind] = [layer] * 3 if bucket["count"] > 1 else layer
    units = [f"{kind}.*" for kind, bucket in MODELS[name].items() if bucket["count"] > 1]

    def spec(path: str, leaf: Any) -> P:
        return P(ragged="fsdp", block=(32, None) if len(leaf[0]) == 2 else ELEMENT)

    return plan(tree, {"fsdp": ranks}, spec, units=units)


@pytest.mark.parametrize("ranks", [1, 3, 4, 8, 64])
def test_every_run_is_a_rectangle(ranks: int) -> None:
    p = readme_layer(ranks)
    root, rects = check(p)
    found = [r.title.split(",")[0] for r in rects if "padding" not in r.title]
    for bucket in p.buckets:
        runs = sorted((f.offset + a, f"{f.path} [{a:,}") for f in bucket.leaves for a, b in f.runs if a < b)
        assert found[: len(runs)] == [text.split(",")[0] for _, text in runs]
        del found[: len(runs)]
    assert not found
    expected = [b.shard for b in p.buckets for _ in range(ranks)]
    assert [sum(r.elements for r in column) for column in stacks(rects)] == expected
    padding = sum(b.length - b.elements for b in p.buckets)
    assert sum(r.elements for r in rects if r.fill == "url(#padding)") == padding
    bucket = p.buckets[0]
    words = " ".join(texts(root))
    facts = ("layer", "bfloat16", f"S = {bucket.shard:,}", f"m*S = {bucket.length:,}", "padding")
    legend = ("layer.down", "[2048,512] block 16,384", "layer.norm", "[512] block 1")
    assert all(word in words for word in (*facts, *legend))


def test_titles_name_path_run_and_blocks() -> None:
    p = plan({"w": ((96, 8), F32)}, {"fsdp": 2}, P(ragged="fsdp", block=(32, None)))
    _, rects = check(p)
    assert [r.title for r in rects] == [
        "w [0, 512) of 768, blocks 0 to 1 of 256",
        "w [512, 768) of 768, block 2 of 256",
        "padding, 256 elements",
    ]


def test_leaves_keep_one_colour_and_the_legend_has_it() -> None:
    root, rects = check(readme_layer(8))
    colors: dict[str, set[str]] = {}
    for r in rects:
        colors.setdefault(r.title.split()[0].rstrip(","), set()).add(r.fill)
    assert all(len(own) == 1 for own in colors.values())
    legend = {
        (group.findtext(f"{SVG}title") or "").split(":")[0]: group.find(f"{SVG}path").attrib["fill"]  # type: ignore[union-attr]
        for group in root.iter(f"{SVG}g")
        if group.find(f"{SVG}title") is not None
    }
    assert legend == {path: own.pop() for path, own in colors.items()}


def test_block_borders_are_drawn_where_there_is_room() -> None:
    def lines(rows: int) -> int:
        p = plan({"w": ((1024, 8), F32)}, {"fsdp": 2}, P(ragged="fsdp", block=(rows, None)))
        root, _ = check(p)
        (borders,) = [node for node in root.iter(f"{SVG}path") if node.attrib.get("stroke-opacity") == ".4"]
        return borders.attrib["d"].count("h")

    assert lines(128) == 2 * 3
    assert lines(1) == 0


def test_equal_units_are_drawn_once() -> None:
    tree = {"layers": [{"w": ((96, 8), BF16)} for _ in range(32)]}
    root, rects = check(plan(tree, {"fsdp": 2}, RAGGED, units=["layers.*"]))
    assert "layers.0 .. layers.31 (32x)" in texts(root)
    assert len(rects) == 2


def test_buffers_of_a_unit_stand_under_one_another() -> None:
    tree = {"unit": {"a": ((96, 8), BF16), "b": ((50, 8), F32), "c": ((), torch.int64)}}
    p = plan(tree, {"fsdp": 2}, RAGGED)
    root, rects = check(p)
    heads = [t for t in texts(root) if t.startswith("unit") and "." not in t]
    assert heads == [b.name for b in p.buckets] == ["unit", "unit#1", "unit#2"]
    assert len({r.fill for r in rects} - {"url(#padding)"}) == 3  # one legend, so no colour twice
    tops = [min(r.y for r in rects if r.title.startswith(f"unit.{name} ")) for name in "abc"]
    assert tops == sorted(tops)
    assert texts(root).count("padding") == 1


@pytest.mark.parametrize("ranks", [8, 16, 64, 1024, 10240])
def test_hundreds_of_experts_are_a_few_families(ranks: int) -> None:
    p = model("dsv3_671b", ranks)
    root, rects = check(p)
    assert len(visualize(p, format="svg").encode()) < 300_000
    words = texts(root)
    assert "moe.*.experts.*.up" in words
    assert any(word.startswith("256x [2048,7168]") for word in words)
    assert len(words) < 1000
    for _, column in zip(range(64), stacks(rects), strict=False):
        assert len({r.fill for r in column}) <= 22
    drawn = sum(r.elements for r in rects)
    assert drawn == sum(b.length for b in p.buckets if b.unit.split(".")[-1] not in ("1", "2"))
    if ranks > 64:
        assert max(len({r.x for r in rects if r.y == y}) for y in {r.y for r in rects}) <= 64
        assert any("of 160 ranks" in w or f"a column is {ranks // 64} ranks" in w for w in words)


def test_many_leaves_on_few_ranks_are_drawn_by_kind() -> None:
    tree = {"m": [{"up": ((4, 8), F32), "down": ((8, 4), F32)} for _ in range(1000)]}
    root, rects = check(plan(tree, {"fsdp": 4}, RAGGED))
    assert len(rects) <= 4 * 3
    assert any("leaves of a column by kind" in text for text in texts(root))
    assert any(re.fullmatch(r"m\.\*\.up: [\d,]+ elements of \d+ leaves", r.title) for r in rects)


def test_shares() -> None:
    p = plan({"w": ((10, 8), F32)}, {"fsdp": 3}, P(ragged="fsdp", shares=(2, 0, 3)))
    root, rects = check(p)
    assert [r.elements for r in rects] == [32, 48]
    assert rects[0].height / rects[1].height == pytest.approx(2 / 3, abs=1e-3)
    assert any("all shares = 80" in text for text in texts(root))


def test_whole_tensors_even_dims_and_frozen_leaves() -> None:
    tree = {"u": {"a": ((8, 8), F32), "b": ((8, 8), F32), "c": ((8, 8), F32)}}
    spec = rules({"*.a": P("tp", ragged="fsdp", block=TENSOR), "*.b": None, "*.c": RAGGED})
    p = plan(tree, {"fsdp": 2, "tp": 2}, spec, frozen=rules({"*.c": True, "**": False}))
    root, rects = check(p)
    words = " ".join(texts(root))
    assert all(word in words for word in ("even dims over tp", "replicated on every rank", "every rank", "frozen"))
    assert [r.elements for r in rects if r.title.startswith("u.a")] == [32]


@pytest.mark.parametrize("tree", [{}, {"w": ((0, 3), F32)}, {"u": {"w": ((0,), F32), "v": ((), F32)}}])
def test_nothing_to_draw(tree: Any) -> None:
    root, rects = check(plan(tree, {"fsdp": 2}, RAGGED))
    assert len(rects) == (3 if "u" in tree else 0)
    assert root.tag == f"{SVG}svg"


def test_any_path_is_valid_xml() -> None:
    names = ["<b>&amp;\"'", "]]>", "\x00\x1b\ud800", "ключ", "x" * 200]
    root, rects = check(plan({"u": dict.fromkeys(names, ((64,), F32))}, {"fsdp": 1}, RAGGED))
    shown = {r.title.rsplit(" [", 1)[0].removeprefix("u.") for r in rects}
    assert shown == {*names[:2], "\ufffd" * 3, *names[3:]}
    assert any(text.startswith("…x") for text in texts(root))


def test_the_same_picture_each_time() -> None:
    assert visualize(readme_layer(), format="svg") == visualize(readme_layer(), format="svg")
