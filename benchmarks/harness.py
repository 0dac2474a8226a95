"""What the benchmarks share: processes, interleaved rounds, and what a step allocates, computes and sends."""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's CommDebugMode counts

__all__ = ["Counts", "Laps", "counts", "interleaved", "join", "launch", "live_peak", "quartiles", "ratio"]


def join(rank: int, args: argparse.Namespace, port: int) -> None:
    """Become one of `args.ranks` gloo processes that share the cores."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(args.ranks),
        "LOCAL_RANK": str(rank),
    }
    torch.set_num_threads(max((os.cpu_count() or 1) // args.ranks, 1))
    dist.init_process_group("gloo")


def launch(target: Any, args: argparse.Namespace, *extra: Any) -> Any:
    """Run `target(rank, args, port, *extra, out)` on all ranks; what the first puts into `out`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = mp.get_context("spawn").SimpleQueue()
    mp.spawn(target, (args, port, *extra, out), args.ranks, join=True)
    return out.get()


class Laps:
    """Seconds between the marks that a step sets."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._last = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self.spent[name] = self.spent.get(name, 0.0) + now - self._last
        self._last = now


def interleaved(
    steps: Mapping[str, Callable[[], Any]], rounds: int, repeat: int = 1, laps: Mapping[str, Laps] | None = None
) -> dict[str, list[float]]:
    """Seconds of each step in each round, all of them in a shuffled order, which is the same on all ranks."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    shuffler = random.Random(0)
    for _ in range(rounds):
        for name in shuffler.sample(list(steps), len(steps)):
            dist.barrier()
            if laps is not None:
                laps[name].start()
            start = time.perf_counter()
            for _ in range(repeat):
                steps[name]()
            dist.barrier()
            found[name].append((time.perf_counter() - start) / repeat)
    return found


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def quartiles(times: Sequence[float], scale: float = 1e3, digits: int = 1) -> str:
    """As text, in milliseconds by default."""
    q = statistics.quantiles(times, n=4)
    return f"{q[0] * scale:.{digits}f} .. {q[2] * scale:.{digits}f}"


def live_peak(run: Callable[[], Any]) -> int:
    """The most bytes alive at once that were allocated inside, by the profiler's record of the allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    now = live = 0
    for event in record.profiler.kineto_results.events():  # (de)allocations in order
        if event.name() == "[memory]":
            now += event.nbytes()
            live = max(live, now)
    return live


class Counts(NamedTuple):
    """Of one step on one rank: kernels (torch's operators that aren't views), messages or collectives, bytes sent."""

    kernels: int
    collectives: int
    sent: int


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.collectives = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            self.collectives += _collective(name)
            self.sent += _sent(name, args)
        elif not all(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            self.kernels += 1
        return func(*args, **(kwargs or {}))


def _collective(name: str) -> bool:
    return not any(word in name for word in ("barrier", "recv", "monitored"))


def _sent(name: str, args: Any) -> int:
    """Bytes that a rank gives to others, at the least that the operation needs."""
    m = dist.get_world_size()
    if "allgather" in name:  # (outputs, inputs, ...)
        return _nbytes(args[1]) * (m - 1)
    if "reduce_scatter" in name:
        return _nbytes(args[0]) * (m - 1)
    if "allreduce" in name:
        return 2 * _nbytes(args[0]) * (m - 1) // m
    return _nbytes(args[0]) if "send" in name or "broadcast" in name else 0


def _nbytes(x: Any) -> int:
    return x.nbytes if isinstance(x, Tensor) else sum(map(_nbytes, x))


def counts(step: Callable[[], Any]) -> Counts:
    """What one step computes and sends."""
    with _Counter() as counter:
        step()
    return Counts(counter.kernels, counter.collectives, counter.sent)
