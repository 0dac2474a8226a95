"""Blocks, units and candidates: what the options of the command line mean."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from ragged import ELEMENT, ROW, TENSOR, P, plan
from ragged.cli.advise import advice, recommend, rows_of
from ragged.cli.blocks import blocks_of, parse_block, parse_pattern
from ragged.cli.candidates import Costs, Row, evaluate, items_of, shard_groups
from ragged.cli.headers import Tensors
from ragged.cli.units import join_layers, layer_patterns
from ragged.planner import Item
from ragged.spec import block_elements
from ragged.units import group_units

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.w": (100, 64),
    **{
        f"layers.{i}.{name}": shape
        for i in range(11)
        for name, shape in (("w", (96, 64)), ("experts", (4, 64, 8)), ("norm", (64,)), ("scale", ()))
    },
}
TENSORS: Tensors = {path: (shape, BF16) for path, shape in SHAPES.items()}


# --- blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "block", "elements"),
    [
        ("row", ROW, (64, 512)),
        ("Tensor", TENSOR, (6144, 2048)),
        ("element", ELEMENT, (1, 1)),
        ("256", 256, (256, 256)),
        ("32r", None, (2048, 256)),
        ("32x32", None, (2048, 256)),
        ("1x4", None, (4, 4)),
        ("1x48x8", None, None),
    ],
)
def test_block_words(text: str, block: Any, elements: tuple[int, int] | None) -> None:
    """On a matrix (96, 64), and on a stack of four matrices (4, 64, 8)."""
    rule = parse_block(text)
    assert rule.pattern is None
    if elements is None:
        assert block_elements(rule.block("e", (4, 64, 8)), (4, 64, 8)) == 512  # 48 rows don't divide 64
        with pytest.raises(ValueError, match=r"block '1x48x8' has 3 dims, leaf 'w' of shape \(96, 64\) has 2"):
            rule.block("w", (96, 64))
        return
    if block is not None:
        assert rule.block("w", (96, 64)) == block
    assert tuple(block_elements(rule.block("x", s), s) for s in ((96, 64), (4, 64, 8))) == elements


@pytest.mark.parametrize("text", ["", "rows", "0", "0r", "32x", "x32", "32x0", "-1", "1.5", "32 32", "a=", "a=b", "٣"])
def test_no_blocks(text: str) -> None:
    with pytest.raises(ValueError, match=f"block {re.escape(repr(text))}: expected row, tensor, element"):
        parse_block(text)


def test_patterns() -> None:
    assert parse_pattern("layers.*") == "layers.*"
    assert parse_pattern("re:a=[0-9]") == re.compile("a=[0-9]")
    assert parse_block("re:a=[0-9]=32r").pattern == re.compile("a=[0-9]")
    for text, message in (("", "empty pattern"), ("re:", "empty pattern"), ("re:(", "no regular expression")):
        with pytest.raises(ValueError, match=message):
            parse_pattern(text)


def test_the_first_rule_that_claims_a_leaf_wins() -> None:
    rules = [parse_block(t) for t in ("layers.0.**=tensor", "re:experts$=1x8x8", "**.norm=32r", "**.w=32r", "16")]
    with pytest.raises(ValueError, match="block '16' is never used"):
        blocks_of({"layers.0.w": (8, 8)}, [rules[0], parse_block("row"), rules[-1]])
    blocks = blocks_of({**SHAPES, "head": (8, 8)}, rules)
    assert blocks["layers.0.norm"] is blocks["layers.0.w"] is TENSOR
    assert blocks["layers.1.experts"] == (1, 8, 8)
    assert blocks["layers.1.norm"] == (32,)
    assert blocks["layers.1.scale"] is ELEMENT
    assert blocks["embed.w"] == (32, None)
    assert blocks["head"] == 16


def test_default_blocks() -> None:
    blocks = blocks_of(SHAPES, [])
    assert blocks["embed.w"] is blocks["layers.0.experts"] is ROW
    assert blocks["layers.0.norm"] is blocks["layers.0.scale"] is ELEMENT


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["**.q=32r"], r"block '\*\*.q=32r' is never used: its pattern matches no leaf"),
        (["row", "**.w=32r"], r"'\*\*.w=32r' is never used: rules before it claim all its leaves; put it first"),
        (["row", "32r"], "'32r' is never used: rules before it claim all"),
        (["**.norm=32x32"], r"block '\*\*.norm=32x32' has 2 dims, leaf 'layers.0.norm' of shape \(64,\) has 1"),
    ],
)
def test_rules_of_no_use(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks_of(SHAPES, [parse_block(text) for text in texts])


def test_a_block_for_all_matrices_may_meet_none() -> None:
    assert blocks_of({"norm": (8,)}, [parse_block("32r")]) == {"norm": ELEMENT}


# --- units ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "patterns"),
    [
        (SHAPES, ["layers.*"]),
        (["a.layers.0.w", "a.layers.1.w", "b.0.w", "b.1.w", "head.0.w"], ["a.layers.*", "b.*"]),
        (["layers.0.w", "norm"], ["layers.*"]),
        (["0.w", "1.w", "norm"], []),
        (["x.0.w", "x.1.w", "x.y.0.w", "x.y.1.w"], ["x.y.*", "x.*"]),
    ],
)
def test_layers_are_found_by_their_numbers(paths: Any, patterns: list[str]) -> None:
    assert layer_patterns(paths) == patterns
    assert plan(dict.fromkeys(paths, ((8, 8), F32)), {"fsdp": 2}, P(ragged="fsdp"), units=patterns)


def test_units_are_those_of_plan() -> None:
    patterns: list[str | re.Pattern[str]] = ["layers.*", re.compile(r"embed\.w")]
    made = plan(TENSORS, {"fsdp": 4}, P(ragged="fsdp"), units=patterns)
    units = group_units(TENSORS, patterns)
    assert [unit.name for unit in units] == [unit.name for unit in made.units]
    assert [set(unit.paths) for unit in units] == [{f.path for f in unit.leaves} for unit in made.units]
    with pytest.raises(ValueError, match=r"units pattern 'blocks\.\*' matches no leaf"):
        group_units(TENSORS, ["blocks.*"])


def test_layers_in_natural_order_are_joined() -> None:
    joined = join_layers(group_units(SHAPES, ["layers.*"]), 4)
    numbers = [sorted({int(path.split(".")[1]) for path in paths}) for paths in joined if paths != ("embed.w",)]
    assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


# --- candidates -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "groups"),
    [
        (1, [1]),
        (6, [6]),
        (1024, [8, 16, 32, 64, 128, 256, 512, 1024]),
        (1009, [1009]),
        (3**12, [3**k for k in range(5, 13)]),
    ],
)
def test_shard_groups(ranks: int, groups: list[int]) -> None:
    assert shard_groups(ranks) == groups


@pytest.mark.parametrize("block", ["row", "32r", "256"])
@pytest.mark.parametrize("price", [0, 2**20])
def test_a_row_says_what_the_plan_says(block: str, price: int) -> None:
    rules = [parse_block(block)]
    (row,) = rows_of(TENSORS, 8, rules, ["layers.*"], groups=[8], layers=[1], costs=Costs(price=price))
    spec = {path: P(ragged="fsdp", block=b) for path, b in blocks_of(SHAPES, rules).items()}
    made = plan(TENSORS, {"fsdp": 8}, spec, units=["layers.*"], price=price)
    assert row.shard == sum(b.shard for b in made.buckets)
    assert row.buffers == len(made.buckets)
    assert row.elements == sum(b.elements for b in made.buckets)
    assert row.padding == pytest.approx(made.padding)
    assert 0 <= row.unavoidable <= row.padding


def test_bytes_by_hand() -> None:
    """Two units of 64 floats and 64 byte codes, and one of 128 bf16, on two ranks; codes aren't trained."""
    mixed = ((F32, (Item(64, 1),)), (U8, (Item(64, 1),)))
    row = evaluate(
        Counter({mixed: 2, ((BF16, (Item(128, 1),)),): 1}), 2, 3, "element", 1, Costs(align=32, state_bytes=5)
    )
    assert (row.buffers, row.elements, row.shard, row.least) == (5, 384, 192, 192)
    assert row.state == 2 * (32 * (4 + 4 + 5) + 32 * 1) + 64 * (2 + 2 + 5)
    assert row.flight == 3 * (64 * 4 + 64)
    assert row.gathered == 2 * (2 * 320 + 256)


