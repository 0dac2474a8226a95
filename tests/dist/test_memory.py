"""What a plan says about the memory of a training step is what the step needs, by the allocator's own record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.profiler import profile

from benchmarks.gpt import Config, batch, block, full_params, make_loss
from fsdp import Footprint, MixedPrecision, fold, footprint, gathered, value_and_grad
from optim import adamw, adamw8bit, make_step
from ragged import Memory, P, init, make_mesh, plan, random, rules, shard
from ragged.tree import sharded_trees

BF16, F32 = torch.bfloat16, torch.float32
BIG = Config(d=128, layers=4, heads=4, T=16, B=1, V=1024)  # parameters are most of it
LONG = Config(d=64, layers=3, heads=4, T=64, B=4, V=512)  # activations are
CASES = {
    "fp32": (BIG, {}, None, adamw),
    "fp32, activations": (LONG, {}, None, adamw),
    "kept": (BIG, {"reshard_after_forward": False}, None, adamw),
    "kept, activations": (LONG, {"reshard_after_forward": False}, None, adamw),
    "bf16": (BIG, {}, MixedPrecision(BF16), adamw),
    "bf16, activations": (LONG, {}, MixedPrecision(BF16), adamw),
    "bf16, fp32 on the wire": (BIG, {}, MixedPrecision(BF16, reduce_dtype=F32), adamw),
    "8-bit": (BIG, {}, None, adamw8bit),
}


class Peaks(NamedTuple):
    """Bytes: of parameters and state, and the peak with them; measured, and said before."""

    static: int
    peak: int
    said: Memory


def live_peak(run: Callable[[], Any]) -> int:
    """The most bytes alive at once that were allocated inside, by the profiler's record of the allocator."""
    with profile(profile_memory=True) as record:
        run()
    now = most = 0
    for event in record.kineto_results.events():  # (de)allocations in order
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def measured(f: Any, step: Any, params: Any, state: Any, *batch: Tensor) -> tuple[int, int]:
    """Bytes of parameters and state, and the peak of a later step with them."""
    box = [params, state]

    def train() -> None:
        _, grads = f(box[0], *batch)
        box[:] = step(box[0], grads, box[1])

    for _ in range(2):
        train()
    static = sum(x.nbytes for tree in sharded_trees(box) for x in tree.tensors)
    return static, static + live_peak(train)


def footprints(config: Config, dtype: torch.dtype) -> dict[str, Footprint]:
    """Of the benchmark's model, unit by unit."""

    def embed(p: Any, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, p["tokens"]) + p["positions"]

    def head(p: Any, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.rms_norm(x, (config.d,), p["norm"]) @ p["logits"]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    full = full_params(config)
    part = {name: {k: v.to(dtype) for k, v in full[name].items()} for name in ("embed", "head")}
    layer = {k: v.to(dtype) for k, v in full["layers"][0].items()}
    tokens, targets = batch(config, 0)
    x = torch.ones(config.B, config.T, config.d, dtype=dtype, requires_grad=True)
    return {
        "embed": footprint(embed, part["embed"], tokens),
        "layers.*": footprint(lambda p, x: block(p, x, config.heads), layer, x),
        "head": footprint(head, part["head"], x, targets),
    }


def gpt_peaks() -> dict[str, Peaks]:
    out = {}
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    for name, (config, options, precision, optimizer) in CASES.items():
        tx = optimizer(1e-4)
        params = shard(full_params(config), mesh, P(ragged="fsdp"), units=["layers.*"], optimizer=tx)
        f = value_and_grad(make_loss(config, **options), precision=precision)
        static, peak = measured(f, make_step(tx), params, tx.init(params), *batch(config, dist.get_rank()))
        feet = footprints(config, F32 if precision is None else BF16)
        out[name] = Peaks(static, peak, params.plan.memory(tx, footprints=feet, precision=precision, **options))
    return out


def check(found: list[dict[str, Peaks]]) -> None:
    for name in found[0]:
        static, peak = (max(ranks) for ranks in zip(*(here[name][:2] for here in found), strict=True))
        said = found[0][name].said
        assert said.params + said.state == pytest.approx(static, rel=0.01), name
        assert said.peak == pytest.approx(peak, rel=0.05), f"{name}: measured {peak:,}\n{said}"


def test_the_peak_of_a_gpt_is_predicted(run: Any) -> None:
    check(run(2, gpt_peaks))


# --- other meshes and structures ---------------------------------------------------------------

D, V, LAYERS, TOKENS = 64, 512, 3, 32


def embed(p: Any, t: Tensor) -> Tensor:
    out: Tensor = p[t]
    return out


def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x + torch.tanh(x @ p["w"] + p["b"]) @ p["v"])


def head(p: Any, x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((x * p["norm"]) @ p["w"], t)


def unembed(p: Any, x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x @ p.t(), t)


def peaks_of(shape: tuple[int, ...], kinds: tuple[str, ...]) -> dict[str, Peaks]:
    mesh = make_mesh(shape, ("replica", "fsdp")[2 - len(shape) :], device_type="cpu")
    one = {"w": ((D, 4 * D), F32), "b": ((4 * D,), F32), "v": ((4 * D, D), F32)}
    return {kind: _peak(kind, mesh, one) for kind in kinds}


def _peak(kind: str, mesh: Any, one: Any) -> Peaks:
    tied = kind == "tied"
    tree: dict[str, Any] = {"embed": ((V, D), F32), "layers": [one] * LAYERS}
    if not tied:
        tree["head"] = {"norm": ((D,), F32), "w": ((D, V), F32)}
    spec = rules({"embed": None, "**": P(ragged="fsdp")}) if kind == "replicated" else P(ragged="fsdp")
    layout = plan(tree, mesh, spec, units=["layers.*"])
    body, first, last = gathered(layer), gathered(embed), gathered(unembed if tied else head)

    def loss(p: Any, t: Tensor) -> Tensor:
        x = fold(body, p["layers"], first(p["embed"], t))
        return last(p["embed"] if tied else p["head"], x, t)

    tx, donate = adamw(1e-4), kind != "new trees"
    params = init(layout, random.normal(0.05), seed=0)
    t = torch.arange(TOKENS) * 7 % V
    static, peak = measured(value_and_grad(loss), make_step(tx, donate=donate), params, tx.init(params), t)
    full = {"w": torch.ones(D, V), "norm": torch.ones(D)}
    x, table = torch.ones(TOKENS, D, requires_grad=True), torch.ones(V, D)
    feet: dict[str, Any] = {
        "layers.*": footprint(layer, {name: torch.ones(shape) for name, (shape, _) in one.items()}, x),
        "embed": footprint(embed, table, t),
    }
    calls = ["embed", *(f"layers.{i}" for i in range(LAYERS))]
    if tied:
        feet["embed"] = [feet["embed"], footprint(unembed, table, x, t)]
        calls.append("embed")
    else:
        feet["head"] = footprint(head, full, x, t)
        calls.append("head")
    return Peaks(static, peak, layout.memory(tx, calls=calls, footprints=feet, donate=donate))


def test_tied_replicated_and_new_trees(run: Any) -> None:
    check(run(2, peaks_of, (-1,), ("plain", "tied", "replicated", "new trees")))


def test_replicas_of_shards(run: Any) -> None:
    check(run(4, peaks_of, (2, 2), ("plain",)))


def test_one_rank(run: Any) -> None:
    check(run(1, peaks_of, (1,), ("plain", "tied")))
