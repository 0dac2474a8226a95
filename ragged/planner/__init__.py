"""Where do the leaves of a unit go? Exact integer planning of ragged buffers, without torch.

A buffer of ``ranks * S`` elements holds leaves that are contiguous and disjoint; no rank boundary may cut a
block of a leaf; the shard size ``S`` shall be as small as possible.

- `pack_in_order`: one buffer, the leaves in the order given, the minimum ``S`` exactly.
- `pack`: any order and several buffers per unit, where that is smaller by more than the price of a buffer.
- `lower_bound`: what no layout at all can beat, for one buffer or for any number.

`ragged.planner.reference` is the same by trying everything. To read: `one_buffer`, then `bounds`,
`buffers`.
"""

from ragged.planner.bounds import lower_bound
from ragged.planner.buffers import PRICE, Buffer, UnitPacking, pack
from ragged.planner.items import Item, Packing
from ragged.planner.one_buffer import pack_in_order

__all__ = ["PRICE", "Buffer", "Item", "Packing", "UnitPacking", "lower_bound", "pack", "pack_in_order"]
