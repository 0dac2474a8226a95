"""Which matrices a leaf holds: einops patterns, sections of fused weights, and what they cost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

__all__ = ["Matrices", "matrices_of"]


@dataclass(frozen=True)
class Matrices:
    """How a leaf is a stack of matrices.

    Attributes:
      shape: of the leaf; `pattern`: einops, whose last two axes are the matrix and whose others are batch.
      sizes: of axes that the shape doesn't give, as `(name, size)` pairs.
      split: row counts of the sections of each matrix, which are matrices of their own; one section if empty.
    """

    shape: tuple[int, ...]
    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()
    split: tuple[int, ...] = ()
    stack: tuple[int, int, int] = field(default=(0, 0, 0))  # batch, rows, columns

    @cached_property
    def in_place(self) -> bool:
        """Whether the pattern only groups dims anew, so that every matrix is a run of the leaf."""
        left, right = (re.sub(r"[()]", " ", side).split() for side in self.pattern.split("->"))
        return left == right

    @property
    def sections(self) -> tuple[int, ...]:
        return self.split or (self.stack[1],)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(first flat element, rows, columns) of every matrix, where they are runs of the leaf."""
        batch, rows, cols = self.stack
        for i in range(batch):
            at = i * rows
            for section in self.sections:
                yield at * cols, section, cols
                at += section

    def cost(self) -> int:
        """Multiplications of one Newton-Schulz step for all of them, up to a factor."""
        return self.stack[0] * sum(cost(rows, self.stack[2]) for rows in self.sections)

    def map(self, f: Any, leaf: Tensor) -> Tensor:
        """Apply `f`, from stacks `(batch, rows, cols)` to the same, to a leaf in its own shape."""
        sizes = dict(self.sizes)
        x = rearrange(leaf, self.pattern, **sizes)
        parts = torch.split(x.reshape(self.stack), list(self.sections), dim=1)
        y = torch.cat([f(part) for part in parts], dim=1).reshape(x.shape)
        left, right = self.pattern.split("->")
        sizes |= {name: n for name, n in zip(_outer(left), self.shape, strict=True) if name}
        return rearrange(y, f"{right} -> {left}", **sizes)


def cost(rows: int, cols: int) -> int:
    """Multiplications of one Newton-Schulz step on one matrix, up to a factor."""
    small, large = sorted((rows, cols))
    return small * small * (2 * large + small)


def _outer(side: str) -> list[str]:
    """Axis names by tensor dim, empty for composed ones."""
    return ["" if group.startswith("(") else group for group in re.findall(r"\([^)]*\)|\S+", side)]


def matrices_of(path: str, shape: tuple[int, ...], rule: Any, split: Any) -> Matrices:
    """Resolve a leaf's rule.

    Args:
      rule: None (a 2-D leaf is its own matrix), a pattern, or `(pattern, {axis: size})`.
      split: None, or row counts of sections.

    Raises:
      ValueError: naming path, shape and pattern.

    Example:
      >>> matrices_of("wq", (12, 5), ("(h d) m -> h d m", {"h": 3}), None).stack
      (3, 4, 5)
    """
    about = f"leaf {path!r} of shape {shape}"
    if rule is None:
        if len(shape) != 2:
            raise ValueError(
                f"{about} is no matrix: give it an einops pattern whose last two axes are one, such as "
                f'matrix=rules({{{path!r}: "e m n -> e m n", "**": None}}), or train it with another optimizer'
            )
        rule = "m n -> m n"
    pattern, sizes = rule if isinstance(rule, tuple) and len(rule) == 2 else (rule, {})
    if not isinstance(pattern, str) or not isinstance(sizes, Mapping):
        raise ValueError(f"{about}: matrix={rule!r}, expected an einops pattern, or (pattern, sizes of its axes)")
    try:
        made = rearrange(torch.empty(shape, device="meta"), pattern, **sizes)
    except Exception as error:
        raise ValueError(f"{about} does not fit the pattern {pattern!r} with {dict(sizes)}: {error}") from None
    if made.ndim < 2:
        raise ValueError(f"{about}: the pattern {pattern!r} leaves {made.ndim} axes; its last two are the matrix")
    stack = (math.prod(made.shape[:-2]), made.shape[-2], made.shape[-1])
    sections = () if split is None else tuple(split)
    if sections and (sum(sections) != stack[1] or any(type(n) is not int or n < 1 for n in sections)):
        raise ValueError(
            f"{about}: split={sections} must be positive and add up to the {stack[1]} rows of its matrices"
        )
    return Matrices(shape, pattern, tuple(sorted(sizes.items())), sections, stack)
