"""Standard normals by inversion, in operations that are rounded alike everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragged.random.counter import in_chunks, stream_keys, uniform01_into

__all__ = ["normal_quantile_", "standard_normal"]


def standard_normal(seed: int, path: str, index: Tensor) -> Tensor:
    """Standard normals: the quantiles of `uniform01(seed, path, index)`, to about 1e-15 relative.

    Args:
      seed, path, index: as in `bits`.

    Returns:
      float64 of the shape and device of `index`, within +-8.21 (the quantile of 2^-53).

    Raises:
      ValueError: as in `bits`.

    Source:
      M. J. Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied
      Statistics 37 (1988) 477-484, routine PPND16.

    Example:
      >>> standard_normal(0, "layers.0.wq", torch.arange(2)).tolist()
      [2.1770275117107993, 0.7853759686962601]
    """
    keys = stream_keys(seed, path)

    def kernel(i: Tensor, out: Tensor) -> None:
        uniform01_into(keys, i, out)
        normal_quantile_(out)

    return in_chunks(kernel, index, torch.float64)


# Same bits everywhere. Kernels for log, cos or erfinv give different last bits in the vectorised
# part of a range and in its tail, and where the tail lies depends on the chunk and on the number of
# threads; torch.sqrt calls a vendor's library that isn't correctly rounded (MKL's is off in 1 % of
# float64 roots on some processors). So below there are only +, -, * and / in float64, which IEEE
# 754 rounds in one way, and integer operations. Each rounding is an op of its own, since a fused
# multiply-add rounds once where two ops round twice (so don't compile this), and nothing is divided
# by a Python number, for which CUDA multiplies by the reciprocal.


def normal_quantile_(u: Tensor) -> Tensor:
    """Standard normal quantiles, in place; `u` is 1-D float64, odd multiples of 2^-53 in (0, 1)."""
    u.sub_(0.5)  # exact, as is 0.5 - |u|, the probability of the tail
    outer = (u.abs() > 0.425).nonzero().squeeze(1)  # 15 % of the elements
    signed = u[outer]

    r = torch.mul(u, u).neg_().add_(0.180625)
    u.mul_(_polynomial(r, _CENTRE[0])).div_(_polynomial(r, _CENTRE[1]))

    r = _square_root(_minus_log(signed.abs().neg_().add_(0.5)))
    far = (r > 5.0).nonzero().squeeze(1)  # about one element in 4e10
    z = _ratio(r - 1.6, _TAIL)
    if far.numel():
        z[far] = _ratio(r[far] - 5.0, _FAR_TAIL)
    u[outer] = torch.copysign(z, signed)
    return u


def _ratio(r: Tensor, coefficients: tuple[Sequence[float], Sequence[float]]) -> Tensor:
    return _polynomial(r, coefficients[0]).div_(_polynomial(r, coefficients[1]))


def _polynomial(r: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's rule, highest power first."""
    highest, *others, lowest = coefficients
    total = torch.mul(r, highest)
    for c in others:
        total.add_(c).mul_(r)
    return total.add_(lowest)


def _minus_log(p: Tensor) -> Tensor:
    """`-log(p)` of normal positive numbers, `p = 2^e m` with `m` in [sqrt(1/2), sqrt(2)).

    `log(m) = 2 artanh(s) = 2 (s + s^3/3 + s^5/5 + ...)` with `s = (m - 1) / (m + 1)`, so `s^2`
    is below 0.03, and 12 terms leave an error below 1e-19.
    """
    words = p.view(torch.int64)
    e = (words - _SQRT_HALF).bitwise_right_shift_(52)
    m = (words - (e << 52)).view(torch.float64)
    s = (m - 1.0).div_(m + 1.0)
    log_m = _polynomial(s * s, _ARTANH).mul_(s)
    return e.to(torch.float64).mul_(-_LOG_2).sub_(log_m)


def _square_root(x: Tensor) -> Tensor:
    """Heron's method from half the exponent: relative errors 6e-2, 2e-3, 2e-6, 2e-12, rounding."""
    y = (x.view(torch.int64) >> 1).add_(1023 << 51).view(torch.float64)
    for _ in range(4):
        y = torch.div(x, y).add_(y).mul_(0.5)
    return y


_LOG_2 = 0.6931471805599453
_SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2) as a float64
_ARTANH = [2.0 / (2 * k + 1) for k in reversed(range(12))]

# AS 241, numerators and denominators, highest power first.
_CENTRE = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_TAIL = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258,
        3.64784832476320460504,
        5.76949722146069140550,
        4.63033784615654529590,
        1.42343711074968357734,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940,
        2.05319162663775882187,
        1.0,
    ),
)
_FAR_TAIL = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580,
        5.46378491116411436990,
        6.65790464350110377720,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)
