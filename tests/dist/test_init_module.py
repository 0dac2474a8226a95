"""`init_module`: a module's own initializers fill shards, bit by bit as `module.apply` fills the module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp import functionalize, init_module
from ragged import P, make_mesh, plan, unshard


class Mlp(nn.Module):
    """A parent whose initializer reaches into a child, as GPT-2's does; nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.embedding = nn.Embedding(5, 4, padding_idx=1)
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.layers.append(self.layers[0])
        self.attention = nn.MultiheadAttention(4, 2)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def by_methods(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            return


def as_transformers_do(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(std=0.02)
    if isinstance(module, nn.MultiheadAttention):
        nn.init.xavier_uniform_(module.in_proj_weight)
    if isinstance(module, Net):
        module.scale.data.fill_(2.0)
    if isinstance(module, nn.BatchNorm1d):
        module.reset_parameters()
    for p in module.parameters(recurse=False):
        if p.ndim == 1 and not isinstance(module, Net | nn.BatchNorm1d):
            nn.init.zeros_(p)
    if isinstance(module, Mlp):
        module.down.weight.data.mul_(0.5)


def made(how: Callable[[nn.Module], None] | None, units: list[str]) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        module = Net()
    _, shapes, _ = functionalize(module)
    layout = plan(shapes, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=units)
    state = torch.random.get_rng_state()
    params, buffers = init_module(module, layout, seed=7, init_fn=how)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(p.is_meta for p in module.parameters())
    assert buffers["layers"]["0"]["norm"]["running_var"].tolist() == [1.0] * 8
    full = unshard(params)
    return {path: functools.reduce(lambda t, k: t[k], path.split("."), full) for path in params.paths}


@pytest.mark.parametrize("how", [None, as_transformers_do])
@pytest.mark.parametrize(("ranks", "units"), [(1, ["."]), (2, ["layers.*"]), (3, []), (3, ["layers.*"])])
def test_ranks_hold_what_one_process_makes(run: Any, how: Any, ranks: int, units: list[str]) -> None:
    module = Net()
    torch.manual_seed(7)
    with torch.no_grad():
        module.apply(how or by_methods)
    want = dict(module.named_parameters())
    for found in run(ranks, made, how, units):
        assert found.keys() == want.keys()
        for path, x in found.items():
            assert torch.equal(x, want[path]), path


def refused() -> list[str]:
    def weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    def half(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight[:2])
            nn.init.ones_(module.bias)

    def reaching(module: nn.Module) -> None:
        by_methods(module)
        if isinstance(module, nn.Sequential):
            module[0].weight.data.zero_()

    said = []
    for how in (weights, half, reaching, by_methods):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            if how is by_methods:
                module.register_buffer("ids", torch.arange(4))
        _, shapes, _ = functionalize(module)
        layout = plan(shapes, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=["*"])
        with pytest.raises(ValueError, match="initialise") as error:
            init_module(module, layout, seed=0, init_fn=how)
        said.append(str(error.value))
    return said


def test_what_stays_without_values_is_named(run: Any) -> None:
    words = ["parameter '0.bias'", "parameter '0.weight'", "'0.weight' of unit '0'", "buffer 'ids'"]
    for said in run(2, refused):
        for word, text in zip(words, said, strict=True):
            assert word in text
