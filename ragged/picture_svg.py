"""Layouts as SVG: the document, its panels and legends. One standalone file, no scripts, no fonts of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from ragged.layout import Bucket
from ragged.picture_chart import CHAR, Box, chart, number, text
from ragged.picture_parts import OTHERS, Family, Panel, columns, families

__all__ = ["draw_svg"]

_WIDTH, _MARGIN, _GUTTER = 960, 20, 22
_HEIGHT, _LEAST = 250, 48  # of a panel's charts together, and of one chart
_MOST_COLUMNS, _WIDEST = 64, 170
_MOST_COLORS = 21
_MOST_RUNS = 1200  # drawn one by one in a document, which keeps it under 300 KB
_LEGEND_LINE = 17
_LABEL = 46
_GREY = 'fill="#555555"'
_ILLEGAL = re.compile("[^\t\n -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PATTERN = (
    '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f4f4f4"/><path d="M1 0v6" stroke="#a0a0a0" stroke-width="1.4"/></pattern></defs>'
)


def draw_svg(panels: Sequence[Panel]) -> str:
    """A panel per kind of unit, under one another: a chart per bucket, and a legend."""
    exact = _exact(panels)
    parts, y = [], float(_MARGIN)
    for panel in panels:
        own = families(panel.leaves, _MOST_COLORS)
        total = sum(b.shard for b in panel.buckets)
        for title, bucket in zip(panel.titles, panel.buckets, strict=True):
            height = max(_HEIGHT * bucket.shard / total, _LEAST) if bucket.length else 0.0
            parts.append(_bucket(title, bucket, own, height, y, bucket.index in exact))
            y += height + 74
        drawn, lines = _legend(panel, own, y)
        parts.append(drawn)
        y += lines * _LEGEND_LINE + 26
    tall = number(max(y, 2 * _MARGIN))
    name = "Layout of " + (", ".join(t for p in panels for t in p.titles) or "no leaves")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{tall}" '
            f'viewBox="0 0 {_WIDTH} {tall}" role="img" aria-label={quoteattr(_legal(name))} '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="11" fill="#222222">',
            _PATTERN,
            f'<rect width="{_WIDTH}" height="{tall}" rx="6" fill="#ffffff"/>',
            *map(_legal, parts),
            "</svg>",
        ]
    )


def _legal(drawn: str) -> str:
    """Without the characters that XML can't hold, which a path may have."""
    return _ILLEGAL.sub("\ufffd", drawn)


def _exact(panels: Sequence[Panel]) -> set[int]:
    """Buckets whose runs are drawn one by one: small ones first, as many as the document has room for."""
    found, room = set(), _MOST_RUNS
    buckets = [b for panel in panels for b in panel.buckets if b.ranks <= _MOST_COLUMNS]
    for runs, index in sorted((len(b.leaves) + len(b.gaps) + b.ranks, b.index) for b in buckets):
        if runs <= room:
            found.add(index)
            room -= runs
    return found


def _bucket(title: str, bucket: Bucket, own: Sequence[Family], height: float, y: float, exact: bool) -> str:
    """Title, facts and chart of a bucket; 74 units higher than the chart."""
    groups = columns(bucket.ranks, _MOST_COLUMNS)
    left = _MARGIN + _GUTTER
    width = min(_WIDTH - _MARGIN - left, _WIDEST * len(groups))
    box = Box(left, y + 56, width, height)
    lines = [
        text(_MARGIN, y + 14, title, 'font-size="14" font-weight="bold"'),
        text(_MARGIN, y + 31, _facts(bucket, groups, exact), _GREY),
    ]
    if bucket.length:
        lines.append(text(left - 6, box.y + 8, "0", 'text-anchor="end" font-size="9" fill="#555555"'))
        lines.append(text(left - 6, box.y + height, "S", 'text-anchor="end" font-size="9" fill="#555555"'))
        lines.append(chart(bucket, groups, own, box, exact))
    return "\n".join(lines)


def _facts(bucket: Bucket, groups: Sequence[tuple[int, int]], exact: bool) -> str:
    dtype = str(bucket.dtype).removeprefix("torch.")
    padding = bucket.length - bucket.elements
    share = f" ({padding / bucket.elements:,.2%})" if bucket.elements else ""
    facts = [
        dtype,
        f"{bucket.ranks:,} ranks over {'+'.join(bucket.ragged)}" if bucket.ragged else "replicated on every rank",
        f"S = {bucket.shard:,}",
        f"m*S = {bucket.length:,}" if bucket.bounds.explicit is None else f"all shares = {bucket.length:,}",
        f"padding {padding:,}{share}",
        *([f"even dims over {'+'.join(bucket.even)}"] if bucket.even else []),
        *(["frozen"] if bucket.frozen else []),
    ]
    a, b = groups[0]
    if b > a + 1:
        facts.append(f"a column is {b - a:,} ranks")
    elif not exact:
        facts.append("leaves of a column by kind")
    return " · ".join(facts)


def _legend(panel: Panel, own: Sequence[Family], y: float) -> tuple[str, int]:
    """Colour, paths, shape and block of each family, in as many columns as fit; and the number of lines."""
    entries = [(family.color, *_entry(family)) for family in own]
    padding = sum(b.length - b.elements for b in panel.buckets)
    if padding:
        entries.append(("url(#padding)", "padding", f"{padding:,} elements", "padding"))
    label = max((len(name) for _, name, _, _ in entries), default=0)
    width = max((CHAR * (label + 2 + len(facts)) + 44 for _, _, facts, _ in entries), default=1.0)
    across = max(int((_WIDTH - 2 * _MARGIN + 20) // width), 1)
    lines = -(-len(entries) // across)
    drawn = []
    for i, (fill, name, facts, title) in enumerate(entries):
        x, line = _MARGIN + width * (i // lines), y + _LEGEND_LINE * (i % lines)
        drawn.append(
            f'<g><title>{escape(title)}</title><path d="M{number(x)} {number(line)}h11v11h-11z" fill="{fill}" '
            f'stroke="#555555" stroke-width=".5"/>{text(x + 18, line + 10, name)}'
            f"{text(x + 18 + CHAR * (label + 2), line + 10, facts, _GREY)}</g>"
        )
    return "\n".join(drawn), lines


def _entry(family: Family) -> tuple[str, str, str]:
    """A family's name, facts and tooltip."""
    shapes, blocks = {f.shape for f in family.leaves}, {f.block for f in family.leaves}
    shape = f"[{','.join(map(str, next(iter(shapes))))}]" if len(shapes) == 1 else "various shapes"
    block = f"block {next(iter(blocks)):,}" if len(blocks) == 1 else f"blocks {min(blocks):,} to {max(blocks):,}"
    many = f"{len(family.leaves)}x " if len(family.leaves) > 1 or family.label == OTHERS else ""
    elements = sum(f.size for f in family.leaves)
    facts = f"{many}{shape} {block}"
    return _tail(family.label, _LABEL), facts, f"{family.label}: {facts}, {elements:,} elements"


def _tail(path: str, most: int) -> str:
    """The end of a path, which tells leaves apart, after an ellipsis if it is too long."""
    return path if len(path) <= most else "…" + path[len(path) - most + 1 :]
