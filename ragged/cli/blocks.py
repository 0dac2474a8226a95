"""Blocks on the command line: a word or a few numbers, for all leaves or for those of a pattern.

    row        one index of dim 0 (the library's default)
    tensor     whole leaves
    element    no blocks: cut anywhere
    32r        32 rows of a matrix
    256        256 flat elements
    32x32      tiles of a matrix

Rows and tiles are those of the last two dims: a leaf with more dims is a stack of matrices. `PATTERN=BLOCK` says it
for the leaves of a pattern; what no pattern claims and has fewer than two dims is cut anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragged.resolver import matches
from ragged.spec import ELEMENT, ROW, TENSOR, Block

__all__ = ["BlockRule", "blocks_of", "parse_block", "parse_pattern"]

_WORDS: Mapping[str, Block] = {"row": ROW, "tensor": TENSOR, "element": ELEMENT}


@dataclass(frozen=True)
class BlockRule:
    """One `--block`: its text, the pattern it is for (None: all leaves of two dims or more), and the block.

    Attributes:
      tile: sizes for the last dims, None for a full one; empty if `named` is the block for every shape.
    """

    text: str
    pattern: str | re.Pattern[str] | None
    named: Block = ROW
    tile: tuple[int | None, ...] = ()

    def block(self, path: str, shape: tuple[int, ...]) -> Block:
        """The block of a leaf.

        Raises:
          ValueError: a tile of more dims than the leaf has.
        """
        if not self.tile:
            return self.named
        # The rows of a vector are its elements.
        tile = self.tile[:1] if len(shape) == 1 and self.tile[1:] == (None,) else self.tile
        if len(tile) > len(shape):
            raise ValueError(
                f"block {self.text!r} has {len(tile)} dims, leaf {path!r} of shape {shape} has {len(shape)}; "
                "give that leaf another block by a pattern first, such as PATTERN=row"
            )
        return (1,) * (len(shape) - len(tile)) + tile


def parse_pattern(text: str) -> str | re.Pattern[str]:
    """A glob on dotted paths, or after `re:` a regular expression.

    Raises:
      ValueError: an empty pattern, or no regular expression.
    """
    if not text.removeprefix("re:"):
        raise ValueError("an empty pattern matches no leaf; write ** for all leaves")
    if not text.startswith("re:"):
        return text
    try:
        return re.compile(text.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"pattern {text!r} is no regular expression: {error}") from None


def parse_block(text: str) -> BlockRule:
    """A `BlockRule` from its text, `BLOCK` or `PATTERN=BLOCK`.

    Raises:
      ValueError: no such block.

    Example:
      >>> parse_block("32r").block("w", (4096, 1024)), parse_block("**.mlp.**=32x32").block("e", (8, 4096, 1024))
      ((32, None), (1, 32, 32))
    """
    before, equals, name = text.rpartition("=")
    pattern = parse_pattern(before) if equals else None
    name = name.strip().lower()
    if name in _WORDS:
        return BlockRule(text, pattern, _WORDS[name])
    if re.fullmatch(r"[1-9]\d{0,17}", name):
        return BlockRule(text, pattern, int(name))
    if re.fullmatch(r"[1-9]\d{0,17}r", name):
        return BlockRule(text, pattern, tile=(int(name[:-1]), None))
    if re.fullmatch(r"[1-9]\d{0,17}(x[1-9]\d{0,17})+", name):
        return BlockRule(text, pattern, tile=tuple(int(n) for n in name.split("x")))
    raise ValueError(
        f"block {text!r}: expected row, tensor, element, rows such as 32r, flat elements such as 256, "
        "or tiles such as 32x32, with or without PATTERN= before it"
    )


def blocks_of(shapes: Mapping[str, tuple[int, ...]], rules: Sequence[BlockRule]) -> dict[str, Block]:
    """The block of each leaf: the first rule that claims it; without one, `row`, or `element` below two dims.

    Raises:
      ValueError: a pattern that matches no leaf, a rule that comes too late to be of use, or a tile that
        doesn't fit, naming it.

    Example:
      >>> blocks_of({"a.w": (64, 8), "a.b": (64,)}, [parse_block("**.b=tensor"), parse_block("32r")])
      {'a.w': (32, None), 'a.b': TENSOR}
    """
    blocks: dict[str, Block] = {}
    used = set()
    for path, shape in shapes.items():
        blocks[path] = ROW if len(shape) > 1 else ELEMENT
        for i, rule in enumerate(rules):
            if len(shape) > 1 if rule.pattern is None else matches(rule.pattern, path):
                blocks[path] = rule.block(path, shape)
                used.add(i)
                break
    for i, rule in enumerate(rules):
        if i not in used and (rule.pattern is not None or any(r.pattern is None for r in rules[:i])):
            hit = rule.pattern is None or any(matches(rule.pattern, path) for path in shapes)
            raise ValueError(
                f"block {rule.text!r} is never used: "
                + ("rules before it claim all its leaves; put it first" if hit else "its pattern matches no leaf")
            )
    return blocks
