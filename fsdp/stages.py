"""Where the units of a plan are gathered in a module, and the places that their full tensors go to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from fsdp.gates import Gate, Options, Point, Slot, gate_of
from fsdp.gathering import policy_of
from ragged import ShardedTree, partition
from ragged.selection import Selection

__all__ = ["Part", "all_names", "common_module", "points_of", "slots_of"]


class Part(NamedTuple):
    """A sharded tree of some module's parameters, and where that module is.

    Attributes:
      prefix: "" for the root, else its name and a dot; paths of the tree come after it.
      options: by name of unit.
    """

    prefix: str
    tree: ShardedTree
    options: Mapping[str, Options]


def all_names(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter and buffer, under its first."""
    first: dict[int, str] = {}
    out: dict[str, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            out.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return out


def slots_of(module: nn.Module, names: Mapping[str, Sequence[str]]) -> dict[str, list[Slot]]:
    """Where tensors go, by their first names. A module under two parents has each place once."""
    out: dict[str, list[Slot]] = {}
    for path, aliases in names.items():
        slots = [_slot(module, alias, path) for alias in aliases]
        out[path] = list({(id(slot.entries), slot.name): slot for slot in slots}.values())
    return out


def _slot(module: nn.Module, name: str, path: str) -> Slot:
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    entries: Any = owner._parameters if last in owner._parameters else owner._buffers
    return Slot(entries, last, path)


def points_of(module: nn.Module, names: Mapping[str, Sequence[str]], parts: Sequence[Part]) -> dict[Gate, Point]:
    """Where the units of some plans are gathered: at the module that all leaves of a unit lie in, and where else one
    of them is used.

    Args:
      names: as `all_names` has them.
    """
    found: dict[str, dict[tuple[int, str], list[tuple[str, str]]]] = {}
    for i, part in enumerate(parts):
        for unit, path, alias, place in _uses(module, names, part):
            found.setdefault(place, {}).setdefault((i, unit), []).append((path, alias))
    points: dict[Gate, Point] = {}
    for place, units in found.items():
        inside = any(other != place and (not place or other.startswith(f"{place}.")) for other in found)
        gate = gate_of(module.get_submodule(place))
        slots: dict[str, Slot] = {}
        for (i, _), uses in units.items():
            for path, alias in uses:
                slots[alias] = _slot(module, alias, parts[i].prefix + path)
        selections = [
            (i, part.prefix, selection)
            for i, part in enumerate(parts)
            if (selection := _select(part.tree, {unit for j, unit in units if j == i})) is not None
        ]
        options = _joined([parts[i].options.get(unit, Options()) for i, unit in units], list(units), inside)
        policy = policy_of(options.reshard_after_forward, options.precision)
        point = Point(tuple(selections), tuple(slots.values()), options, policy)
        if gate in points:  # a module under two names
            point = point._replace(slots=(*points[gate].slots, *point.slots))
        points[gate] = point
    return points


def _joined(options: Sequence[Options], units: Sequence[tuple[int, str]], inside: bool) -> Options:
    """Options of a call that several units share. A module that calls others which gather isn't recomputed whole."""
    precisions = list({o.precision: None for o in options})
    if len(precisions) > 1:
        names = [name for _, name in units]
        raise ValueError(f"units {names} are gathered together, and can't have different precisions {precisions}")
    budgets = [o.reshard_after_forward for o in options]
    keep = False if any(b is False for b in budgets) else max((int(b) for b in budgets if b is not True), default=True)
    return Options(keep, not inside and any(o.remat for o in options), precisions[0])


def _uses(module: nn.Module, names: Mapping[str, Sequence[str]], part: Part) -> Iterator[tuple[str, str, str, str]]:
    """(unit, leaf, one of the leaf's names, module at which the unit is gathered for it)."""
    mine = part.tree.selection.home
    for unit in part.tree.plan.units:
        home = _called(module, common_module([(part.prefix + leaf.path).rpartition(".")[0] for leaf in unit.leaves]))
        for leaf in (leaf for leaf in unit.leaves if leaf.path in mine):
            for alias in names[part.prefix + leaf.path]:
                inside = not home or alias.startswith(f"{home}.")
                yield unit.name, leaf.path, alias, home if inside else _called(module, alias.rpartition(".")[0])


def _select(tree: ShardedTree, units: Collection[str]) -> Selection | None:
    """What a tree has of some units."""
    part, _ = partition(tree, lambda path, leaf: tree.plan.leaves[path].unit in units)
    return part.selection if part.paths else None


def _called(module: nn.Module, place: str) -> str:
    """The module itself, or the innermost one around it that is called: containers have no forward."""
    while place and type(module.get_submodule(place)).forward is nn.Module.forward:
        place = place.rpartition(".")[0]
    return place


def common_module(modules: list[str]) -> str:
    """The innermost module that all lie in."""
    parts = [m.split(".") if m else [] for m in modules]
    shared = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return ".".join(shared)
