"""Selections: which leaves of a plan a tree holds, and which intervals of the buffers that is."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import optree

from ragged.layout import Bucket
from ragged.plans import Plan

__all__ = ["Piece", "Selection", "select"]


class Piece(NamedTuple):
    """An interval of a bucket's global buffer: one child of a `ShardedTree`."""

    bucket: Bucket
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop == self.bucket.length

    def local(self, rank: int) -> tuple[int, int]:
        """The part that a rank holds, in the global buffer."""
        lo, hi = self.bucket.bounds(rank), self.bucket.bounds(rank + 1)
        return min(max(self.start, lo), hi), min(max(self.stop, lo), hi)


@dataclass(frozen=True, eq=False)
class Selection:
    """A subtree, partition, mask or label: a set of leaves with a structure of its own.

    Attributes:
      structure: the selection's own structure.
      paths: full paths of its leaves, in the structure's order.
      pieces: intervals of the buffers, in bucket order. Neighbouring leaves share one, a gap
        belongs to the leaf before it, so that a selection and its complement tile the buffers.
    """

    structure: optree.PyTreeSpec
    paths: tuple[str, ...]
    pieces: tuple[Piece, ...] = field(repr=False)
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.paths))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Selection)
            and self._hash == other._hash
            and self.paths == other.paths
            and self.structure == other.structure
        )

    @cached_property
    def digest(self) -> str:
        """Of the paths: equal on all ranks for equal selections."""
        return hashlib.sha256("\n".join(self.paths).encode()).hexdigest()[:16]

    @cached_property
    def whole(self) -> bool:
        """Whether it has all leaves of the buckets that it touches."""
        return all(piece.whole for piece in self.pieces)

    @cached_property
    def index(self) -> dict[tuple[int, int, int], int]:
        """The index of a piece by its bucket and borders."""
        return {(piece.bucket.index, piece.start, piece.stop): i for i, piece in enumerate(self.pieces)}

    @cached_property
    def order(self) -> list[int]:
        """The place of each path among all leaves of its buckets, in buffer order."""
        leaves = [leaf.path for piece in self.pieces for leaf in piece.bucket.leaves]
        at = {path: i for i, path in enumerate(leaves)}
        return [at[path] for path in self.paths]

    @cached_property
    def home(self) -> dict[str, int]:
        """Index of the piece that holds a path, in buffer order.

        A piece is a run of neighbouring leaves. Its borders alone would not tell: empty leaves share them.
        """
        wanted, out, index = set(self.paths), {}, -1
        for bucket in {piece.bucket.index: piece.bucket for piece in self.pieces}.values():
            inside = False
            for leaf in bucket.leaves:
                if leaf.path in wanted:
                    index += not inside
                    out[leaf.path] = index
                inside = leaf.path in wanted
        return out


def select(plan: Plan, structure: optree.PyTreeSpec, paths: Iterable[str]) -> Selection:
    """The selection of some leaves of a plan."""
    paths = tuple(paths)
    wanted = set(paths)
    by_bucket = sorted({plan.leaves[p].bucket for p in paths})
    pieces: list[Piece] = []
    for index in by_bucket:
        bucket = plan.buckets[index]
        cells, open_ = bucket.cells(), None
        for i, leaf in enumerate(bucket.leaves):
            if leaf.path in wanted:
                open_ = cells[i] if open_ is None else open_
            elif open_ is not None:
                pieces.append(Piece(bucket, open_, cells[i]))
                open_ = None
        if open_ is not None:
            pieces.append(Piece(bucket, open_, bucket.length))
    return Selection(structure, paths, tuple(pieces))


def whole(plan: Plan) -> Selection:
    """All leaves of a plan."""
    memo = plan.memo
    if "whole" not in memo:
        memo["whole"] = select(plan, plan.structure, plan.leaves)
    found: Selection = memo["whole"]
    return found


def child(plan: Plan, parent: Selection, key: Any) -> Selection | None:
    """The selection under one entry of a container, a slice of a sequence, or None for `None`.

    Raises:
      KeyError, IndexError: as the container itself would.
    """
    memo = parent._memo
    token = (key.start, key.stop, key.step) if isinstance(key, slice) else key
    if token not in memo:
        memo[token] = _child(plan, parent, key)
    found: Selection | None = memo[token]
    return found


def keys(structure: optree.PyTreeSpec) -> list[Any]:
    """The keys, indices or (of a named tuple) fields of a container."""
    fields = getattr(structure.type, "_fields", None)
    return list(structure.entries()) if fields is None else list(fields)


def _child(plan: Plan, parent: Selection, key: Any) -> Selection | None:
    structure = parent.structure
    if structure.is_leaf():
        raise KeyError(f"{key!r}: {parent.paths[0]!r} is a leaf, not a container")
    entries, children = keys(structure), structure.children()
    ends = [0]
    for spec in children:
        ends.append(ends[-1] + spec.num_leaves)
    if isinstance(key, slice):
        if not issubclass(structure.type or object, (list, tuple)):
            raise KeyError(f"slices need a list or tuple, not {structure.type}")
        chosen = range(len(children))[key]
        make = optree.treespec_list if structure.type is list else optree.treespec_tuple
        paths = [p for i in chosen for p in parent.paths[ends[i] : ends[i + 1]]]
        return select(plan, make([children[i] for i in chosen]), paths)
    if isinstance(key, int) and issubclass(structure.type or object, (list, tuple, deque)):
        if not -len(entries) <= key < len(entries):
            raise IndexError(f"index {key} out of range for {len(entries)} entries")
        key = entries[key]
    if key not in entries:
        raise KeyError(f"{key!r}; the entries are {entries[:20]}")
    i = entries.index(key)
    if children[i].type is type(None):
        return None
    return select(plan, children[i], parent.paths[ends[i] : ends[i + 1]])
