"""What a choice of shard group, block and layers per unit costs; each kind of unit is packed once, not each unit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ragged.cli.blocks import BlockRule, blocks_of
from ragged.cli.headers import Tensors
from ragged.planner import PRICE, Item, lower_bound, pack
from ragged.report import MOMENTS
from ragged.spec import block_elements

__all__ = ["Costs", "Kinds", "Row", "evaluate", "items_of", "kinds_of_units", "shard_groups"]

Kinds: TypeAlias = Counter[tuple[tuple[torch.dtype, tuple[Item, ...]], ...]]
"""Units by what the planner sees of them, items per dtype, and how many units look like that."""

MOST_GROUPS = 8
LEAST_GROUP = 8


@dataclass(frozen=True)
class Costs:
    """What is assumed of every candidate.

    Attributes:
      align: starts and shard sizes are multiples of so many elements.
      price: elements of gathered padding that one buffer less is worth.
      state_bytes: of optimizer state per element.
    """

    align: int = 64
    price: int = PRICE
    state_bytes: int = MOMENTS


@dataclass(frozen=True)
class Row:
    """One candidate.

    Attributes:
      group: m, ranks among which shards are divided.
      replicas: of that group.
      block: the block's text.
      layers: per unit.
      buffers: of all units: collectives per pass over the model.
      elements: of all leaves.
      shard: S, elements per rank, summed over all buffers.
      least: what no layout with these blocks and units goes below, of `shard`.
      state: bytes per rank of parameters, gradients and optimizer state.
      flight: bytes of the two largest units gathered, and of the gradients of one.
      gathered: bytes that a rank's buffers gather per step, forward and again before backward.
    """

    group: int
    replicas: int
    block: str
    layers: int
    buffers: int
    elements: int
    shard: int
    least: int
    state: int
    flight: int
    gathered: int

    @property
    def padding(self) -> float:
        """Gathered elements over those of the leaves, less one."""
        return self.group * self.shard / self.elements - 1 if self.elements else 0.0

    @property
    def unavoidable(self) -> float:
        """A proven lower bound of `padding`."""
        return self.group * self.least / self.elements - 1 if self.elements else 0.0

    @property
    def memory(self) -> int:
        """Bytes per rank, without activations."""
        return self.state + self.flight


def shard_groups(ranks: int) -> list[int]:
    """Sizes of shard groups worth a look: divisors of `ranks` of at least 8; if they are many, its halves.

    Example:
      >>> shard_groups(48), shard_groups(10240), shard_groups(4)
      ([8, 12, 16, 24, 48], [80, 160, 320, 640, 1280, 2560, 5120, 10240], [4])
    """
    small = [d for d in range(1, math.isqrt(ranks) + 1) if ranks % d == 0]
    divisors = sorted({*small, *(ranks // d for d in small)})
    found = [d for d in divisors if d >= LEAST_GROUP] or [ranks]
    if len(found) > MOST_GROUPS:
        halves = [d for d in found if (ranks // d).bit_count() == 1]
        found = halves if len(halves) > 2 else found
    return found[-MOST_GROUPS:]


def items_of(tensors: Tensors, rules: Sequence[BlockRule]) -> dict[str, Item]:
    """What the planner sees of each leaf.

    Raises:
      ValueError: a block that doesn't fit the model.

    Example:
      >>> from ragged.cli.blocks import parse_block
      >>> items_of({"w": ((64, 8), torch.float32)}, [parse_block("32r")])
      {'w': Item(size=512, block=256)}
    """
    blocks = blocks_of({path: shape for path, (shape, _) in tensors.items()}, rules)
    known: dict[tuple[object, tuple[int, ...]], Item] = {}
    items = {}
    for path, (shape, _) in tensors.items():
        key = (blocks[path], shape)
        if key not in known:
            known[key] = Item(math.prod(shape), block_elements(blocks[path], shape))
        items[path] = known[key]
    return items


def kinds_of_units(tensors: Tensors, items: Mapping[str, Item], units: Iterable[Sequence[str]]) -> Kinds:
    """Units, given as the paths of their leaves, equal ones counted.

    Example:
      >>> w = ((64,), torch.float32)
      >>> kinds_of_units({"a": w, "b": w}, {"a": Item(64, 1), "b": Item(64, 1)}, [["a"], ["b"]])
      Counter({((torch.float32, (Item(size=64, block=1),)),): 2})
    """
    kinds: Kinds = Counter()
    for paths in units:
        buckets: dict[torch.dtype, list[Item]] = {}
        for path in paths:
            buckets.setdefault(tensors[path][1], []).append(items[path])
        kinds[tuple((dtype, tuple(members)) for dtype, members in buckets.items())] += 1
    return kinds


def evaluate(kinds: Kinds, group: int, replicas: int, block: str, layers: int, costs: Costs) -> Row:
    """Pack every kind of unit once and add up.

    Example:
      >>> item = Item(800, 256)
      >>> row = evaluate(Counter({((torch.bfloat16, (item,)),): 2}), 2, 1, "256", 1, Costs())
      >>> row.shard, row.buffers, f"{row.padding:.2%}", row.state, row.gathered
      (1024, 2, '28.00%', 12288, 8192)
    """
    shard = least = buffers = elements = state = gathered = 0
    units: list[tuple[int, int]] = []
    for buckets, count in kinds.items():
        full = 0
        for dtype, items in buckets:
            size = dtype.itemsize
            packing = pack(items, group, align=costs.align, price=costs.price)
            shard += count * packing.shard
            least += count * lower_bound(items, group, align=costs.align)
            buffers += count * len(packing.buffers)
            elements += count * packing.elements
            # Codes and counters are neither differentiated nor optimized.
            learns = dtype.is_floating_point or dtype.is_complex
            trained = size + costs.state_bytes if learns else 0
            state += count * packing.shard * (size + trained)
            full += group * packing.shard * size
        gathered += 2 * count * full
        units.append((full, count))
    units.sort(reverse=True)
    largest = [full for full, count in units for _ in range(min(count, 2))][:2]
    flight = sum(largest) + max(largest, default=0)
    return Row(group, replicas, block, layers, buffers, elements, shard, least, state, flight, gathered)
