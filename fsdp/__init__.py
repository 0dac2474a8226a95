"""Gather, differentiate, reduce: functional fully-sharded training over `ragged` trees."""

from fsdp.folding import fold
from fsdp.gathering import gathered
from fsdp.grad import ValueAndGrad, value_and_grad

__all__ = ["ValueAndGrad", "fold", "gathered", "value_and_grad"]
