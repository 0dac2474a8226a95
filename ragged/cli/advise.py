"""`python -m ragged advise`: a table of choices, and the one recommended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ragged.cli.blocks import BlockRule
from ragged.cli.candidates import Costs, Row, evaluate, items_of, kinds_of_units, shard_groups
from ragged.cli.headers import Tensors
from ragged.cli.units import join_layers
from ragged.planner import Item
from ragged.report import size, table
from ragged.units import group_units

__all__ = ["advice", "recommend", "rows_of"]

SLACK = 0.01  # rows that gather so much more than the least are as good


def rows_of(
    tensors: Tensors,
    ranks: int,
    blocks: Sequence[BlockRule],
    patterns: Sequence[str | re.Pattern[str]],
    *,
    groups: Sequence[int] = (),
    layers: Sequence[int] = (1, 2),
    costs: Costs,
) -> list[Row]:
    """All candidates: shard groups times blocks times layers per unit.

    Args:
      blocks: those without a pattern are the candidates, those with one belong to each of them.
      groups: sizes of shard groups; by default `shard_groups(ranks)`.

    Raises:
      ValueError: a group that doesn't divide the ranks, or a block or a pattern that doesn't fit the model.
    """
    for group in groups:
        if ranks % group:
            raise ValueError(f"a shard group of {group} ranks does not divide {ranks} ranks; give divisors")
    fixed = [rule for rule in blocks if rule.pattern is not None]
    merged: dict[str, Mapping[str, Item]] = {}
    for rule in blocks:
        if rule.pattern is None:
            items = items_of(tensors, [*fixed, rule])
            # 32r and 32x32 are the same runs of most matrices.
            same = next((text for text, known in merged.items() if known == items), None)
            merged[rule.text if same is None else f"{same} = {rule.text}"] = items if same is None else merged.pop(same)
    units = group_units(tensors, patterns)
    rows = []
    for n in layers:
        joined = join_layers(units, n)
        for text, blocked in merged.items():
            kinds = kinds_of_units(tensors, blocked, joined)
            rows += [evaluate(kinds, group, ranks // group, text, n, costs) for group in groups or shard_groups(ranks)]
    order = {row.block: i for i, row in enumerate(rows)}
    return sorted(rows, key=lambda row: (row.group, order[row.block], row.layers))


def recommend(rows: Sequence[Row], memory: int | None) -> Row | None:
    """The row with the fewest bytes per rank, of those that fit and gather hardly more than the least of these.

    Hardly is 1 %: bytes per rank halve from one shard group to the next, while gathered bytes stay the same until
    blocks get in the way. Equals are decided by gathered bytes, then by buffers. None if nothing fits.

    Args:
      rows: the candidates.
      memory: bytes of one rank, or None for any number.
    """
    fitting = [row for row in rows if memory is None or row.memory <= memory]
    if not fitting:
        return None
    enough = (1 + SLACK) * min(row.gathered for row in fitting)
    return min(
        (row for row in fitting if row.gathered <= enough),
        key=lambda row: (row.memory, row.gathered, row.buffers, row.layers),
    )


def advice(title: str, rows: Sequence[Row], memory: int | None, costs: Costs) -> str:
    """The table, its assumptions, the recommended row and the rule by which it was chosen."""
    best = recommend(rows, memory)
    head = ("shard group", "replicas", "block", "layers/unit", "padding", "at least", "buffers", "S")
    lines: list[tuple[str, ...]] = [(*head, "state/rank", "in flight", "gathered/step", "")]
    lines += [_line(row, "<" if row is best else "") for row in rows]
    return "\n".join([title, "", table(lines), "", *_notes(costs), *_verdict(rows, best, memory)])


def _notes(costs: Costs) -> list[str]:
    return [
        "at least: the padding that no layout with these blocks and units avoids. buffers: collectives per pass.",
        "S: elements per rank, all units together.",
        f"state: parameters, gradients of the same dtype, {costs.state_bytes} bytes per element of optimizer state.",
        "in flight: the two largest units gathered, and the gradients of one. Activations are not counted.",
        "gathered: bytes per rank and step, each unit once forward and once more for its backward.",
    ]


def _verdict(rows: Sequence[Row], best: Row | None, memory: int | None) -> list[str]:
    """The recommended row, and what would be it if the other blocks were wanted."""
    if best is None:
        least = min(row.memory for row in rows)
        return [f"recommended: none; the least of the rows needs {size(least)}, more than {size(memory or 0)}"]
    limit = "" if memory is None else f"fit in {size(memory)} (state + in flight) and "
    lines = [
        f"recommended: {_words(best)}",
        f"(of the rows that {limit}gather at most {SLACK:.0%} more than the least of these, the one with the fewest "
        "bytes per rank)",
    ]
    for block in dict.fromkeys(row.block for row in rows):
        other = recommend([row for row in rows if row.block == block], memory)
        if block != best.block:
            lines.append(f"by the same rule with blocks {block}: {_words(other) if other else 'none fits'}")
    return lines


def _line(row: Row, mark: str) -> tuple[str, ...]:
    return (
        str(row.group),
        str(row.replicas),
        row.block,
        str(row.layers),
        f"{row.padding:.2%}",
        f"{row.unavoidable:.2%}",
        f"{row.buffers:,}",
        f"{row.shard:,}",
        size(row.state),
        size(row.flight),
        size(row.gathered),
        mark,
    )


def _words(row: Row) -> str:
    """A row in a sentence."""
    replicas = "no replicas" if row.replicas == 1 else f"{row.replicas} replicas"
    layers = "1 layer" if row.layers == 1 else f"{row.layers} layers"
    return f"shard group of {row.group}, {replicas}, block {row.block}, {layers} per unit: {size(row.memory)} per rank"
