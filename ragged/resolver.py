"""One resolver for everything that is said per leaf: specs, labels, masks, initializers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import optree

from ragged.paths import flatten

__all__ = ["Rules", "match_prefix", "matches", "one_by_one", "resolve", "rules"]

Pattern = str | re.Pattern[str]


class Rules:
    """Ordered patterns on dotted paths and their values. Made by `rules`."""

    def __init__(self, table: Mapping[Pattern, Any]) -> None:
        for pattern in table:
            if not isinstance(pattern, (str, re.Pattern)):
                raise ValueError(f"rules: pattern {pattern!r} is neither a glob string nor a compiled regex")
        self.table = dict(table)

    def __repr__(self) -> str:
        return f"rules({self.table!r})"


def rules(table: Mapping[Pattern, Any]) -> Rules:
    """Values by pattern: the first pattern that matches a leaf's dotted path wins.

    A `str` is a glob on the whole path, `*` for one component and `**` for any number; a
    compiled `re.Pattern` is searched. A leaf that nothing matches and a pattern that matches
    nothing both raise when the rules are used, so that a typing error can't go unnoticed.

    Example:
      >>> from ragged import P, TENSOR, plan, rules
      >>> spec = rules({"**.bias": P(ragged="fsdp"), "**": P(ragged="fsdp", block=TENSOR)})
    """
    return Rules(table)


@lru_cache(maxsize=4096)
def _glob(pattern: str) -> re.Pattern[str]:
    """The glob as a regex over components, each followed by a dot."""
    one = {"*": r"[^.]*"}
    parts = [
        r"(?:[^.]+\.)*" if part == "**" else "".join(one.get(c, re.escape(c)) for c in part) + r"\."
        for part in pattern.split(".")
    ]
    return re.compile("".join(parts))


def _dotted(path: str) -> str:
    return path + "." if path else ""


def matches(pattern: Pattern, path: str) -> bool:
    """Whether a pattern matches a whole path."""
    if isinstance(pattern, str):
        return _glob(pattern).fullmatch(_dotted(path)) is not None
    return pattern.search(path) is not None


def match_prefix(pattern: Pattern, path: str) -> str | None:
    """The leading components of `path` that the pattern matches, or None; "." stands for the root, which all share."""
    if pattern == ".":
        return "."
    if isinstance(pattern, str):
        found = _glob(pattern).match(_dotted(path))
        return found.group().removesuffix(".") if found else None
    found = pattern.search(path)
    if found is None:
        return None
    end = path.find(".", max(found.end() - 1, 0))
    return path if end == -1 else path[:end]


def resolve(
    value: Any,
    tree: Any,
    *,
    what: str,
    is_value: Callable[[Any], bool],
    is_leaf: Callable[[Any], bool] | None = None,
    paths_leaves: tuple[list[str], list[Any]] | None = None,
) -> list[Any]:
    """One value per leaf of `tree`, in flatten order.

    Args:
      value: a single value, a prefix pytree of values, a callable `(path, leaf) -> value`, or
        `rules({pattern: value})`.
      what: what the values are, for messages ("spec", "label", ...).
      is_value: tells a value from a container of values. A pytree that is also callable is a
        pytree: only a value that is no container is taken for a function.

    Raises:
      ValueError: a leaf without a value, a pattern without a leaf, or a prefix tree of another
        structure, naming the first path that differs.
    """
    if paths_leaves is None:
        paths, leaves, _ = flatten(tree, is_leaf)
    else:
        paths, leaves = paths_leaves
    if isinstance(value, Rules):
        return _from_rules(value, paths, what)
    if is_value(value):
        return [value] * len(paths)
    if optree.tree_is_leaf(value, none_is_leaf=False) and callable(value):
        return [value(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    return _from_prefix(value, paths, what, is_value)


def _from_rules(table: Rules, paths: Sequence[str], what: str) -> list[Any]:
    for pattern in table.table:
        if not any(matches(pattern, path) for path in paths):
            raise ValueError(f"{what} rule {_text(pattern)!r} matches no leaf; correct or remove it")
    return [_by_rule(table, path, what) for path in paths]


def _by_rule(table: Rules, path: str, what: str) -> Any:
    for pattern, value in table.table.items():
        if matches(pattern, path):
            return value
    known = ", ".join(repr(_text(p)) for p in table.table)[:200]
    raise ValueError(f'no {what} for leaf {path!r}: none of {known} matches; add a rule or "**" last')


def one_by_one(value: Any, *, what: str, is_value: Callable[[Any], bool]) -> Callable[[str, Any], Any]:
    """A function from a leaf's path and the leaf to its value, as `resolve` finds it, for when all leaves aren't known.

    Raises:
      ValueError: from the function, if there is no value for a leaf.
    """
    if isinstance(value, Rules):
        return lambda path, leaf: _by_rule(value, path, what)
    if is_value(value):
        return lambda path, leaf: value
    if optree.tree_is_leaf(value, none_is_leaf=False) and callable(value):
        found: Callable[[str, Any], Any] = value
        return found
    table = _prefix_table(value, what, is_value)
    return lambda path, leaf: table[_prefix_of(table, path, what)]


def _text(pattern: Pattern) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def _from_prefix(value: Any, paths: Sequence[str], what: str, is_value: Callable[[Any], bool]) -> list[Any]:
    """Values of a prefix tree, looked up by path, so that mappings of any type may be mixed."""
    table = _prefix_table(value, what, is_value)
    unused = set(table)
    out = []
    for path in paths:
        found = _prefix_of(table, path, what)
        unused.discard(found)
        out.append(table[found])
    # An entry for a subtree without leaves (None, an empty list) is no mistake: None is structure.
    if extra := sorted(p for p in unused if table[p] is not None):
        raise ValueError(f"the {what} tree has an entry {extra[0]!r} that matches no leaf")
    return out


def _prefix_table(value: Any, what: str, is_value: Callable[[Any], bool]) -> dict[str, Any]:
    prefixes, values, _ = flatten(value, is_value, none_is_leaf=True)
    table: dict[str, Any] = {}
    for path, v in zip(prefixes, values, strict=True):
        if v is None and not is_value(v):
            continue  # structure, as in the tree itself
        if not is_value(v):
            raise ValueError(f"{what} tree: the entry {path!r} is {brief(v)}, not a {what}")
        table[path] = v
    return table


def _prefix_of(table: Mapping[str, Any], path: str, what: str) -> str:
    """The longest entry above a path."""
    parts = path.split(".")
    found = next((p for n in range(len(parts), -1, -1) if (p := ".".join(parts[:n])) in table), None)
    if found is None:
        raise ValueError(f"no {what} for leaf {path!r}: the {what} tree has no entry for it or above it")
    return found


def brief(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 60 else text[:57] + "..."
