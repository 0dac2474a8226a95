"""GPT-2: learned positions, weights stored as (inputs, outputs), the head tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass

from ragged.cli.families.figures import Config, Shapes
from ragged.cli.families.parts import prefixed

__all__ = ["Gpt2"]


def _affine(name: str, first: tuple[int, ...]) -> Shapes:
    """A weight and the bias of its last dim."""
    return {f"{name}.weight": first, f"{name}.bias": first[-1:]}


@dataclass(frozen=True)
class Gpt2:
    """The figures of a GPT-2 model.

    Example:
      >>> Gpt2(768, 3072, 12, 50257, 1024).shapes()["transformer.h.11.attn.c_attn.weight"]
      (768, 2304)
    """

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    positions: int
    tied: bool = True

    def shapes(self) -> Shapes:
        h = self.hidden
        layer = {
            **_affine("ln_1", (h,)),
            **_affine("attn.c_attn", (h, 3 * h)),
            **_affine("attn.c_proj", (h, h)),
            **_affine("ln_2", (h,)),
            **_affine("mlp.c_fc", (h, self.intermediate)),
            **_affine("mlp.c_proj", (self.intermediate, h)),
        }
        shapes: Shapes = {"transformer.wte.weight": (self.vocab, h), "transformer.wpe.weight": (self.positions, h)}
        for i in range(self.layers):
            shapes |= prefixed(f"transformer.h.{i}", layer)
        shapes |= _affine("transformer.ln_f", (h,))
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, h)
        return shapes

    @staticmethod
    def from_config(config: Config) -> Gpt2:
        """From a config file, which has keys of its own (`n_embd`, `n_layer`, ...)."""
        hidden = config.size("n_embd")
        renamed = Config({**config.entries, "num_hidden_layers": config.size("n_layer")}, config.source)
        return Gpt2(
            hidden,
            config.size("n_inner", 4 * hidden),
            renamed.layers(),
            config.size("vocab_size"),
            config.size("n_positions"),
            config.flag("tie_word_embeddings", True),
        )
