"""Train a byte-level GPT, its parameters sharded, on the source text of Python's standard library.

    python examples/train_gpt.py                              # one process
    torchrun --nproc-per-node 2 examples/train_gpt.py         # the same training, shared by two
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh 2,2 --axes replica,fsdp
    python examples/train_gpt.py --optimizer muon --lr 1e-2   # Muon for matrices, AdamW for the rest
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or restarted workers may look for dead ones (pytorch#135712)
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --resume runs/saved   # goes on after a crash

The parameters are a pytree of tensors, the model is pure functions of it. From shapes to text:

    plan(shapes, mesh, spec)        which rank owns which part: pure, nothing is allocated
    init(plan, initializers)        a ShardedTree: per unit of the plan one flat tensor on each rank
    value_and_grad(loss_fn)         gathers a layer when it runs, reduces its gradient when it is complete
    make_step(optimizer)            new parameters from old ones, over the same few flat tensors
    checkpoint.save, load           files of full tensors, whatever the ranks that write or read them
    unshard(params)                 plain tensors again, for the very same functions

Batches and initial values depend on the seed only, so any number of ranks trains the same model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import optim
import ragged
from fsdp import fold, gathered, value_and_grad
from ragged import P, checkpoint, rules
from ragged.random import fan_in, normal, ones, uniform01

# ---- The model: shapes, and functions of a tree of these shapes ----


def shapes(d: int, layers: int, heads: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The parameters as (shape, dtype) pairs. A token is a byte, matrices are (in, out)."""
    if d % (2 * heads):
        raise ValueError(f"d={d} must be a multiple of 2 * heads={2 * heads}")
    layer = {
        "norm1": ((d,), dtype),
        "qkv": ((d, 3, heads, d // heads), dtype),
        "out": ((d, d), dtype),
        "norm2": ((d,), dtype),
        "up": ((d, 4 * d), dtype),
        "down": ((4 * d, d), dtype),
    }
    ends = {"embedding": ((256, d), dtype), "norm": ((d,), dtype)}
    return {"ends": ends, "layers": [layer] * layers}


INITIALIZERS = rules(
    {
        "**.norm*": ones,
        "**.embedding": normal(0.02),
        "**.qkv": fan_in(distribution="normal", dim=(1, 2, 3)),  # the dims that are not summed over
        "**": fan_in(distribution="normal", dim=1),
    }
)


def specs(block: Any = ragged.ROW) -> Any:
    """Cut everything along the axis "fsdp", matrices into whole blocks."""
    return rules({"**.norm*": P(ragged="fsdp"), "**": P(ragged="fsdp", block=block)})


@gathered
def embed(p: Any, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, p["embedding"])


@gathered
def layer(p: Any, x: Tensor) -> Tensor:
    x = x + attention(p, norm(x, p["norm1"]))
    return x + F.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


@gathered
def unembed(p: Any, x: Tensor) -> Tensor:
    return norm(x, p["norm"]) @ p["embedding"].T


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x, scale.shape, scale)


def attention(p: Any, x: Tensor) -> Tensor:
    heads = p["qkv"].shape[2]
    qkv = x @ rearrange(p["qkv"], "d three h c -> d (three h c)")
    q, k, v = rearrange(qkv, "b t (three h c) -> three b h t c", three=3, h=heads)
    y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    return rearrange(y, "b h t c -> b t (h c)") @ p["out"]


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864): turn pairs of the channels of (..., t, c) by t * frequency."""
    a, b = x.chunk(2, dim=-1)
    t, c = a.shape[-2:]
    frequency = 10_000 ** -torch.linspace(0, 1, c, device=x.device)
    angle = torch.outer(torch.arange(t, device=x.device), frequency).to(x.dtype)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def logits_fn(params: Any, tokens: Tensor) -> Tensor:
    """Logits (b, t, 256) of the byte after each of `tokens` (b, t); `params` is sharded or plain."""
    x = embed(params["ends"], tokens)
    x = fold(layer, params["layers"], x)  # the next layer is on its way while this one computes
    return unembed(params["ends"], x)  # the same parameters again; their gradient is reduced once


def loss_fn(params: Any, window: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte, of predicting all but the first of (b, t + 1) bytes."""
    logits = logits_fn(params, window[:, :-1])
    return F.cross_entropy(rearrange(logits, "b t v -> (b t) v"), rearrange(window[:, 1:], "b t -> (b t)"))


# ---- The data ----


