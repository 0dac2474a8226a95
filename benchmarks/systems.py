"""The systems that a benchmark compares, each as a `step()` over the same model and batch.

A builder takes the model's sizes and `mark`, which a step calls where one of its parts ends.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpt import GPT, Block, Config, batch, full_params, make_loss
from benchmarks.limit import limit_bytes, limit_compute

__all__ = ["LR", "REQUIRES", "SYSTEMS", "missing", "ours"]

LR = 1e-4
Mark = Callable[[str], None]
Step = Callable[[], Tensor]


def _quiet(name: str) -> None:
    pass


def ours(config: Config, mark: Mark = _quiet, bf16: bool = False, **options: Any) -> Step:
    """This library: ragged shards, zero-copy gathers, fused AdamW on the donated path."""
    from fsdp import MixedPrecision, value_and_grad
    from optim import adamw, make_step
    from ragged import P, make_mesh, rules, shard

    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    rows = P(ragged="fsdp")
    by_expert = P(ragged="fsdp", block=(1, 1, None))  # rows of an expert's matrix, not whole experts
    spec = rules({"**.up": by_expert, "**.down": by_expert, "**": rows}) if config.experts else rows
    params = shard(full_params(config), mesh, spec, units=["layers.*"])
    model = make_loss(config, **options)

    def loss_fn(params: Any, *args: Tensor) -> Tensor:
        loss = model(params, *args)
        mark("forward")
        return loss

    f = value_and_grad(loss_fn, precision=MixedPrecision(torch.bfloat16) if bf16 else None)
    tx = adamw(LR, weight_decay=0.01)
    update = make_step(tx, donate=True)
    box = [params, tx.init(params)]
    del params
    tokens, targets = batch(config, dist.get_rank())

    def step() -> Tensor:
        loss, grads = f(box[0], tokens, targets)
        mark("backward")
        params, state = box
        box.clear()
        box.extend(update(params, grads, state))
        mark("optimizer")
        out: Tensor = loss
        return out

    return step


def _in_place(config: Config, mark: Mark, wrap: Callable[[GPT], nn.Module]) -> Step:
    """The loop that everybody writes, around a model that some system has wrapped."""
    model = wrap(GPT(full_params(config), config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
    tokens, targets = batch(config, dist.get_rank())

    def step() -> Tensor:
        loss: Tensor = model(tokens, targets)
        mark("forward")
        loss.backward()
        mark("backward")
        optimizer.step()
        optimizer.zero_grad()
        mark("optimizer")
        return loss.detach()

    return step


def unsharded(config: Config, mark: Mark = _quiet, bf16: bool = False) -> Step:
    """One process, nothing wrapped."""
    return _in_place(config, mark, lambda model: model.bfloat16() if bf16 else model)


def ours_in_place(config: Config, mark: Mark = _quiet, bf16: bool = False, **options: Any) -> Step:
    """This library's `fully_shard` on every block and on the root."""
    from fsdp import MixedPrecision, fully_shard

    if bf16:
        options["mp_policy"] = MixedPrecision(torch.bfloat16)
    return _in_place(config, mark, lambda model: _every_block(fully_shard, model, options))


def fsdp2(config: Config, mark: Mark = _quiet, bf16: bool = False, **options: Any) -> Step:
    """torch's `fully_shard` on every block and on the root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return _in_place(config, mark, lambda model: _every_block(fully_shard, model, options))


def _every_block(fully_shard: Any, model: GPT, options: dict[str, Any]) -> nn.Module:
    from ragged import make_mesh

    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def fsdp2_kept(config: Config, mark: Mark = _quiet, bf16: bool = False) -> Step:
    """torch's, with all parameters kept from forward to backward."""
    return fsdp2(config, mark, bf16, reshard_after_forward=False)


def fsdp1(config: Config, mark: Mark = _quiet, bf16: bool = False) -> Step:
    """torch's `FullyShardedDataParallel`, every block and the root, as its users wrap them."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    dtype = torch.bfloat16 if bf16 else None
    precision = MixedPrecision(dtype, reduce_dtype=dtype, buffer_dtype=dtype) if bf16 else None

    def wrap(model: GPT) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=precision,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )

    return _in_place(config, mark, wrap)


def ddp(config: Config, mark: Mark = _quiet, bf16: bool = False) -> Step:
    """torch's `DistributedDataParallel`: every rank holds everything. The yardstick without sharding."""
    from torch.nn.parallel import DistributedDataParallel

    return _in_place(config, mark, lambda model: DistributedDataParallel(model.bfloat16() if bf16 else model))


def deepspeed(config: Config, mark: Mark = _quiet, bf16: bool = False) -> Step:
    """DeepSpeed's ZeRO-3 with torch's AdamW; gradient clipping off."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore")
    import deepspeed as ds  # type: ignore[import-not-found]

    model = GPT(full_params(config), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": bf16},
    }
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    tokens, targets = batch(config, dist.get_rank())

    def step() -> Tensor:
        loss: Tensor = engine(tokens, targets)
        mark("forward")
        engine.backward(loss)
        mark("backward")
        engine.step()
        mark("optimizer")
        return loss.detach()

    return step


SYSTEMS: dict[str, Callable[..., Step]] = {
    "ours": ours,
    "ours, in place": ours_in_place,
    "FSDP2": fsdp2,
    "FSDP2, kept": fsdp2_kept,
    "FSDP1": fsdp1,
    "DDP": ddp,
    "DeepSpeed ZeRO-3": deepspeed,
    "limit: compute": limit_compute,
    "limit: bytes": limit_bytes,
}
REQUIRES = {"DeepSpeed ZeRO-3": "deepspeed"}


def missing(name: str) -> str | None:
    """Why a system can't be built here, if its package isn't installed."""
    package = REQUIRES.get(name)
    return None if package is None or importlib.util.find_spec(package) else f"{package} is not installed"
