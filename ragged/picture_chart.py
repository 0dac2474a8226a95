"""The chart of one bucket: ranks as columns, and in each column its runs in the order in which they lie there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from ragged.layout import Bucket, LeafInfo
from ragged.picture_parts import Family, Piece, ink, pieces

__all__ = ["CHAR", "Box", "chart", "number", "text"]

CHAR = 6.65  # width of a character of the 11 unit font
_SMALL_CHAR = 6.05  # and of the 10 unit font
_LABEL_HEIGHT, _BLOCK_HEIGHT, _RUN_HEIGHT, _LINE_WIDTH = 12, 4, 3, 8


@dataclass(frozen=True)
class Box:
    """Where a chart lies in the document."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class _Run:
    """A rectangle of a column: its colour, what it is called, what its tooltip says, and how many elements it is."""

    color: str
    label: str
    title: str
    size: int
    piece: Piece | None = None


def number(x: float) -> str:
    """Two decimals at most."""
    return f"{x:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{number(x)}" y="{number(y)}"{" " * bool(style)}{style}>{escape(words)}</text>'


def chart(bucket: Bucket, groups: Sequence[tuple[int, int]], own: Sequence[Family], box: Box, exact: bool) -> str:
    """Columns side by side.

    Args:
      bucket: what is drawn, with at least one element.
      groups: ranks `[a, b)` of each column.
      own: colours of the leaves.
      box: where; its height stands for S elements of each rank.
      exact: a column is one rank, with a rectangle per run; else one per family and column, so that
        the size of the picture does not grow with the number of leaves or ranks.
    """
    family = {leaf.path: f for f in own for leaf in f.leaves}
    unit = box.width / bucket.ranks
    heads = _heads(groups, unit) if bucket.ragged else ["every rank"]
    fills, lines, labels, frames, tops = [], [], [], [], []
    for i, ((a, b), held) in enumerate(zip(groups, pieces(bucket, groups), strict=True)):
        gap = min(6.0, 0.12 * unit * (b - a))
        x, width = round(box.x + unit * a, 2), round(unit * (b - a) - gap, 2)
        scale = box.height / (bucket.shard * (b - a))
        runs = [_run(p, family) for p in held] if exact else _mix(held, own, family)
        y, done, above = box.y, 0, 0.0
        for run in runs:
            done += run.size
            end = round(box.y + scale * done, 2)
            height = end - round(y, 2)
            fills.append(
                f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
                f'fill="{run.color}"><title>{escape(run.title)}</title></rect>'
            )
            edges = [y] if min(height, above) >= _RUN_HEIGHT else []
            if exact and width >= _LINE_WIDTH:
                edges += _blocks(run.piece, y, scale)
            lines += [f"M{number(x)} {number(edge)}h{number(width)}" for edge in edges]
            labels.append(_label(run, x + width / 2, y, width, height))
            y, above = end, height
        frames.append(f"M{number(x)} {number(box.y)}h{number(width)}V{number(y)}h{number(-width)}z")
        tops.append(text(x + width / 2, box.y - 6, heads[i], 'fill="#555555"') if heads[i] else "")
    return "\n".join(
        [
            f'<g text-anchor="middle">{"".join(tops)}</g>',
            *fills,
            '<g pointer-events="none" fill="none" stroke="#000000">'
            f'<path d="{"".join(lines)}" stroke-opacity=".4" stroke-width=".5"/>'
            f'<path d="{"".join(frames)}" stroke-opacity=".7" stroke-width=".75"/></g>',
            f'<g pointer-events="none" text-anchor="middle" font-size="10">{"".join(labels)}</g>',
        ]
    )


def _run(piece: Piece, family: Mapping[str, Family]) -> _Run:
    size, leaf = piece.stop - piece.start, piece.leaf
    if leaf is None:
        return _Run("url(#padding)", "", f"padding, {size:,} elements", size, piece)
    start, stop = piece.start - leaf.offset, piece.stop - leaf.offset
    first, last = start // leaf.block, (stop - 1) // leaf.block
    blocks = f"block {first:,}" if first == last else f"blocks {first:,} to {last:,}"
    title = f"{leaf.path} [{start:,}, {stop:,}) of {leaf.size:,}, {blocks} of {leaf.block:,}"
    return _Run(family[leaf.path].color, _inside(leaf), title, size, piece)


def _mix(held: Sequence[Piece], own: Sequence[Family], family: Mapping[str, Family]) -> list[_Run]:
    """A run per family, in the order of the legend in every column, and the padding last."""
    parts: dict[str | None, list[Piece]] = {f.label: [] for f in own} | {None: []}
    for piece in held:
        parts[None if piece.leaf is None else family[piece.leaf.path].label].append(piece)
    runs = []
    for label, some in parts.items():
        size = sum(p.stop - p.start for p in some)
        if label is None and some:
            runs.append(_Run("url(#padding)", "", f"padding, {size:,} elements", size))
        elif len(some) == 1:
            runs.append(_run(some[0], family))
        elif label is not None and (leaf := next((p.leaf for p in some), None)):
            title = f"{label}: {size:,} elements of {len(some):,} leaves"
            runs.append(_Run(family[leaf.path].color, label.removeprefix(f"{leaf.unit}."), title, size))
    return runs


def _inside(leaf: LeafInfo) -> str:
    """The path within the unit."""
    return leaf.path.removeprefix(f"{leaf.unit}.")


def _blocks(piece: Piece | None, y: float, scale: float) -> list[float]:
    """Heights of the block borders inside a run, where they are far enough apart to be seen."""
    if piece is None or piece.leaf is None or piece.leaf.block * scale < _BLOCK_HEIGHT:
        return []
    block, offset = piece.leaf.block, piece.leaf.offset
    first = (piece.start - offset) // block + 1
    last = (piece.stop - offset - 1) // block
    return [y + scale * (offset + i * block - piece.start) for i in range(first, last + 1)]


def _label(run: _Run, x: float, y: float, width: float, height: float) -> str:
    """The run's name if it is tall enough: as much of it as fits, best a whole path or its last component."""
    most = int((width - 4) / _SMALL_CHAR)
    if not run.label or height < _LABEL_HEIGHT or most < 3:
        return ""
    fits = [name for name in (run.label, run.label.rsplit(".", 1)[-1]) if len(name) <= most]
    name = fits[0] if fits else run.label.rsplit(".", 1)[-1][: most - 1] + "…"
    return text(x, y + height / 2 + 3.5, name, f'fill="{ink(run.color)}"')


def _heads(groups: Sequence[tuple[int, int]], unit: float) -> list[str]:
    """Names of the columns: in full where they fit, else the first rank of every few columns."""
    full = [f"rank {a}" if b == a + 1 else f"ranks {a}-{b - 1}" for a, b in groups]
    width = unit * (groups[0][1] - groups[0][0])
    if CHAR * (max(map(len, full)) + 1) <= width:
        return full
    step = -(-int(CHAR * (len(str(groups[-1][0])) + 1)) // max(int(width), 1))
    return ["" if i % step else str(a) for i, (a, _) in enumerate(groups)]
