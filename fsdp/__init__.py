"""Gather, differentiate, reduce: functional fully-sharded training over `ragged` trees."""

from fsdp.folding import fold
from fsdp.footprint import Footprint, footprint
from fsdp.functional import Apply, functionalize
from fsdp.gathering import gathered
from fsdp.grad import ValueAndGrad, value_and_grad
from fsdp.initializing import init_module
from fsdp.leaves import ShardedLeaf
from fsdp.microbatching import microbatch
from fsdp.precision import MixedPrecision
from fsdp.sharded_module import ShardedModule, full_parameters, fully_shard, parameter_trees
from fsdp.torch_optimizer import as_torch_optimizer

__all__ = [
    "Apply",
    "Footprint",
    "MixedPrecision",
    "ShardedLeaf",
    "ShardedModule",
    "ValueAndGrad",
    "as_torch_optimizer",
    "fold",
    "footprint",
    "full_parameters",
    "fully_shard",
    "functionalize",
    "gathered",
    "init_module",
    "microbatch",
    "parameter_trees",
    "value_and_grad",
]
