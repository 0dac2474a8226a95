"""Modules that tests train: tied ends, blocks under two names, checkpoints, Hugging Face's Llama."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpt import GPT, Config, full_params

__all__ = ["MODELS", "RATE", "STEPS", "Block", "Net", "llama", "net", "straight", "tokens"]


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d, bias=False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = x + scale * self.down(self.up(self.norm(x)).relu())
        return out


class Net(nn.Module):
    """Tied ends, a block that is called twice under two names, a buffer assigned anew, containers."""

    def __init__(self, d: int = 8, remat: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, d)
        self.layers = nn.ModuleList([Block(d) for _ in range(3)])
        self.layers.append(self.layers[1])
        self.ends = nn.ModuleDict({"norm": nn.LayerNorm(d), "head": nn.Linear(d, 11, bias=False)})
        self.ends["head"].weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.remat = remat

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls = self.calls + 1
        x = self.embedding(tokens)
        for layer in self.layers:
            run = functools.partial(checkpoint, layer, use_reentrant=False) if self.remat else layer
            x = run(x, scale=0.5)
        out: Tensor = self.ends["head"](self.ends["norm"](x))
        return out


def net(**options: Any) -> tuple[nn.Module, Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Net(**options), lambda out, tokens: nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten())


def llama(tied: bool = False, remat: bool = False) -> tuple[nn.Module, Callable[..., Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=11, num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=tied, **sizes
    )
    module = transformers.LlamaForCausalLM(config)
    if remat:
        module.activation_checkpointing_enable()
    return module, lambda out, tokens: nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens.flatten())


class PlainGPT(GPT):
    """The benchmarks' GPT, as a function of tokens alone."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens[:, :-1], tokens[:, 1:])


def gpt() -> tuple[nn.Module, Callable[..., Tensor]]:
    config = Config(d=8, layers=3, heads=2, T=5, B=1, V=11)
    return PlainGPT(full_params(config), config), lambda out, tokens: out


MODELS: dict[str, tuple[Callable[..., Any], list[str], dict[str, Any]]] = {
    "gpt": (gpt, ["layers.*"], {}),
    "net": (net, ["layers.*"], {}),
    "net, units as they come": (net, [], {}),
    "net, every module": (net, ["layers.*.*", "ends.*"], {}),
    "net, remat": (net, ["layers.*"], {"remat": True}),
    "llama": (llama, ["model.layers.*"], {}),
    "llama, tied": (llama, ["model.layers.*"], {"tied": True}),
    "llama, remat": (llama, ["model.layers.*"], {"remat": True}),
}
STEPS, RATE = 10, 1e-2


def tokens(rank: int, ranks: int, step: int) -> Tensor:
    all_of = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
    return all_of.chunk(ranks)[rank]


@functools.cache
def straight(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of plain torch."""
    make, _, options = MODELS[name]
    module, loss_of = make(**options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        batch = tokens(0, 1, step)
        optimizer.zero_grad()
        loss = loss_of(module(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in module.named_parameters()}
