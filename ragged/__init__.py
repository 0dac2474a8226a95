"""Functional sharding specs over PyTorch: ragged shards, plans, zero-copy buffers.

A pytree of tensors, a mesh with named axes and a spec per leaf give a plan; a plan gives a
`ShardedTree` whose leaves are flat local buffers. See the README for the shortest loop.
"""

from ragged import checkpoint, collectives, random
from ragged.buffer import DBuffer
from ragged.dtensor import from_dtensor, to_dtensor
from ragged.initialize import init
from ragged.layout import Bucket, LeafInfo, Unit
from ragged.mapping import map_leaves, tree_map
from ragged.memory import Memory
from ragged.mesh import Comm, make_mesh
from ragged.picture import typeof, visualize
from ragged.planning import plan
from ragged.plans import Plan
from ragged.redistributing import redistribute
from ragged.resolver import rules
from ragged.sharding import from_local, shard
from ragged.spec import ELEMENT, ROW, TENSOR, P
from ragged.structure import combine, partition
from ragged.tree import ShardedTree
from ragged.unsharding import reduce_scatter, unshard

__all__ = [
    "ELEMENT",
    "ROW",
    "TENSOR",
    "Bucket",
    "Comm",
    "DBuffer",
    "LeafInfo",
    "Memory",
    "P",
    "Plan",
    "ShardedTree",
    "Unit",
    "checkpoint",
    "collectives",
    "combine",
    "from_dtensor",
    "from_local",
    "init",
    "make_mesh",
    "map_leaves",
    "partition",
    "plan",
    "random",
    "redistribute",
    "reduce_scatter",
    "rules",
    "shard",
    "to_dtensor",
    "tree_map",
    "typeof",
    "unshard",
    "visualize",
]
