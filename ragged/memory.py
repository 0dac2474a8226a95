"""`Plan.memory`: the live bytes of a training step on one rank, before anything is allocated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optree
import torch

from ragged.ahead import AHEAD
from ragged.collectives import SMALL
from ragged.layout import Bucket, axis_size
from ragged.reduction import default_data_axes, reduction
from ragged.report import MOMENTS, size, state_bytes, table
from ragged.resolver import matches
from ragged.stepping import Buffer, Call, Moment, play

if TYPE_CHECKING:
    from ragged.plans import Plan

__all__ = ["Memory", "as_budget", "memory"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Memory:
    """Live bytes of one rank during a training step. Made by `Plan.memory`.

    Attributes:
      params, grads, state: what the step begins or ends with: shards, their gradients, the optimizer's state.
      peak: the most that is alive at once, the parameters and the state included.
      when: at which moment, such as "backward of layers.3".
      moments: every moment of the step and what is alive then, as (what, bytes), in the order of the step.
      alive: what the peak consists of, as (what, bytes).

    Example:
      >>> import torch
      >>> from ragged import P, plan
      >>> print(plan({"w": ((256, 256), torch.float32)}, {"fsdp": 4}, P(ragged="fsdp")).memory())
      peak: reduce of w         896.0 KiB
        full parameters         256.0 KiB
        gradients of leaves     256.0 KiB
        gradients on their way  192.0 KiB
        optimizer state         128.0 KiB
        parameters               64.0 KiB
      sum of w                  704.0 KiB
      forward of w              448.0 KiB
      backward of w             448.0 KiB
      optimizer                 256.0 KiB
    """

    params: int
    grads: int
    state: int
    peak: int
    when: str
    moments: tuple[tuple[str, int], ...]
    alive: tuple[tuple[str, int], ...]

    def table(self) -> str:
        """What is alive at the peak, and the highest moment of every kind (forward, backward, reduce ...)."""
        kinds: dict[str, tuple[str, int]] = {}
        for what, n in self.moments:
            kind = what.partition(" of ")[0]
            if kind not in kinds or kinds[kind][1] < n:
                kinds[kind] = what, n
        rows = [(f"peak: {self.when}", size(self.peak)), *((f"  {what}", size(n)) for what, n in self.alive)]
        rest = sorted((row for row in kinds.values() if row[0] != self.when), key=lambda row: -row[1])
        return table([*rows, *((what, size(n)) for what, n in rest)])

    def __str__(self) -> str:
        return self.table()


def memory(
    plan: Plan,
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
    """See `Plan.memory`."""
    order = _calls(plan, calls)
    feet = _footprints(plan, footprints or {})
    budget = as_budget(reshard_after_forward)
    if ahead < 0:
        raise ValueError(f"ahead={ahead}: expected a number of bytes >= 0")
    if device_type is None:
        device_type = "cpu" if plan.comm is None else plan.comm.device.type
    buffers = {b.name: _buffer(plan, b, precision, device_type == "cpu") for b in plan.buckets}
    times = Counter(names[0] for names in order)
    turns: Counter[str] = Counter()
    played = []
    for names in order:
        buckets = tuple(b.name for name in names for b in plan.unit[name].buckets)
        foot = _of_turn(feet.get(names[0]), names[0], turns[names[0]], times[names[0]])
        turns[names[0]] += 1
        sizes = [getattr(foot, name, 0) for name in ("saved", "forward", "backward", "passed")]
        played.append(Call(" + ".join(names), buckets, *sizes))
    params = plan.bytes_per_rank()
    grads = sum(b.shard * b.dtype.itemsize for b in plan.buckets if b.trains)
    state = sum(MOMENTS * b.shard for b in plan.buckets if b.trains)
    if optimizer is not None:
        state = sum(state_bytes(plan, optimizer).values())
    # An update that leaves its inputs alone makes the updates first, then the new parameters.
    update = 0 if donate else state + 2 * grads
    static = [("parameters", params), ("optimizer state", state)]
    lone = device_type == "cpu" and math.prod(plan.axes.values()) == 1
    moments = play(buffers, played, static, update, budget, ahead, lone)
    top = max(moments, key=lambda moment: moment.total)
    return Memory(params, grads, state, top.total, top.what, tuple((m.what, m.total) for m in moments), _sorted(top))


def _sorted(moment: Moment) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(moment.alive, key=lambda row: -row[1]))


def _calls(plan: Plan, calls: Sequence[str | Sequence[str]] | None) -> list[tuple[str, ...]]:
    """The units of each call; by default one call per unit, in the order of the tree."""
    if calls is None:
        paths = _written(optree.tree_unflatten(plan.structure, list(plan.leaves)))
        return [(name,) for name in dict.fromkeys(plan.leaves[path].unit for path in paths)]
    if isinstance(calls, str):
        raise ValueError(f"calls={calls!r}: expected a list of unit names, as in calls=[{calls!r}]")
    out = [(call,) if isinstance(call, str) else tuple(call) for call in calls]
    for name in (name for names in out for name in names):
        if name not in plan.unit:
            raise ValueError(f"calls names the unit {name!r}, which the plan lacks; {_known(plan)}")
    if not all(out):
        raise ValueError("calls has an entry without units; leave it out")
    return out


def _written(tree: Any) -> Iterator[Any]:
    """The leaves in the order in which the tree was written, where flattening sorts the keys of dicts."""
    if isinstance(tree, (dict, list, tuple)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _written(part)
    else:
        yield from optree.tree_leaves(tree)


def _known(plan: Plan) -> str:
    names = [u.name for u in plan.units]
    return f"its units are {names[:20]}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _footprints(plan: Plan, given: Mapping[Any, Any]) -> dict[str, Any]:
    """A footprint by unit name, the first pattern that matches it."""
    table = getattr(given, "table", given)  # rules({...}) or a plain dict
    if not isinstance(table, Mapping):
        raise ValueError(f"footprints={given!r}: expected a dict from unit names or patterns to footprints")
    for pattern, foot in table.items():
        if not any(matches(pattern, u.name) for u in plan.units):
            raise ValueError(f"footprints names {pattern!r}, which matches no unit; {_known(plan)}")
        for one in foot if _several(foot) else (foot,):
            sizes = [getattr(one, name, None) for name in ("saved", "forward", "backward")]
            if not all(isinstance(n, int) and n >= 0 for n in sizes):
                raise ValueError(
                    f"footprints[{pattern!r}] is {foot!r}: expected saved, forward and backward in bytes, as "
                    "fsdp.footprint(fn, params, *args) returns them"
                )
    return {
        u.name: next(foot for pattern, foot in table.items() if matches(pattern, u.name))
        for u in plan.units
        if any(matches(pattern, u.name) for pattern in table)
    }


def _several(foot: Any) -> bool:
    return isinstance(foot, (list, tuple)) and not hasattr(foot, "saved")


def _of_turn(foot: Any, name: str, turn: int, times: int) -> Any:
    """The footprint of one of a unit's calls."""
    if not _several(foot):
        return foot
    if len(foot) != times:
        raise ValueError(
            f"unit {name!r} is called {times} times and has {len(foot)} footprints; give one for all, or a list of "
            "one per call"
        )
    return foot[turn]


