"""A whole training step, ours beside every system a user would pick, in one interleaved run.

    python -m benchmarks.step                       # GPT d=512, L=8, T=128, B=1, V=8192, fp32, 2 gloo ranks
    python -m benchmarks.step --ranks 4
    python -m benchmarks.step --ranks 4 --model moe # 8 experts, 73 MB of parameters in 5 units
    python -m benchmarks.step --bf16                # parameters gathered, and gradients reduced, in bf16

Every round runs all systems once in a shuffled order (the same on all ranks); the first table has medians, quartiles,
the median of the ratios within a round, and the medians of forward, backward and optimizer. Kernels (torch's
operators that aren't views), collectives (or messages) and bytes sent are counted on the first rank. Memory is
measured in processes of their own: live bytes as the allocator counts them, and resident memory above what the
imports take. The limit is `benchmarks.limit`'s.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpt import Config
from benchmarks.harness import Laps, counts, interleaved, join, launch, live_peak, quartiles, ratio
from benchmarks.systems import SYSTEMS, missing

__all__ = ["main"]

MODELS = {"gpt": Config(), "moe": Config(d=384, layers=3, heads=6, V=3072, experts=8)}
PARTS = ("forward", "backward", "optimizer")


def _times(rank: int, args: argparse.Namespace, port: int, out: Any) -> None:
    join(rank, args, port)
    laps = {name: Laps() for name in args.systems}
    steps, failed = {}, {}
    for name in args.systems:
        why = ""
        try:
            steps[name] = SYSTEMS[name](args.config, laps[name], args.bf16)
            for _ in range(3):
                steps[name]()
        except Exception as error:  # what a peer can't do is told in its row
            if name.startswith(("ours", "limit")):
                raise
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        reasons: list[str | None] = [None] * args.ranks
        dist.all_gather_object(reasons, why)
        if any(reasons):
            failed[name] = next(filter(None, reasons))
            steps.pop(name, None)
    counted = {name: counts(step) for name, step in steps.items()}
    for lap in laps.values():
        lap.spent.clear()
    rounds = interleaved(steps, args.rounds, args.repeat, laps)
    if rank == 0:
        parts = {name: [laps[name].spent.get(p, 0.0) / args.rounds / args.repeat for p in PARTS] for name in steps}
        out.put((rounds, parts, counted, failed))
    dist.destroy_process_group()


def _memory(rank: int, args: argparse.Namespace, port: int, name: str, live: bool, out: Any) -> None:
    """Live or resident bytes of one system, from before it is built to after its last step."""
    import psutil

    join(rank, args, port)
    import torch.distributed.fsdp  # imports belong to the baseline
    import torch.optim

    if name == "DeepSpeed ZeRO-3":
        import deepspeed  # type: ignore[import-not-found]  # noqa: F401

    torch.ones(64, 64) @ torch.ones(64, 64)
    before = psutil.Process().memory_info().rss

    def run(n: int) -> None:
        step = SYSTEMS[name](args.config, bf16=args.bf16)
        for _ in range(n):
            step()

    if live:
        found = live_peak(lambda: run(3))
    else:
        run(6)
        found = _peak_rss() - before
    dist.barrier()
    if rank == 0:
        out.put(found)
    dist.destroy_process_group()


def _peak_rss() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    for field in vars(Config()):
        parser.add_argument(f"--{field}", type=int, help="another size than the model's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=2, help="steps per round and system")
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    args = parser.parse_args()
    sizes = {k: v if (given := getattr(args, k)) is None else given for k, v in vars(MODELS[args.model]).items()}
    args.config = Config(**sizes)
    absent = {name: why for name in args.systems if (why := missing(name))}
    args.systems = [name for name in args.systems if name not in absent]

    rounds, parts, counted, failed = launch(_times, args)
    mb = sum(torch.Size(s).numel() for s, _ in _leaves(args.config)) * 4 / 1e6
    dtype = "bf16 over fp32" if args.bf16 else "fp32"
    print(
        f"{args.config}, {mb:.0f} MB, {dtype}, {args.ranks} gloo ranks, {args.rounds} rounds of {args.repeat} steps\n"
    )
    print("| system | ms per step | quartiles | of FSDP2 | of the limit | forward | backward | optimizer | "
          "kernels | collectives | MB sent |\n|---|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    base = rounds.get("FSDP2")
    pair = [rounds[name] for name in ("limit: compute", "limit: bytes") if name in rounds]
    limit = [sum(both) for both in zip(*pair, strict=True)] if len(pair) == 2 else None
    if limit is not None:
        rounds["limit: both"] = limit
    for name, times in rounds.items():
        row = [name, f"{statistics.median(times) * 1e3:.1f}", quartiles(times)]
        row += [f"{ratio(times, other):.3f}" if other else "" for other in (base, limit)]
        row += [f"{x * 1e3:.1f}" if x else "" for x in parts.get(name, [0.0] * 3)]
        if name in counted:
            row += [str(counted[name].kernels), str(counted[name].collectives), f"{counted[name].sent / 1e6:.1f}"]
        else:
            row += [""] * 3
        print("| " + " | ".join(row) + " |")
    for name, why in {**absent, **failed}.items():
        print(f"| {name} | not run: {why} |")
    if args.no_memory:
        return
    print("\n| system | live peak MB | RSS over the imports MB |\n|---|---|---|")
    for name in [n for n in rounds if not n.startswith("limit")]:
        live, resident = (launch(_memory, args, name, live) for live in (True, False))
        print(f"| {name} | {live / 1e6:.1f} | {resident / 1e6:.1f} |")


def _leaves(config: Config) -> list[Any]:
    import optree

    return optree.tree_leaves(config.shapes(), is_leaf=lambda x: isinstance(x, tuple))


if __name__ == "__main__":
    main()
