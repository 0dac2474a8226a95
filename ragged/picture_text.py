"""Layouts as text: one line per leaf, one column per rank; coloured where asked."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from itertools import accumulate

from ragged.layout import Bucket
from ragged.picture_parts import Panel, columns, families

__all__ = ["draw_text"]

_MOST_RANKS = 16
_MOST_COLORS = 21
_BAR = 8
# A stretch of a line and its colour, or a word of rich's ("bold", "dim"), or "" for as it is.
_Span = tuple[str, str]


def draw_text(panels: Sequence[Panel], color: bool | None) -> str:
    """A table per bucket, with empty lines between them.

    Args:
      panels: what to draw.
      color: with ANSI colours; None: if rich is installed, stdout is a terminal and NO_COLOR is unset.

    Raises:
      ValueError: colours are asked for and rich is not installed.
    """
    if color is None:
        color = _has_rich() and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    elif color and not _has_rich():
        raise ValueError('color=True needs the package "rich", which is not installed; install it, or leave color out')
    drawings = []
    for panel in panels:
        colors = {f.path: family.color for family in families(panel.leaves, _MOST_COLORS) for f in family.leaves}
        for title, bucket in zip(panel.titles, panel.buckets, strict=True):
            lines = _draw(title, bucket, colors)
            drawings.append(_ansi(lines) if color else "\n".join("".join(text for text, _ in line) for line in lines))
    return "\n\n".join(drawings)


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def _draw(title: str, bucket: Bucket, colors: dict[str, str]) -> list[list[_Span]]:
    groups = columns(bucket.ranks, _MOST_RANKS)
    heads = [f"rank {a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in groups]
    counts = [[f.span(b - 1)[1] - f.span(a)[0] for a, b in groups] for f in bucket.leaves]
    used = [sum(column) for column in zip(*counts, strict=True)] or [0] * len(groups)
    size = [bucket.bounds(b) - bucket.bounds(a) for a, b in groups]
    rows: list[list[list[_Span]]] = [[[(cell, "dim")] for cell in ("", "block", *heads)]]
    for leaf, own in zip(bucket.leaves, counts, strict=True):
        color = colors[leaf.path]
        cells = [[_number(n, color)] for n in own]
        rows.append([[(leaf.path, color)], [(f"{leaf.block:,}", "")], *cells])
    pads = [[_number(n - u, "dim")] for n, u in zip(size, used, strict=True)]
    rows.append([[("(padding)", "dim")], [("", "")], *pads])
    tones = [colors[leaf.path] for leaf in bucket.leaves]
    bars = [_bar([own[i] for own in counts], tones, n) for i, n in enumerate(size)]
    rows.append([[("(filled)", "dim")], [("", "")], *bars])
    axes = "+".join(bucket.ragged) or "every rank"
    dtype = str(bucket.dtype).removeprefix("torch.")
    facts = f"  {dtype}, S = {bucket.shard:,} over {axes}"
    return [[(title, "bold"), (facts, "")], *_align(rows)]


def _number(n: int, style: str) -> _Span:
    return (f"{n:,}", style) if n else ("·", "dim")


def _bar(counts: Sequence[int], colors: Sequence[str], size: int) -> list[_Span]:
    """Eight characters: full ones for the leaves, in the colours of the leaves that lie there."""
    used = sum(counts)
    full = round(_BAR * used / size) if size else 0
    ends = list(accumulate(counts))
    spans = []
    for i in range(full):
        at = (2 * i + 1) * used // (2 * full)
        spans.append(("█", next(color for end, color in zip(ends, colors, strict=True) if at < end)))
    return [*spans, ("░" * (_BAR - full), "dim")]


def _align(rows: Sequence[Sequence[list[_Span]]]) -> list[list[_Span]]:
    """Rows of cells as lines: the first column to the left, the rest to the right."""
    width = [max(_length(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        line = [*row[0], (" " * (width[0] - _length(row[0])), "")]
        for cell, w in zip(row[1:], width[1:], strict=True):
            line += [(" " * (2 + w - _length(cell)), ""), *cell]
        lines.append(line)
    return lines


def _length(cell: Sequence[_Span]) -> int:
    return sum(len(text) for text, _ in cell)


def _ansi(lines: Sequence[Sequence[_Span]]) -> str:
    """The lines with colours of the 256-colour set, which terminals have in common."""
    # By name: an import of an optional package would make type checks depend on what is installed.
    rich_console, rich_text = importlib.import_module("rich.console"), importlib.import_module("rich.text")
    out = io.StringIO()
    console = rich_console.Console(
        file=out, force_terminal=True, color_system="256", no_color=False, legacy_windows=False, width=1 << 16
    )
    for line in lines:
        console.print(rich_text.Text.assemble(*line), soft_wrap=True)
    return out.getvalue().removesuffix("\n")
