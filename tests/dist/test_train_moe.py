"""The mixture of experts: the same training on every mesh as in plain torch, and what its parts do to gradients."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples import train_gpt as gpt
from examples import train_moe as moe
from fsdp import gathered, value_and_grad
from optim import adamw, chain, clip_by_global_norm, global_norm, make_step
from ragged import P, init, make_mesh, plan, shard, unshard
from tests.dist.test_train_gpt import by_path
from tests.pool import Pool
from tests.programs import Ahead, execute

SIZES: dict[str, Any] = {"d": 32, "layers": 2, "heads": 4, "experts": 8}
BATCH, CONTEXT, RATE, DECAY, ALPHA, CLIP = 8, 24, 3e-3, 0.1, 0.05, 0.5
STEPS = {torch.float32: 10, torch.float64: 3}  # why: test_train_gpt.py
EPS = {torch.float32: 1e-6, torch.float64: 1e-8}  # why: test_train_gpt.py
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10}


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]
    loads: list[list[list[int]]]  # tokens per step, layer and expert
    params: dict[str, Tensor]


def draw(step: int, share: tuple[int, int]) -> Tensor:
    text = (torch.arange(10_000) ** 2 % 251 % 96 + 32).to(torch.uint8)
    return gpt.batch(text, (0, "train"), step, BATCH, CONTEXT + 1, share)


def start(dtype: torch.dtype, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    mesh = make_mesh(shape, axes, device_type="cpu")
    layout = plan(moe.shapes(**SIZES, dtype=dtype), mesh, moe.SPECS, units=["layers.*"])
    return init(layout, moe.INITIALIZERS, seed=0)


def sharded(dtype: torch.dtype, shape: tuple[int, ...], axes: tuple[str, ...]) -> Run:
    """On every rank of the pool: the library's loop."""
    params = start(dtype, shape, axes)
    at = moe.groups(params.plan)
    tx = chain(clip_by_global_norm(CLIP), adamw(RATE, eps=EPS[dtype], weight_decay=DECAY))
    state, step_fn = tx.init(params), make_step(tx)
    loss_and_grad = value_and_grad(moe.loss_fn, has_aux=True)  # the default data axes are the right ones
    run = Run([], [], [], {})
    for step in range(STEPS[dtype]):
        (loss, aux), grads = loss_and_grad(params, draw(step, (at.data.rank, at.data.size)), at, ALPHA)
        run.losses.append(loss.item())
        run.norms.append(global_norm(grads).item())
        run.loads.append(aux["load"].tolist())
        params, state = step_fn(params, grads, state)
    return run._replace(params=by_path(unshard(params)))


def plain(dtype: torch.dtype) -> Run:
    """The same functions on plain tensors, with torch's own optimizer and autograd."""
    params = unshard(start(dtype, (-1,), ("fsdp",)))
    leaves = [x.requires_grad_() for x in optree.tree_leaves(params)]
    optimizer = torch.optim.AdamW(leaves, lr=RATE, eps=EPS[dtype], weight_decay=DECAY)
    run = Run([], [], [], by_path(params))
    for step in range(STEPS[dtype]):
        optimizer.zero_grad()
        loss, aux = moe.loss_fn(params, draw(step, (0, 1)), alpha=ALPHA)
        loss.backward()
        norm = torch.stack([x.grad.norm() for x in leaves]).norm().item()
        for x in leaves:
            x.grad.mul_(min(CLIP / norm, 1))
        optimizer.step()
        run.losses.append(loss.item())
        run.norms.append(norm)
        run.loads.append(aux["load"].tolist())
    return run


@pytest.fixture(scope="module")
def reference(pool: Pool) -> dict[torch.dtype, Run]:
    runs: dict[torch.dtype, Run] = {dtype: pool.run(1, plain, dtype)[0] for dtype in CLOSE}
    for run in runs.values():
        assert run.losses[-1] < run.losses[0] - 0.03 * len(run.losses)
        assert min(run.norms) > CLIP
        assert all(sum(load) == BATCH * CONTEXT * 2 for step in run.loads for load in step)  # nothing is dropped
    return runs


