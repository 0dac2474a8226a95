"""Checksums that add up: every rank sums over the bytes it has, and the sum of the sums is the tensor's.

A tensor's bytes are 64-bit little-endian words x_0, x_1, ..., the last one filled with zeros. The checksum is the sum
of (2 k + 1) x_k modulo 2^64. As every factor is odd, no change within one word can go unnoticed. As it
is a sum, ranks that each hold some of the bytes can check a tensor that none of them reads whole, however they
share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MODULUS", "checksum"]

MODULUS = 1 << 64
_COLUMNS = 1 << 12  # words per row: a chunk of some rows stays in the cache while it is summed twice
_ROWS = 1 << 5


def checksum(x: Tensor, at: int = 0) -> int:
    """The part that some bytes contribute to the checksum of their tensor.

    Args:
      x: 1-D, uint8, contiguous, on the CPU; `at`: their place in the tensor, in bytes.

    Example:
      >>> import torch
      >>> x = torch.arange(100, dtype=torch.uint8)
      >>> checksum(x) == (checksum(x[:13]) + checksum(x[13:], at=13)) % MODULUS
      True
      >>> checksum(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.uint8))
      4
    """
    shift = at % 8
    whole = x.numel() % 8 == 0 and shift == 0 and x.data_ptr() % 8 == 0 and x.storage_offset() % 8 == 0
    if not whole:
        padded = x.new_zeros(-(-(shift + x.numel()) // 8) * 8)
        padded[shift : shift + x.numel()] = x
        x = padded
    words, first, total = x.view(torch.int64), at // 8, 0
    step = _ROWS * _COLUMNS
    for a in range(0, words.numel(), step):
        total += _words(words[a : a + step], first + a)
    return total % MODULUS


def _words(x: Tensor, first: int) -> int:
    """The sum over one chunk of words: by rows and by columns, which is two plain sums."""
    rows = x.numel() // _COLUMNS
    table, rest = x[: rows * _COLUMNS].view(rows, _COLUMNS), x[rows * _COLUMNS :]
    along, down = table.sum(1), table.sum(0)
    plain = int(along.sum()) + int(rest.sum())
    # the sum of k x_k, with k from the chunk's first word on
    placed = int(torch.dot(along, torch.arange(rows))) * _COLUMNS + int(torch.dot(down, torch.arange(_COLUMNS)))
    placed += int(torch.dot(rest, torch.arange(rows * _COLUMNS, x.numel())))
    return (2 * first + 1) * plain + 2 * placed
