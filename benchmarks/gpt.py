"""One GPT in two forms with the same arithmetic: pure functions over a tree, and an nn.Module.

Dense, or with a mixture of experts in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fsdp import fold, gathered


@dataclass(frozen=True)
class Config:
    """Sizes of a GPT: width, layers, heads, tokens per sequence, sequences per rank, vocabulary, experts (0: dense)."""

    d: int = 512
    layers: int = 8
    heads: int = 8
    T: int = 128
    B: int = 1
    V: int = 8192
    experts: int = 0

    def shapes(self) -> dict[str, Any]:
        """The parameter tree as (shape, dtype) pairs; matrices are (in, out)."""
        d, f32 = self.d, torch.float32
        layer = {
            "norm1": ((d,), f32),
            "qkv": ((d, 3 * d), f32),
            "out": ((d, d), f32),
            "norm2": ((d,), f32),
        }
        if self.experts:
            e = self.experts
            layer |= {"router": ((d, e), f32), "up": ((e, d, 2 * d), f32), "down": ((e, 2 * d, d), f32)}
        else:
            layer |= {"up": ((d, 4 * d), f32), "down": ((4 * d, d), f32)}
        return {
            "embed": {"tokens": ((self.V, d), f32), "positions": ((self.T, d), f32)},
            "layers": [dict(layer) for _ in range(self.layers)],
            "head": {"norm": ((d,), f32), "logits": ((d, self.V), f32)},
        }


def attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int) -> Tensor:
    q, k, v = rearrange(x @ qkv, "b t (three h c) -> three b h t c", three=3, h=heads)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return rearrange(y, "b h t c -> b t (h c)") @ out


def block(p: Any, x: Tensor, heads: int) -> Tensor:
    d = x.shape[-1]
    x = x + attention(F.rms_norm(x, (d,), p["norm1"]), p["qkv"], p["out"], heads)
    y = F.rms_norm(x, (d,), p["norm2"])
    if "router" in p:
        return x + mixture(y, p["router"], p["up"], p["down"])
    return x + F.gelu(y @ p["up"]) @ p["down"]


def mixture(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every token goes to the one expert that its router prefers."""
    tokens = rearrange(x, "b t d -> (b t) d")
    weight, chosen = (tokens @ router).softmax(-1).max(-1)
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=len(up)).tolist()
    parts = [
        F.gelu(part @ u) @ v for part, u, v in zip(tokens[order].split(counts), up.unbind(), down.unbind(), strict=True)
    ]
    out = torch.zeros_like(tokens).index_copy(0, order, torch.cat(parts)) * weight[:, None]
    return out.view_as(x)


def make_loss(config: Config, **options: Any) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """Cross-entropy of the next token, on sharded or plain trees."""

    # Backward reads nothing of the embedding: kept, it is freed after forward and not gathered again.
    @gathered(**{"reshard_after_forward": False} | options)
    def embed(p: Any, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, p["tokens"]) + p["positions"]

    @gathered(**options)
    def layer(p: Any, x: Tensor) -> Tensor:
        return block(p, x, config.heads)

    @gathered(**options)
    def head(p: Any, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.rms_norm(x, (config.d,), p["norm"]) @ p["logits"]
        return F.cross_entropy(rearrange(logits, "b t v -> (b t) v"), targets.flatten())

    def loss(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        x = embed(params["embed"], tokens)
        x = fold(layer, params["layers"], x)
        return head(params["head"], x, targets)

    return loss


class Block(nn.Module):
    def __init__(self, p: Any, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name, value in p.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, x: Tensor) -> Tensor:
        return block(dict(self.named_parameters(recurse=False)), x, self.heads)


class GPT(nn.Module):
    """The module form, from a tree of full tensors."""

    def __init__(self, params: Any, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Parameter(params["embed"]["tokens"].clone())
        self.positions = nn.Parameter(params["embed"]["positions"].clone())
        self.layers = nn.ModuleList(Block(p, config.heads) for p in params["layers"])
        self.norm = nn.Parameter(params["head"]["norm"].clone())
        self.logits = nn.Parameter(params["head"]["logits"].clone())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(tokens, self.tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = F.rms_norm(x, (self.config.d,), self.norm) @ self.logits
        return F.cross_entropy(rearrange(logits, "b t v -> (b t) v"), targets.flatten())


def full_params(config: Config, seed: int = 0) -> Any:
    """Full tensors, the same for every system of a comparison."""
    generator = torch.Generator().manual_seed(seed)

    def make(spec: Any) -> Tensor:
        shape, dtype = spec
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        return torch.randn(shape, generator=generator, dtype=dtype) / math.sqrt(shape[-2])

    import optree

    return optree.tree_map(make, config.shapes(), is_leaf=lambda x: isinstance(x, tuple))


def batch(config: Config, rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """This rank's tokens and targets."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, config.V, (config.B, config.T + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].contiguous()
