"""To and from the format of `torch.distributed.checkpoint`, in which FSDP2's users have their checkpoints."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ragged.agree import same
from ragged.checkpoint.dcp_index import INDEX, Piece, Pieced, Stored, read_index
from ragged.checkpoint.holders import Holder, Ranks, ranks_of
from ragged.checkpoint.loading import Rename, load_from
from ragged.checkpoint.names import Named, named
from ragged.checkpoint.sources import Source
from ragged.layout import LeafInfo, axis_size
from ragged.moves import Grid, Move, compile_move, holdings_of, start_move
from ragged.moves.boxes import Box, intersect, strides
from ragged.placements import Pieces
from ragged.selection import Selection
from ragged.tree import ShardedTree

__all__ = ["export_dcp", "import_dcp"]


def import_dcp(
    path: str | os.PathLike[str], like: Mapping[str, Any], *, strict: bool = True, rename: Rename | None = None
) -> dict[str, Any]:
    """`load` from a folder that `torch.distributed.checkpoint.save` wrote, FSDP2's among them.

    Collective. A rank reads the pieces that hold something of its own. The folder's index is a pickle; it is read as
    data, and an index that names anything but torch's own records is refused. Tensors and values are read by
    `torch.load(weights_only=True)`.

    Args:
      path, like, strict, rename: as in `load`. torch's names are dotted paths in the state dict, such as
        `model.layers.0.weight` and `optim.state.layers.0.weight.exp_avg`.

    Returns:
      New trees, by name.

    Raises:
      ValueError: as `load`; an index that holds more than it should, naming what; pieces that don't make up their
        tensor, or were stored in another way than by `torch.save`.

    Example:
      >>> import tempfile, torch
      >>> from ragged import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.export_dcp(folder, {"model": {"w": torch.ones(2)}})
      >>> checkpoint.import_dcp(folder, {"model": {"w": torch.zeros(2)}})
      {'model': {'w': tensor([1., 1.])}}
    """
    return load_from(_source, path, like, strict, rename)


def export_dcp(path: str | os.PathLike[str], trees: Mapping[str, Any]) -> None:
    """Write trees with `torch.distributed.checkpoint.save`, under the names that `save` gives them.

    Collective. Sharded leaves go as DTensors whose chunks are spread over the same axes, so every rank writes about
    what it holds, and `torch.distributed.checkpoint.load` reads them into tensors and DTensors of any layout. Replicas
    are written once; Python's numbers and text go as they are.

    Args:
      path: a folder without a checkpoint in it. torch shows the folder's index last, so what was killed has none.
      trees: by name, as for `save`.

    Raises:
      ValueError: on all ranks: `path` holds a checkpoint, ranks that pass different things, or a rank that
        couldn't write, naming it and the cause.

    Example:
      >>> import tempfile, torch
      >>> import torch.distributed.checkpoint as dcp
      >>> from ragged import P, checkpoint, make_mesh, shard
      >>> tree = shard({"w": torch.ones(2)}, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"))
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.export_dcp(folder, {"model": tree, "step": 7})
      >>> state = {"model": {"w": torch.zeros(2)}, "step": 0}
      >>> dcp.load(state, checkpoint_id=folder)
      >>> state
      {'model': {'w': tensor([1., 1.])}, 'step': 7}
    """
    where, error, facts = Path(path), None, dict[str, str]()
    ranks = ranks_of(trees)
    try:
        parts = named(trees)
        if (where / INDEX).exists():
            raise ValueError(f"{where} holds a checkpoint; export into a folder of its own, or remove it first")
        facts = {"the path": str(where)} | dict(_facts(parts))
    except Exception as problem:
        error = problem
    same("export_dcp", repr(facts), lambda: facts, ranks.group, error)
    made: list[dict[str | None, Any]] = [
        _dtensors(leaf) if isinstance(leaf, ShardedTree) else {None: leaf} for leaf in parts.leaves
    ]
    _save({e.name: made[e.at][e.path] for e in parts.entries}, where, ranks)


def _source(path: Path) -> Source:
    index = read_index(path)
    values, refused = dict[str, Any](), dict[str, str]()
    for name, stored in index.values.items():
        raw = _bytes(path, name, stored)  # what can't be read at all ends the load on all ranks
        try:
            values[name] = _unpacked(path, name, stored, raw)
        except ValueError as error:
            refused[name] = f"{error}"

    def file(name: str) -> Path:
        return path / index.tensors[name].pieces[0].stored.file if name in index.tensors else path / INDEX

    def fill(name: str, holder: Holder, rank: int) -> int:
        _fill(path, name, index.tensors[name], holder, rank)
        return 0

    return Source({name: x.shaped for name, x in index.tensors.items()}, _Values(values, refused), {}, file, fill)


@dataclass(frozen=True)
class _Values(Mapping[str, Any]):
    """Values, and those that are refused once somebody wants them: other programs store all sorts of things."""

    known: Mapping[str, Any]
    refused: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        if name in self.refused:
            raise ValueError(self.refused[name])
        return self.known[name]

    def __contains__(self, name: object) -> bool:
        return name in self.known or name in self.refused

    def __iter__(self) -> Iterator[str]:
        yield from self.known
        yield from self.refused

    def __len__(self) -> int:
        return len(self.known) + len(self.refused)


def _bytes(path: Path, name: str, stored: Stored) -> bytes:
    with open(path / stored.file, "rb") as file:
        file.seek(stored.start)
        raw = file.read(stored.length)
    if len(raw) < stored.length:
        raise ValueError(f"{path / stored.file} was cut short, in {name!r}")
    return raw


def _unpacked(path: Path, name: str, stored: Stored, raw: bytes) -> Any:
    """What `torch.save` packed."""
    if not raw.startswith(b"PK"):
        raise ValueError(
            f"{path / stored.file}: {name!r} was not written by torch.save; if serialization_format=SAFETENSORS was, "
            "save without it: the index doesn't tell where such tensors lie"
        )
    try:
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:
        first, *_ = f"{error}".strip().splitlines() or [repr(error)]
        raise ValueError(
            f"{path / stored.file}: {name!r} is damaged, or more than a tensor or plain value: {first}"
        ) from None


def _fill(path: Path, name: str, source: Pieced, holder: Holder, rank: int) -> None:
    """Copy what a rank holds of a tensor out of the pieces that have some of it."""
    held, grid, target = holder.held, holder.grid, holder.tensor.view(-1)
    shape = held.shape or (1,)
    cut = held.cut_dims(grid.axes)
    cut |= {d for piece in source.pieces for d, (lo, hi) in enumerate(piece.box) if (lo, hi) != (0, shape[d])}
    parts = list(held.parts(grid.axes, grid.coordinate[rank], cut))
    for piece in source.pieces:
        box = _folded(piece.box, shape, cut)
        common = [(part, both) for part in parts if (both := intersect(part.box, box))]
        if not common:
            continue
        x = _piece(path, name, source, piece).reshape(_lengths(box))
        for part, both in common:
            begin = target.storage_offset() + held.begin + part.offset(both)
            there = tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(both, box, strict=True))
            target.as_strided(_lengths(both), part.strides, begin).copy_(x[there])


def _piece(path: Path, name: str, source: Pieced, piece: Piece) -> Tensor:
    x = _unpacked(path, name, piece.stored, _bytes(path, name, piece.stored))
    want = _lengths(piece.box) if source.shaped.shape else ()
    if not isinstance(x, Tensor) or (tuple(x.shape), x.dtype) != (want, source.shaped.dtype):
        has = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"{path / piece.stored.file}: a piece of {name!r} is {has}, {want} {source.shaped.dtype} in the index"
        )
    return x


def _lengths(box: Box) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in box)


def _folded(box: Box, shape: Sequence[int], cut: set[int]) -> Box:
    """A box of a tensor in its folded shape: a dim that isn't cut is whole, and joined to the one before it."""
    heads = [0, *sorted(d for d in cut if d > 0)]
    rest = [math.prod(shape[d + 1 : e]) for d, e in zip(heads, [*heads[1:], len(shape)], strict=True)]
    return tuple((box[d][0] * n, box[d][1] * n) for d, n in zip(heads, rest, strict=True))


def _facts(parts: Named) -> Iterator[tuple[str, str]]:
    """What ranks must agree on before they write."""
    for entry in parts.entries:
        leaf = parts.leaves[entry.at]
        if isinstance(leaf, ShardedTree):
            assert entry.shape is not None
            yield f"leaf {entry.name!r}", f"{entry.shape.shape} {entry.shape.dtype}"
        else:
            yield f"{entry.name!r}", f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)
    for leaf in parts.leaves:
        if isinstance(leaf, ShardedTree):
            yield f"the layout of {leaf.paths[:3]}", leaf.plan.fingerprint


