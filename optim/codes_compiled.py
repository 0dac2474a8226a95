"""A step of 8-bit Adam over whole flat blocks as one kernel of `torch.compile`: what codes.py does call by call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from optim.codes import BEND, LEAST, MOST, TOP, TOP_ROOT

__all__ = ["LANES", "step_blocks"]

# Elements that two words of codes hold; a block is a multiple of it.
LANES = 8


def step_blocks(
    block: int,
    betas: tuple[float, float],
    p: Tensor,
    g: Tensor,
    out: Tensor | None,
    moments: tuple[Tensor, ...],
    numbers: tuple[Tensor, Tensor, Tensor],
) -> None:
    """One step of whole blocks, which compiles at its first call, and once more when other sizes come.

    The results are those of the eager operations except for roundings of square roots: the compiled one is
    correctly rounded. On CPUs a block has the same bits wherever it lies, and however many lie beside it: nothing is
    contracted to multiply-adds there, and every element goes through the same instructions.

    Args:
      block: elements of a block, a multiple of 8.
      p, g: 1-D, of any floating dtype.
      out: fp32, takes the updates; with None they are added to `p`.
      moments: codes and scales of the first moment, then of the second; written.
      numbers: eps, step size and decay of the parameters, in fp32 and as the kernel wants them: the first two in
        units in which a gradient enters both moments as it is. A decay of 0 is none.
    """
    codes_mu, scales_mu, codes_nu, scales_nu = moments
    rows = [None if x is None else x.detach().view(-1, block) for x in (p, g, out, codes_mu, codes_nu)]
    held = [*rows[:4], scales_mu.view(-1, 1), rows[4], scales_nu.view(-1, 1)]
    kernel = _kernel(block, *betas)
    # Codes are read as words, which begin at multiples of four bytes. One block alone would be compiled by itself,
    # since the compiler takes a size of 1 for a constant.
    if scales_mu.numel() > 1 and codes_mu.storage_offset() % 4 == codes_nu.storage_offset() % 4 == 0:
        kernel(*held, *numbers)
        return
    copies = [None if x is None else _room(x) for x in held]
    kernel(*copies, *numbers)
    written = [0 if out is None else 2, 3, 4, 5, 6]
    for x, copy in ((held[k], copies[k]) for k in written):
        assert x is not None
        assert copy is not None
        x.copy_(copy[: len(x)])


def _room(x: Tensor) -> Tensor:
    """A copy with at least two rows."""
    return torch.cat([x, x]) if len(x) == 1 else x.clone()


@functools.cache
def _kernel(block: int, b1: float, b2: float) -> Callable[..., None]:
    """The arithmetic of codes.py and adam8bit.py, in a form that the C++ compiler makes vector instructions of.

    Only the number of blocks may change without compiling again. All sizes free (`dynamic=True`) would make
    numbers of the block's size and of constants too, and slow loops.
    """
    one, two = 1 - b1, math.sqrt(1 - b2)
    keep_mu, keep_nu = b1 / one / (TOP * (1 - BEND)), math.sqrt(b2) / two / TOP_ROOT

    def step(
        p: Tensor,
        g: Tensor,
        out: Tensor | None,
        mu: Tensor,
        mu_scales: Tensor,
        nu: Tensor,
        nu_scales: Tensor,
        eps: Tensor,
        size: Tensor,
        decay: Tensor,
    ) -> None:
        old, g = p.to(torch.float32), g.to(torch.float32)
        word, at = _words(mu, block)
        c = ((word << (24 - at)) >> 24).to(torch.float32).view(p.shape)
        s = c.abs()
        s2 = s * s
        m = ((c * s) * s2) / (s2 + TOP * BEND / (1 - BEND)) * (mu_scales * keep_mu) + g
        word, at = _words(nu, block)
        r = ((word >> at) & 255).to(torch.float32).view(p.shape)
        r = r * r * (nu_scales * keep_nu)
        r = (r * r + g * g).sqrt()
        # Chosen so that what isn't decayed is used once: used twice it would be written down, and take a pass more.
        update = (m / (r + eps)) * size + torch.where(decay == 0, 0.0, old * decay)
        if out is None:
            p.add_(update)
        else:
            out.copy_(update)
        most_mu, most_nu = m.abs().amax(1, keepdim=True), r.amax(1, keepdim=True)
        mu_scales.copy_(torch.where(most_mu <= LEAST, 0.0, most_mu) * one)
        nu_scales.copy_(torch.where(most_nu <= LEAST, 0.0, most_nu) * two)
        b = m.abs() / (most_mu.clamp(LEAST, MOST) * (2 / (TOP * (1 - BEND))))
        q = (((b + 2 * BEND * TOP / (1 - BEND)) * b).sqrt() + b).sqrt().round()
        # Two's complement by arithmetic, and from fp32 to uint8 at once (NaN and infinity become 0, as eagerly):
        # through int32, or through int8 and a view, this is a loop over single elements.
        mu.copy_(torch.where((m < 0) & (q > 0), 256.0 - q, q))
        h = (r / (most_nu.clamp(LEAST, MOST) / TOP_ROOT)).sqrt()
        nu.copy_(torch.where((h > 0) & (h < 0.5), 1.0, h.round()))  # what isn't zero doesn't become zero

    return torch.compile(step, fullgraph=True)


def _words(codes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Words of codes, each beside the elements it holds, and the bit where an element's byte begins.

    Vectors of bytes would be loaded through a buffer on the stack, a failed store forward for every eight
    elements; words are broadcast from a scalar register, two for the eight lanes of a vector.
    """
    words = codes.view(torch.int32).view(codes.shape[0], block // LANES, 2)
    lane = torch.arange(LANES, dtype=torch.int32, device=codes.device)
    return torch.where(lane < 4, words[:, :, :1], words[:, :, 1:]), (lane & 3) * 8
