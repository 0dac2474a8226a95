"""Train a byte-level mixture of experts on a mesh: experts, heads and data each along an axis of it.

    python examples/train_moe.py                                                   # one process
    torchrun --nproc-per-node 2 examples/train_moe.py --mesh 1,2 --axes fsdp,ep
    torchrun --nproc-per-node 4 examples/train_moe.py --mesh 2,2 --axes fsdp,tp    # or replica,ep, or ep,tp ...

What an axis means is said once, in the specs; an axis that the mesh lacks has size 1:

    fsdp     ranks have batches of their own, and share all parameters
    ep       ranks have batches of their own, and each has some of the experts: tokens travel to them and back
    tp       ranks have the same batch, and each has some of the attention heads: partial sums are added up
    others   ranks have batches of their own, and the same parameters

The text, attention, batches and the log are those of train_gpt.py. No token is dropped and the load-balancing loss
is that of all ranks' tokens together, so every mesh trains the same model.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

import ragged
from fsdp import fold, gathered, value_and_grad
from optim import adamw, chain, clip_by_global_norm, make_step, schedules
from ragged import P, collectives, rules
from ragged.collectives import Group
from ragged.random import fan_in, normal, ones

if __package__:
    from examples import train_gpt as gpt
else:  # run as a script: then its folder is where imports are looked for
    import train_gpt as gpt

# ---- Who has what ----


def shapes(d: int, layers: int, heads: int, experts: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The parameters as (shape, dtype) pairs. Two of the experts see a token: as many channels as train_gpt's MLP."""
    layer = {
        "norm1": ((d,), dtype),
        "qkv": ((d, 3, heads, d // heads), dtype),
        "out": ((d, d), dtype),
        "norm2": ((d,), dtype),
        "router": ((d, experts), dtype),
        "up": ((experts, d, 2 * d), dtype),
        "down": ((experts, 2 * d, d), dtype),
    }
    return {**gpt.shapes(d, layers, heads, dtype), "layers": [layer] * layers}


DENSE = ("fsdp", "ep")  # what every token needs is shared by all ranks that have batches of their own
SPECS = rules(
    {
        "**.qkv": P(None, None, "tp", ragged=DENSE),  # heads: columns of the matrix
        "**.out": P("tp", ragged=DENSE),  # and the rows that take them in
        "**.up": P("ep", ragged="fsdp", block=(1, None, None)),  # whole experts
        "**.down": P("ep", ragged="fsdp", block=(1, None, None)),
        "**": P(ragged=DENSE),
    }
)
INITIALIZERS = rules(
    {
        "**.norm*": ones,
        "**.embedding": normal(0.02),
        "**.qkv": fan_in(distribution="normal", dim=(1, 2, 3)),  # the dims that are not summed over
        "**.up": fan_in(distribution="normal", dim=(0, 2)),
        "**.down": fan_in(distribution="normal", dim=(0, 2)),
        "**": fan_in(distribution="normal", dim=1),
    }
)


class Groups(NamedTuple):
    """The ranks that this one works with: with other batches, with other experts, with other heads."""

    data: Group
    ep: Group
    tp: Group


ALONE = Groups(*[Group((0,), 0)] * 3)  # for plain tensors: nothing is sent


def data_axes(plan: ragged.Plan) -> tuple[str, ...]:
    return tuple(axis for axis in plan.axes if axis != "tp")


def groups(plan: ragged.Plan) -> Groups:
    comm = plan.bound()
    return Groups(comm.group(data_axes(plan)), comm.group(("ep",)), comm.group(("tp",)))


# ---- What is sent inside a layer, and inside its backward ----


class Exchange(torch.autograd.Function):
    """Rows of `x`, the first `sent[0]` for rank 0 and so on; `received[k]` rows come from rank k."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.back = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        collectives.exchange(x.contiguous().split(sent), out.split(received), group).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.apply(grad, *ctx.back), None, None, None


class _Sum(torch.autograd.Function):
    """A sum over the group on the way there, or else on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: bool) -> Tensor:
        ctx.how = group, there
        return summed(x, group) if there else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group, there = ctx.how
        return grad if there else summed(grad, group), None, None


def enter(x: Tensor, group: Group) -> Tensor:
    """From what all ranks have to what each computes a part with: the gradients of the parts add up."""
    return _Sum.apply(x, group, False)


def leave(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' parts; each part's gradient is that of the sum."""
    return _Sum.apply(x, group, True)


def summed(x: Tensor, group: Group) -> Tensor:
    return collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()


# ---- The model ----


class Carry(NamedTuple):
    """What goes from layer to layer: tokens (b, t, d), the sum of balancing losses, and per layer tokens per expert."""

    x: Tensor
    balance: Tensor
    load: tuple[Tensor, ...]


@gathered
def layer(p: Any, carry: Carry, at: Groups) -> Carry:
    x = carry.x
    x = x + leave(gpt.attention(p, enter(gpt.norm(x, p["norm1"]), at.tp)), at.tp)
    y, balance, load = mixture(p, rearrange(gpt.norm(x, p["norm2"]), "b t d -> (b t) d"), at)
    return Carry(x + y.view_as(x), carry.balance + balance, (*carry.load, load))


def mixture(p: Any, x: Tensor, at: Groups, k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum of k experts for each of the tokens (n, d), the balancing loss, and tokens per expert."""
    scores = F.softmax(x @ p["router"], dim=-1)
    best, expert = scores.topk(k)
    weight = best / best.sum(dim=-1, keepdim=True)
    load = torch.bincount(expert.flatten(), minlength=scores.shape[1])

    order = expert.flatten().argsort(stable=True)  # experts ascend, and with them the ranks that have them
    y = elsewhere(p, repeat(x, "n d -> (n k) d", k=k)[order], load, at.ep)
    y = rearrange(y[order.argsort()], "(n k) d -> n k d", k=k)

    # The share of an expert is one of all ranks' tokens. It has no gradient, so the mean over ranks of this loss,
    # each with its own scores, is the loss of the whole batch. The product of shares of a rank would not be.
    total = collectives.all_reduce(load.clone(), at.data).wait()
    balance = len(total) * (total.to(scores.dtype) / total.sum() * scores.mean(dim=0)).sum()
    return (y * weight[..., None]).sum(dim=1), balance, total


def elsewhere(p: Any, rows: Tensor, load: Tensor, ep: Group) -> Tensor:
    """The experts' results for rows ordered by expert, `load[e]` of them for expert e, on the ranks that have them."""
    sent = load.view(ep.size, -1)  # from here: by owner, and by expert there
    received = torch.empty_like(sent)  # to here: by origin, and by expert here
    collectives.exchange(sent.unbind(), received.unbind(), ep).wait()
    out, back = sent.sum(dim=1).tolist(), received.sum(dim=1).tolist()

    rows = Exchange.apply(rows, out, back, ep)
    expert = torch.arange(received.numel(), device=rows.device) % received.shape[1]
    order = expert.repeat_interleave(received.flatten()).argsort(stable=True)
    parts = rows[order].split(received.sum(dim=0).tolist())
    done = [F.gelu(part @ up) @ down for part, up, down in zip(parts, p["up"], p["down"], strict=True)]
    return Exchange.apply(torch.cat(done)[order.argsort()], back, out, ep)


def loss_fn(params: Any, window: Tensor, at: Groups = ALONE, alpha: float = 0.03) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy in nats per byte plus `alpha` times the mean balancing loss, 1 where all experts do the same.

    `window` is (b, t + 1) bytes, `params` sharded or plain. The second result holds this rank's cross-entropy, and
    per layer and expert the tokens of all ranks.
    """
    x = gpt.embed(params["ends"], window[:, :-1])
    end = fold(lambda p, carry: layer(p, carry, at), params["layers"], Carry(x, x.new_zeros(()), ()))
    logits = gpt.unembed(params["ends"], end.x)
    targets = rearrange(window[:, 1:], "b t -> (b t)")
    cross_entropy = F.cross_entropy(rearrange(logits, "b t v -> (b t) v"), targets)
    return cross_entropy + alpha * end.balance / len(end.load), {
        "cross_entropy": cross_entropy,
        "load": torch.stack(end.load),
    }


# ---- Training ----


def train(args: argparse.Namespace, mesh: Any) -> float:
    """Train, report, write a few lines; returns the last validation loss."""
    text = gpt.read_text(args.text)
    cut = len(text) * 9 // 10
    plan = ragged.plan(shapes(args.width, args.layers, args.heads, args.experts), mesh, SPECS, units=["layers.*"])
    at = groups(plan)
    share = at.data.rank, at.data.size  # ranks that differ along tp only draw the same

    def draw(split: str, step: int) -> Tensor:
        part = text[:cut] if split == "train" else text[cut:]
        return gpt.batch(part, (args.seed, split), step, args.batch, args.context + 1, share).to(mesh.device_type)

    params = ragged.init(plan, INITIALIZERS, seed=args.seed)
    rate = schedules.warmup_cosine_decay_schedule(
        args.lr / 10, args.lr, warmup_steps=args.steps // 20, decay_steps=args.steps, end_value=args.lr / 10
    )
    tx = chain(clip_by_global_norm(1.0), adamw(rate, b2=0.95, weight_decay=args.weight_decay))
    state, step_fn = tx.init(params), make_step(tx)
    loss_and_grad = value_and_grad(loss_fn, has_aux=True, data_axes=data_axes(plan))

    @torch.no_grad()
    def validate() -> float:
        found = [loss_fn(params, draw("validation", i), at)[1]["cross_entropy"] for i in range(args.eval_batches)]
        return summed(torch.stack(found).mean(), at.data).item() / at.data.size

    log = gpt.Log(args.out if mesh.get_rank() == 0 else None)
    log.print(f"{plan.summary()}\n\n{ragged.visualize(params['layers'][0])}\n")
    log.print(
        f"{cut:,} bytes to train on, {len(text) - cut:,} to validate with; in nats per byte,\n"
        "loss with and val_loss without the load-balancing loss\n"
    )
    begin = mark = time.perf_counter()
    losses: list[float] = []
    for step in range(1, args.steps + 1):
        (loss, aux), grads = loss_and_grad(params, draw("train", step), at, args.alpha)
        params, state = step_fn(params, grads, state)
        losses.append(loss.item())
        if step == 1 or step % args.every == 0 or step == args.steps:
            now = time.perf_counter()
            log.row(
                step=step,
                loss=sum(losses) / len(losses),
                val_loss=validate(),
                busiest_expert_percent=(100 * aux["load"].amax(dim=1) / aux["load"].sum(dim=1)).mean().item(),
                tokens_per_second=len(losses) * args.batch * args.context / (now - mark),
                peak_memory_mib=gpt.peak_memory(mesh.device_type) / 2**20,
                seconds=now - begin,
            )
            losses, mark = [], time.perf_counter()
    log.finish()
    return log.rows[-1]["val_loss"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--width", type=int, default=64, help="of the model (%(default)s)")
    add("--layers", type=int, default=2, help="(%(default)s)")
    add("--heads", type=int, default=4, help="attention heads per layer (%(default)s)")
    add("--experts", type=int, default=8, help="per layer, two of which see a token (%(default)s)")
    add("--alpha", type=float, default=0.03, help="weight of the load-balancing loss (%(default)s)")
    add("--context", type=int, default=128, help="bytes per sequence (%(default)s)")
    add("--batch", type=int, default=12, help="sequences per step, of all ranks together (%(default)s)")
    add("--steps", type=int, default=400, help="(%(default)s)")
    add("--lr", type=float, default=5e-3, help="peak learning rate (%(default)s)")
    add("--weight-decay", type=float, default=0.1, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of initial values and batches (%(default)s)")
    add("--mesh", default="-1,1,1", help="ranks per mesh axis, -1 for all that are left (%(default)s)")
    add("--axes", default="fsdp,ep,tp", help="names of the mesh axes (%(default)s)")
    add("--device", choices=("cpu", "cuda"), help="by default cuda, if every process of this machine can have one")
    add("--threads", type=int, default=1, help="per process; more hardly help so small a model (%(default)s)")
    add("--text", type=Path, help="a file to train on, in place of the standard library")
    add("--every", type=int, default=50, help="steps between reports (%(default)s)")
    add("--eval-batches", type=int, default=10, help="batches per validation (%(default)s)")
    add("--out", type=Path, default=Path("runs/train_moe"), help="for metrics.jsonl and loss.png (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(argv)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.device_count() >= processes else "cpu")
    joined = dist.is_initialized()
    try:
        mesh = ragged.make_mesh([int(n) for n in args.mesh.split(",")], args.axes.split(","), device_type=device)
        return train(args, mesh)
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