def read_text(path: Path | None = None) -> Tensor:
    """A file, or all of the standard library's Python files but tests and tables, as bytes."""
    files = [path] if path else []
    if not path:
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
        for folder, below, names in os.walk(root):
            below[:] = [name for name in below if name not in skipped]  # where the walk goes on
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        files.sort()
        random.Random(0).shuffle(files)  # always the same way: the last tenth is a sample of the whole
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(text: Tensor, key: tuple[int, str], step: int, size: int, length: int, share: tuple[int, int]) -> Tensor:
    """Rank `share[0]`'s part, of `share[1]`, of the step's batch of random windows, (b, length) int64.

    The n-th window ever drawn lies where `key` and n say, whoever draws it.
    """
    rank, ranks = share
    if size % ranks or len(text) < length:
        raise ValueError(f"can't draw {size} windows of {length} of {len(text)} bytes, equally many on {ranks} ranks")
    n = step * size + torch.arange(size).view(ranks, -1)[rank]
    start = (uniform01(*key, n) * (len(text) - length + 1)).long()
    return text[start[:, None] + torch.arange(length)].long()


# ---- Training ----


def optimizer(name: str, rate: optim.schedules.Schedule, weight_decay: float) -> optim.GradientTransformation:
    """One of OPTIMIZERS, after clipping. With Muon, matrices inside layers are Muon's, the rest is its partner's."""
    adam = optim.adamw8bit if name.endswith("adamw8bit") else optim.adamw
    tx = adam(rate, b2=0.95, weight_decay=weight_decay)
    if name.startswith("muon"):
        matrices = optim.muon(
            rate,
            weight_decay=weight_decay,
            matrix=rules({"**.qkv": "d three h c -> three d (h c)", "**": None}),  # q, k and v: a matrix each
            adjust_lr_fn="match_rms_adamw",  # steps as long as AdamW's, so that one rate serves both
        )
        labels = rules({"**.norm*": "adam", "**.embedding": "adam", "**": "muon"})
        tx = optim.partition({"muon": matrices, "adam": tx}, labels)
    return optim.chain(optim.clip_by_global_norm(1.0), tx)


OPTIMIZERS = ("adamw", "adamw8bit", "muon", "muon+adamw8bit")


def train(args: argparse.Namespace, mesh: Any) -> float:
    """Train, report, write a few lines; returns the last validation loss."""
    torch.manual_seed(args.seed)
    share = mesh.get_rank(), mesh.size()
    first = share[0] == 0
    text = read_text(args.text)
    cut = len(text) * 9 // 10

    def draw(split: str, step: int) -> Tensor:
        part = text[:cut] if split == "train" else text[cut:]
        return batch(part, (args.seed, split), step, args.batch, args.context + 1, share).to(mesh.device_type)

    rate = optim.schedules.warmup_cosine_decay_schedule(
        args.lr / 10, args.lr, warmup_steps=args.steps // 20, decay_steps=args.steps, end_value=args.lr / 10
    )
    tx = optimizer(args.optimizer, rate, args.weight_decay)
    model = shapes(args.width, args.layers, args.heads)
    plan = ragged.plan(model, mesh, specs(args.block), units=["layers.*"], optimizer=tx)  # cuts none of tx's blocks
    params = ragged.init(plan, INITIALIZERS, seed=args.seed)
    state, done = tx.init(params), 0
    if args.resume and (last := checkpoint.latest(args.resume)):
        found = checkpoint.load(last, {"params": params, "opt": state, "step": 0})
        params, state, done = found["params"], found["opt"], found["step"]
    loss_and_grad = value_and_grad(loss_fn)
    step_fn = optim.make_step(tx)

    @torch.no_grad()
    def validate() -> float:
        losses = [loss_fn(params, draw("validation", i)) for i in range(args.eval_batches)]
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return mean.item() / mesh.size()

    log = Log(args.out if first else None, done)
    log.print(f"{plan.summary()}\n\n{ragged.visualize(params['layers'][0])}\n")
    log.print(f"{cut:,} bytes to train on, {len(text) - cut:,} to validate with; loss in nats per byte\n")
    begin = mark = time.perf_counter()
    losses: list[float] = []
    val_loss, saving = None, None
    if done:
        log.print(f"resumed after step {done:,}\n")
    for step in range(done + 1, args.steps + 1):
        loss, grads = loss_and_grad(params, draw("train", step))
        params, state = step_fn(params, grads, state)
        losses.append(loss.item())
        if step == 1 or step % args.every == 0 or step == args.steps:
            now, val_loss = time.perf_counter(), validate()
            log.row(
                step=step,
                loss=sum(losses) / len(losses),
                val_loss=val_loss,
                tokens_per_second=len(losses) * args.batch * args.context / (now - mark),
                peak_memory_mib=peak_memory(mesh.device_type) / 2**20,
                seconds=now - begin,
            )
            losses, mark = [], time.perf_counter()
        if args.resume and (step % args.save_every == 0 or step == args.steps):
            trees = {"params": params, "opt": state, "step": step}
            saving = checkpoint.save(args.resume / f"step-{step}", trees, async_=True, keep=2)  # while training goes on
    if saving:
        saving.wait()
    full = ragged.unshard(params, dst=0)
    if first:
        log.print("\n" + generate(full, args.prompt, args.sample, args.context, args.temperature))
    log.finish()
    return validate() if val_loss is None else val_loss  # if there was nothing left to do


