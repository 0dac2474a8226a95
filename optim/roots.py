"""Where matrices are orthogonalized: roots balanced by cost over the whole tree, and the trips there and back."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optim.matrices import Matrices, cost
from ragged import ShardedTree
from ragged.agree import same
from ragged.layout import LeafInfo, axis_size
from ragged.moves import Grid, Holding, Move, compile_move, holdings_of, start_move
from ragged.moves.moving import Moving
from ragged.places import flat_rank
from ragged.selection import Selection

__all__ = ["Job", "Route", "balanced", "orthogonalized", "route"]

Orthogonalize = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Job:
    """What one rank orthogonalizes at once: a matrix that is a run of its leaf, or a leaf whose pattern permutes it.

    Attributes:
      path, unit: of its leaf; `start`: first flat element; `shape`: (rows, columns), or the leaf's.
      whole: how a leaf that is not a plain matrix is taken apart, None for a matrix.
      cost: as `optim.matrices.cost`.
      held: how shards hold it.
      home: flat coordinate on `held.ragged` of the only shard that has any of it, None if there are several.
    """

    path: str
    unit: str
    start: int
    shape: tuple[int, ...]
    whole: Matrices | None
    cost: int
    held: Holding
    home: int | None


@dataclass(frozen=True)
class Stop:
    """One unit's trip: jobs in stacks of equal shape, the moves between shards and stacks.

    Attributes:
      stacks: shapes of this rank's stacks, `(jobs, *shape)`; `wholes`: beside each, how to take it apart.
    """

    stacks: tuple[tuple[int, ...], ...]
    wholes: tuple[Matrices | None, ...]
    there: Move
    back: Move


@dataclass(frozen=True)
class Route:
    """All trips of a tree, in the order of its units; `load`: cost per rank of the mesh."""

    stops: tuple[Stop, ...]
    load: tuple[int, ...]


def balanced(costs: Sequence[int], ranks: int, load: Sequence[int] | None = None) -> list[int]:
    """A rank per job: the dearest first, each to the rank with the least load so far (LPT).

    Within 4/3 of the best balance, and much closer with many jobs. Deterministic: ties go to the first rank.

    >>> balanced([5, 4, 3, 3, 3], 2)
    [0, 1, 1, 0, 1]
    """
    heap = [(0 if load is None else load[k], k) for k in range(ranks)]
    heapq.heapify(heap)
    out = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least, k = heapq.heappop(heap)
        out[i] = k
        heapq.heappush(heap, (least + costs[i], k))
    return out


def route(tree: ShardedTree, matrices: Mapping[str, Matrices]) -> Route:
    """Roots and moves for the leaves of a tree; compiled once and kept with its plan.

    Raises:
      ValueError: on all ranks: they take the leaves for other matrices, or lie on other plans.
    """
    memo = tree.plan.memo.setdefault("roots", {})
    token = tree.selection, tuple(matrices[p] for p in tree.paths)
    if token not in memo:
        memo[token] = _route(tree.plan.leaves, tree.selection, matrices, tree)
    found: Route = memo[token]
    return found


def _route(
    leaves: Mapping[str, LeafInfo], selection: Selection, matrices: Mapping[str, Matrices], tree: ShardedTree
) -> Route:
    comm = tree.plan.bound()
    facts = {f"matrices of leaf {path!r}": str(matrices[path]) for path in selection.paths}
    facts |= {"plan": tree.plan.fingerprint}
    same("the roots of matrices", repr(facts), lambda: facts, comm.everyone)
    grid = Grid.of(comm)
    me = comm.me
    jobs = [
        job
        for path, held in zip(selection.paths, holdings_of(selection, leaves, comm), strict=True)
        for job in _jobs(path, leaves[path].unit, matrices[path], held, grid, me)
    ]
    # What lies on one rank (and its replicas) as it is stays there; the rest goes where there is least to do.
    load = [0] * len(grid.ranks)
    roots: list[list[int]] = []
    for job in jobs:
        at = [] if job.home is None else _holders(job, grid)
        for k in at:
            load[k] += job.cost
        roots.append(at)
    away = [i for i, at in enumerate(roots) if not at]
    for i, k in zip(away, balanced([jobs[i].cost for i in away], len(load), load), strict=True):
        roots[i] = [k]
        load[k] += jobs[i].cost
    by_unit: dict[str, list[int]] = {unit.name: [] for unit in tree.plan.units}
    for i, job in enumerate(jobs):
        by_unit[job.unit].append(i)
    stops = [_stop([jobs[i] for i in mine], [roots[i] for i in mine], grid, me) for mine in by_unit.values() if mine]
    return Route(tuple(stops), tuple(load))


def _holders(job: Job, grid: Grid) -> list[int]:
    """Positions in the grid of the ranks that hold all of a job that lies on one shard."""
    return [
        i for i, rank in enumerate(grid.ranks)
        if flat_rank(grid.axes, grid.coordinate[rank], job.held.ragged) == job.home
    ]  # fmt: skip


def _jobs(path: str, unit: str, how: Matrices, held: Holding, grid: Grid, me: int) -> list[Job]:
    if math.prod(how.shape) == 0:
        return []
    cut = held.cut_dims(grid.axes)
    if cut - {0}:  # cut across rows: a matrix is no run of anything, so the leaf goes as a whole
        plain = how.stack[0] == 1 and not how.split and how.shape == how.stack[1:]
        return [Job(path, unit, 0, how.shape, None if plain else how, how.cost(), held, None)]
    flat = _flattened(held, grid)
    if not how.in_place:
        home = _home(flat, grid)
        return [Job(path, unit, 0, how.shape, how, how.cost(), flat, home)]
    here = flat_rank(grid.axes, grid.coordinate[me], flat.ragged)
    out = []
    for start, rows, cols in how.runs():
        part = _part(flat, start, rows * cols, here)
        home = _home(part, grid)
        out.append(Job(path, unit, start, (rows, cols), None, cost(rows, cols), part, home))
    return out


def _flattened(held: Holding, grid: Grid) -> Holding:
    """A leaf that is cut evenly along dim 0 at most, as one row of elements cut raggedly over all these axes."""
    size = math.prod(held.shape)
    outer = held.dims[0] if held.dims else ()
    inner = axis_size(grid.axes, held.ragged)
    local = size // axis_size(grid.axes, outer)

    def span(k: int) -> tuple[int, int]:
        start, stop = held.span(k % inner)
        return k // inner * local + start, k // inner * local + stop

    return Holding((size,), (), (*outer, *held.ragged), span, held.tensor, held.begin)


def _part(held: Holding, first: int, size: int, here: int) -> Holding:
    """A run of a row of elements, as a row of its own; `here` is this rank's coordinate."""

    def span(k: int) -> tuple[int, int]:
        start, stop = held.span(k)
        return min(max(start - first, 0), size), max(min(stop - first, size), 0)

    begin = held.begin + max(first - held.span(here)[0], 0)
    return Holding((size,), (), held.ragged, span, held.tensor, begin)


