"""The buckets of a step, by name and by tensor."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fsdp.full import Full
from fsdp.precision import Cast
from ragged.layout import Bucket
from ragged.mesh import Comm
from ragged.tree import ShardedTree

__all__ = ["Buckets"]


class Buckets:
    """Every bucket that a step knows or meets.

    Attributes:
      derived: some gathered tree was computed in the loss.
    """

    def __init__(self) -> None:
        self.derived = False
        self._by_tensor: dict[int, Full] = {}
        self._by_key: dict[str, Full] = {}

    def __getitem__(self, key: str) -> Full:
        return self._by_key[key]

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[Full]:
        return iter(self._by_key.values())

    def register(self, tree: ShardedTree, name: str, trainable: bool) -> None:
        """Know a tree's whole buckets by name, so that they can be started ahead."""
        for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
            if piece.whole:
                self._add(name, tensor, piece.bucket, tree.plan.bound(), trainable and tensor.requires_grad, False)

    def _add(self, name: str, tensor: Tensor, bucket: Bucket, comm: Comm, trainable: bool, derived: bool) -> Full:
        key = f"{name}{bucket.name}"
        full = Full(key, f"{name}{bucket.unit}", tensor, bucket, comm, trainable, derived)
        self._by_tensor[id(tensor)] = self._by_key[key] = full
        return full

    def of(self, tree: ShardedTree) -> list[Full]:
        """The buckets of a tree, which must be whole."""
        tree.require_whole_buckets("a gathered function")
        out = []
        for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
            full = self._by_tensor.get(id(tensor))
            if full is None:
                name = f"derived {len(self._by_key)}: "
                self.derived = True
                learns = tensor.requires_grad
                full = self._add(name, tensor, piece.bucket, tree.plan.bound(), learns, learns and not tensor.is_leaf)
            out.append(full)
        return out

    def key_of(self, tensor: Tensor) -> str:
        """The name under which a tensor was registered, "" if it was not."""
        full = self._by_tensor.get(id(tensor))
        return "" if full is None else full.key

    @property
    def casts(self) -> dict[str, Cast]:
        """The dtypes in which buckets were used."""
        return {full.key: full.cast for full in self if full.cast is not None}

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of their full buffers."""
        return {full.key: full.nbytes for full in self if full.cast is not None}

    def clear(self) -> None:
        """Forget them."""
        self._by_key.clear()
        self._by_tensor.clear()
