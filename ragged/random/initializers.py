"""Initial values as functions of which element of which leaf they are for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ragged.random.counter import uniform01
from ragged.random.quantile import standard_normal

__all__ = ["Initializer", "constant", "fan_in", "normal", "ones", "uniform", "zeros"]

# (seed, path, GLOBAL shape of the leaf, int64 flat indices) -> values at those indices, of any
# float dtype; the caller casts. Everything that depends on the shape comes from the global one, so
# no layout changes a value.
Initializer: TypeAlias = Callable[[int, str, tuple[int, ...], Tensor], Tensor]


@dataclass(frozen=True)
class normal:
    """Normal values with the given standard deviation and mean: `mean + std * standard_normal(...)`.

    Raises:
      ValueError: `std` is negative, or a number is not finite.

    Example:
      >>> normal(0.02)
      normal(std=0.02, mean=0.0)
      >>> normal(0.02)(0, "wte", (50257, 768), torch.arange(2)).tolist()
      [-0.02656748953371324, -0.0017943531822049042]
    """

    std: float = 1.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.std) and math.isfinite(self.mean) and self.std >= 0):
            raise ValueError(f"{self!r}: write a finite mean and a finite std >= 0")

    def __call__(self, seed: int, path: str, shape: tuple[int, ...], index: Tensor) -> Tensor:
        return standard_normal(seed, path, index).mul_(self.std).add_(self.mean)


@dataclass(frozen=True)
class uniform:
    """Uniform values between `low` and `high`: `low + (high - low) * uniform01(...)`.

    Raises:
      ValueError: `low` exceeds `high`, or their distance is not finite.

    Example:
      >>> uniform(-1, 1)(0, "wte", (50257, 768), torch.arange(2)).tolist()
      [-0.815945573078235, -0.07148841740632039]
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not (self.low <= self.high and math.isfinite(self.high - self.low)):
            raise ValueError(f"{self!r}: write finite bounds with low <= high")

    def __call__(self, seed: int, path: str, shape: tuple[int, ...], index: Tensor) -> Tensor:
        # Never beyond high, even where the width was rounded up: (1 - 2^-53) times it is the float
        # before it, which is at most the true width, and rounding keeps order.
        return uniform01(seed, path, index).mul_(self.high - self.low).add_(self.low)


@dataclass(frozen=True)
class fan_in:
    """Values scaled by the fan-in: the number of inputs that each output sums over, `fan`.

    The fan-in is taken from the global shape, never from a shard's.

    `"uniform"` lies within `+-scale / sqrt(fan)`; with scale 1 it is what `torch.nn.Linear` and the
    convolutions do by default. `"normal"` has the standard deviation `scale / sqrt(fan)`; with
    scale sqrt(2) it is the initialisation of He et al. (arXiv 1502.01852), with scale 1 LeCun's.

    Args:
      scale: see above; >= 0.
      distribution: `"uniform"` or `"normal"`.
      dim: the dims, one or several, that are *not* summed over: outputs, experts, heads. `fan` is
        the product of the others. The default 0 is torch's `(out, in, *kernel)`; -1 is `(*kernel,
        in, out)`, as in JAX; `(0, 1)` is `(expert, out, in)`; `()` is a vector that is summed over.

    Raises:
      ValueError: a bad `scale` or `distribution`; and when called, a `dim` that the leaf lacks or
        has twice, or nothing left to sum over, as in 0-d and (by default) 1-D leaves: the fan-in of
        a bias is its weight's.

    Example:
      >>> fan_in(dim=-1)
      fan_in(scale=1.0, distribution='uniform', dim=-1)
      >>> fan_in()(0, "wq", (4096, 1024), torch.arange(2)).tolist()  # within +-1/32
      [-0.006631070452632039, 0.013701613731742522]
    """

    scale: float = 1.0
    distribution: Literal["uniform", "normal"] = "uniform"
    dim: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise ValueError(f"{self!r}: write a finite scale >= 0")
        if self.distribution not in ("uniform", "normal"):
            raise ValueError(f'{self!r}: write distribution="uniform" or distribution="normal"')

    def __call__(self, seed: int, path: str, shape: tuple[int, ...], index: Tensor) -> Tensor:
        fan = self._fan(path, shape)
        size = self.scale / math.sqrt(fan) if fan else 0.0  # a fan of 0 means that the leaf is empty
        values = normal(size) if self.distribution == "normal" else uniform(-size, size)
        return values(seed, path, shape, index)

    def _fan(self, path: str, shape: tuple[int, ...]) -> int:
        dims = (self.dim,) if isinstance(self.dim, int) else self.dim
        kept = {d % len(shape) for d in dims if -len(shape) <= d < len(shape)}
        if len(kept) < len(dims) or len(kept) == len(shape):
            raise ValueError(
                f"{self!r} has no fan-in for {path!r} of shape {tuple(shape)}: dim must name different dims "
                "of the leaf and leave at least one to sum over; for biases and scalars write zeros, "
                "ones, or uniform(-b, b) with b = 1/sqrt(the weight's fan-in)"
            )
        return math.prod(n for d, n in enumerate(shape) if d not in kept)


@dataclass(frozen=True)
class constant:
    """The same value everywhere; `zeros` and `ones` are two of them.

    Example:
      >>> zeros
      constant(value=0.0)
      >>> constant(0.5)(0, "gate", (8,), torch.arange(2))
      tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    value: float

    def __call__(self, seed: int, path: str, shape: tuple[int, ...], index: Tensor) -> Tensor:
        return torch.full_like(index, self.value, dtype=torch.float64)


zeros = constant(0.0)
ones = constant(1.0)
