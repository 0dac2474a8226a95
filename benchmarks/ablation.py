"""What each part of the system is worth: our own training step with one of them taken out at a time.

    python -m benchmarks.ablation             # GPT d=480, L=8, 8-bit AdamW in tiles of 32 x 32, on 2 gloo ranks
    python -m benchmarks.ablation --ranks 4

- "no DBuffer": gathers arrive in a buffer from which every leaf is copied out, in forward and in backward, and
  gradients are copied into a buffer of their own before they are reduced.
- "no planner": leaves are laid end to end and cut evenly, through tiles. The optimizer, which needs whole tiles, gets
  parameters and gradients in a layout of whole tiles, and parameters go back: three moves per step.
- "no ragged blocks": every rank gets equally many bands of tiles of every leaf, which is padded for that.

The optimizer's own arithmetic is the same in all of them. Medians and ratios within rounds in a shuffled order;
live bytes as the allocator counts them, and bytes sent, on the first rank.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt import Config, batch, full_params, make_loss
from benchmarks.harness import interleaved, join, launch, live_peak, quartiles, ratio
from fsdp import value_and_grad
from fsdp.full import Full
from fsdp.rooms import Room
from optim import adamw8bit, make_step
from ragged import P, Plan, collectives, make_mesh, plan, redistribute, shard
from ragged.buffer import gather_into

__all__ = ["main"]

Step = Callable[[], Tensor]
TILE = 32
ROWS = P(ragged="fsdp")


class CopyingFull(Full):
    """Full parameters that lie on memory of their own, into which they are copied."""

    def prepare(self, cast: Any, kept: Any = None) -> None:
        fresh = self.cast is None
        super().prepare(cast, kept)
        if fresh and not self.alone:
            leaves = [torch.empty(f.local_shape, dtype=cast.gather) for f in self.bucket.leaves]
            self.room = Room(torch.empty(0, dtype=cast.gather), tuple(leaves))
            self.empty()

    def fill(self) -> None:
        assert self.cast is not None
        self._landing = torch.empty(self.bucket.length, dtype=self.cast.gather)
        self.pending = gather_into(self._landing, self.local, self.bucket, self.comm)

    def refit(self) -> None:
        self.room = Room(torch.empty(self.bucket.length, dtype=self.gathers), self.room.leaves)  # type: ignore[union-attr]

    def wait(self) -> None:
        if self.pending is None:
            return
        super().wait()
        assert self.room is not None
        with torch.no_grad():
            for leaf, info in zip(self.room.leaves, self.bucket.leaves, strict=True):
                leaf.untyped_storage().resize_(leaf.numel() * leaf.itemsize)
                # as a refill, which autograd doesn't count as a change
                torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage()).copy_(
                    self._landing[info.offset : info.stop]
                )
        del self._landing

    def empty(self) -> None:
        if self.room is not None and not self.alone:
            for leaf in self.room.leaves:
                leaf.untyped_storage().resize_(0)
            self.filled = False

    def leave(self) -> None:
        self.empty()
        self.room = None

    def contributions(self, grads: Any, onto: Any = None, apart: bool = False) -> Tensor:
        return super().contributions(grads, onto, apart=True)

    def in_place(self, grads: Any) -> None:
        """Every gradient is copied."""

    def held(self) -> bool:
        """Nothing is let go: the leaves have storages of their own."""
        return True


def build(config: Config, params: Any, loss_fn: Any, layout: Plan, aligned: Plan | None = None) -> Step:
    """A training step; with `aligned` the optimizer works in that layout, and parameters go back."""
    held = shard(params, layout)
    tx = adamw8bit(1e-4, block=(TILE, TILE))
    update = make_step(tx)
    f = value_and_grad(loss_fn)
    box = [held, tx.init(held if aligned is None else redistribute(held, aligned))]
    tokens, targets = batch(config, dist.get_rank())

    def step() -> Tensor:
        loss, grads = f(box[0], tokens, targets)
        params, state = box
        box.clear()
        if aligned is not None:
            params, grads = redistribute(params, aligned), redistribute(grads, aligned)
        params, state = update(params, grads, state)
        box.extend([params if aligned is None else redistribute(params, layout), state])
        out: Tensor = loss
        return out

    return step


def systems(config: Config) -> dict[str, Callable[[], Step]]:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    full, tx = full_params(config), adamw8bit(1e-4, block=(TILE, TILE))
    loss = make_loss(config, reshard_after_forward=True)
    tiles = plan(full, mesh, ROWS, units=["layers.*"], optimizer=tx)

    def no_dbuffer() -> Step:
        step = build(config, full, loss, tiles)

        def patched() -> Tensor:
            with mock.patch("fsdp.buckets.Full", CopyingFull):
                return step()

        return patched

    def no_planner() -> Step:
        return build(config, full, loss, plan(full, mesh, ROWS, units=["layers.*"]), tiles)

    def no_ragged() -> Step:
        padded = {"leaves": full, "padding": paddings(full, dist.get_world_size())}
        units = ["leaves.layers.*", "leaves.embed", "leaves.head", "padding"]
        layout = plan(padded, mesh, ROWS, units=units, optimizer=tx)

        def on_leaves(p: Any, tokens: Tensor, targets: Tensor) -> Tensor:
            return loss(p["leaves"], tokens, targets) + 0.0 * carry(p["padding"])

        from fsdp import gathered

        carry = gathered(lambda p: sum(x.view(-1)[0] for x in optree.tree_leaves(p)))
        return build(config, padded, on_leaves, layout)

    return {
        "ours": lambda: build(config, full, loss, tiles),
        "no DBuffer": no_dbuffer,
        "no planner": no_planner,
        "no ragged blocks": no_ragged,
    }


def paddings(full: Any, ranks: int) -> list[Tensor]:
    """What is added to every matrix, so that its bands of tiles go evenly into the ranks."""
    out = []
    for x in optree.tree_leaves(full):
        if x.ndim == 2:
            rows = math.ceil(x.shape[0] / (TILE * ranks)) * TILE * ranks
            if rows > x.shape[0]:
                out.append(torch.zeros(rows - x.shape[0], x.shape[1]))
    return out


def _worker(rank: int, args: argparse.Namespace, port: int, out: Any) -> None:
    join(rank, args, port)
    steps, live, sent, losses = {}, {}, {}, []
    for name, make in systems(args.config).items():
        box: list[Step] = []

        def run(make: Callable[[], Step] = make, box: list[Step] = box) -> None:
            box.append(make())
            for _ in range(3):
                box[0]()

        live[name] = live_peak(run)
        steps[name] = box[0]
        with collectives.record() as events:
            steps[name]()
        sent[name] = sum(e.sent for e in events)
        losses.append(steps[name]().item())
    assert max(losses) - min(losses) < 1e-4 * losses[0], losses  # all of them train alike
    rounds = interleaved(steps, args.rounds)
    if rank == 0:
        out.put((rounds, live, sent))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field, value in (vars(Config()) | {"d": 480}).items():
        parser.add_argument(f"--{field}", type=int, default=value)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    args.config = Config(**{k: getattr(args, k) for k in vars(Config())})
    rounds, live, sent = launch(_worker, args)
    print(f"{args.config}, {args.ranks} gloo ranks, {args.rounds} rounds\n")
    print("| system | ms per step | quartiles | of ours | live peak MB | MB sent |\n|---|---|---|---|---|---|")
    for name, times in rounds.items():
        of_ours = f"{ratio(times, rounds['ours']):.2f}"
        row = [f"{statistics.median(times) * 1e3:.0f}", quartiles(times, digits=0), of_ours]
        row += [f"{live[name] / 1e6:.1f}", f"{sent[name] / 1e6:.1f}"]
        print("| " + " | ".join([name, *row]) + " |")


if __name__ == "__main__":
    main()
