"""Padding of the planner beside other rules, on the layers of real models: `python -m benchmarks.padding [--markdown]`.

Pure integers, no device; every number is computed in the run. Padding is what a unit gathers over what its leaves
hold, less one: `ranks * S / elements - 1`. Blocks: `R32` is 32 rows of the last dim, `F256` is 256 flat elements,
1-D leaves are element-wise. Four tables: chosen cases (all with `--all`), their spread, what start alignment costs,
and where more ranks save nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.padding_rules import lcm_shard, prefix_shard, row_shard
from benchmarks.planner import BLOCKS, MODELS, items_of
from ragged.planner import Item, lower_bound, pack, pack_in_order
from ragged.report import table

__all__ = ["ALL", "SHOWN", "SYSTEMS", "Case", "main", "padding", "percent"]

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 10240)


@dataclass(frozen=True)
class Case:
    """One kind of unit of one model, with its blocks, on so many ranks."""

    model: str
    unit: str
    blocks: str
    ranks: int

    @property
    def shapes(self) -> list[list[int]]:
        return [shape for _, shape in MODELS[self.model][self.unit]["leaves"]]

    @property
    def items(self) -> list[Item]:
        return items_of(MODELS[self.model][self.unit]["leaves"], self.blocks)

    @property
    def elements(self) -> int:
        return sum(item.size for item in self.items)

    def __str__(self) -> str:
        return f"{self.model} {self.unit} {self.blocks}"


SYSTEMS: dict[str, Callable[[Case], int]] = {
    "ours": lambda case: pack(case.items, case.ranks).shard,
    "one buffer": lambda case: pack(case.items, case.ranks, max_buffers=1).shard,
    "at least": lambda case: lower_bound(case.items, case.ranks),
    "paper": lambda case: prefix_shard(case.items, case.ranks),
    "rows": lambda case: row_shard(case.shapes, case.items, case.ranks),
    "lcm": lambda case: lcm_shard(case.items, case.ranks),
}

LAYERS = [(model, unit) for model, units in MODELS.items() for unit, entry in units.items() if entry["count"] > 1]
ALL = [Case(model, unit, blocks, m) for model, unit in LAYERS for blocks in BLOCKS for m in RANKS]
SHOWN = [
    Case("llama3_70b", "layer", "R1", 1024),
    Case("llama3_70b", "layer", "R32", 64),
    Case("llama3_70b", "layer", "R32", 256),
    Case("llama3_70b", "layer", "R32", 1024),
    Case("llama3_70b", "layer", "F256", 1024),
    Case("seedoss_36b", "layer", "R32", 64),
    Case("seedoss_36b", "layer", "R32", 128),
    Case("gptoss_120b", "layer_hf", "R1", 1024),
    Case("gptoss_120b", "layer_hf", "R32", 256),
    Case("gptoss_120b", "layer_hf", "R32", 1024),
    Case("gptoss_120b", "layer_hf", "R128", 512),
    Case("qwen3_30b_a3b", "moe", "R1", 1024),
    Case("qwen3_30b_a3b", "moe", "R32", 256),
    Case("qwen3_30b_a3b", "moe", "R32", 1024),
    Case("dsv3_671b", "dense", "R1", 512),
    Case("dsv3_671b", "dense", "R32", 64),
    Case("dsv3_671b", "moe", "R1", 1024),
    Case("dsv3_671b", "moe", "R32", 1024),
    Case("dsv3_671b", "moe", "R128", 1024),
    Case("dsv3_671b", "moe", "R1", 10240),
    Case("dsv3_671b", "moe", "F256", 10240),
]


def padding(case: Case, shard: int) -> float:
    """What the unit gathers over what its leaves hold, less one: 0.02 is two per cent."""
    return case.ranks * shard / case.elements - 1


def percent(x: float) -> str:
    """Two digits behind the point for what is small, none for what is large.

    >>> percent(0.00004), percent(0.0979), percent(1.196), percent(11.1)
    ('0.00 %', '9.79 %', '119.6 %', '1,110 %')
    """
    return f"{x:,.{2 if x < 0.1 else 1 if x < 10 else 0}%}".replace("%", " %")


def comparison(cases: Sequence[Case]) -> list[list[str]]:
    rows = [["layer, blocks", "ranks", *SYSTEMS, "buffers"]]
    for case in cases:
        found = [percent(padding(case, shard(case))) for shard in SYSTEMS.values()]
        rows.append([str(case), f"{case.ranks:,}", *found, str(len(pack(case.items, case.ranks).buffers))])
    return rows


def spread() -> list[list[str]]:
    """Over all layers and 8 to 1024 ranks: the median, and the share of cases with at most one per cent."""
    rows = [["blocks", "cases", *SYSTEMS]]
    for blocks in BLOCKS:
        cases = [case for case in ALL if case.blocks == blocks and case.ranks <= 1024]
        row = [blocks, str(len(cases))]
        for shard in SYSTEMS.values():
            found = [padding(case, shard(case)) for case in cases]
            row.append(f"{percent(median(found))} / {100 * mean(x <= 0.01 for x in found):.0f} %")
        rows.append(row)
    return rows


def alignment() -> list[list[str]]:
    """S over S at `align=8`, in all cases: mean and worst."""
    rows = [["start alignment", "order given: mean", "worst", "best plan: mean", "worst"]]
    given = {case: pack_in_order(case.items, case.ranks, align=8).shard for case in ALL}
    best = {case: pack(case.items, case.ranks, align=8).shard for case in ALL}
    for align in (64, 128, 512):
        row = [str(align)]
        in_order = [pack_in_order(case.items, case.ranks, align=align).shard / given[case] - 1 for case in ALL]
        any_order = [pack(case.items, case.ranks, align=align).shard / best[case] - 1 for case in ALL]
        for found in (in_order, any_order):
            row += [f"{mean(found):+.4%}".replace("%", " %"), f"{max(found):+.3%}".replace("%", " %")]
        rows.append(row)
    return rows


def stalls() -> list[list[str]]:
    rows = [["ranks", "one buffer: S", "m * S", "padding", "best plan: S", "m * S", "padding", "at least"]]
    for m in (64, 128, 256, 512, 1024):
        case = Case("llama3_70b", "layer", "R32", m)
        row = [f"{m:,}"]
        for name in ("one buffer", "ours"):
            shard = SYSTEMS[name](case)
            row += [f"{shard:,}", f"{m * shard:,}", percent(padding(case, shard))]
        rows.append([*row, percent(padding(case, SYSTEMS["at least"](case)))])
    return rows


def show(title: str, rows: Sequence[Sequence[str]], markdown: bool) -> None:
    print(f"\n{title}\n")
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        print("\n".join([lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]]))
        return
    print(table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--markdown", action="store_true", help="tables as in docs/planner.md")
    parser.add_argument("--all", action="store_true", help="every layer, block and number of ranks in the first table")
    options = parser.parse_args(arguments)
    tables = {
        "Padding of one layer": comparison(ALL if options.all else SHOWN),
        "All layers, 8 to 1,024 ranks: median padding / share of cases with at most 1 %": spread(),
        "S over S at a start alignment of 8, less one, over all layers, blocks and ranks": alignment(),
        "llama3_70b layer in blocks of 32 rows: S in elements per rank": stalls(),
    }
    for title, rows in tables.items():
        show(title, rows, options.markdown)


if __name__ == "__main__":
    main()
