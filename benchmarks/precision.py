"""Mixed precision beside FSDP2's with the same policy: losses of training steps, and how far apart parameters end.

    python -m benchmarks.precision             # GPT d=128, L=4, T=64, B=2, V=256 on 2 gloo ranks, 10 steps

fp32 masters, bf16 computation, gradients reduced in fp32 or bf16, AdamW.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt import GPT, Config, batch, full_params
from benchmarks.harness import join, launch

DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def trained(config: Config, steps: int, ours: bool, param: Any, reduce: Any) -> tuple[list[float], Tensor]:
    """Mean losses, and all parameters as one vector."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as theirs

    from fsdp import MixedPrecision, fully_shard
    from ragged import make_mesh

    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    model: Any = GPT(full_params(config), config)
    policy: Any = (MixedPrecision if ours else MixedPrecisionPolicy)(param_dtype=param, reduce_dtype=reduce)
    shard: Any = fully_shard if ours else theirs
    for layer in model.layers:
        shard(layer, mesh=mesh, mp_policy=policy)
    shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batch(config, dist.get_rank(), step))
        loss.backward()
        optimizer.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses, torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])


def worker(rank: int, args: argparse.Namespace, port: int, out: Any) -> None:
    join(rank, args, port)
    rows, exact = [], None
    for name, param, reduce in (
        ("fp32", None, None),
        ("bf16, reduced in fp32", torch.bfloat16, torch.float32),
        ("bf16, reduced in bf16", torch.bfloat16, None),
    ):
        (a, p), (b, q) = (trained(args.config, args.steps, ours, param, reduce) for ours in (True, False))
        exact = q if exact is None else exact
        apart = max(abs(x - y) for x, y in zip(a, b, strict=True))
        away = [((x - y).norm() / y.norm()).item() for x, y in ((p, q), (q, exact))]
        rows.append((name, a[0], a[-1], b[0], b[-1], apart, *away))
    if rank == 0:
        out.put(rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small = {"d": 128, "layers": 4, "heads": 4, "T": 64, "B": 2, "V": 256}
    for field, value in small.items():
        parser.add_argument(f"--{field}", type=int, default=value)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    args.config = Config(**{k: getattr(args, k) for k in small})
    print("| policy | loss of the first, last step: ours | FSDP2's | losses differ by | parameters differ by | "
          "FSDP2's from fp32 |\n|---|---|---|---|---|---|")  # fmt: skip
    for name, a, b, c, d, apart, ours, theirs in launch(worker, args):
        print(f"| {name} | {a:.6f}, {b:.6f} | {c:.6f}, {d:.6f} | {apart:.1e} | {ours:.1e} | {theirs:.1e} |")


if __name__ == "__main__":
    main()
