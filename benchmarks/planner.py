"""How long planning takes, on the layers of real models: `python -m benchmarks.planner [--rounds 5]`.

Pure Python, no device. The cases are timed in turn, round after round, so that a busy moment of the machine hits all
of them alike; the table gives the median over the rounds, and the CPU time beside the wall clock. Nothing is kept
from one solve to the next, except that within a whole model identical units are solved once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from ragged.planner import Item, buffers, lower_bound, pack, pack_in_order

__all__ = ["main"]

MODELS = json.loads((Path(__file__).parents[1] / "tests" / "data" / "planner" / "models.json").read_text())
RANKS = (8, 64, 128, 256, 512, 1024, 10240)
BLOCKS = ("R1", "R32", "R128", "F256")


@dataclass
class Case:
    """A thing to time; `wall` and `cpu` in seconds, one entry per round."""

    name: str
    run: Callable[[], object]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def time(self) -> None:
        wall, cpu = perf_counter(), process_time()
        self.run()
        self.wall.append(perf_counter() - wall)
        self.cpu.append(process_time() - cpu)


def items_of(leaves: Sequence[tuple[str, Sequence[int]]], blocks: str) -> list[Item]:
    """`R32`: blocks of 32 rows of the last dim; `F256`: 256 flat elements; 1-D leaves element-wise."""
    rows, count = blocks[0] == "R", int(blocks[1:])
    return [Item(prod(shape), 1 if len(shape) < 2 else count * shape[-1] if rows else count) for _, shape in leaves]


def forget() -> None:
    """Solve every unit afresh."""
    buffers._pack.cache_clear()


def solve_unit(items: Sequence[Item], ranks: int) -> object:
    forget()
    return pack(items, ranks)


def solve_model(units: Sequence[Sequence[Item]], ranks: int) -> object:
    """All layers of a model, each as its own unit."""
    forget()
    return [pack(items, ranks) for items in units]


def show(title: str, cases: Sequence[Case], allowed: float, rows: int) -> None:
    slowest = sorted(cases, key=lambda case: -median(case.wall))
    print(f"\n{title}: {len(cases)} cases, at most {allowed * 1e3:.0f} ms wanted")
    print(f"{'':44}{'wall':>9}{'CPU':>9}   ms, median of {len(cases[0].wall)}")
    for case in slowest[:rows]:
        print(f"{case.name:44}{median(case.wall) * 1e3:9.2f}{median(case.cpu) * 1e3:9.2f}")
    typical = sorted(median(case.wall) for case in cases)[len(cases) // 2]
    print(f"{'(the median case)':44}{typical * 1e3:9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="times each case is measured")
    parser.add_argument("--rows", type=int, default=6, help="slowest cases shown per table")
    options = parser.parse_args()
    one, unit, certificate, model = [], [], [], []
    for name, units in MODELS.items():
        for kind, entry in units.items():
            for blocks in BLOCKS:
                items = items_of(entry["leaves"], blocks)
                for m in RANKS:
                    label = f"{name} {kind} {blocks} m={m}"
                    one.append(Case(label, lambda i=items, m=m: pack_in_order(i, m)))
                    unit.append(Case(label, lambda i=items, m=m: solve_unit(i, m)))
                    certificate.append(Case(label, lambda i=items, m=m: lower_bound(i, m)))
        for blocks in BLOCKS:
            layers = [items_of(e["leaves"], blocks) for e in units.values() for _ in range(e["count"])]
            model.append(Case(f"{name} {blocks} m=10240", lambda u=layers: solve_model(u, 10240)))
    for _ in range(options.rounds):
        for case in (*one, *unit, *certificate, *model):
            case.time()
    show("one buffer, order given", one, 0.010, options.rows)
    show("one unit, up to three buffers", unit, 0.060, options.rows)
    show("certificate for any number of buffers", certificate, 0.010, options.rows)
    show("whole model, identical units solved once", model, 0.150, options.rows)


if __name__ == "__main__":
    main()
