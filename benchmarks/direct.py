"""Would it pay to have backward write weight gradients straight into the buffer that is reduced?

    python -m benchmarks.direct

A unit of four weights (those of a GPT's layer), one process and thread. "Copied" is what the library does: autograd
makes the gradients, one kernel puts them into the unit's buffer. "Direct" multiplies by the weights through a function
whose backward writes each gradient to its place in the buffer, found by a mode that sees every torch function
(`torch.overrides.TorchFunctionMode`), as it would have to be found in code that knows nothing of it. Every round
runs both in a shuffled order; gradients are compared bit by bit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.harness import quartiles, ratio

__all__ = ["main"]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.place = place
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        x, w = ctx.saved_tensors
        torch.mm(x.t(), g, out=ctx.place)
        return g @ w.t(), None, None


class Direct(TorchFunctionMode):
    """Multiplications by one of some weights become those that write their gradient to its place."""

    def __init__(self, places: dict[int, Tensor]) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and id(args[1]) in self.places:
            return _Multiply.apply(*args, self.places[id(args[1])])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def layer(x: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
    d = x.shape[1]
    x = x + (F.rms_norm(x, (d,)) @ qkv)[:, :d] @ out
    return x + F.gelu(F.rms_norm(x, (d,)) @ up) @ down


def variants(d: int, T: int) -> tuple[dict[str, Callable[[], None]], Tensor, Tensor]:
    """Both, and the buffers that they fill."""
    shapes = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
    sizes = [a * b for a, b in shapes]
    weights = [torch.randn(s).mul_(s[0] ** -0.5).requires_grad_() for s in shapes]
    x = torch.randn(T, d, requires_grad=True)
    copied, direct = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
    places = {id(w): part.view(w.shape) for w, part in zip(weights, direct.split_with_sizes(sizes), strict=True)}

    def by_copy() -> None:
        grads = torch.autograd.grad(layer(x, *weights).sum(), [x, *weights])[1:]
        torch.cat([g.view(-1) for g in grads], out=copied)

    def directly() -> None:
        with Direct(places):
            loss = layer(x, *weights).sum()
        torch.autograd.grad(loss, [x])

    return {"copied": by_copy, "direct": directly}, copied, direct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| layer | MB of gradients | copied, us | direct, us | quartiles | direct / copied |\n|---|---|---|---|---|---|"
    )
    for d, T in ((64, 16), (128, 64), (512, 128), (512, 1024), (1024, 128)):
        runs, copied, direct = variants(d, T)
        times: dict[str, list[float]] = {name: [] for name in runs}
        shuffler, repeat = random.Random(0), max(1, 2048 // d)
        for k in range(args.rounds + 1):
            for name in shuffler.sample(list(runs), len(runs)):
                start = time.perf_counter()
                for _ in range(repeat):
                    runs[name]()
                if k:  # the first round warms up
                    times[name].append((time.perf_counter() - start) / repeat)
        assert torch.equal(copied, direct)
        a, b = (f"{statistics.median(times[name]) * 1e6:.0f}" for name in ("copied", "direct"))
        spread = quartiles(times["direct"], 1e6, 0)
        of = f"{ratio(times['direct'], times['copied']):.3f}"
        print(f"| d={d}, T={T} | {copied.nbytes / 1e6:.1f} | {a} | {b} | {spread} | {of} |")


if __name__ == "__main__":
    main()
