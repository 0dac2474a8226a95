"""`ShardedTree`: a pytree whose leaves are this rank's pieces of the plan's buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import optree
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from ragged.buffer import DBuffer
from ragged.plans import Plan
from ragged.selection import Piece, Selection, child, keys

__all__ = ["Life", "ShardedTree", "refuse_traced", "sharded_trees"]


class Life:
    """Which intervals of some buffers were given away; shared by all trees that are views of them."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        self.ended: list[tuple[Piece, str]] = []

    def cause(self, pieces: Sequence[Piece], since: int = 0) -> str | None:
        """What any of the pieces were donated to, or None; `since`: not counting the first so many donations."""
        for gone, cause in self.ended[since:]:
            for piece in pieces:
                if piece.bucket is gone.bucket and piece.start < gone.stop and gone.start < piece.stop:
                    return cause
        return None


class ShardedTree:
    """A tree of tensors in sharded form: a plan, a selection of its leaves, and local buffers.

    As a pytree its children are, per bucket, the intervals of the global buffer that the
    selection covers, cut to this rank: the buffers themselves for a whole tree, possibly empty,
    the same number on every rank. So `tree_map` is a fused group operation and an optimizer
    works on a handful of flat tensors. Registered with optree (in every namespace) and with
    torch's pytree.

    `tree["layers"][3]`, slices of lists, `partition` and optimizer states are selections;
    subtrees share storage with the whole. Lists have `len` and iterate, mappings have `keys`.

    Attributes:
      plan: the layout; `selection`: which leaves, and where.
      scope: what the library knows about a tree inside a differentiated function.

    Example:
      >>> import torch
      >>> from ragged import P, make_mesh, shard
      >>> mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
      >>> tree = shard({"w": torch.ones(4, 2), "b": torch.zeros(3)}, mesh, P(ragged="fsdp"))
      >>> tree["w"].leaf("w").sum().item()
      8.0
    """

    __slots__ = ("_born", "_lives", "_tensors", "plan", "scope", "selection")

    def __init__(
        self,
        plan: Plan,
        selection: Selection,
        tensors: Iterable[Any],
        *,
        scope: Any = None,
        lives: tuple[Life, ...] | None = None,
    ) -> None:
        self.plan = plan
        self.selection = selection
        self._tensors = tuple(tensors)
        self.scope = scope
        self._lives = (Life(),) if lives is None else lives
        # What was donated before concerns other storage: a tree is made of tensors that are alive.
        self._born = tuple(len(life.ended) for life in self._lives)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The local pieces, 1-D, one per piece of the selection.

        Raises:
          ValueError: the tree was donated, naming to what.
        """
        if (cause := self._donated()) is not None:
            raise ValueError(
                f"this tree was donated to {cause} and its storage reused; keep the tree that "
                "call returned, or pass donate=False"
            )
        return self._tensors

    def _donated(self) -> str | None:
        """What the tree was donated to, or None."""
        for life, born in zip(self._lives, self._born, strict=True):
            if len(life.ended) > born and (cause := life.cause(self.selection.pieces, born)) is not None:
                return cause
        return None

    @property
    def rank(self) -> dict[str, int]:
        """This rank's coordinate per mesh axis."""
        return self.plan.bound().coordinate

    @property
    def paths(self) -> tuple[str, ...]:
        """Full dotted paths of the leaves."""
        return self.selection.paths

    @property
    def buffers(self) -> tuple[DBuffer, ...]:
        """One `DBuffer` per bucket.

        Raises:
          ValueError: the selection covers only a part of some bucket.
        """
        self.require_whole_buckets("buffers")
        comm = self.plan.bound()
        pairs = zip(self.tensors, self.selection.pieces, strict=True)
        return tuple(DBuffer(tensor, piece.bucket, comm) for tensor, piece in pairs)

    def require_whole_buckets(self, what: str) -> None:
        if self.selection.whole:
            return
        for piece in self.selection.pieces:
            if not piece.whole:
                missing = next(f.path for f in piece.bucket.leaves if f.path not in self.selection.home)
                raise ValueError(
                    f"{what} needs whole units, but this tree lacks {missing!r} of unit {piece.bucket.unit!r}; "
                    f"pass the whole unit, or plan with units={[*self._own_units(piece.bucket.unit)]!r}"
                )

    def _own_units(self, unit: str) -> list[str]:
        """Unit patterns under which this tree would be a unit of its own."""
        mine = [p for p in self.paths if self.plan.leaves[p].unit == unit]
        parts = [p.split(".") for p in mine]
        common = []
        for column in zip(*parts, strict=False):
            if len(set(column)) > 1:
                break
            common.append(column[0])
        return [".".join(common)] if common else mine

    def leaf(self, path: str) -> Tensor:
        """This rank's run of a leaf, as a 1-D view of the local buffer; possibly empty.

        Raises:
          ValueError: the tree has no leaf of that path.
        """
        if path not in self.selection.home:
            raise ValueError(f"no leaf {path!r} in this tree; its leaves are {list(self.paths)[:20]}")
        info, i = self.plan.leaves[path], self.selection.home[path]
        piece = self.selection.pieces[i]
        rank = self.plan.bound().rank(piece.bucket.ragged)
        start, stop = info.span(rank)
        first = piece.local(rank)[0]
        begin = info.offset + start - first if stop > start else 0
        return self.tensors[i][begin : begin + stop - start]

    def with_tensors(self, tensors: Iterable[Any], *, scope: Any = None) -> ShardedTree:
        """The same leaves over other buffers of the same sizes."""
        return ShardedTree(self.plan, self.selection, tensors, scope=scope)

    def end(self, cause: str) -> None:
        """Mark this tree's storage as reused: it and all trees that overlap with it raise from now on."""
        for life in self._lives:
            life.ended += [(piece, cause) for piece in self.selection.pieces]

    def __getitem__(self, key: Any) -> Any:
        found = child(self.plan, self.selection, key)
        return None if found is None else self.view(found)

    def view(self, selection: Selection) -> ShardedTree:
        """Fewer leaves of this tree, on the same storage."""
        comm = self.plan.bound()
        out, i = [], 0
        mine, tensors = self.selection.pieces, self.tensors
        for piece in selection.pieces:
            known = self.selection.index.get((piece.bucket.index, piece.start, piece.stop))
            if known is not None:
                out.append(tensors[known])
                continue
            while mine[i].bucket.index < piece.bucket.index or mine[i].stop < piece.stop:
                i += 1
            rank = comm.rank(piece.bucket.ragged)
            start, stop = piece.local(rank)
            first = mine[i].local(rank)[0]
            out.append(tensors[i][start - first : stop - first])
        return ShardedTree(self.plan, selection, out, scope=self.scope, lives=self._lives)

    def __len__(self) -> int:
        if self.selection.structure.is_leaf():
            raise TypeError(f"{self.paths[0]!r} is a leaf and has no length")
        return int(self.selection.structure.num_children)

    def __bool__(self) -> bool:
        return True

    def keys(self) -> list[Any]:
        """The container's own keys, indices or fields."""
        return keys(self.selection.structure)

    def __iter__(self) -> Iterator[Any]:
        structure = self.selection.structure
        if structure.is_leaf():
            raise TypeError(f"{self.paths[0]!r} is a leaf and can't be iterated")
        if issubclass(structure.type or object, (list, tuple, deque)):
            return (self[i] for i in range(len(self)))
        return iter(self.keys())

    def values(self) -> Iterator[Any]:
        """The subtrees, in the order of `keys`."""
        return (self[key] for key in self.keys())

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Pairs of key and subtree."""
        return ((key, self[key]) for key in self.keys())

    def __repr__(self) -> str:
        dead = self._donated()
        state = f"donated to {dead}" if dead else f"{len(self._tensors)} local buffers"
        return f"ShardedTree({len(self.paths)} leaves of {self.plan!r}, {state})"


def refuse_traced(tree: ShardedTree, what: str) -> None:
    """Raise for a tree that a loss is differentiated with respect to: what follows would have no gradient.

    Raises:
      ValueError: naming what was tried.
    """
    if tree.scope is not None and torch.is_grad_enabled():
        raise ValueError(
            f"{what} inside a differentiated function has no gradient; use the tree through gathered functions, or "
            f"do it before or after the step"
        )


class _Aux:
    """What a flattened tree keeps beside its children. The scope is carried, not compared."""

    __slots__ = ("plan", "scope", "selection")

    def __init__(self, plan: Plan, selection: Selection, scope: Any) -> None:
        self.plan, self.selection, self.scope = plan, selection, scope

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Aux) and self.plan == other.plan and self.selection == other.selection

    def __hash__(self) -> int:
        return hash((self.plan, self.selection))

    def __repr__(self) -> str:
        return f"{self.plan!r}, {len(self.selection.paths)} leaves"


def _flatten(tree: ShardedTree) -> tuple[tuple[Tensor, ...], _Aux]:
    return tree.tensors, _Aux(tree.plan, tree.selection, tree.scope)


def _unflatten(aux: _Aux, children: Iterable[Any]) -> ShardedTree:
    return ShardedTree(aux.plan, aux.selection, children, scope=aux.scope)


_register = cast(Any, optree.register_pytree_node)  # its annotation asks for a Collection, its code for any class
_register(ShardedTree, _flatten, _unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE)
torch_pytree.register_pytree_node(
    ShardedTree,
    lambda tree: (list(tree.tensors), _Aux(tree.plan, tree.selection, tree.scope)),
    lambda children, aux: _unflatten(aux, children),
)


def sharded_trees(tree: Any) -> list[ShardedTree]:
    """The ShardedTrees inside a pytree, in flatten order."""
    found = optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, ShardedTree))
    return [x for x in found if isinstance(x, ShardedTree)]
