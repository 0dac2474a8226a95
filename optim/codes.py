"""Eight-bit codes of Adam's moments: one byte per element and one scale per block, by arithmetic alone.

Both maps send byte 0 to exactly 0 and the largest code to the scale, which is the largest magnitude of the block;
magnitudes below 2^-100 count as zero. The second moment is coded by its square root, which is what divides.
The maps use additions, products, quotients and square roots only, which are rounded the same way wherever an element
lies in a vector: so codes don't depend on how a buffer is cut. Hardware rounds all four correctly, but torch's eager
square root on the CPU is MKL's, which doesn't, though it is the same at any place. The compiled one, codes_compiled.py,
is the hardware's, so that the two differ by roundings. The maps work in memory that is given to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BEND", "LEAST", "MOST", "TOP", "TOP_ROOT", "decode_root", "decode_signed", "encode_root", "encode_signed"]

# Signed: with z = (c / 127)^2 and K = BEND, the value is z^2 / (K + (1 - K) z): like z near 1, so that steps are fine
# where most elements of an even block lie, and like z^2 / K near 0, so that small ones of an uneven block are not lost.
BEND = 1 / 64
TOP = 127**2
TOP_ROOT = 255**2
LEAST, MOST = 2.0**-100, torch.finfo(torch.float32).max


def decode_signed(codes: Tensor, scales: Tensor, out: Tensor, spare: Tensor, factor: float = 1.0) -> Tensor:
    """Values in fp32 of two's complement codes, times a factor.

    Args:
      codes: uint8.
      scales: fp32, broadcast against the codes.
      out, spare: fp32, of the codes' shape, written.

    Example:
      >>> import torch
      >>> codes = torch.tensor([0, 127, 129], dtype=torch.uint8)
      >>> [round(x, 5) for x in decode_signed(codes, torch.tensor([2.0]), torch.empty(3), torch.empty(3)).tolist()]
      [0.0, 2.0, -2.0]
    """
    out.copy_(codes.view(torch.int8))
    torch.abs(out, out=spare)
    out.mul_(spare).mul_(spare.mul_(spare))
    return out.div_(spare.add_(TOP * BEND / (1 - BEND))).mul_(scales * (factor / (TOP * (1 - BEND))))


def encode_signed(
    x: Tensor, dims: tuple[int, ...], codes: Tensor, scales: Tensor, spare: Tensor, other: Tensor, factor: float = 1.0
) -> None:
    """The nearest codes of values times a factor, and the scales of their blocks.

    A block of zeros has scale and codes 0. One that holds something infinite or NaN has such a scale,
    and decodes to NaN or infinity: it stays visible, and inside its block.

    Args:
      x: fp32.
      dims: dims of `x` that a block spans, kept in `scales` with size 1.
      codes, scales: written; `spare`, `other`: fp32, of the shape of `x`, overwritten.
    """
    torch.abs(x, out=spare)
    divisor = _scale(spare, dims, scales, factor)
    b = spare.div_(divisor.mul_(2 / (TOP * (1 - BEND))))
    z = torch.add(b, 2 * BEND * TOP / (1 - BEND), out=other).mul_(b).sqrt_().add_(b)
    codes.view(torch.int8).copy_(z.sqrt_().round_().copysign_(x))


def decode_root(codes: Tensor, scales: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
    """Square roots of second moments in fp32, times a factor: the square of `code / 255`, times the scale.

    Args:
      codes: uint8.
      scales: fp32, broadcast against the codes.
      out: fp32, of the codes' shape, written.

    Example:
      >>> import torch
      >>> decode_root(torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([3.0]), torch.empty(2)).tolist()
      [0.0, 3.0]
    """
    return out.copy_(codes).mul_(out).mul_(scales * (factor / TOP_ROOT))


def encode_root(
    x: Tensor, dims: tuple[int, ...], codes: Tensor, scales: Tensor, spare: Tensor, factor: float = 1.0
) -> None:
    """As `encode_signed`, of roots, which are nowhere negative; `x` is overwritten.

    What isn't zero in a block doesn't become zero: it is a divisor.
    """
    c = x.div_(_scale(x, dims, scales, factor).div_(TOP_ROOT)).sqrt_()
    torch.sign(c, out=spare)
    torch.maximum(c.round_(), spare, out=c)
    codes.copy_(spare.view(torch.int32).copy_(c))  # by int32, a much faster way to bytes


def _scale(size: Tensor, dims: tuple[int, ...], scales: Tensor, factor: float) -> Tensor:
    """Write the scales of blocks, and return what to divide by."""
    most = size.amax(dims, keepdim=True)
    scales.copy_(torch.threshold(most, LEAST, 0.0).mul_(factor))  # NaN stays
    return most.clamp_(LEAST, MOST)
