"""How each unit is gathered: one setting for all, or rules on their names."""

from __future__ import annotations

from typing import Any

from fsdp.gates import Options
from fsdp.precision import as_precision
from ragged.plans import Plan
from ragged.resolver import resolve

__all__ = ["options_by_unit"]


def options_by_unit(plan: Plan, options: Options) -> dict[str, Options]:
    """The options of each unit of a plan.

    Raises:
      ValueError: a unit that no rule matches, or a value that an option can't have.
    """
    names = [unit.name for unit in plan.units]

    def each(value: Any, what: str, good: Any) -> list[Any]:
        found = resolve(value, None, what=what, is_value=good, paths_leaves=(names, list(plan.units)))
        for name, x in zip(names, found, strict=True):
            if not good(x):
                raise ValueError(f"{what} of unit {name!r} is {x!r}")
        return found

    reshard = each(options.reshard_after_forward, "reshard_after_forward", lambda x: isinstance(x, int) and x >= 0)
    remat = each(options.remat, "remat", lambda x: isinstance(x, bool))
    precision = each(options.precision, "precision", lambda x: x is None or hasattr(x, "param_dtype"))
    return {
        name: Options(r, m, None if p is None else as_precision(p))
        for name, r, m, p in zip(names, reshard, remat, precision, strict=True)
    }
