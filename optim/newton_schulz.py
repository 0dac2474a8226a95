"""Newton-Schulz iteration: the nearest semi-orthogonal matrix, roughly, from matrix products alone."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "newton_schulz"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(x: Tensor, *, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS) -> Tensor:
    """Push the singular values of matrices towards 1 (into about [0.7, 1.2]).

    Args:
      x: `(batch, rows, cols)`, each matrix by itself; computed in its dtype, norms in fp32 at least. Any scale:
        the largest entry is divided out before squares are taken. A zero matrix stays zero.
      coefficients: a, b, c of `a X + (b S + c S^2) X` with `S = X X^T`.

    Returns:
      A new tensor of the same shape and dtype.

    Example:
      >>> import torch
      >>> newton_schulz(5 * torch.eye(4)[None])[0].diagonal().mean().item()  # doctest: +ELLIPSIS
      0.7654...

    Source: Jordan et al., Muon (2024); torch.optim.Muon.
    """
    a, b, c = coefficients
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.mT if x.shape[-2] > x.shape[-1] else x
    largest = y.abs().amax(dim=(-2, -1), keepdim=True).to(wide)
    y = y.to(wide) / torch.where(largest == 0, torch.ones_like(largest), largest)
    norm = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True)
    y = (y / torch.where(norm == 0, torch.ones_like(norm), norm)).to(x.dtype)
    for _ in range(steps):
        s = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(s, s, s, beta=b, alpha=c), y, beta=a)
    return (y.mT if x.shape[-2] > x.shape[-1] else y).contiguous()
