"""Decoders with one gated MLP per layer: LLaMA, Mistral, Qwen 2 and 3, Seed-OSS."""

from __future__ import annotations

from dataclasses import dataclass

from ragged.cli.families.figures import Config, Shapes
from ragged.cli.families.parts import Attention, decoder, gated_mlp, prefixed

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense:
    """The figures of a dense decoder.

    Example:
      >>> figures = Dense(Attention(4096, 32, 8, 128), intermediate=14336, layers=32, vocab=128256)
      >>> figures.shapes()["model.layers.31.self_attn.k_proj.weight"]
      (1024, 4096)
    """

    attention: Attention
    intermediate: int
    layers: int
    vocab: int
    mlp_bias: bool = False
    tied: bool = False

    def shapes(self) -> Shapes:
        hidden = self.attention.hidden
        layer = {
            **prefixed("self_attn", self.attention.shapes()),
            **prefixed("mlp", gated_mlp(hidden, self.intermediate, self.mlp_bias)),
        }
        return decoder(hidden, self.vocab, self.tied, (layer for _ in range(self.layers)))

    @staticmethod
    def from_config(config: Config) -> Dense:
        """From a config file of one of the five model types, which differ in biases and norms."""
        kind = config.entries["model_type"]
        bias = config.flag("attention_bias", kind == "seed_oss") if kind not in ("mistral", "qwen2") else False
        out_bias = config.flag("attention_out_bias", False) if kind == "seed_oss" else bias
        return Dense(
            Attention.of(config, qkv_bias=bias or kind == "qwen2", out_bias=out_bias, qk_norm=kind == "qwen3"),
            config.size("intermediate_size"),
            config.layers(),
            config.size("vocab_size"),
            config.flag("mlp_bias", False) if kind in ("llama", "seed_oss") else False,
            config.flag("tie_word_embeddings", False),
        )
