"""A tree moved from one layout to another, ours beside the obvious alternatives, in one interleaved run.

    python -m benchmarks.moves                       # 20 leaves, about 6 MB in fp32, 4 gloo ranks
    python -m benchmarks.moves --d 128 --rounds 31   # small leaves: what a move costs beside its bytes

Three moves: from rows to whole matrices (an optimizer's trip to its roots), from rows to bands of 64 rows, and, for
torch's DTensor, which has no ragged layouts, from even cuts of dim 0 to even cuts of dim 1. The alternatives are a
leaf at a time: gather it whole and keep a slice (`unshard`, or the backend's bare all-gather and no check of any
kind), or `DTensor.redistribute`. Every round runs all of them once in a shuffled order, equal on all ranks; the table
has medians, the median of ours / theirs within a round, and the bytes that all ranks send.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import join, launch
from ragged import TENSOR, P, Plan, ShardedTree, collectives, make_mesh, plan, redistribute, shard, unshard

__all__ = ["main"]

Run = Callable[[], Any]
ROWS, WHOLE, BANDS = P(ragged="fsdp"), P(ragged="fsdp", block=TENSOR), P(ragged="fsdp", block=(64,))


def full_tree(d: int) -> dict[str, dict[str, Tensor]]:
    """Four layers of five leaves: 20 leaves, 5 d^2 elements a layer."""
    shapes = {"qkv": (d, 3 * d // 2), "out": (d // 2, d), "up": (2 * d, d), "down": (d, d), "norm": (d,)}
    draw = torch.Generator().manual_seed(0)
    return {f"layer{i}": {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} for i in range(4)}


def by_unshard(tree: ShardedTree, to: Plan) -> Run:
    """A leaf at a time: full tensors on all ranks, of which each keeps its run."""
    rank, parts = to.bound().rank(("fsdp",)), [(tree[u][k], to.leaves[f"{u}.{k}"]) for u in tree for k in tree[u]]

    def run() -> list[Tensor]:
        out = [torch.zeros(b.bounds.size(rank)) for b in to.buckets]
        for part, leaf in parts:
            start, stop = leaf.span(rank)
            begin = leaf.offset + start - leaf.bounds(rank)
            if stop > start:
                out[leaf.bucket][begin : begin + stop - start] = unshard(part).view(-1)[start:stop]
            else:
                unshard(part)
        return out

    return run


def by_all_gather(tree: ShardedTree, to: Plan) -> Run:
    """The same by the backend's all-gather of runs padded to equal size: no checks, no library between."""
    comm, rank = to.bound(), to.bound().rank(("fsdp",))
    leaves = []
    for path, leaf in tree.plan.leaves.items():
        most = max(b - a for a, b in leaf.runs)
        leaves.append((tree.leaf(path), leaf.runs, most, to.leaves[path]))

    def run() -> list[Tensor]:
        out = [torch.zeros(b.bounds.size(rank)) for b in to.buckets]
        for mine, runs, most, leaf in leaves:
            padded = torch.zeros(most)
            padded[: mine.numel()] = mine
            parts = [torch.empty(most) for _ in range(comm.everyone.size)]
            dist.all_gather(parts, padded)
            full = torch.cat([part[: b - a] for part, (a, b) in zip(parts, runs, strict=True)])
            start, stop = leaf.span(rank)
            if stop > start:
                begin = leaf.offset + start - leaf.bounds(rank)
                out[leaf.bucket][begin : begin + stop - start] = full[start:stop]
        return out

    return run


def by_dtensor(full: dict[str, dict[str, Tensor]], mesh: Any) -> Run:
    """Even cuts of dim 0 to even cuts of the last dim; vectors to replicas."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    flat = [x for layer in full.values() for x in layer.values()]
    cut = [(distribute_tensor(x, mesh, [Shard(0)]), [Shard(1)] if x.ndim > 1 else [Replicate()]) for x in flat]

    def run() -> list[Any]:
        moved = [x.redistribute(placements=to).to_local() for x, to in cut]
        return [x.wait() if hasattr(x, "wait") else x for x in moved]

    return run


def systems(d: int) -> dict[str, dict[str, Run]]:
    """Per move: ours first, then what it is compared with."""
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    full = full_tree(d)
    rows = shard(full, mesh, ROWS)
    even = shard(full, mesh, P("fsdp"))
    out: dict[str, dict[str, Run]] = {}
    for name, spec in (("rows to whole matrices", WHOLE), ("rows to bands of 64 rows", BANDS)):
        to = plan(full, mesh, spec)
        out[name] = {
            "ours": lambda to=to: redistribute(rows, to).tensors,
            "unshard and slice": by_unshard(rows, to),
            "bare all-gather and slice": by_all_gather(rows, to),
        }
    columns = plan(full, mesh, lambda path, leaf: P(None, "fsdp") if len(leaf.shape) > 1 else P())
    out["dim 0 to dim 1, evenly"] = {
        "ours": lambda: redistribute(even, columns).tensors,
        "DTensor": by_dtensor(full, mesh),
        "unshard and slice": lambda: [unshard(even[u][k]).chunk(4, -1)[0].clone() for u in even for k in even[u]],
    }
    return out


def check(moves: dict[str, dict[str, Run]]) -> None:
    """The systems that give buffers give equal ones."""
    for runs in list(moves.values())[:2]:
        ours, *others = [list(run()) for run in runs.values()]
        assert all(torch.equal(a, b) for other in others for a, b in zip(ours, other, strict=True))


def worker(rank: int, args: argparse.Namespace, port: int, out: Any) -> None:
    join(rank, args, port)
    moves = systems(args.d)
    check(moves)
    table: dict[str, dict[str, tuple[list[float], int]]] = {}
    for move, runs in moves.items():
        table[move] = {}
        for name, run in runs.items():
            run()
            with collectives.record() as events:
                run()
            sent = torch.tensor(sum(event.sent for event in events))
            dist.all_reduce(sent)
            table[move][name] = [], int(sent)
    shuffler = random.Random(0)
    order = [(move, name) for move, runs in moves.items() for name in runs]
    for _ in range(args.rounds):
        for move, name in shuffler.sample(order, len(order)):
            dist.barrier()
            start = time.perf_counter()
            moves[move][name]()
            dist.barrier()
            table[move][name][0].append(time.perf_counter() - start)
    if rank == 0:
        out.put(table)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=256, help="width of the layers, a multiple of 128")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    table = launch(worker, args)
    print(f"20 leaves, width {args.d}, {args.ranks} gloo ranks, {args.rounds} rounds")
    print(f"\n{'move':<26}{'by':<28}{'ms':>8}{'quartiles':>16}{'ours / it':>11}{'MB sent':>9}")
    for move, rows in table.items():
        ours = rows["ours"][0]
        for name, (times, sent) in rows.items():
            q = statistics.quantiles(times, n=4)
            ratio = statistics.median(a / b for a, b in zip(ours, times, strict=True))
            spread = f"{q[0] * 1e3:.1f} .. {q[2] * 1e3:.1f}"
            known = f"{sent / 1e6:.2f}" if sent else "-"
            print(f"{move:<26}{name:<28}{q[1] * 1e3:>8.1f}{spread:>16}{ratio:>11.2f}{known:>9}")
    print("\n-: not counted, the collectives are not ours. DTensor has no ragged layouts: the first two moves can't be")
    print("written with it, and on gloo it makes an all-to-all of an all-gather and a slice.")


if __name__ == "__main__":
    main()