def as_budget(reshard_after_forward: bool | int) -> float:
    """Bytes of full parameters that stay after forward.

    Raises:
      ValueError: a negative number of bytes, or no number.
    """
    if isinstance(reshard_after_forward, bool):
        return 0.0 if reshard_after_forward else math.inf
    if not isinstance(reshard_after_forward, int) or reshard_after_forward < 0:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r}: expected True, False, or a number of bytes >= 0"
        )
    return reshard_after_forward


def _buffer(plan: Plan, b: Bucket, precision: Any, cpu: bool) -> Buffer:
    """What the executor allocates for a bucket."""
    gathers = reduces = b.dtype
    if b.dtype in _FLOATS:
        gathers = getattr(precision, "param_dtype", None) or b.dtype
        reduces = getattr(precision, "reduce_dtype", None) or gathers
    shard, grad = b.shard, b.shard * b.dtype.itemsize
    nbytes = b.length * gathers.itemsize
    alone = b.ranks == 1 and gathers == b.dtype  # the shard is the full buffer
    data = default_data_axes(plan.buckets, plan.axes)
    replicas = axis_size(plan.axes, reduction(b, plan.axes, data).across)
    parts = summing = 0
    if b.ranks == 1:
        # Nothing is sent; where the dtype differs, the result is a copy.
        parts = grad if reduces != b.dtype and replicas == 1 else 0
    elif cpu:
        parts = (b.ranks - 1) * shard * reduces.itemsize
        summing = _summing(shard, reduces, b.dtype if replicas == 1 else reduces)
    else:
        parts = shard * reduces.itemsize
        summing = 0 if reduces == b.dtype or replicas > 1 else grad
    apart = b.length * reduces.itemsize if alone or reduces != gathers else 0
    sent = 0
    if b.ranks > 1 and cpu and reduces == gathers != torch.float16:
        sent = sum(b.leaves[c.leaf].size for c in b.chunks if c.leaf is not None) * reduces.itemsize
        apart = b.length * reduces.itemsize - sent if sent else apart
    if replicas > 1:
        gone = parts + apart if b.ranks > 1 else 0  # once the reduced shard is there
        summing = max(summing, _across(shard, reduces, b.dtype, replicas, b.ranks > 1, cpu) - gone)
    return Buffer(
        name=b.name,
        unit=b.unit,
        nbytes=nbytes,
        full=0 if alone else nbytes,
        trains=b.trains,
        leaves=b.elements * gathers.itemsize,
        largest=max((leaf.size for leaf in b.leaves), default=0) * gathers.itemsize,
        sent=sent,
        apart=apart,
        parts=parts,
        summing=summing,
        grad=grad * b.trains,
        goes_on=replicas > 1,
    )


def _summing(n: int, dtype: torch.dtype, to: torch.dtype) -> int:
    """The most that a sum of parts of n elements needs on a CPU, the result included."""
    if dtype not in _HALVES:
        return n * (dtype.itemsize + (to.itemsize if to != dtype else 0))
    # Two parts as fp32 and their sum; then the sum, and what it is rounded to.
    return max(3 * n * 4, n * 4 + (n * to.itemsize if to != torch.float32 else 0))


def _across(n: int, dtype: torch.dtype, to: torch.dtype, replicas: int, scattered: bool, cpu: bool) -> int:
    """The most that the sum over replicas needs: the reduced shard, what arrives, and the sum of it."""
    own, cast = n * dtype.itemsize * scattered, n * to.itemsize * (to != dtype)
    if not cpu:
        return own + cast
    each = n if n * dtype.itemsize <= SMALL else -(-n // replicas)
    return own + max((replicas - 1) * each * dtype.itemsize + _summing(each, dtype, dtype), cast)
