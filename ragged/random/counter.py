"""Counter-based bits: element `i` of a leaf is a hash of the counter `i`, keyed by seed and path."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Keys", "bits", "in_chunks", "stream_keys", "uniform01", "uniform01_into"]

Keys = tuple[int, int]


def bits(seed: int, path: str, index: Tensor) -> Tensor:
    """64 random bits for each flat index of a leaf.

    With `k0` and `k1` the two words of a BLAKE2b hash of seed and path, and `mix` the output
    function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014), element `i` is `mix(mix(i * golden + k0) ^ k1)` modulo 2^64. With `k0` alone all
    leaves would lie on one orbit, where long leaves may overlap; with `k1` two leaves are related
    only if 128 bits of hash agree.

    Args:
      seed: any Python int, also a negative one or one longer than 64 bits.
      path: the dotted path of the leaf.
      index: int64 of any shape, on any device: flat (row-major) indices into the global leaf.

    Returns:
      int64 of the shape and device of `index`. Different indices of a leaf never share a value,
      since every step is a bijection.

    Raises:
      ValueError: `seed` is no integer, or `index` is not int64.

    Example:
      >>> bits(0, "layers.0.wq", torch.arange(2)).tolist()
      [-271891309113243245, -3986647299545692957]
    """
    keys = stream_keys(seed, path)
    return in_chunks(lambda i, out: _bits_into(keys, i, out), index, torch.int64)


def uniform01(seed: int, path: str, index: Tensor) -> Tensor:
    """Uniform numbers in the open interval (0, 1).

    `(k + 1/2) / 2^52`, where `k` is the top 52 of the `bits` of the index. The midpoints keep 0 and
    1 out, so that logarithms and quantiles are finite, and make the distribution exactly symmetric
    about 1/2.

    Args:
      seed, path, index: as in `bits`.

    Returns:
      float64 of the shape and device of `index`.

    Raises:
      ValueError: as in `bits`.

    Example:
      >>> uniform01(0, "layers.0.wq", torch.arange(2)).tolist()
      [0.9852607425989747, 0.7838834168449546]
    """
    keys = stream_keys(seed, path)
    return in_chunks(lambda i, out: uniform01_into(keys, i, out), index, torch.float64)


def stream_keys(seed: int, path: str) -> Keys:
    """The two int64 keys of a leaf's sequence."""
    try:
        seed = operator.index(seed)
    except TypeError:
        raise ValueError(f"seed must be an integer, got {seed!r}; write an int, as in seed=0") from None
    # Hexadecimal, since Python refuses to print huge integers in decimal. No number contains the
    # NUL, so no two pairs of seed and path hash the same text.
    text = f"{seed:x}\0{path}".encode()
    digest = hashlib.blake2b(text, digest_size=16, person=b"ragged.random").digest()
    k0, k1 = (int.from_bytes(word, "little", signed=True) for word in (digest[:8], digest[8:]))
    return k0, k1


def uniform01_into(keys: Keys, index: Tensor, out: Tensor) -> None:
    """`uniform01` of one chunk, written to the float64 `out`."""
    words = out.view(torch.int64)
    _bits_into(keys, index, words)
    # As the fraction of a float64 with the exponent of 1, the top 52 bits k are the number
    # 1 + k/2^52, and subtracting 1 - 2^-53 from it is exact. In place, with no conversion.
    words.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1).bitwise_or_(1023 << 52)
    out.sub_(1 - 2.0**-53)


def in_chunks(kernel: Callable[[Tensor, Tensor], None], index: Tensor, dtype: torch.dtype) -> Tensor:
    """Element-wise `kernel(index, out)`, piece by piece, so that pieces stay in cache between ops."""
    if index.dtype != torch.int64:
        raise ValueError(
            f"index must be an int64 tensor of flat indices into the global leaf, got {index.dtype} "
            f"of shape {tuple(index.shape)}; write index.long()"
        )
    flat = index.reshape(-1)
    out = torch.empty_like(flat, dtype=dtype, memory_format=torch.contiguous_format)
    size = _CHUNK * torch.get_num_threads() if flat.device.type == "cpu" else _CHUNK_ON_DEVICE
    for start in range(0, flat.numel(), size):
        kernel(flat[start : start + size], out[start : start + size])
    return out.view(index.shape)


# Elements per thread: a few float64 arrays of this length stay in a core's caches, and torch splits
# an op among threads in pieces of this length. On a device launches cost more than cache misses.
_CHUNK = 1 << 15
_CHUNK_ON_DEVICE = 1 << 22


def _int64(word: int) -> int:
    """The int64 with the bits of an unsigned word; torch adds and multiplies int64 modulo 2^64."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _int64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, made odd
_MIX = _int64(0xBF58476D1CE4E5B9), _int64(0x94D049BB133111EB)  # David Stafford's "Mix13"


def _bits_into(keys: Keys, index: Tensor, out: Tensor) -> None:
    spare = torch.empty_like(out)
    torch.mul(index, _GOLDEN, out=out)
    _mix_(out.add_(keys[0]), spare)
    _mix_(out.bitwise_xor_(keys[1]), spare)


def _mix_(x: Tensor, spare: Tensor) -> None:
    """SplitMix64's output function, in place."""
    torch.bitwise_right_shift(x, 30, out=spare)
    x.bitwise_xor_(spare.bitwise_and_((1 << 34) - 1)).mul_(_MIX[0])
    torch.bitwise_right_shift(x, 27, out=spare)
    x.bitwise_xor_(spare.bitwise_and_((1 << 37) - 1)).mul_(_MIX[1])
    torch.bitwise_right_shift(x, 31, out=spare)
    x.bitwise_xor_(spare.bitwise_and_((1 << 33) - 1))
