"""Decoders with experts of their own weights: Qwen 3 MoE and Mixtral."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ragged.cli.families.figures import Config, Shapes
from ragged.cli.families.parts import Attention, decoder, gated_mlp, linear, prefixed

__all__ = ["Mixtral", "Qwen3Moe"]


def _experts(count: int, shapes: Shapes) -> Shapes:
    return {k: v for i in range(count) for k, v in prefixed(f"experts.{i}", shapes).items()}


@dataclass(frozen=True)
class Qwen3Moe:
    """The figures of a decoder most of whose layers are routed.

    Attributes:
      dense: indices of layers with an ordinary MLP of width `intermediate`.

    Example:
      >>> tiny = Qwen3Moe(Attention(64, 4, 2, 16), 96, 32, experts=8, layers=2, vocab=100, dense=(0,))
      >>> [name for name in tiny.shapes() if "experts.7.up" in name]
      ['model.layers.1.mlp.experts.7.up_proj.weight']
    """

    attention: Attention
    intermediate: int
    expert_intermediate: int
    experts: int
    layers: int
    vocab: int
    dense: tuple[int, ...] = ()
    tied: bool = False

    def shapes(self) -> Shapes:
        return decoder(self.attention.hidden, self.vocab, self.tied, self._layers())

    def _layers(self) -> Iterator[Shapes]:
        hidden = self.attention.hidden
        attention = prefixed("self_attn", self.attention.shapes())
        dense = prefixed("mlp", gated_mlp(hidden, self.intermediate))
        expert = gated_mlp(hidden, self.expert_intermediate)
        routed = prefixed("mlp", {**linear("gate", self.experts, hidden), **_experts(self.experts, expert)})
        for i in range(self.layers):
            yield {**attention, **(dense if i in self.dense else routed)}

    @staticmethod
    def from_config(config: Config) -> Qwen3Moe:
        """From a config file; `decoder_sparse_step` and `mlp_only_layers` say which layers are dense."""
        experts = config.count("num_experts")
        layers = config.layers(experts)
        step = config.size("decoder_sparse_step", 1)
        listed = config.entries.get("mlp_only_layers") or []
        if not isinstance(listed, list) or any(type(i) is not int for i in listed):
            raise ValueError(f"{config.source}: 'mlp_only_layers' is {listed!r}, expected a list of layer numbers")
        dense = tuple(i for i in range(layers) if i in listed or not experts or (i + 1) % step)
        bias = config.flag("attention_bias", False)
        return Qwen3Moe(
            Attention.of(config, qkv_bias=bias, out_bias=bias, qk_norm=True),
            config.size("intermediate_size", 1 if not dense else None),
            config.size("moe_intermediate_size"),
            experts,
            layers,
            config.size("vocab_size"),
            dense,
            config.flag("tie_word_embeddings", False),
        )


@dataclass(frozen=True)
class Mixtral:
    """The figures of a decoder all of whose layers are routed, under Mixtral's names."""

    attention: Attention
    intermediate: int
    experts: int
    layers: int
    vocab: int
    tied: bool = False

    def shapes(self) -> Shapes:
        hidden = self.attention.hidden
        expert = gated_mlp(hidden, self.intermediate, names="w1 w3 w2")
        layer = {
            **prefixed("self_attn", self.attention.shapes()),
            **prefixed("block_sparse_moe", {**linear("gate", self.experts, hidden), **_experts(self.experts, expert)}),
        }
        return decoder(hidden, self.vocab, self.tied, (layer for _ in range(self.layers)))

    @staticmethod
    def from_config(config: Config) -> Mixtral:
        """From a config file."""
        experts = config.size("num_local_experts")
        return Mixtral(
            Attention.of(config),
            config.size("intermediate_size"),
            experts,
            config.layers(experts),
            config.size("vocab_size"),
            config.flag("tie_word_embeddings", False),
        )
