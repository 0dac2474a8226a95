"""GPT-OSS: experts stacked in tensors of three dims, attention with sinks."""

from __future__ import annotations

from dataclasses import dataclass

from ragged.cli.families.figures import Config, Shapes
from ragged.cli.families.parts import Attention, decoder, linear, prefixed

__all__ = ["GptOss"]


@dataclass(frozen=True)
class GptOss:
    """The figures of a GPT-OSS model, in its unquantized form.

    Example:
      >>> figures = GptOss(Attention(2880, 64, 8, 64, qkv_bias=True, out_bias=True), 2880, 32, 24, 201088)
      >>> figures.shapes()["model.layers.0.mlp.experts.gate_up_proj"]
      (32, 2880, 5760)
    """

    attention: Attention
    intermediate: int
    experts: int
    layers: int
    vocab: int
    tied: bool = False

    def shapes(self) -> Shapes:
        n, hidden, inner = self.experts, self.attention.hidden, self.intermediate
        experts: Shapes = {
            "gate_up_proj": (n, hidden, 2 * inner),
            "gate_up_proj_bias": (n, 2 * inner),
            "down_proj": (n, inner, hidden),
            "down_proj_bias": (n, hidden),
        }
        layer = {
            **prefixed("self_attn", {**self.attention.shapes(), "sinks": (self.attention.heads,)}),
            **prefixed("mlp", {**linear("router", n, hidden, bias=True), **prefixed("experts", experts)}),
        }
        return decoder(hidden, self.vocab, self.tied, (layer for _ in range(self.layers)))

    @staticmethod
    def from_config(config: Config) -> GptOss:
        """From a config file."""
        bias = config.flag("attention_bias", True)
        return GptOss(
            Attention.of(config, qkv_bias=bias, out_bias=bias),
            config.size("intermediate_size"),
            config.size("num_local_experts"),
            config.layers(),
            config.size("vocab_size"),
            config.flag("tie_word_embeddings", False),
        )
