"""What a rank has to do for a checkpoint: names, files, places, and which bytes are its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragged.agree import same
from ragged.checkpoint.checksums import checksum
from ragged.checkpoint.holders import Holder, Ranks, holders
from ragged.checkpoint.names import Named, named
from ragged.checkpoint.safetensors import Place, header
from ragged.checkpoint.segments import Segment, replicas, segments, shared
from ragged.collectives import plain
from ragged.paths import Shaped, natural_key
from ragged.plans import Plan
from ragged.tree import ShardedTree

__all__ = ["Job", "planned"]


@dataclass(frozen=True)
class Job:
    """What a rank has to do for a checkpoint.

    Attributes:
      path: of the folder; `rank`, `ranks`: position among those that save, and their number; `me`: global rank.
      keep: checkpoints to keep, None for all.
      places: where tensors go, by name; `headers`: first bytes by file; `indices`: texts by file.
      values: numbers, text and counters by name; `plans`: layouts by tree.
      held: what this rank has of the tensors.
    """

    path: Path
    rank: int
    ranks: int
    me: int
    keep: int | None
    places: Mapping[str, Place]
    headers: Mapping[str, bytes]
    indices: Mapping[str, str]
    values: Mapping[str, Any]
    plans: Mapping[str, Plan]
    held: Sequence[Holder]

    @property
    def folder(self) -> Path:
        """Where it is written before it is complete."""
        return self.path.parent / f".{self.path.name}.partial"

    def size(self, file: str) -> int:
        return max([len(self.headers[file])] + [p.start + p.nbytes for p in self.places.values() if p.file == file])

    def apart(self) -> Job:
        """The same on copies of the tensors, one per tensor that holds several leaves."""
        copies: dict[int, Tensor] = {}
        held = []
        for holder in self.held:
            x = holder.tensor
            if id(x) not in copies:
                copies[id(x)] = x.detach().clone() if x.device.type == "cpu" else x.detach().cpu()
            held.append(holder._replace(tensor=copies[id(x)]))
        return replace(self, held=held)

    def own(self, holder: Holder) -> list[Segment]:
        """What of a tensor is this rank's to write: its share where replicas hold the same."""
        index, count = replicas(holder.held, holder.grid, self.me)
        return shared(segments(holder.held, holder.grid, self.me), index, count)


def planned(path: Path, trees: Any, ranks: Ranks, keep: int | None, file_size: int, async_: bool) -> Job:
    """Names, places and this rank's part of the work; compared between ranks.

    Raises:
      ValueError: on all ranks: a name that can't be a file's, a number of checkpoints that is none, and what
        `named` and `header` refuse.
    """
    error: Exception | None = None
    facts: dict[str, str] = {}
    options = {"keep": keep, "file_size": file_size, "async_": async_}
    try:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep={keep!r}: expected the number of checkpoints to keep, at least 1")
        parts = named(trees)
        odd = next((name for name in trees if not set(name).isdisjoint("/\\.\0")), None)
        if odd is not None:
            raise ValueError(f"a tree called {odd!r} can't be a file; use a name without slashes and dots")
        tensors = {e.name: e.shape for e in parts.entries if e.shape is not None}
        values = {e.name: parts.leaves[e.at] for e in parts.entries if e.shape is None}
        files = _files(tensors, file_size)
        made = {file: header(file, some, {"format": "pt"}) for file, some in files.items()}
        places = {name: place for _, found in made.values() for name, place in found.items()}
        found = holders(parts, ranks)
        facts = {"the path": str(path), "the options": repr(options)}
        facts |= {f"value {name!r}": _told(value) for name, value in values.items()}
        facts |= {f"tensor {name!r}": f"{tuple(s.shape)} {s.dtype}" for name, s in tensors.items()}
        facts |= {f"tensor {h.name!r}": _content(h.tensor) for h in found if h.plain}
        plans = _plans(parts)
        facts |= {f"the plan of {name!r}": plan.fingerprint for name, plan in plans.items()}
    except Exception as problem:
        error = problem
    same("the checkpoint to save", repr(facts), lambda: facts, ranks.group, error)
    counters = {name: v.detach().cpu().clone() if isinstance(v, Tensor) else v for name, v in values.items()}
    return Job(
        path,
        ranks.group.rank,
        ranks.group.size,
        ranks.me,
        keep,
        places,
        {file: start for file, (start, _) in made.items()},
        _indices(files, tensors),
        counters,
        plans,
        found,
    )


def _told(value: Any) -> str:
    """A value as text, equal on all ranks: without the device."""
    return f"{value.dtype} {value.item()!r}" if isinstance(value, Tensor) else repr(value)


def _content(x: Tensor) -> str:
    """Of a tensor that every rank holds whole, to see that all hold the same."""
    return f"{tuple(x.shape)} {x.dtype} of checksum {checksum(plain(x.detach()).cpu().view(-1).view(torch.uint8)):x}"


def _plans(parts: Named) -> dict[str, Plan]:
    """The plan of each top-level tree that has one."""
    found: dict[str, Plan] = {}
    for entry in parts.entries:
        leaf, tree = parts.leaves[entry.at], entry.name.split(".")[0]
        if isinstance(leaf, ShardedTree):
            found.setdefault(tree, leaf.plan)
    return found


def _files(tensors: Mapping[str, Shaped], limit: int) -> dict[str, dict[str, Shaped]]:
    """Tensors by file: one per tree, or several of at most `limit` bytes (but for a tensor that is larger)."""
    trees: dict[str, list[dict[str, Shaped]]] = {}
    filled: dict[str, int] = {}
    for name in sorted(tensors, key=natural_key):
        tree = name.split(".")[0]
        groups = trees.setdefault(tree, [{}])
        size = tensors[name].numel() * tensors[name].dtype.itemsize
        if groups[-1] and filled.get(tree, 0) + size > limit:
            groups.append({})
            filled[tree] = 0
        groups[-1][name] = tensors[name]
        filled[tree] = filled.get(tree, 0) + size
    out = {}
    for tree, groups in trees.items():
        for k, group in enumerate(groups, 1):
            out[f"{tree}-{k:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else f"{tree}.safetensors"] = (
                group
            )
    return out


def _indices(files: Mapping[str, Mapping[str, Shaped]], tensors: Mapping[str, Shaped]) -> dict[str, str]:
    """The index that other tools expect beside several files."""
    out = {}
    for file in files:
        tree = next(iter(files[file])).split(".")[0]
        if file != f"{tree}.safetensors":
            where = {name: f for f, group in files.items() for name in group if name.split(".")[0] == tree}
            total = sum(tensors[name].numel() * tensors[name].dtype.itemsize for name in where)
            out[f"{tree}.safetensors.index.json"] = json.dumps({"metadata": {"total_size": total}, "weight_map": where})
    return out
