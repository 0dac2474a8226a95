"""A whole training step, ours beside torch's `fully_shard`, in one interleaved run.

    python -m benchmarks.step                  # GPT d=512, L=8, T=128, B=1, V=8192, 2 gloo ranks
    python -m benchmarks.step --ranks 4 --d 64 --layers 64 --T 16 --V 256

Every round runs all systems once in a shuffled order (the same on all ranks); the table has medians
and the median of the ratios within a round. Memory is measured in processes of their own: live
bytes as the allocator counts them, and resident memory above what the imports take.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpt import Config
from benchmarks.systems import SYSTEMS


def join(rank: int, args: argparse.Namespace, port: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(args.ranks),
        "LOCAL_RANK": str(rank),
    }
    torch.set_num_threads(max((os.cpu_count() or 1) // args.ranks, 1))
    dist.init_process_group("gloo")


def interleaved(steps: Mapping[str, Callable[[], Any]], rounds: int, repeat: int = 1) -> dict[str, list[float]]:
    """Seconds of each step in each round, all of them in a shuffled order, which is the same on all ranks."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    shuffler = random.Random(0)
    for _ in range(rounds):
        for name in shuffler.sample(list(steps), len(steps)):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                steps[name]()
            dist.barrier()
            found[name].append((time.perf_counter() - start) / repeat)
    return found


def time_worker(rank: int, args: argparse.Namespace, port: int, out: Any) -> None:
    join(rank, args, port)
    steps = {name: SYSTEMS[name](args.config) for name in args.systems}
    for _ in range(3):
        for step in steps.values():
            step()
    rounds = interleaved(steps, args.rounds, args.repeat)
    if rank == 0:
        out.put(rounds)
    dist.destroy_process_group()


def memory_worker(rank: int, args: argparse.Namespace, port: int, name: str, out: Any) -> None:
    """Live and resident bytes of one system, from before it is built to after its fourth step."""
    import psutil
    from torch.profiler import ProfilerActivity, profile

    join(rank, args, port)
    import torch.distributed.fsdp  # imports belong to the baseline
    import torch.optim

    torch.ones(64, 64) @ torch.ones(64, 64)
    before = psutil.Process().memory_info().rss
    live = None
    if args.live:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            step = SYSTEMS[name](args.config)
            for _ in range(3):
                step()
        now = live = 0
        for event in run.profiler.kineto_results.events():  # the profiler's raw record: (de)allocations in order
            if event.name() == "[memory]":
                now += event.nbytes()
                live = max(live, now)
        resident = None
    else:
        step = SYSTEMS[name](args.config)
        resident = 0
        for _ in range(6):
            step()
            resident = max(resident, psutil.Process().memory_info().rss)
        peak = _peak_rss()
        resident = max(resident, peak) - before
    dist.barrier()
    if rank == 0:
        out.put((live, resident))
    dist.destroy_process_group()


def _peak_rss() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def launch(target: Any, args: argparse.Namespace, *extra: Any) -> Any:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = mp.get_context("spawn").SimpleQueue()
    mp.spawn(target, (args, port, *extra, out), args.ranks, join=True)
    return out.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field, value in vars(Config()).items():
        parser.add_argument(f"--{field}", type=int, default=value)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=2, help="steps per round and system")
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--no-memory", action="store_true")
    args = parser.parse_args()
    args.config = Config(**{k: getattr(args, k) for k in vars(Config())})
    args.live = True

    rounds = launch(time_worker, args)
    print(f"GPT {args.config}, {args.ranks} gloo ranks, {args.rounds} rounds of {args.repeat} steps\n")
    base = rounds.get("FSDP2")
    print(f"{'system':<16}{'ms/step':>9}{'quartiles':>16}{'of FSDP2':>10}")
    for name, times in rounds.items():
        q = statistics.quantiles(times, n=4)
        ratio = statistics.median(a / b for a, b in zip(times, base, strict=True)) if base else float("nan")
        spread = f"{q[0] * 1e3:.1f} .. {q[2] * 1e3:.1f}"
        print(f"{name:<16}{statistics.median(times) * 1e3:>9.1f}{spread:>16}{ratio:>10.3f}")
    parts = [rounds[name] for name in ("limit: compute", "limit: bytes") if name in rounds]
    if len(parts) == 2 and "ours" in rounds and base:
        limit = [a + b for a, b in zip(*parts, strict=True)]
        of_fsdp2 = statistics.median(a / b for a, b in zip(limit, base, strict=True))
        multiple = statistics.median(a / b for a, b in zip(rounds["ours"], limit, strict=True))
        print(f"{'limit':<16}{statistics.median(limit) * 1e3:>9.1f}{'':>16}{of_fsdp2:>10.3f}")
        print(f"\nours is {multiple:.3f} of the limit")
    if args.no_memory:
        return
    print(f"\n{'system':<16}{'live peak MB':>14}{'RSS over imports MB':>21}")
    for name in [n for n in args.systems if not n.startswith("limit")]:
        args.live = True
        live = launch(memory_worker, args, name)[0]
        args.live = False
        resident = launch(memory_worker, args, name)[1]
        print(f"{name:<16}{live / 1e6:>14.1f}{resident / 1e6:>21.1f}")


if __name__ == "__main__":
    main()