def test_equal_blocks_share_a_row() -> None:
    blocks = [parse_block(t) for t in ("**.norm=tensor", "32r", "256", "32x32")]
    rows = rows_of(TENSORS, 16, blocks, ["layers.*"], groups=[8, 16], layers=[1, 3], costs=Costs())
    assert len(rows) == 8
    assert {row.block for row in rows} == {"256", "32r = 32x32"}
    assert {(row.group, row.replicas) for row in rows} == {(8, 2), (16, 1)}
    with pytest.raises(ValueError, match="a shard group of 5 ranks does not divide 16 ranks"):
        rows_of(TENSORS, 16, blocks, ["layers.*"], groups=[5], costs=Costs())


def some_row(state: int, gathered: int, block: str = "a", buffers: int = 1) -> Row:
    return Row(8, 1, block, 1, buffers, 100, 13, 13, state, 10, gathered)


def test_recommendation() -> None:
    rows = [some_row(1000, 10_000), some_row(500, 10_099), some_row(400, 10_300), some_row(500, 10_099, buffers=2)]
    assert recommend(rows, None) is rows[1]
    assert recommend(rows, 510) is rows[1]
    assert recommend(rows, 509) is rows[2]
    assert recommend(rows, 409) is None


def test_advice_states_its_rule() -> None:
    rows = [some_row(2**30, 10_000), some_row(2**31, 20_000, "b")]
    text = advice("title", rows, 2**40, Costs())
    assert text.startswith("title\n")
    assert "recommended: shard group of 8, no replicas, block a, 1 layer per unit: 1.0 GiB per rank" in text
    assert "(of the rows that fit in 1.0 TiB (state + in flight) and gather at most 1% more than the least" in text
    assert "by the same rule with blocks b: shard group of 8" in text
    assert sum(line.endswith("  <") for line in text.splitlines()) == 1
    assert "recommended: none; the least of the rows needs 1.0 GiB, more than 1.0 MiB" in advice(
        "", rows, 2**20, Costs()
    )
    assert items_of({"w": ((0, 3), F32)}, []) == {"w": Item(0, 1)}
