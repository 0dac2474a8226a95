"""Random numbers that depend on *which* element they are for, never on who makes them.

Every value is a pure function of ``(seed, path, flat index in the global leaf)``. There is no
generator and no state, so any rank can make any run of any leaf, and every mesh, chunking, thread
count and device gets the same bits.

    >>> import torch
    >>> leaf = standard_normal(0, "layers.0.wq", torch.arange(12))
    >>> run = standard_normal(0, "layers.0.wq", torch.arange(5, 9))
    >>> torch.equal(leaf[5:9], run)
    True

The numbers of one leaf and seed are one sequence: what is drawn twice for a path is the same twice.
For a second, independent sequence append to the path, as in ``path + "/noise"``.
"""

from ragged.random.counter import bits, uniform01
from ragged.random.dropout import dropout
from ragged.random.initializers import Initializer, constant, fan_in, normal, ones, uniform, zeros
from ragged.random.quantile import standard_normal

__all__ = [
    "Initializer",
    "bits",
    "constant",
    "dropout",
    "fan_in",
    "normal",
    "ones",
    "standard_normal",
    "uniform",
    "uniform01",
    "zeros",
]
