"""`load`: every rank reads its own bytes, whatever layout they were written from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from ragged.agree import agree, same
from ragged.checkpoint.checksums import MODULUS
from ragged.checkpoint.holders import Holder, Ranks, holders, plain_holders, ranks_of
from ragged.checkpoint.names import Named, named
from ragged.checkpoint.segments import replicas
from ragged.checkpoint.sources import Source, folder
from ragged.collectives import all_reduce
from ragged.paths import Shaped
from ragged.plans import Plan
from ragged.selection import whole
from ragged.tree import ShardedTree

__all__ = ["Rename", "load", "load_from"]

Rename = Callable[[str], str] | Mapping[str, str]


def load(
    path: str | os.PathLike[str],
    like: Mapping[str, Any],
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into trees like the given ones: of any layout, on any number of ranks.

    Collective. Each rank reads the bytes that it shall hold and no others; checksums are added up over the ranks.
    Nothing is unpickled, and `like` stays as it is.

    Args:
      path: a folder that `save` wrote, a folder of safetensors files (with or without an index) as Hugging Face's
        libraries write, or one such file.
      like: by name: sharded trees (tensors on the meta device will do), plans, plain tensors, states, values.
        Dtypes are those of `like`; what the files hold must fit in without loss.
      strict: raise unless files and `like` have the same names, with shapes and dtypes that fit. Otherwise what
        doesn't fit keeps the values of `like`, and a warning lists it.
      rename: from names in `like` to names in the files.

    Returns:
      New trees, by name.

    Raises:
      ValueError: on all ranks, before a tensor is read: names that are missing or unexpected, other shapes,
        narrower dtypes; files that were cut short or damaged, naming them.

    Example:
      >>> import tempfile, torch
      >>> from ragged import checkpoint
      >>> folder = tempfile.mkdtemp() + "/step-7"
      >>> _ = checkpoint.save(folder, {"params": {"w": torch.arange(3)}, "step": 7})
      >>> checkpoint.load(folder, {"model": {"v": torch.zeros(3)}}, rename=str)
      Traceback (most recent call last):
      ...
      ValueError: /tmp/... does not fit: 'model.v' is missing; 'params.w' is unexpected; 'step' is unexpected ...
    """
    return load_from(folder, path, like, strict, rename)


def load_from(
    open_source: Callable[[Path], Source], path: str | os.PathLike[str], like: Any, strict: bool, rename: Rename | None
) -> dict[str, Any]:
    """`load`, from any kind of source."""
    where = Path(path)
    target: Any = optree.tree_map(_empty, like, is_leaf=_is_tree)
    ranks = ranks_of(target)
    error: Exception | None = None
    facts: dict[str, str] = {}
    try:
        parts = named(target)
        source = open_source(where)
        names = _renamed(parts, rename)
        troubles, unexpected = _troubles(parts, source, names)
        skipped = [*troubles.values(), *unexpected]
        if skipped and strict:
            raise ValueError(f"{where} does not fit: {_brief(skipped)}")
        facts = {"the path": str(where), "what is loaded": repr(sorted(names.items())), "strict": repr(strict)}
        facts |= {f"tensor {name!r}": f"{s.shape} {s.dtype}" for name, s in sorted(source.shapes.items())}
        facts["the checksums"] = repr(sorted(source.checksums.items()))
        facts["what is skipped"] = repr(skipped)
        trees = [leaf for leaf in parts.leaves if isinstance(leaf, ShardedTree)]
        facts |= {f"plan {i}": tree.plan.fingerprint for i, tree in enumerate(trees)}
    except Exception as problem:
        error = problem
    same("loading", repr(facts), lambda: facts, ranks.group, error)
    if skipped:
        warnings.warn(f"load skipped {len(skipped)} of {where}: {'; '.join(skipped)}", stacklevel=3)
    wanted = {e.name for e in parts.entries if e.name not in troubles}
    return _filled(where, parts, wanted, source, names, ranks)


