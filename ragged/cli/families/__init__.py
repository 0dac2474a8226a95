"""Parameter shapes of well-known models, computed from the figures of their config files.

One frozen dataclass per family, whose `shapes()` gives shapes by Hugging Face's own parameter names;
`FAMILIES` has their readers by `model_type`, and `family` chooses one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ragged.cli.families.deepseek import DeepseekV3
from ragged.cli.families.dense import Dense
from ragged.cli.families.experts import Mixtral, Qwen3Moe
from ragged.cli.families.figures import Config, Family, Shapes
from ragged.cli.families.gpt2 import Gpt2
from ragged.cli.families.gpt_oss import GptOss
from ragged.cli.families.parts import Attention

__all__ = [
    "FAMILIES",
    "Attention",
    "DeepseekV3",
    "Dense",
    "Family",
    "Gpt2",
    "GptOss",
    "Mixtral",
    "Qwen3Moe",
    "Shapes",
    "family",
]

FAMILIES: Mapping[str, Callable[[Config], Family]] = {
    "llama": Dense.from_config,
    "mistral": Dense.from_config,
    "qwen2": Dense.from_config,
    "qwen3": Dense.from_config,
    "seed_oss": Dense.from_config,
    "qwen3_moe": Qwen3Moe.from_config,
    "mixtral": Mixtral.from_config,
    "gpt_oss": GptOss.from_config,
    "deepseek_v3": DeepseekV3.from_config,
    "gpt2": Gpt2.from_config,
}


def family(entries: Mapping[str, Any], source: str = "config") -> Family:
    """The figures in the entries of a config file.

    Args:
      entries: the parsed file.
      source: its name, for messages.

    Raises:
      ValueError: an unknown `model_type`, or an entry that is missing or no fitting number.

    Example:
      >>> gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024}
      >>> family(gpt2)
      Gpt2(hidden=768, intermediate=3072, layers=12, vocab=50257, positions=1024, tied=True)
    """
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{source}: model_type {kind!r} is not one of {', '.join(sorted(FAMILIES))}; "
            "give the model's *.safetensors or model.safetensors.index.json file, which has all shapes"
        )
    return FAMILIES[kind](Config(entries, source))