@torch.no_grad()
def generate(params: Any, prompt: str, size: int, context: int, temperature: float) -> str:
    """The prompt and `size` bytes more; greedy at temperature 0. `params` are plain tensors here."""
    tokens = torch.tensor([list(prompt.encode())], device=params["ends"]["norm"].device)
    for _ in range(size):
        logits = logits_fn(params, tokens[:, -context:])[:, -1]
        if temperature:
            new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
        else:
            new = logits.argmax(dim=-1, keepdim=True)
        tokens = torch.cat((tokens, new), dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


class Log:
    """Progress for people on the terminal and for programs in metrics.jsonl; silent without a directory.

    What is there of the steps that are done already stays.
    """

    def __init__(self, directory: Path | None, done: int = 0) -> None:
        self.directory = directory
        self.rows: list[dict[str, float]] = []
        if directory:
            directory.mkdir(parents=True, exist_ok=True)
            file = directory / "metrics.jsonl"
            before = [json.loads(line) for line in file.read_text().splitlines()] if done and file.exists() else []
            self.rows = [row for row in before if row["step"] <= done]
            file.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self.header = False

    def print(self, text: str) -> None:
        if self.directory:
            print(text, flush=True)

    def row(self, **metrics: float) -> None:
        if not self.header:
            self.header = True
            self.print("  ".join(f"{name:>8}" for name in metrics))
        self.rows.append(metrics)
        decimals = {"loss": 4, "val_loss": 4, "seconds": 1}  # others whole
        self.print("  ".join(f"{x:>{max(8, len(k))},.{decimals.get(k, 0)}f}" for k, x in metrics.items()))
        if self.directory:
            with (self.directory / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")

    def finish(self) -> None:
        """Say where things are; draw the loss curve where matplotlib is installed."""
        if self.directory and importlib.util.find_spec("matplotlib"):
            from matplotlib.figure import Figure

            figure = Figure(figsize=(6, 4), layout="constrained")
            axes = figure.subplots()
            for name in ("loss", "val_loss"):
                axes.plot([row["step"] for row in self.rows], [row[name] for row in self.rows], label=name)
            axes.set(xlabel="step", ylabel="nats per byte")
            axes.legend()
            figure.savefig(self.directory / "loss.png", dpi=150)
        self.print(f"\nsee {self.directory}")


def peak_memory(device: str) -> int:
    """Bytes: on the device, or of this process as a whole on CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- The command line ----


def block_of(text: str) -> Any:
    """`row`, `tensor`, `element`, a number of elements, or a tile such as `32,32`."""
    named = {"row": ragged.ROW, "tensor": ragged.TENSOR, "element": ragged.ELEMENT}
    if text in named:
        return named[text]
    numbers = tuple(int(n) for n in text.split(","))
    return numbers if len(numbers) > 1 else numbers[0]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--width", type=int, default=128, help="of the model (%(default)s)")
    add("--layers", type=int, default=4, help="(%(default)s)")
    add("--heads", type=int, default=4, help="attention heads per layer (%(default)s)")
    add("--context", type=int, default=128, help="bytes per sequence (%(default)s)")
    add("--batch", type=int, default=12, help="sequences per step, of all ranks together (%(default)s)")
    add("--steps", type=int, default=800, help="(%(default)s)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="(%(default)s)")
    add("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    add("--weight-decay", type=float, default=0.1, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of initial values, batches and sampling (%(default)s)")
    add("--mesh", default="-1", help="ranks per mesh axis, -1 for all that are left (%(default)s)")
    add("--axes", default="fsdp", help="names of the mesh axes; all but fsdp hold replicas (%(default)s)")
    add("--block", type=block_of, default="row", help=f"{block_of.__doc__} (%(default)s)")
    add("--device", choices=("cpu", "cuda"), help="by default cuda, if every process of this machine can have one")
    add("--threads", type=int, help="per process; by default its share of the machine's cores, at most 8")
    add("--text", type=Path, help="a file to train on, in place of the standard library")
    add("--every", type=int, default=50, help="steps between reports (%(default)s)")
    add("--eval-batches", type=int, default=10, help="batches per validation (%(default)s)")
    add("--prompt", default="def ", help="what the text at the end begins with (%(default)r)")
    add("--sample", type=int, default=400, help="bytes of text at the end (%(default)s)")
    add("--temperature", type=float, default=0.7, help="0 for the likeliest byte always (%(default)s)")
    add("--resume", type=Path, help="save checkpoints here, and begin after the last one that is here")
    add("--save-every", type=int, default=100, help="steps between checkpoints (%(default)s)")
    add("--out", type=Path, default=Path("runs/train_gpt"), help="for metrics.jsonl and loss.png (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(argv)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(args.threads or max(min(cores // processes, 8), 1))  # more don't help so small a model
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
