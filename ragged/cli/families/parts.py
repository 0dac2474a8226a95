"""The parts that decoder families share: linear maps, attention with grouped heads, gated MLPs, embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ragged.cli.families.figures import Config, Shapes

__all__ = ["Attention", "decoder", "gated_mlp", "linear", "prefixed"]


def linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Shapes:
    """A weight of (outputs, inputs), and its bias.

    Example:
      >>> linear("o_proj", 8, 4, bias=True)
      {'o_proj.weight': (8, 4), 'o_proj.bias': (8,)}
    """
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    """The same shapes one level down."""
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def gated_mlp(hidden: int, intermediate: int, bias: bool = False, names: str = "gate_proj up_proj down_proj") -> Shapes:
    """Two maps up, of which one gates the other, and one down."""
    gate, up, down = names.split()
    return {
        **linear(gate, intermediate, hidden, bias),
        **linear(up, intermediate, hidden, bias),
        **linear(down, hidden, intermediate, bias),
    }


@dataclass(frozen=True)
class Attention:
    """Attention in which groups of `heads / kv_heads` queries share a key and a value."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False

    @staticmethod
    def of(config: Config, *, qkv_bias: bool = False, out_bias: bool = False, qk_norm: bool = False) -> Attention:
        """From the usual entries of a config file."""
        heads = config.size("num_attention_heads")
        return Attention(
            config.size("hidden_size"),
            heads,
            config.size("num_key_value_heads", heads),
            config.head_dim(),
            qkv_bias,
            out_bias,
            qk_norm,
        )

    def shapes(self) -> Shapes:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms: Shapes = {"q_norm.weight": (self.head_dim,), "k_norm.weight": (self.head_dim,)} if self.qk_norm else {}
        return {
            **linear("q_proj", q, self.hidden, self.qkv_bias),
            **linear("k_proj", kv, self.hidden, self.qkv_bias),
            **linear("v_proj", kv, self.hidden, self.qkv_bias),
            **linear("o_proj", self.hidden, q, self.out_bias),
            **norms,
        }


def decoder(hidden: int, vocab: int, tied: bool, layers: Iterator[Shapes]) -> Shapes:
    """Embedding, layers with a norm before each half, last norm, and the head unless it is the embedding."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i, layer in enumerate(layers):
        shapes |= prefixed(f"model.layers.{i}", layer)
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (hidden,)
        shapes[f"model.layers.{i}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes
