"""Steps of Muon on gloo, ours beside its bound and its alternatives, in one interleaved run.

    python -m benchmarks.muon                       # a GPT's layers, d=512: 16.8M parameters per rank, 2 ranks
    python -m benchmarks.muon --ranks 4 --rounds 5
    python -m benchmarks.muon --bf16 --d 256 --layers 2    # beside torch.optim.Muon too

The bound does nothing but what can't be left out: Newton-Schulz on balanced roots, equal shapes as batches, and the
bytes that our moves send, through two calls of `all_to_all_single` with equal pieces. The alternative is Muon as it
is written over FSDP2's parameters: momentum on the local shards, `full_tensor()` of one parameter after the other,
Newton-Schulz on every rank, a slice of the result. All use one Newton-Schulz in fp32. `torch.optim.Muon`, straight on
FSDP2's DTensors, has its own and iterates in bf16 alone: with `--bf16` all of them do, and it takes part. (On a CPU
without products in bf16 these are some fifty times as slow, so sizes must be small.) Every round runs all of them once
in a shuffled order, equal on all ranks; the table has medians, the median of the ratios within a round, the collectives
per step and the bytes that all ranks send.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import optim
from benchmarks.harness import interleaved, join, launch
from optim.matrices import cost
from optim.newton_schulz import newton_schulz
from optim.roots import balanced
from ragged import P, collectives, make_mesh, shard

__all__ = ["main"]

RATE, MOMENTUM, DECAY = 0.02, 0.95, 0.1
Run = Callable[[], Any]


def full_tree(d: int, layers: int) -> dict[str, dict[str, Tensor]]:
    """The matrices of a GPT's layers: 12 d^2 elements each."""
    shapes = {"qkv": (3 * d, d), "out": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
    draw = torch.Generator().manual_seed(0)
    return {f"layer{i}": {k: torch.randn(s, generator=draw) for k, s in shapes.items()} for i in range(layers)}


def ours(full: Any, mesh: Any, dtype: torch.dtype) -> Run:
    params = shard(full, mesh, P(ragged="fsdp"), units=["*"])
    tx = optim.muon(RATE, MOMENTUM, weight_decay=DECAY, ns_dtype=dtype)
    held: list[Any] = [params, tx.init(params)]
    grads = params.with_tensors([x.cos() for x in params.tensors])
    step = optim.make_step(tx)

    def run() -> None:
        held[:] = step(held[0], grads.with_tensors(grads.tensors), held[1])

    return run


def bound(full: Any, ranks: int, me: int, sent: int, dtype: torch.dtype) -> Run:
    """Two exchanges of contiguous memory, of `sent` bytes over all ranks, and the products between."""
    shapes = [tuple(x.shape) for layer in full.values() for x in layer.values()]
    roots = balanced([cost(*shape) for shape in shapes], ranks)
    mine = [shape for shape, k in zip(shapes, roots, strict=True) if k == me]
    stacks = [torch.randn(mine.count(shape), *shape, dtype=dtype) for shape in sorted(set(mine))]
    piece = sent // (2 * ranks * (ranks - 1))  # to each of the others, in each of the exchanges
    there, back = torch.zeros(2, piece * ranks, dtype=torch.uint8)

    def run() -> None:
        dist.all_to_all_single(there, back)
        for stack in stacks:
            newton_schulz(stack)
        dist.all_to_all_single(back, there)

    return run


def fsdp2(full: Any, mesh: Any) -> list[torch.nn.Parameter]:
    """The parameters under `fully_shard`, a unit per layer."""
    from torch.distributed.fsdp import fully_shard

    layers = [
        torch.nn.ParameterDict({k: torch.nn.Parameter(x.clone()) for k, x in layer.items()}) for layer in full.values()
    ]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return [p for layer in layers for p in layer.parameters()]


def by_full_tensor(full: Any, mesh: Any, dtype: torch.dtype) -> Run:
    """A parameter at a time."""
    from torch.distributed.tensor import distribute_tensor

    params = fsdp2(full, mesh)
    grads = [p.detach().cos() for p in params]
    momenta = [torch.zeros_like(p.detach()) for p in params]

    @torch.no_grad()
    def run() -> None:
        for p, g, m in zip(params, grads, momenta, strict=True):
            m.lerp_(g, 1 - MOMENTUM)
            whole = g.lerp(m, MOMENTUM).full_tensor()
            factor = math.sqrt(max(1.0, whole.shape[0] / whole.shape[1]))
            update = newton_schulz(whole[None].to(dtype))[0].to(p.dtype)
            p.mul_(1 - RATE * DECAY)
            p.add_(distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None), alpha=-RATE * factor)

    return run


def of_torch(full: Any, mesh: Any) -> Run:
    params = fsdp2(full, mesh)
    for p in params:
        p.grad = p.detach().cos()
    return torch.optim.Muon(params, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY).step


def worker(rank: int, args: argparse.Namespace, port: int, out: Any) -> None:
    join(rank, args, port)
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    full = full_tree(args.d, args.layers)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    run = ours(full, mesh, dtype)
    run()
    with collectives.record() as events:
        run()
    sent = torch.tensor(sum(event.sent for event in events))
    dist.all_reduce(sent)
    runs = {
        "ours": run,
        "bound": bound(full, args.ranks, rank, int(sent), dtype),
        "full_tensor": by_full_tensor(full, mesh, dtype),
    }
    if args.bf16:
        runs["torch's Muon"] = of_torch(full, mesh)
    table: dict[str, tuple[list[float], int, int]] = {name: ([], 0, 0) for name in runs}
    table["ours"] = [], len(events), int(sent)
    for run in runs.values():
        run()  # warms up
    for name, seconds in interleaved(runs, args.rounds).items():
        table[name][0].extend(seconds)
    if rank == 0:
        out.put(table)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--layers", type=int, help="by default so many that a rank has 16.8M parameters")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bf16", action="store_true", help="Newton-Schulz in bf16, and torch.optim.Muon beside it")
    args = parser.parse_args()
    args.layers = args.layers or round(16.8e6 * args.ranks / (12 * args.d**2))
    table = launch(worker, args)
    size = 12 * args.d**2 * args.layers
    kind = "bf16" if args.bf16 else "fp32"
    print(f"{size / 1e6:.1f}M parameters in {args.layers} units, {args.ranks} gloo ranks, {args.rounds} rounds, {kind}")
    print(f"\n{'Muon by':<14}{'ms':>8}{'quartiles':>18}{'ours / it':>11}{'collectives':>13}{'MB sent':>9}")
    mine = table["ours"][0]
    for name, (times, count, sent) in table.items():
        q = statistics.quantiles(times, n=4)
        ratio = statistics.median(a / b for a, b in zip(mine, times, strict=True))
        spread = f"{q[0] * 1e3:.0f} .. {q[2] * 1e3:.0f}"
        known = f"{count:>13}{sent / 1e6:>9.1f}" if sent else f"{'-':>13}{'-':>9}"
        print(f"{name:<14}{q[1] * 1e3:>8.0f}{spread:>18}{ratio:>11.2f}{known}")
    if not args.bf16:
        print("torch's Muon   not run: torch.optim.Muon iterates in bf16 alone, use --bf16")


if __name__ == "__main__":
    main()
