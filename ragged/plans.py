"""`Plan`: the layout of a whole tree, equal on every rank, comparable, printable, storable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import optree
from torch.distributed.device_mesh import DeviceMesh

from ragged.ahead import AHEAD
from ragged.layout import Bucket, LeafInfo, Unit
from ragged.mesh import Comm, mesh_axes
from ragged.planner import PRICE

if TYPE_CHECKING:
    from ragged.memory import Memory

__all__ = ["Plan"]


@dataclass(frozen=True, eq=False)
class Plan:
    """A pure function's result: where every leaf of a tree lies on every rank of a mesh.

    Made by `ragged.plan`. Two plans are equal if their `fingerprint` is: paths, shapes and
    layout, not dtype, so that fp32 states and byte codes map with bf16 parameters.

    Attributes:
      axes: sizes of the mesh axes by name, in mesh order.
      leaves: `LeafInfo` by dotted path, in the tree's flatten order.
      units: in natural order (`layers.2` before `layers.10`), each with its buckets.
      align: every leaf starts at a multiple of it, and S is one (elements).
      price: elements of gathered padding that an extra buffer per unit had to save.
      structure: the tree's structure.
      mesh: the mesh the plan is bound to, or None.
      memo: what the library derived from the plan once, to find it again.
    """

    axes: Mapping[str, int]
    leaves: Mapping[str, LeafInfo]
    units: tuple[Unit, ...]
    align: int
    structure: optree.PyTreeSpec = field(repr=False)
    comm: Comm | None = field(default=None, repr=False)
    memo: dict[str, Any] = field(default_factory=dict, repr=False)
    price: int = PRICE

    @property
    def mesh(self) -> DeviceMesh | None:
        return None if self.comm is None else self.comm.mesh

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(b for unit in self.units for b in unit.buckets)

    @cached_property
    def unit(self) -> Mapping[str, Unit]:
        """Units by name."""
        return {u.name: u for u in self.units}

    def bind(self, mesh: DeviceMesh) -> Plan:
        """The same plan attached to a mesh.

        Raises:
          ValueError: the mesh's axes or sizes are not those the plan was made for.
        """
        if self.comm is not None and self.comm.mesh is mesh:
            return self
        if mesh_axes(mesh) != dict(self.axes):
            raise ValueError(f"plan was made for mesh axes {dict(self.axes)}, got a mesh of {mesh_axes(mesh)}")
        bound = replace(self, comm=Comm(mesh), memo={})
        bound.__dict__["fingerprint"] = self.fingerprint
        return bound

    def bound(self) -> Comm:
        """The plan's communicators.

        Raises:
          ValueError: the plan was made from axis sizes and is not bound to a mesh.
        """
        if self.comm is None:
            raise ValueError("this plan is not bound to a mesh: use plan.bind(mesh), or pass mesh=")
        return self.comm

    def shard_size(self, bucket: int | Bucket) -> int:
        """S of a bucket in elements (the largest, where `shares` make shards unequal)."""
        return (self.buckets[bucket] if isinstance(bucket, int) else bucket).shard

    @property
    def padding(self) -> float:
        """Padding of all buckets together: buffer elements / leaf elements - 1."""
        elements = sum(b.elements for b in self.buckets)
        return sum(b.length for b in self.buckets) / elements - 1 if elements else 0.0

    def bytes_per_rank(self) -> int:
        """Bytes of one rank's shards, in the dtypes the plan was made for."""
        return sum(b.shard * b.dtype.itemsize for b in self.buckets)

    def describe(self) -> dict[str, str]:
        """Facts by name, in a form that ranks can compare and a person can read."""
        facts = {"mesh axes": str(dict(self.axes)), "align": str(self.align)}
        for path in sorted(self.leaves):
            leaf = self.leaves[path]
            dtype = str(leaf.dtype).removeprefix("torch.")
            facts[f"leaf {path!r}"] = f"{leaf.shape} {dtype}, spec {leaf.spec!r}, block {leaf.block}"
            facts[f"place of leaf {path!r}"] = f"unit {leaf.unit!r}, bucket {leaf.bucket}, offset {leaf.offset}"
        for b in self.buckets:
            facts[f"bucket {b.name!r}"] = f"{b.ranks} ranks, shard size {b.shard}" + ", frozen" * b.frozen
        return facts

    @cached_property
    def fingerprint(self) -> str:
        """Digest of paths, shapes and layout: equal on all ranks, runs and hash seeds."""
        facts = [
            [list(self.axes.items()), self.align],
            [
                [p, f.shape, f.local_shape, f.block, f.unit, f.bucket, f.offset, repr(f.spec)]
                for p, f in sorted(self.leaves.items())
            ],
            [[b.index, b.ragged, b.even, b.bounds.ranks, b.bounds.shard, b.bounds.explicit] for b in self.buckets],
        ]
        return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Plan) and self.fingerprint == other.fingerprint)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        return (
            f"Plan({len(self.leaves)} leaves, {len(self.units)} units, {axes}, "
            f"padding {self.padding:.2%}, {self.fingerprint[:8]})"
        )

    def summary(self, optimizer: Any = None) -> str:
        """A table per kind of unit: where its elements and bytes go.

        Columns: leaves, elements, buffers, S and m*S (summed over the buffers), padding, the padding that no
        layout of these blocks can avoid ("at least"), and bytes per rank of parameters, gradients and optimizer
        state.

        Args:
          optimizer: a transformation, whose `init` then tells the bytes of its state; two fp32 moments if None.
        """
        from ragged.report import summary

        return summary(self, optimizer)

    def explain(self, path: str) -> str:
        """Who asked for the block and the start of a leaf, and what each request costs in elements per rank.

        Raises:
          ValueError: no such leaf.
        """
        from ragged.report import explain

        return explain(self, path)

    def memory(
        self,
        optimizer: Any = None,
        *,
        calls: Sequence[str | Sequence[str]] | None = None,
        footprints: Mapping[Any, Any] | None = None,
        reshard_after_forward: bool | int = True,
        precision: Any = None,
        donate: bool = True,
        ahead: int = AHEAD,
        device_type: str | None = None,
    ) -> Memory:
        """The live bytes of one rank during a training step, and when they are the most: nothing is allocated.

        `fsdp`'s step is played through in bytes: full buffers that fill and empty, gathers that run ahead, gradients
        on their way, activations that backward frees. It is the step after the first two, which learn the order, of a
        loop that lets go of the gradients before it comes to the next. Not counted: the batch, what a donating
        optimizer uses inside (Muon's matrices at their roots, a few MiB of 8-bit Adam), what libraries keep.

        Args:
          optimizer: a transformation, whose `init` then tells the bytes of its state; two fp32 moments if None.
          calls: names of units, in the order in which the loss calls them; a list of names for a call of several. By
            default each unit once, in the order in which the tree was written.
          footprints: bytes of activations and temporaries by unit name or pattern, the first that matches; for a
            call of several units under the name of its first; a list of one per call for a unit with several.
            `fsdp.footprint` measures them. Without one a call allocates nothing beside parameters and gradients.
          reshard_after_forward: of all `gathered` functions: True, False, or bytes.
          precision: `param_dtype` and `reduce_dtype`, as of `fsdp.MixedPrecision`; None casts nothing.
          donate: of `make_step`. False adds the updates, new parameters and a new state.
          ahead: bytes of full buffers up to which gathers run ahead and reductions stay in flight, beyond those of
            one unit; the default is what `fsdp` does.
          device_type: where it runs. By default where the plan's mesh is, "cpu" without one.

        Returns:
          A `ragged.Memory`, in bytes; `print` shows what the peak consists of.

        Raises:
          ValueError: a unit that the plan lacks, a pattern that no unit matches, a footprint without its bytes, or
            another number of them than of calls; a negative number of bytes.

        Example:
          >>> import torch
          >>> from ragged import P, plan
          >>> layer = {"w": ((64, 64), torch.float32)}
          >>> layout = plan({"layers": [layer] * 4}, {"fsdp": 2}, P(ragged="fsdp"), units=["layers.*"])
          >>> said = layout.memory(ahead=0)
          >>> said.params, said.grads, said.state, said.peak, said.when
          (32768, 32768, 65536, 188416, 'sum of layers.2')
        """
        from ragged.memory import memory

        return memory(
            self,
            optimizer,
            calls=calls,
            footprints=footprints,
            reshard_after_forward=reshard_after_forward,
            precision=precision,
            donate=donate,
            ahead=ahead,
            device_type=device_type,
        )

    def to_json(self) -> str:
        """The plan as JSON text; `Plan.from_json(text, like=tree)` reads it."""
        from ragged.plan_json import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str, like: Any) -> Plan:
        """A plan from its JSON text; `like` is a tree with the same paths, shapes and dtypes.

        Raises:
          ValueError: `like` differs, naming the first path.
        """
        from ragged.plan_json import from_json

        return from_json(text, like)