def _home(held: Holding, grid: Grid) -> int | None:
    """The only coordinate that holds any of it, if it is the only one."""
    ranks = axis_size(grid.axes, held.ragged)
    having = [k for k in range(ranks) if held.span(k)[1] > held.span(k)[0]]
    return having[0] if len(having) == 1 else None


def _stop(jobs: Sequence[Job], roots: Sequence[Sequence[int]], grid: Grid, me: int) -> Stop:
    """Stacks of equal jobs on this rank, and the moves from shards into them and back."""
    here = grid.ranks.index(me)
    stacks: dict[tuple[Matrices | None, tuple[int, ...]], int] = {}
    counts: list[int] = []
    places: list[tuple[int, int]] = []
    for job, at in zip(jobs, roots, strict=True):
        key = (job.whole, job.shape)
        if here in at:
            index = stacks.setdefault(key, len(stacks))
            if index == len(counts):
                counts.append(0)
            places.append((index, counts[index] * math.prod(job.shape)))
            counts[index] += 1
        else:
            places.append((0, 0))
    source, target = [], []
    for job, at, (tensor, begin) in zip(jobs, roots, places, strict=True):
        source.append(job.held)
        if job.home is not None:  # where it is: nothing moves between ranks
            target.append(Holding(job.held.shape, job.held.dims, job.held.ragged, job.held.span, tensor, begin))
        else:
            target.append(Holding(job.held.shape, (), tuple(grid.axes), _only(at[0], job), tensor, begin))
    shapes = tuple((counts[i], *shape) for (_, shape), i in stacks.items())
    wholes = tuple(whole for whole, _ in stacks)
    there = compile_move(source, target, (grid, grid), me)
    back = compile_move(target, source, (grid, grid), me)
    return Stop(shapes, wholes, there, back)


def _only(at: int, job: Job) -> Callable[[int], tuple[int, int]]:
    size = math.prod(job.held.shape)
    return lambda k: (0, size if k == at else 0)


def orthogonalized(tree: ShardedTree, matrices: Mapping[str, Matrices], ns: Orthogonalize) -> ShardedTree:
    """`ns` of every matrix of a tree, in the tree's own layout and dtype.

    Per unit one move to the roots and one back; the next unit is on its way while this one is computed.
    """
    plan = route(tree, matrices)
    comm = tree.plan.bound()
    source = [x.contiguous() for x in tree.tensors]
    out = [torch.zeros_like(x) for x in source]
    returning: list[Moving] = []
    coming = [_start(stop, source, tree) for stop in plan.stops[:1]]
    for i, stop in enumerate(plan.stops):
        coming += [_start(ahead, source, tree) for ahead in plan.stops[i + 1 : i + 2]]
        moving, stacks = coming[i]
        moving.wait()
        parts = zip(stacks, stop.stacks, stop.wholes, strict=True)
        done = [_computed(x.view(shape), whole, ns) for x, shape, whole in parts]
        returning.append(start_move(stop.back, done or [source[0][:0]], out, comm))
        coming[i] = moving, []
    for moving in returning:
        moving.wait()
    return tree.with_tensors(out, scope=tree.scope)


def _start(stop: Stop, source: Sequence[Tensor], tree: ShardedTree) -> tuple[Moving, list[Tensor]]:
    stacks = [source[0].new_empty(math.prod(shape)) for shape in stop.stacks]
    return start_move(stop.there, source, stacks or [source[0].new_empty(0)], tree.plan.bound()), stacks


def _computed(stack: Tensor, whole: Matrices | None, ns: Orthogonalize) -> Tensor:
    if whole is None:
        return ns(stack).reshape(-1)
    return torch.stack([whole.map(ns, leaf) for leaf in stack]).reshape(-1)
