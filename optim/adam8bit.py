"""AdamW whose moments take one byte per element, quantized block by block, with the same bits on any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from optim.adam import scale_by_adam
from optim.base import EmptyState, GradientTransformation, is_sharded, refuse
from optim.blockwise import CHUNK, check_blocking, regions
from optim.bytes_state import Blockwise, Part, parts, zeros
from optim.codes import decode_root, decode_signed, encode_root, encode_signed
from optim.codes_compiled import LANES, step_blocks
from optim.scaling import ScaleByScheduleState, new_count
from optim.schedules import Schedule
from ragged import ShardedTree
from ragged.mapping import zero_padding

__all__ = ["ScaleByAdam8bitState", "adamw8bit"]


class ScaleByAdam8bitState(NamedTuple):
    """count: steps done, int32; mu, nu: first and second moments."""

    count: Tensor  # type: ignore[assignment]  # optax's name; it hides tuple.count
    mu: Blockwise
    nu: Blockwise


class _Numbers(NamedTuple):
    """What a step multiplies by; 0-d fp32 tensors beside the parameters."""

    b1: float
    b2: float
    eps: Tensor
    size: Tensor
    decay: Tensor | None


# What is done with a finished update: given it and where it belongs.
_Sink = Callable[[Tensor, Tensor], None]


def adamw8bit(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay: float = 1e-4,
    mask: Any = None,
    block: int | tuple[int, int] = 256,
    min_size: int = 4096,
    compile: bool = False,
) -> GradientTransformation:
    """AdamW with both moments in one byte per element and one fp32 scale per block.

    Pass it to `plan(optimizer=)`, so that no rank boundary cuts a block. Codes, scales and updates
    then have the same bits on any mesh for equal gradients. The donated path (`make_step`) works in
    place and has the bits of `update`.

    Args:
      learning_rate: a number, or a schedule of the count before the step.
      mask: leaves that decay, as in `add_decayed_weights`; all by default.
      block: elements of a block, or the sides of tiles over the last two dims. Blocks at the end of a leaf
        are shorter. With tiles, a leaf of less than two dims has flat blocks of as many elements.
      min_size: leaves of fewer elements (global) keep fp32 moments.
      compile: whole blocks as one kernel of `torch.compile`, some 2.5 times as fast on a CPU, where it needs a C++
        compiler: torch raises its own error at the first step if there is none. Blocks are flat, of a multiple of
        8 elements. The first step takes some 10 to 20 seconds more, and as many again if leaves differ in size.
        The bits are the same on any mesh (checked on CPUs), but not those without `compile`: square roots round
        otherwise.

    Returns:
      A transformation with a state of three parts, as `adamw`; the first is a `ScaleByAdam8bitState`.

    Raises:
      ValueError: an argument out of range, or blocks that don't compile; at `init`: integer, bool or complex
        leaves, by path, and a plan or an even cut that goes through a block.

    Example:
      >>> import torch
      >>> from optim import adamw8bit, make_step
      >>> tx, params = adamw8bit(0.1, weight_decay=0.0, min_size=0), torch.ones(512)
      >>> params, state = make_step(tx)(params, torch.full((512,), 0.5), tx.init(params))
      >>> [round(x, 4) for x in params[:2].tolist()], state[0].mu.codes.dtype, state[0].mu.scales.shape
      ([0.9, 0.9], torch.uint8, torch.Size([2]))

    Source: Dettmers et al., arXiv 2110.02861, for the idea of blocks; the codes are this library's own.
    """
    scale_by_adam(b1, b2, eps)  # checks the numbers
    blocking = check_blocking(block, min_size)
    if compile and (isinstance(block, tuple) or block % LANES):
        raise ValueError(
            f"block={block!r}: compile=True needs flat blocks of a multiple of {LANES} elements, such as block=256; "
            f"for other blocks leave it out"
        )

    def init_fn(params: Any) -> tuple[Any, ...]:
        refuse(params, "adamw8bit")
        last = ScaleByScheduleState(new_count(params)) if callable(learning_rate) else EmptyState()
        adam = ScaleByAdam8bitState(new_count(params), zeros(params, blocking), zeros(params, blocking))
        return adam, EmptyState(), last

    def run(params: Any, grads: Any, state: Any, target: Any, sink: _Sink) -> tuple[Any, ...]:
        """One step, in place in the state's moments; updates of all elements go to `sink`."""
        adam, middle, last = state
        count = adam.count + 1
        rate = learning_rate(last.count) if callable(learning_rate) else learning_rate
        rate = torch.as_tensor(rate, dtype=torch.float64, device=count.device)
        t = count.double()  # since 1 - b2^t loses digits at the first steps
        root = (1 - b2**t).sqrt()
        numbers = _Numbers(
            b1,
            b2,
            (eps * root).float(),
            (-rate * root / (1 - b1**t)).float(),
            (-rate * weight_decay).float() if weight_decay else None,
        )
        for part in parts(params, grads, target, adam.mu, adam.nu, blocking, mask):
            _segment(_compiled(part, numbers, sink) if compile else part, numbers, sink)
        if callable(learning_rate):
            last = ScaleByScheduleState(last.count + 1)
        return ScaleByAdam8bitState(count, _kept(adam.mu), _kept(adam.nu)), middle, last

    def update_fn(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("adamw8bit needs the parameters: call update(updates, state, params)")
        updates = optree.tree_map(
            lambda p: torch.zeros_like(p, dtype=torch.float32, memory_format=torch.contiguous_format), params
        )
        adam, *rest = state
        moments: Any = adam.mu, adam.nu
        fresh = optree.tree_map(torch.clone, moments)
        after = run(params, grads, (adam._replace(mu=fresh[0], nu=fresh[1]), *rest), updates, _write)
        return _kept(updates), after

    def step_fn(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        after = run(params, grads, state, params, _add)
        return _kept(params), after

    return GradientTransformation(
        init_fn, torch.no_grad()(update_fn), step_fn, lambda path, shape, dtype: blocking.request(tuple(shape))
    )


def _write(target: Tensor, update: Tensor) -> None:
    target.copy_(update)


def _add(target: Tensor, update: Tensor) -> None:
    target.add_(update)


def _kept(tree: Any) -> Any:
    """New trees on the same storage, with padding zero even where a block's last element isn't finite."""
    return optree.tree_map(lambda x: _fresh(x) if is_sharded(x) else x, tree, is_leaf=is_sharded)


def _fresh(tree: ShardedTree) -> ShardedTree:
    return zero_padding(tree.with_tensors(tree.tensors, scope=tree.scope))


def _compiled(part: Part, numbers: _Numbers, sink: _Sink) -> Part:
    """Step a part's whole blocks by the compiled kernel; what remains is the rest of it."""
    block = part.grid.flat if part.grid else 0
    blocks = part.g.numel() // block if block else 0
    if not blocks:
        return part
    one, two = _units(numbers)
    whole = blocks * block
    codes_mu, scales_mu, codes_nu, scales_nu = part.moments
    cut = [(part.p, whole), (part.g, whole), (part.target, whole)]
    cut += [(codes_mu, whole), (scales_mu, blocks), (codes_nu, whole), (scales_nu, blocks)]
    p, g, target, *moments = (x[:n] for x, n in cut)
    decay = numbers.decay if part.decays and numbers.decay is not None else torch.zeros_like(numbers.eps)
    given = numbers.eps / two, numbers.size * (one / two), decay
    step_blocks(block, (numbers.b1, numbers.b2), p, g, None if sink is _add else target, tuple(moments), given)
    p, g, target, *moments = (x[n:] for x, n in cut)
    return part._replace(p=p, g=g, target=target, moments=tuple(moments))


def _units(numbers: _Numbers) -> tuple[float, float]:
    """What a gradient is multiplied by where it enters the moments, and the root of the second."""
    return 1 - numbers.b1, math.sqrt(1 - numbers.b2)


def _segment(part: Part, numbers: _Numbers, sink: _Sink) -> None:
    decay = numbers.decay if part.decays else None
    if part.grid is None:
        data = [*part.moments, part.g, part.p, part.target]
        for a in range(0, part.g.numel(), CHUNK):
            m, v, g, p, target = (x[a : a + CHUNK] for x in data)
            g, p = g.to(torch.float32), p.to(torch.float32)
            m.mul_(numbers.b1).add_(g * (1 - numbers.b1))
            root = v.mul_(numbers.b2).add_(g.square().mul_(1 - numbers.b2)).sqrt()
            spare = torch.empty_like(m), torch.empty_like(m)
            sink(target, _direction(m, root, p, numbers.eps, numbers.size, decay, *spare))
        return
    codes_mu, scales_mu, codes_nu, scales_nu = part.moments
    data = [part.p, part.g, part.target, codes_mu, codes_nu]
    memory = torch.empty((4, 0), device=part.g.device)
    for (p, g, target, mu, nu), (mu_scales, nu_scales), dims in regions(part.grid, data, [scales_mu, scales_nu]):
        if memory.shape[1] < g.numel():
            memory = torch.empty((4, g.numel()), device=g.device)
        m, root, spare, other = (x[: g.numel()].view(g.shape) for x in memory)
        # In units in which a gradient enters both moments as it is: what the units are is left to the scales.
        one, two = _units(numbers)
        g, p = g.to(torch.float32), p.to(torch.float32)
        decode_signed(mu, mu_scales, m, spare, numbers.b1 / one).add_(g)
        decode_root(nu, nu_scales, root, math.sqrt(numbers.b2) / two).mul_(root)
        root.add_(torch.mul(g, g, out=spare)).sqrt_()
        eps, size = numbers.eps / two, numbers.size * (one / two)
        sink(target, _direction(m, root, p, eps, size, decay, spare, other))
        encode_signed(m, dims, mu, mu_scales, spare, other, one)
        encode_root(root, dims, nu, nu_scales, spare, two)


def _direction(
    m: Tensor, root: Tensor, p: Tensor, eps: Tensor, size: Tensor, decay: Tensor | None, out: Tensor, spare: Tensor
) -> Tensor:
    """Adam's update, in spare memory: `size * m / (root + eps)`, and what the parameters decay by.

    No operation here rounds twice in one place and once in another, as a fused multiply-add in a kernel's vector
    part and none in its rest would: a shard has the bits of the whole.
    """
    torch.add(root, eps, out=out)
    torch.div(m, out, out=out).mul_(size)
    return out if decay is None else out.add_(torch.mul(p, decay, out=spare))
