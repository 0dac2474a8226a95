"""Reading the figures of a Hugging Face `config.json`: whole numbers and flags, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

__all__ = ["Config", "Family", "Shapes"]

Shapes: TypeAlias = dict[str, tuple[int, ...]]

MOST_PARTS = 1_000_000  # layers times experts: more is a typing error that would fill the memory


class Family(Protocol):
    """The figures of one model; a frozen dataclass per family of models."""

    def shapes(self) -> Shapes:
        """Shapes by Hugging Face's own parameter names, tied parameters once."""
        ...


@dataclass(frozen=True)
class Config:
    """The entries of a config file, and where it is, for messages.

    Example:
      >>> Config({"hidden_size": 64, "head_dim": None}, "config.json").size("head_dim", 16)
      16
    """

    entries: Mapping[str, Any]
    source: str

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; `default` where the entry is missing or null.

        Raises:
          ValueError: no such entry and no default, or no whole number of at least 1.
        """
        return self._whole(key, default, 1)

    def count(self, key: str, default: int | None = None) -> int:
        """As `size`, of things that may be absent altogether: at least 0."""
        return self._whole(key, default, 0)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value; `default` where the entry is missing or null.

        Raises:
          ValueError: neither true nor false.
        """
        value = self.entries.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.source}: {key!r} is {value!r}, expected true or false")
        return value

    def head_dim(self) -> int:
        """`head_dim`, or else the hidden size over the number of heads.

        Raises:
          ValueError: the heads don't divide the hidden size, or as in `size`.
        """
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if self.entries.get("head_dim") is None and hidden % heads:
            raise ValueError(
                f"{self.source}: 'num_attention_heads' = {heads} does not divide 'hidden_size' = {hidden}; "
                "correct one of them, or give 'head_dim'"
            )
        return self.size("head_dim", hidden // heads)

    def layers(self, experts: int = 1) -> int:
        """`num_hidden_layers`, if that many layers of so many experts are believable.

        Raises:
          ValueError: too many, or as in `size`.
        """
        layers = self.size("num_hidden_layers")
        if layers * max(experts, 1) > MOST_PARTS:
            raise ValueError(
                f"{self.source}: {layers} layers of {experts} experts are more than {MOST_PARTS:,} parts; "
                "correct 'num_hidden_layers' or the number of experts"
            )
        return layers

    def _whole(self, key: str, default: int | None, least: int) -> int:
        value = self.entries.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"{self.source} has no {key!r}, which its 'model_type' needs")
            return default
        if type(value) is not int or value < least:
            raise ValueError(f"{self.source}: {key!r} is {value!r}, expected a whole number of at least {least}")
        return value