def _is_tree(x: Any) -> bool:
    return isinstance(x, (ShardedTree, Plan))


def _empty(x: Any) -> Any:
    """A plan as a tree without values."""
    if not isinstance(x, Plan):
        return x
    selection, comm = whole(x), x.bound()
    sizes = [piece.bucket.bounds.size(comm.rank(piece.bucket.ragged)) for piece in selection.pieces]
    kinds = [piece.bucket.dtype for piece in selection.pieces]
    return ShardedTree(
        x, selection, [torch.empty(n, dtype=d, device="meta") for n, d in zip(sizes, kinds, strict=True)]
    )


def _renamed(parts: Named, rename: Rename | None) -> dict[str, str]:
    """Names in the files by names in the trees.

    Raises:
      ValueError: two that are called the same.
    """
    out: dict[str, str] = {}
    for entry in parts.entries:
        if rename is None:
            out[entry.name] = entry.name
        else:
            out[entry.name] = rename(entry.name) if callable(rename) else rename.get(entry.name, entry.name)
    twice = [name for name, n in _counts(out.values()).items() if n > 1]
    if twice:
        both = [name for name, there in out.items() if there == twice[0]]
        raise ValueError(f"rename= calls {' and '.join(map(repr, both))} both {twice[0]!r}")
    return out


