"""Gather, differentiate, reduce: functional fully-sharded training over `ragged` trees."""

from fsdp.folding import fold
from fsdp.functional import Apply, functionalize
from fsdp.gathering import gathered
from fsdp.grad import ValueAndGrad, value_and_grad

__all__ = ["Apply", "ValueAndGrad", "fold", "functionalize", "gathered", "value_and_grad"]
