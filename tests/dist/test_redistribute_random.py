"""Random trees through random chains of layouts on real ranks, bit by bit."""

from __future__ import annotations

import random
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged import Plan, ShardedTree, collectives, redistribute, shard
from tests.random_layouts import Mesh, numbers, other_mesh, places, random_layout, random_mesh, random_shapes, raw

REQUESTS, TRIPS, MESHES = 39, 52, 3  # 2,028 round trips
Places = dict[str, list[tuple[int, tuple[int, ...]]]]


def torch_mesh(mesh: Mesh) -> DeviceMesh:
    table = torch.tensor(mesh.ranks).view(tuple(mesh.axes.values()))
    return DeviceMesh("cpu", table, mesh_dim_names=tuple(mesh.axes))


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def expected(where: Places, made: Plan, full: dict[str, Tensor]) -> list[Tensor]:
    """This rank's buffers as bytes, padding zero."""
    me, comm = dist.get_rank(), made.bound()
    out = []
    for bucket in made.buckets:
        rank = comm.rank(bucket.ragged)
        buffer = torch.zeros(bucket.bounds.size(rank), bucket.dtype.itemsize, dtype=torch.uint8).numpy()
        for leaf in bucket.leaves:
            mine = [(i, place) for i, (place, ranks) in enumerate(where[leaf.path]) if me in ranks]
            if mine:
                elements, at = map(list, zip(*mine, strict=True))
                buffer[[place - bucket.bounds(rank) for place in at]] = raw(full[leaf.path])[elements]
        out.append(torch.from_numpy(buffer.reshape(-1)))
    return out


def least_sent(old: Places, new: Places, full: dict[str, Tensor]) -> int:
    """Bytes that ranks shall hold and don't."""
    missing = 0
    for path, value in full.items():
        pairs = zip(old[path], new[path], strict=True)
        missing += value.itemsize * sum(len({*wanted} - {*held}) for (_, held), (_, wanted) in pairs)
    return missing


def check(tree: ShardedTree, want: list[Tensor], about: Any) -> None:
    for tensor, bits in zip(tree.tensors, want, strict=True):
        assert torch.equal(tensor.view(torch.uint8), bits), about


def four_trips(rng: random.Random, meshes: list[tuple[Mesh, DeviceMesh]]) -> tuple[int, int, int]:
    """Shard a tree, and go from there to one or two other layouts and back, in all ways.

    Returns:
      moves, bytes that this rank sent, and bytes that all ranks together have to send.
    """
    shapes = random_shapes(rng, leaves=4, elements=48)
    tree = optree.tree_map(lambda x: numbers(*x, seed=rng.randrange(1 << 30)), shapes, is_leaf=is_shape)
    paths = [".".join(map(str, path)) for path in optree.tree_paths(tree)]
    full = dict(zip(paths, optree.tree_leaves(tree), strict=True))
    plans, wants, where, layouts = [], [], [], []
    mesh, there = rng.choice(meshes)
    for _ in range(3):
        layouts.append(random_layout(rng, shapes, mesh, layouts[-1] if layouts and rng.randrange(2) else None))
        plans.append(layouts[-1].plan(shapes).bind(there))
        where.append({p: places(f, plans[-1].buckets[f.bucket], mesh) for p, f in plans[-1].leaves.items()})
        wants.append(expected(where[-1], plans[-1], full))
        mesh, there = (mesh, there) if rng.randrange(3) else rng.choice(meshes)
    first = shard(tree, plans[0])
    check(first, wants[0], layouts[0])
    moves = sent = least = 0
    for stops in ([1, 0], [2, 0], [1, 2, 0], [2, 1, 0]):
        now, last = first, 0
        for k in stops:
            with collectives.record() as events:
                now = redistribute(now, plans[k])
            check(now, wants[k], (layouts[last], layouts[k]))
            sent += sum(event.sent for event in events if event.kind == "exchange")
            least += least_sent(where[last], where[k], full)
            moves, last = moves + 1, k
    check(first, wants[0], "the tree that was moved")
    return moves, sent, least


def round_trips(seed: int, count: int) -> list[int]:
    """So many trips on random meshes; the sums of what they return."""
    rng = random.Random(seed)
    drawn = [random_mesh(rng, range(dist.get_world_size()))]
    while len(drawn) < MESHES:
        drawn.append(other_mesh(rng, drawn[-1]))
    meshes = [(mesh, torch_mesh(mesh)) for mesh in drawn]
    return [sum(x) for x in zip(*(four_trips(rng, meshes) for _ in range(count // 4)), strict=True)]


@pytest.mark.parametrize("seed", range(REQUESTS))
def test_random_round_trips(run: Any, seed: int) -> None:
    ranks = 8 if seed == 38 else (4, 2, 3, 2)[seed % 4]
    got = run(ranks, round_trips, seed, TRIPS)
    assert sum(sent for _, sent, _ in got) == got[0][2], "only what a rank doesn't hold travels"
