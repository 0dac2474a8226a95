"""DeepSeek-V3: latent attention, a few dense layers first, then many experts and a shared one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ragged.cli.families.figures import Config, Shapes
from ragged.cli.families.parts import decoder, gated_mlp, linear, prefixed

__all__ = ["DeepseekV3"]


@dataclass(frozen=True)
class DeepseekV3:
    """The figures of a DeepSeek-V3 model, without its layers for multi-token prediction.

    Attributes:
      q_rank, kv_rank: of the latent queries (None: full queries), keys and values.
      rope_dim, nope_dim, v_dim: per head, of queries and keys with and without positions, and of values.
      dense_layers: so many layers at the start have an ordinary MLP of width `intermediate`.
      every: of the layers after these, those whose index is a multiple of it are routed.
    """

    hidden: int
    intermediate: int
    expert_intermediate: int
    experts: int
    shared_experts: int
    layers: int
    dense_layers: int
    heads: int
    q_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    vocab: int
    every: int = 1
    attention_bias: bool = False
    tied: bool = False

    def shapes(self) -> Shapes:
        return decoder(self.hidden, self.vocab, self.tied, self._layers())

    def attention(self) -> Shapes:
        """Queries, keys and values by way of a space of low rank."""
        queries, bias = self.heads * (self.nope_dim + self.rope_dim), self.attention_bias
        if self.q_rank is None:
            q = linear("q_proj", queries, self.hidden)
        else:
            q = {
                **linear("q_a_proj", self.q_rank, self.hidden, bias),
                "q_a_layernorm.weight": (self.q_rank,),
                **linear("q_b_proj", queries, self.q_rank),
            }
        return {
            **q,
            **linear("kv_a_proj_with_mqa", self.kv_rank + self.rope_dim, self.hidden, bias),
            "kv_a_layernorm.weight": (self.kv_rank,),
            **linear("kv_b_proj", self.heads * (self.nope_dim + self.v_dim), self.kv_rank),
            **linear("o_proj", self.hidden, self.heads * self.v_dim, bias),
        }

    def _layers(self) -> Iterator[Shapes]:
        attention = prefixed("self_attn", self.attention())
        dense = prefixed("mlp", gated_mlp(self.hidden, self.intermediate))
        gate: Shapes = {
            **linear("gate", self.experts, self.hidden),
            "gate.e_score_correction_bias": (self.experts,),
        }
        expert = gated_mlp(self.hidden, self.expert_intermediate)
        parts = {k: v for i in range(self.experts) for k, v in prefixed(f"experts.{i}", expert).items()}
        shared: Shapes = {}
        if self.shared_experts:
            shared = prefixed("shared_experts", gated_mlp(self.hidden, self.shared_experts * self.expert_intermediate))
        routed = prefixed("mlp", {**gate, **parts, **shared})
        for i in range(self.layers):
            yield {**attention, **(dense if i < self.dense_layers or i % self.every else routed)}

    @staticmethod
    def from_config(config: Config) -> DeepseekV3:
        """From a config file."""
        experts = config.size("n_routed_experts")
        return DeepseekV3(
            hidden=config.size("hidden_size"),
            intermediate=config.size("intermediate_size"),
            expert_intermediate=config.size("moe_intermediate_size"),
            experts=experts,
            shared_experts=config.count("n_shared_experts", 0),
            layers=config.layers(experts),
            dense_layers=config.count("first_k_dense_replace", 0),
            heads=config.size("num_attention_heads"),
            q_rank=None if config.entries.get("q_lora_rank") is None else config.size("q_lora_rank"),
            kv_rank=config.size("kv_lora_rank"),
            rope_dim=config.size("qk_rope_head_dim"),
            nope_dim=config.size("qk_nope_head_dim"),
            v_dim=config.size("v_head_dim"),
            vocab=config.size("vocab_size"),
            every=config.size("moe_layer_freq", 1),
            attention_bias=config.flag("attention_bias", False),
            tied=config.flag("tie_word_embeddings", False),
        )
