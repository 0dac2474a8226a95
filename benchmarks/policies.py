"""What each policy of gathering and accumulating costs: collectives, bytes, live memory and time of a step.

    python -m benchmarks.policies              # GPT d=256, L=8, T=128, B=4, V=2048 on 2 gloo ranks

Collectives and bytes are counted, live bytes are the profiler's record of the allocator. "Of plain" is time in rounds
that run all policies in a shuffled order.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt import Config, batch, full_params, make_loss
from benchmarks.harness import interleaved, join, launch, live_peak, ratio

MB = 1_000_000


def policies(unit: int) -> dict[str, dict[str, Any]]:
    """By name: options of `gathered`, and n and sync of `microbatch`; `unit`: bytes of a layer."""
    return {
        "plain": {},
        "reshard_after_forward=False": {"reshard_after_forward": False},
        "budget of 3 layers": {"reshard_after_forward": 3 * unit},
        "remat": {"remat": True},
        "bf16": {"bf16": True},
        '4 micro-batches, "each"': {"n": 4, "sync": "each"},
        '4 micro-batches, "last"': {"n": 4, "sync": "last"},
        '4, "each", kept': {"n": 4, "sync": "each", "reshard_after_forward": False},
        '4, "last", kept': {"n": 4, "sync": "last", "reshard_after_forward": False},
    }


def build(config: Config, how: dict[str, Any]) -> Callable[[], Tensor]:
    from fsdp import MixedPrecision, microbatch, value_and_grad
    from optim import adamw, make_step
    from ragged import P, make_mesh, shard

    how = dict(how)
    n, sync = how.pop("n", 1), how.pop("sync", "each")
    precision = MixedPrecision(torch.bfloat16, torch.float32) if how.pop("bf16", False) else None
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard(full_params(config), mesh, P(ragged="fsdp"), units=["layers.*"])
    f = value_and_grad(make_loss(config, **how), precision=precision)
    run = microbatch(f, n, sync=sync, batch_argnums=(1, 2)) if n > 1 else f
    tx = adamw(1e-4)
    update = make_step(tx)
    box = [params, tx.init(params)]
    del params
    tokens, targets = batch(config, dist.get_rank())

    def step() -> Tensor:
        loss, grads = run(box[0], tokens, targets)
        params, state = box
        box.clear()
        box.extend(update(params, grads, state))
        out: Tensor = loss
        return out

    return step


def timed(rank: int, args: argparse.Namespace, port: int, out: Any) -> None:
    from ragged import collectives

    join(rank, args, port)
    steps = {name: build(args.config, how) for name, how in args.table.items()}
    counted = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        with collectives.record() as events:
            step()
        counted[name] = Counter(e.kind for e in events), sum(e.sent for e in events)
    rounds = interleaved(steps, args.rounds)
    if rank == 0:
        out.put((counted, rounds))
    dist.destroy_process_group()


def remembered(rank: int, args: argparse.Namespace, port: int, name: str, out: Any) -> None:
    """The most live bytes of steps, and those before them."""
    join(rank, args, port)

    def run() -> None:
        step = build(args.config, args.table[name])
        for _ in range(3):
            step()

    live = live_peak(run)
    if rank == 0:
        out.put(live)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field, value in (vars(Config()) | {"d": 256, "B": 4, "V": 2048}).items():
        parser.add_argument(f"--{field}", type=int, default=value)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    args.config = Config(**{k: getattr(args, k) for k in vars(Config())})
    layer = sum(torch.Size(shape).numel() for shape, _ in args.config.shapes()["layers"][0].values())
    args.table = policies(4 * layer)
    counted, rounds = launch(timed, args)
    live = {name: launch(remembered, args, name) for name in args.table}
    print(f"GPT {args.config}, {args.ranks} gloo ranks, a layer is {4 * layer / MB:.1f} MB, {args.rounds} rounds\n")
    print("| policy | gathers | reduces | MB sent | live peak MB | of plain |\n|---|---|---|---|---|---|")
    for name, (kinds, sent) in counted.items():
        row = [name, kinds["all_gather"], kinds["reduce_scatter"], f"{sent / MB:.1f}", f"{live[name] / MB:.1f}"]
        print("| " + " | ".join(map(str, [*row, f"{ratio(rounds[name], rounds['plain']):.2f}"])) + " |")


if __name__ == "__main__":
    main()
