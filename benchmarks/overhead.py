"""What the machinery itself costs: 64 tiny layers, where neither arithmetic nor bandwidth hides it.

    python -m benchmarks.overhead                # GPT d=64, L=64, T=16, V=256: 66 units of 0.2 MB, on 1 and on 2 ranks

On one rank nothing is sent: what is above the unsharded loop is the work of the host. On two ranks the limit (the
compute, and bare messages of the same bytes, one after the other) is the base; gathers that run ahead can be better
than that. Every round runs all systems in a shuffled order, each some steps in a row; microseconds per unit are the
median difference to the base in a round, divided by the number of units.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch.distributed as dist

from benchmarks.gpt import Config
from benchmarks.harness import interleaved, join, launch, quartiles, ratio
from benchmarks.limit import limit_bytes, limit_compute
from benchmarks.systems import fsdp2, ours, ours_in_place, unsharded

__all__ = ["main"]

TINY = Config(d=64, layers=64, heads=4, T=16, V=256)
ALONE = {"unsharded": unsharded, "ours": ours, "ours, in place": ours_in_place, "FSDP2": fsdp2}
SHARDED = {
    "limit: compute": limit_compute,
    "limit: bytes": limit_bytes,
    "ours": ours,
    "ours, in place": ours_in_place,
    "FSDP2": fsdp2,
}


def _worker(rank: int, args: argparse.Namespace, port: int, out: Any) -> None:
    join(rank, args, port)
    steps = {name: build(args.config) for name, build in (ALONE if args.ranks == 1 else SHARDED).items()}
    for step in steps.values():
        for _ in range(5):
            step()
    rounds = interleaved(steps, args.rounds, args.repeat)
    if rank == 0:
        out.put(rounds)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field, value in vars(TINY).items():
        parser.add_argument(f"--{field}", type=int, default=value)
    parser.add_argument("--ranks", dest="worlds", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--repeat", type=int, default=5, help="steps per round and system")
    args = parser.parse_args()
    args.config = Config(**{k: getattr(args, k) for k in vars(TINY)})
    units = args.config.layers + 2
    for ranks in args.worlds:
        args.ranks = ranks
        rounds = launch(_worker, args)
        if args.ranks > 1:
            parts = zip(rounds["limit: compute"], rounds["limit: bytes"], strict=True)
            rounds["limit"] = [a + b for a, b in parts]
        base, theirs = rounds["limit" if args.ranks > 1 else "unsharded"], rounds["FSDP2"]
        print(f"\n{args.config}, {args.ranks} ranks, {args.rounds} rounds of {args.repeat} steps, {units} units\n")
        of = "the limit" if args.ranks > 1 else "unsharded"
        print(f"| system | ms per step | quartiles | of {of} | of FSDP2 | us per unit above {of} |")
        print("|---|---|---|---|---|---|")
        for name, times in rounds.items():
            above = statistics.median(a - b for a, b in zip(times, base, strict=True)) / units * 1e6
            ratios = [f"{ratio(times, other):.3f}" for other in (base, theirs)]
            row = [name, f"{statistics.median(times) * 1e3:.1f}", quartiles(times), *ratios]
            print("| " + " | ".join([*row, "" if name.startswith("limit") else f"{above:.0f}"]) + " |")


if __name__ == "__main__":
    main()
