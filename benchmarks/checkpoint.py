"""A checkpoint written and read, ours beside torch's `distributed.checkpoint` of the same tensors under `fully_shard`.

    python -m benchmarks.checkpoint                    # a GPT of 500 MB in fp32, 4 gloo ranks
    python -m benchmarks.checkpoint --mb 50 --rounds 9 --dir /mnt/data

Both write all that they have to the disk before they return (`fsync`; theirs by `sync_files`, its default), into a new
folder in every round, which is removed outside of the timed part. Both read from a warm page cache, ours into new
tensors, theirs into given ones; ours computes and compares checksums. "Asynchronous" is how long a save keeps the
caller, beside one plain copy of the local tensors. Every round runs everything once in a shuffled order, equal on all
ranks; the table has medians, and the median of ours / theirs within a round.

Memory is what resident memory grows by at its peak during a call, summed over the ranks, less the tensors that a load
returns: the kernel's own high-water mark, which is set back before the call.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt import GPT, Config
from benchmarks.harness import join, launch
from ragged import P, checkpoint, init, make_mesh, plan
from ragged import random as draws

__all__ = ["main"]


class Task(NamedTuple):
    """Something timed: what, by whom, a call that gets a new folder, and what to do after the time is taken.

    Attributes:
      result: bytes of the tensors that the call returns on this rank.
    """

    what: str
    by: str
    run: Callable[[Path], Any]
    after: Callable[[Any], Any] = lambda result: None
    result: int = 0


def config_of(mb: float) -> Config:
    """A GPT of so many megabytes in fp32: as many layers as that takes."""
    config = Config()
    layer = 12 * config.d**2 + 2 * config.d
    rest = (2 * config.V + config.T + 1) * config.d
    return Config(layers=max(round((mb * 1e6 / 4 - rest) / layer), 1))


def ours(config: Config) -> tuple[list[Task], Callable[[Path], None]]:
    """Tasks, and a check that a folder holds what was saved."""
    layout = plan(config.shapes(), make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=["layers.*"])
    params = init(layout, draws.normal(0.02), seed=0)
    local = list(params.tensors)

    def load(path: Path) -> Any:
        return checkpoint.load(path, {"params": layout})

    def check(path: Path) -> None:
        found = load(path)["params"].tensors
        assert all(torch.equal(a, b) for a, b in zip(local, found, strict=True))

    tasks = [
        Task("save", "ours", lambda path: checkpoint.save(path, {"params": params})),
        Task("load", "ours", load, result=sum(x.nbytes for x in local)),
        Task(
            "asynchronous",
            "ours",
            lambda path: checkpoint.save(path, {"params": params}, async_=True),
            lambda saving: saving.wait(),
        ),
        Task("asynchronous", "one copy", lambda path: [x.clone() for x in local]),
    ]
    return tasks, check


def theirs(config: Config) -> tuple[list[Task], Callable[[Path], None]]:
    """The same shapes as DTensors of a module under `fully_shard`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    empty = optree.tree_map(
        lambda s: torch.empty(s[0], dtype=s[1], device="meta"), config.shapes(), is_leaf=lambda x: isinstance(x, tuple)
    )
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    model = GPT(empty, config)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.to_local().detach().normal_(0, 0.02)
    state = get_model_state_dict(model)
    local: list[Tensor] = [x.to_local() for x in state.values()]

    def save(path: Path) -> Any:
        return dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))

    def load(path: Path) -> Any:
        return dcp.load(state, storage_reader=dcp.FileSystemReader(path))

    def save_async(path: Path) -> Any:
        return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))

    def check(path: Path) -> None:
        before = [x.clone() for x in local]
        for x in local:
            x.zero_()
        load(path)
        assert all(torch.equal(a, b) for a, b in zip(before, local, strict=True))

    tasks = [
        Task("save", "DCP", save),
        Task("load", "DCP", load),
        Task("asynchronous", "DCP", save_async, lambda made: getattr(made, "upload_completion", made).result()),
    ]
    return tasks, check


def peak() -> int:
    """The process's highest resident memory since it was last set back."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def set_back() -> int:
    """Give free memory back to the system, and have the peak count from here; what is resident now."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def measured(task: Task, folder: Path, fresh: bool) -> tuple[float, int]:
    """Seconds, and bytes of all ranks."""
    before = set_back()
    dist.barrier()
    start = time.perf_counter()
    result = task.run(folder)
    if task.what == "asynchronous":  # the caller goes on when its own part is done
        longest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        seconds = longest.item()
    else:
        dist.barrier()
        seconds = time.perf_counter() - start
    task.after(result)
    extra = torch.tensor(peak() - before - task.result)
    del result
    dist.all_reduce(extra)
    if fresh:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
    return seconds, int(extra)


def worker(rank: int, args: argparse.Namespace, port: int, out: Any) -> None:
    join(rank, args, port)
    warnings.simplefilter("ignore")
    config, base = config_of(args.mb), Path(args.folder)
    (mine, check_mine), (yours, check_yours) = ours(config), theirs(config)
    tasks = [task for task in (*mine, *yours) if not (args.sync and task.what == "asynchronous")]
    kept = {"ours": base / "ours", "DCP": base / "DCP"}
    for task in tasks:
        if task.what == "save":
            task.run(kept[task.by])
    check_mine(kept["ours"])
    check_yours(kept["DCP"])
    table: dict[tuple[str, str], list[tuple[float, int]]] = {(task.what, task.by): [] for task in tasks}
    shuffler = random.Random(0)
    for k in range(-1, args.rounds):
        for task in shuffler.sample(tasks, len(tasks)):
            fresh = task.what != "load"
            folder = base / f"round-{k}-{task.what}-{task.by}" if fresh else kept[task.by]
            row = measured(task, folder, fresh)
            if k >= 0:  # the first one warms up
                table[task.what, task.by].append(row)
    if rank == 0:
        out.put(table)
    dist.barrier()
    dist.destroy_process_group()


def report(table: dict[tuple[str, str], list[tuple[float, int]]]) -> None:
    print(f"\n{'what':<14}{'by':<10}{'ms':>9}{'quartiles':>20}{'ours / it':>11}{'extra MB':>10}{'ours / it':>11}")
    for (what, by), rows in table.items():
        mine = table[what, "ours"]
        q = statistics.quantiles([seconds for seconds, _ in rows], n=4)
        ratio = statistics.median(a / b for (a, _), (b, _) in zip(mine, rows, strict=True))
        extra = statistics.median(memory for _, memory in rows)
        share = statistics.median(memory for _, memory in mine) / extra if extra else float("nan")
        spread = f"{q[0] * 1e3:.0f} .. {q[2] * 1e3:.0f}"
        print(f"{what:<14}{by:<10}{q[1] * 1e3:>9.1f}{spread:>20}{ratio:>11.2f}{extra / 1e6:>10.1f}{share:>11.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=500, help="size of the parameters, in fp32")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", help="where to write; by default a temporary directory")
    parser.add_argument("--sync", action="store_true", help="leave the asynchronous saves out")
    args = parser.parse_args()
    leaves = optree.tree_leaves(config_of(args.mb).shapes(), is_leaf=lambda x: isinstance(x, tuple))
    nbytes = sum(4 * functools.reduce(int.__mul__, shape) for shape, _ in leaves)
    with tempfile.TemporaryDirectory(dir=args.dir) as args.folder:
        table = launch(worker, args)
    print(f"{len(leaves)} leaves, {nbytes / 1e6:.0f} MB in fp32, {args.ranks} gloo ranks, {args.rounds} rounds")
    report(table)


if __name__ == "__main__":
    main()