def _dtensors(tree: ShardedTree) -> dict[str | None, Any]:
    """A tree's leaves in chunks as placements know them: even and ragged cuts alike, in the order of the mesh."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    comm = tree.plan.bound()
    grid, leaves = Grid.of(comm), [tree.plan.leaves[path] for path in tree.paths]
    chunks = [Pieces(f.shape, _dims(f, comm.axes), (), _none, i, 0) for i, f in enumerate(leaves)]
    memo: dict[Selection, Move] = tree.plan.memo.setdefault("export_dcp", {})
    if tree.selection not in memo:
        held = holdings_of(tree.selection, tree.plan.leaves, comm)
        memo[tree.selection] = compile_move(held, chunks, (grid, grid), comm.me)
    source, home = [x.detach() for x in tree.tensors], tree.selection.home
    sizes = [_lengths(chunk.box(comm.axes, comm.coordinate)) for chunk in chunks]
    kinds = [source[home[path]].dtype for path in tree.paths]
    target = [torch.empty(math.prod(n), dtype=d, device=comm.device) for n, d in zip(sizes, kinds, strict=True)]
    start_move(memo[tree.selection], source, target, comm).wait()
    out: dict[str | None, Any] = {}
    for path, chunk, size, x in zip(tree.paths, chunks, sizes, target, strict=True):
        where = {a: Shard(d) for d, names in enumerate(chunk.dims) for a in names}
        placements = [where.get(a, Replicate()) for a in comm.axes]
        shape, steps = torch.Size(chunk.shape), strides(chunk.shape)
        out[path] = DTensor.from_local(x.view(size), comm.mesh, placements, run_check=False, shape=shape, stride=steps)
    return out


def _none(_: int) -> tuple[int, int]:
    return 0, 0  # chunks have no ragged axes, and so no spans


def _dims(leaf: LeafInfo, axes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """The axes that cut each dim: the even ones, and the ragged ones on a dim that has an index for each rank."""
    if 0 in leaf.shape or not leaf.shape:
        return ((),) * len(leaf.shape)
    found = [list(names) for names in (*leaf.spec.dims, *[()] * len(leaf.shape))][: len(leaf.shape)]
    sizes = leaf.local_shape
    enough = sizes[0] >= axis_size(axes, leaf.spec.ragged)
    found[0 if enough else max(range(len(sizes)), key=sizes.__getitem__)] += leaf.spec.ragged
    order = list(axes)
    return tuple(tuple(sorted((a for a in names if axes.get(a, 1) > 1), key=order.index)) for names in found)


def _save(state: dict[str, Any], path: Path, ranks: Ranks) -> None:
    # Imported here, as it takes as long as the rest of torch.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    group, alone = None, ranks.group.size == 1
    if not alone and ranks.group.size < dist.get_world_size():
        group = dist.new_group(sorted(ranks.group.ranks), use_local_synchronization=True)
    try:
        with warnings.catch_warnings():
            # A single process is what is meant, and torch says that it assumes so.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            dcp_save(state, checkpoint_id=os.fspath(path), process_group=group, no_dist=alone)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        ranked = sorted(ranks.group.ranks)[rank]
        raise ValueError(f"export to {path}: rank {ranked} failed: {cause!r}") from None
    finally:
        if group is not None:
            dist.destroy_process_group(group)