def _counts(items: Iterable[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for item in items:
        out[item] = out.get(item, 0) + 1
    return out


def _troubles(parts: Named, source: Source, names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What doesn't fit, by name in the trees; and what is in the files alone."""
    out: dict[str, str] = {}
    for entry in parts.entries:
        there, leaf = names[entry.name], parts.leaves[entry.at]
        about = repr(entry.name) if there == entry.name else f"{entry.name!r} ({there!r} in the files)"
        if there in source.shapes:
            held, want = source.shapes[there], entry.shape or Shaped((), source.shapes[there].dtype)
            if held.shape != want.shape:
                out[entry.name] = f"{about} has shape {held.shape} in the files, expected {want.shape}"
            elif not _fits(held.dtype, want.dtype):
                out[entry.name] = f"{about} is {held.dtype}, which does not fit into {want.dtype}"
        elif there not in source.values:
            out[entry.name] = f"{about} is missing"
        elif entry.path is not None or (entry.shape is not None and entry.shape.shape != ()):
            out[entry.name] = f"{about} is a value in the files, expected a tensor of shape {entry.shape}"
        elif not _is_like(source.values[there], leaf):
            out[entry.name] = f"{about} is {source.values[there]!r} in the files, expected something like {leaf!r}"
    mine = set(names.values())
    return out, [f"{name!r} is unexpected" for name in (*source.shapes, *source.values) if name not in mine]


def _is_like(value: Any, leaf: Any) -> bool:
    """Whether a value can stand where a leaf is: texts for texts, numbers for numbers that can hold them."""
    if isinstance(value, str) or isinstance(leaf, str):
        return type(value) is type(leaf)
    number = value.item() if isinstance(value, Tensor) else value
    return not isinstance(leaf, Tensor) or _tensor(number).to(leaf.dtype).item() == number or number != number


def _fits(held: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether every value of a dtype has an equal one in another."""
    if held == wanted or held.is_complex or wanted.is_complex or torch.bool in (held, wanted):
        return held == wanted
    if held.is_floating_point and wanted.is_floating_point:
        a, b = torch.finfo(held), torch.finfo(wanted)
        return a.max <= b.max and a.smallest_normal >= b.smallest_normal and a.eps >= b.eps
    if held.is_floating_point or wanted.is_floating_point:
        return False
    i, j = torch.iinfo(held), torch.iinfo(wanted)
    return i.min >= j.min and i.max <= j.max


def _brief(found: Sequence[str]) -> str:
    more = f"; and {len(found) - 20} more" if len(found) > 20 else ""
    return "; ".join(found[:20]) + more + " (strict=False skips what does not fit)"


def _filled(
    where: Path, parts: Named, wanted: set[str], source: Source, names: Mapping[str, str], ranks: Ranks
) -> dict[str, Any]:
    """The trees, with what is wanted read from the files."""
    leaves: list[Any] = []
    found: list[Holder] = []
    sums: list[int] = []
    error: Exception | None = None
    try:
        leaves += [_fresh(leaf) for leaf in parts.leaves]
        # Counters and numbers that other programs keep as tensors are read as such, and turned into values.
        scalars = {
            e.name: torch.empty((), dtype=source.shapes[names[e.name]].dtype)
            for e in parts.entries
            if e.name in wanted and e.shape is None and names[e.name] in source.shapes
        }
        own = holders(Named(leaves, parts.structure, parts.entries), ranks) + plain_holders(scalars, ranks)
        found += [h for h in own if h.name in wanted and names[h.name] in source.shapes]
        sums += [source.fill(names[holder.name], holder, ranks.me) for holder in found]
        for entry in parts.entries:
            value = scalars.get(entry.name, source.values.get(names[entry.name]))
            if entry.name in wanted and value is not None:
                leaves[entry.at] = _value(entry.name, leaves[entry.at], value)
    except Exception as problem:
        error = problem
    agree(f"reading {where}", {}, ranks.group, error)
    _verify(found, sums, source, names, ranks)
    return dict(optree.tree_unflatten(parts.structure, leaves))


def _fresh(leaf: Any) -> Any:
    """The same leaf in memory of its own; values are kept for what isn't loaded."""
    if isinstance(leaf, ShardedTree):
        device = leaf.plan.bound().device
        made = [torch.zeros_like(x, device=device) if x.is_meta else x.detach().clone() for x in leaf.tensors]
        return leaf.with_tensors(made)
    if isinstance(leaf, Tensor):
        meta = leaf.is_meta
        return torch.zeros_like(leaf, device="cpu" if meta else None, memory_format=torch.contiguous_format).copy_(
            torch.zeros(()) if meta else leaf.detach()
        )
    return leaf


def _tensor(number: Any) -> Tensor:
    """A number with all its digits."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def _value(name: str, leaf: Any, value: Any) -> Any:
    """A value in the place of a leaf: a tensor of its dtype and device, a whole number for a whole number."""
    number = value.item() if isinstance(value, Tensor) else value
    if isinstance(leaf, Tensor):
        made = _tensor(number).to(leaf.dtype)
        if made.item() != number and number == number:
            raise ValueError(f"{name!r} is {number} in the files, which does not fit into {leaf.dtype}")
        return made if leaf.is_meta else made.to(leaf.device)
    whole = type(leaf) is int and isinstance(number, float) and number.is_integer()
    return int(number) if whole else number


def _verify(
    found: Sequence[Holder], sums: Sequence[int], source: Source, names: Mapping[str, str], ranks: Ranks
) -> None:
    """Add the ranks' checksums up and compare. Each replica has read all of a tensor, so it counts as often."""
    if not source.checksums:
        return
    which = [replicas(holder.held, holder.grid, ranks.me) for holder in found]
    # The sum over all replicas alone would be blind in its top bits: an even number of equal changes there is none.
    first = [s if index == 0 else 0 for s, (index, _) in zip(sums, which, strict=True)]
    halves = [[p >> 32, p & 0xFFFFFFFF, q >> 32, q & 0xFFFFFFFF] for p, q in zip(first, sums, strict=True)]
    table = torch.tensor(halves, dtype=torch.int64, device=ranks.group.host).view(-1, 4)
    totals = all_reduce(table, ranks.group).wait().tolist()
    for holder, (_, copies), (a, b, c, d) in zip(found, which, totals, strict=True):
        name = names[holder.name]
        want = source.checksums[name]
        if ((a << 32) + b - want) % MODULUS or ((c << 32) + d - want * copies) % MODULUS:
            raise ValueError(f"{source.file(name)} is damaged: the checksum of {name!r} doesn't match")
