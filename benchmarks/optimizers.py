"""Optimizer steps in one process and thread, ours and their peers, in one interleaved run.

    python -m benchmarks.optimizers                       # shapes of a GPT with d=512, L=5: 16M parameters
    python -m benchmarks.optimizers --d 256 --rounds 21

8-bit AdamW with flat blocks, as it is and compiled, and with tiles beside our fused fp32 AdamW, on the donated path,
and beside the 8-bit AdamW of bitsandbytes and of torchao (which compiles its step), if they are installed. Every round
runs all of them once in a shuffled order; the table has medians, the median of the ratios within a round, and bytes of
state per parameter. Below it: the relative error of the update after 20 steps against fp32, by how widely the sizes of
gradients are spread inside a block (lognormal, sigma).
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

import optim
from ragged import P, make_mesh, plan, shard

__all__ = ["error", "main"]


def full_tree(d: int, layers: int) -> dict[str, dict[str, Tensor]]:
    """Layers of a GPT: 12 d^2 elements of matrices, and two norms."""
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d), "norm1": (d,), "norm2": (d,)}
    draw = torch.Generator().manual_seed(0)
    return {f"layer{i}": {k: torch.randn(s, generator=draw) for k, s in shapes.items()} for i in range(layers)}


def prepared(tx: optim.GradientTransformation, tree: Any) -> tuple[Callable[[], None], float]:
    """A step to call again and again, and bytes of state per parameter."""
    mesh = make_mesh((1,), ("fsdp",), device_type="cpu")
    layout = plan(tree, mesh, P(ragged="fsdp"), units=["*"], optimizer=tx)
    params = shard(tree, layout)
    held: list[Any] = [params, tx.init(params)]
    step = optim.make_step(tx)
    source = shard(tree, layout)

    def run() -> None:
        held[0], held[1] = step(held[0], source.with_tensors(source.tensors), held[1])

    sizes = sum(x.numel() for x in optree.tree_leaves(tree))
    return run, sum(x.numel() * x.itemsize for x in optree.tree_leaves(held[1])) / sizes


PEERS = {"bitsandbytes": "bitsandbytes.optim", "torchao, compiled": "torchao.optim"}


def peers(tree: Any) -> tuple[dict[str, tuple[Callable[[], None], float]], dict[str, str]]:
    """Those that are installed, on one parameter per leaf; and why the others are not there."""
    warnings.simplefilter("ignore")
    out: dict[str, tuple[Callable[[], None], float]] = {}
    absent = {}
    for name, module in PEERS.items():
        try:
            kind = importlib.import_module(module).AdamW8bit
        except ImportError as error:
            absent[name] = str(error)
            continue
        params = [torch.nn.Parameter(x.clone()) for x in optree.tree_leaves(tree)]
        for p in params:
            p.grad = torch.randn_like(p)
        out[name] = kind(params, lr=1e-3).step, float("nan")
    return out, absent


def error(sigma: float, block: int | tuple[int, int], steps: int = 20, seed: int = 0) -> float:
    """Relative error of the update after some steps, against fp32 AdamW."""
    draw, shape = torch.Generator().manual_seed(seed), (64, 256)
    sizes, p = torch.exp(sigma * torch.randn(shape, generator=draw)), torch.zeros(shape)
    exact, ours = optim.adamw(1e-3, weight_decay=0.0), optim.adamw8bit(1e-3, weight_decay=0.0, block=block)
    a, b = exact.init(p), ours.init(p)
    for _ in range(steps):
        g = sizes * torch.randn(shape, generator=draw)
        (want, a), (got, b) = exact.update(g, a, p), ours.update(g, b, p)
    return float((want - got).norm() / want.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tree = full_tree(args.d, args.layers)
    others, absent = peers(tree)
    made = {
        "adamw": prepared(optim.adamw(1e-3), tree),
        "adamw8bit": prepared(optim.adamw8bit(1e-3), tree),
        "adamw8bit compiled": prepared(optim.adamw8bit(1e-3, compile=True), tree),
        "adamw8bit tiles": prepared(optim.adamw8bit(1e-3, block=(32, 32)), tree),
        **others,
    }
    times: dict[str, list[float]] = {name: [] for name in made}
    shuffler = random.Random(0)
    for k in range(args.rounds + 1):
        for name in shuffler.sample(list(made), len(made)):
            start = time.perf_counter()
            made[name][0]()
            if k:  # the first round warms up, and compiles
                times[name].append(time.perf_counter() - start)
    print(f"{sum(x.numel() for x in optree.tree_leaves(tree)) / 1e6:.1f}M parameters, {args.rounds} rounds\n")
    print(f"{'optimizer':<18}{'ms/step':>9}{'of adamw':>10}{'bytes/param':>13}")
    for name, spent in times.items():
        ratio = statistics.median(a / b for a, b in zip(spent, times["adamw"], strict=True))
        print(f"{name:<18}{statistics.median(spent) * 1e3:>9.1f}{ratio:>10.2f}{made[name][1]:>13.3f}")
    for name, why in absent.items():
        print(f"{name:<18} not run: {why}")
    print(f"\n{'relative error':<18}" + "".join(f"{f'sigma {s:g}':>12}" for s in (0, 0.5, 1, 2)))
    blocks: dict[str, int | tuple[int, int]] = {"256": 256, "32 x 32": (32, 32)}
    for name, block in blocks.items():
        print(f"{name:<18}" + "".join(f"{error(s, block):>12.4f}" for s in (0, 0.5, 1, 2)))


if __name__ == "__main__":
    main()