MESHES = [((n, 4 // n), ("fsdp", axis)) for axis in ("ep", "tp") for n in (4, 2, 1)]
MESHES += [((1,), ("fsdp",)), ((2,), ("ep",)), ((2, 2), ("ep", "tp")), ((2, 2), ("replica", "ep"))]
MESHES += [((2, 1, 2), ("tp", "fsdp", "ep")), ((2, 2), ("ep", "fsdp"))]
ROUNDED = [((n, 4 // n), ("fsdp", "ep")) for n in (4, 2, 1)]  # and every kind of collective
ROUNDED += [((2, 2), ("fsdp", "tp")), ((2, 2), ("replica", "ep"))]
RUNS = [(torch.float64, *mesh) for mesh in MESHES] + [(torch.float32, *mesh) for mesh in ROUNDED]


@pytest.mark.parametrize(("dtype", "shape", "axes"), RUNS, ids=str)
def test_training_is_the_same_on_every_mesh(
    run: Callable[..., list[Run]],
    reference: dict[torch.dtype, Run],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> None:
    ranks = torch.Size(shape).numel()
    want = reference[dtype]
    for got in run(ranks, sharded, dtype, shape, axes):
        assert got.loads == want.loads
        assert got.losses == pytest.approx(want.losses, rel=0, abs=CLOSE[dtype])
        assert got.norms == pytest.approx(want.norms, rel=0, abs=CLOSE[dtype])
        for path, x in want.params.items():
            assert (got.params[path] - x).abs().max().item() < CLOSE[dtype], path


def expert_gradients(shape: tuple[int, int], op: str, dense: P | None) -> dict[str, Any]:
    """One weight per expert; odd tokens go to expert 0, even ones to expert 1. The dense weight sees every token."""
    mesh = make_mesh(shape, ("fsdp", "ep"), device_type="cpu")
    spec = {"expert": P("ep", ragged="fsdp"), "dense": dense}
    params = shard({"expert": torch.ones(2), "dense": torch.ones(2)}, mesh, spec)
    ep, k, n = params.plan.bound().group(("ep",)), dist.get_rank(), 8 // dist.get_world_size()

    @gathered
    def loss_fn(p: Any, tokens: Tensor) -> Tensor:
        owner = (1 - tokens % 2).long() * ep.size // 2  # of the token's expert
        sent = torch.bincount(owner, minlength=ep.size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=mesh.get_group("ep"))
        order = owner.argsort(stable=True)
        there = moe.Exchange.apply((tokens * p["dense"][1])[order], sent.tolist(), received.tolist(), ep)
        expert = (1 - there.detach() % 2).long() - mesh.get_local_rank("ep") * (2 // ep.size)
        total = moe.Exchange.apply(p["expert"][expert] * there, received.tolist(), sent.tolist(), ep).sum()
        return total / (n if op == "mean" else 8)

    tokens = torch.arange(1.0, 9)[k * n : (k + 1) * n]
    out = {}
    for _ in range(2):
        loss, grads = value_and_grad(loss_fn, data_axes=("fsdp", "ep"), op=op)(params, tokens)
        out = {"loss": loss.item()} | {path: x.tolist() for path, x in unshard(grads).items()}
    return out


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("dense", [P(ragged=("fsdp", "ep")), P(ragged="fsdp"), None], ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (4, 1), (1, 1)])
def test_gradients_of_experts(run: Any, shape: tuple[int, int], dense: P | None, op: str) -> None:
    """Not larger by the number of ranks whose tokens an expert sees."""
    want = {"loss": 4.5, "expert": [2.0, 2.5], "dense": [0.0, 4.5]}
    assert run(shape[0] * shape[1], expert_gradients, shape, op, dense) == [want] * (shape[0] * shape[1])


def no_tokens_for_some() -> None:
    """All tokens go to one expert, and half of the ranks have none to begin with: nobody waits in vain."""
    mesh, generator = make_mesh((-1,), ("ep",), device_type="cpu"), torch.Generator().manual_seed(0)
    full = {"router": torch.zeros(4, 8)}  # indifferent: every token chooses the same
    full |= {name: torch.randn(8, 4, 4, generator=generator) for name in ("up", "down")}
    params = shard(full, mesh, {"router": None, "up": P("ep"), "down": P("ep")})
    at = moe.groups(params.plan)
    x = torch.randn(4, 3, 4, generator=generator)[at.ep.rank][: 3 * (at.ep.rank % 2)]
    loss_fn = gathered(lambda p, x: moe.mixture(p, x, at, k=1)[0].square().sum())
    for _ in range(2):
        _, grads = value_and_grad(loss_fn, data_axes="ep", op="sum")(params, x)
        assert (unshard(grads)["up"] != 0).any(dim=2).any(dim=1).sum() == 1


def test_ranks_without_tokens(run: Any) -> None:
    run(4, no_tokens_for_some)


FLAGS = {"width": 32, "layers": 2, "heads": 4, "experts": 4, "context": 32, "batch": 8}
FLAGS |= {"steps": 20, "every": 10, "eval-batches": 2, "device": "cpu"}


def flags(out: Path, **more: str) -> list[str]:
    return [f"--{k}={v}" for k, v in (FLAGS | {"text": moe.__file__, "out": out} | more).items()]


def rows_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def plainly(out: Path) -> tuple[str, list[dict[str, float]]]:
    """What the program prints and writes, run by plain python."""
    return execute(moe.__file__, *flags(out)).stdout, rows_of(out)


AHEAD = [plainly]


def main(arguments: list[str]) -> str:
    """What a rank of the pool prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        moe.main(arguments)
    assert dist.is_initialized()
    return out.getvalue()


def test_program(run: Callable[..., list[str]], ahead: Ahead, tmp_path: Path) -> None:
    """Plain python and four processes print and write the same training. Under torchrun: test_train_gpt.py."""
    said = run(4, main, flags(tmp_path, mesh="2,2", axes="ep,tp"))
    four, (text, one) = rows_of(tmp_path), ahead(plainly)
    assert said[0].count("\n") > 10
    assert said[1:] == [""] * 3
    for rows in (one, four):
        assert [row["step"] for row in rows] == [1, 10, 20]
        assert rows[-1]["val_loss"] < rows[0]["val_loss"] - 1
    for a, b in zip(one, four, strict=True):
        for name in ("loss", "val_loss", "busiest_expert_percent"):
            assert a[name] == pytest.approx(b[name], abs=1e-3)
    assert "layers.0 .. layers.1 (2x)" in text  # the plan
    assert "layers.0.router" in text  # the picture
