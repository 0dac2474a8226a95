"""Validation loss of the example by optimizer: how many steps, and how good after them.

    python -m benchmarks.curves --jobs 2 --svg curves.svg     # tables, and a picture where matplotlib is installed
    python -m benchmarks.curves --jobs 2 --tune               # learning rates first: final losses of all that are tried

Trains `examples/train_gpt.py` as it stands, one process with one thread per run, `--jobs` of them at a time. All runs
have the same seed, so the same initial values, batches and validation text, and the same form of schedule: warm-up
for a twentieth of the steps, then half a cosine down to a tenth. The last run is Muon with a schedule for 0.7 of the
steps. A run that is complete under `--out` is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

__all__ = ["Run", "main", "reached"]

ROOT = Path(__file__).parents[1]
RATES = {"adamw": (1e-3, 2e-3, 3e-3, 5e-3, 8e-3), "muon": (5e-3, 1e-2, 2e-2)}
CHOSEN = {"adamw": 3e-3, "muon": 1e-2}  # AdamW's best and Muon's second best of them
STEPS = 300

Curve = list[tuple[int, float]]  # (step, validation loss), losses in nats per byte


class Run(NamedTuple):
    """A training: an optimizer of the example, its peak learning rate, and the steps it is planned for."""

    optimizer: str
    rate: float
    steps: int

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.rate:g}-{self.steps}"


def compared(steps: int) -> list[Run]:
    """AdamW first: the others are measured by it."""
    adamw, muon = CHOSEN["adamw"], CHOSEN["muon"]
    runs = [Run("adamw", adamw, steps), Run("adamw8bit", adamw, steps)]
    return [*runs, Run("muon", muon, steps), Run("muon+adamw8bit", muon, steps), Run("muon", muon, steps * 7 // 10)]


def train(run: Run, args: argparse.Namespace) -> Curve:
    """The curve of a run, from its file if it is complete."""
    out = args.out / run.name
    curve = read(out / "metrics.jsonl")
    if not curve or curve[-1][0] != run.steps:
        flags = {"optimizer": run.optimizer, "lr": run.rate, "steps": run.steps, "seed": args.seed, "out": out}
        flags |= {"every": args.every, "eval-batches": args.eval_batches, "sample": 0, "threads": 1, "device": "cpu"}
        command = [sys.executable, "examples/train_gpt.py", *(f"--{name}={value}" for name, value in flags.items())]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, check=True)
        curve = read(out / "metrics.jsonl")
    print(f"{run.name}: {curve[-1][1]:.4f}", file=sys.stderr, flush=True)
    return curve


def read(path: Path) -> Curve:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(row["step"], row["val_loss"]) for row in rows]


def reached(curve: Curve, level: float) -> float | None:
    """The step at which a curve first comes down to a level, between its points on a line; None if it doesn't.

    Example:
      >>> reached([(1, 5.0), (10, 3.0), (20, 2.0)], 2.5), reached([(1, 5.0)], 2.5)
      (15.0, None)
    """
    before: tuple[int, float] | None = None
    for step, loss in curve:
        if loss <= level:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - level) / (before[1] - loss)
        before = step, loss
    return None


def table(curves: Mapping[Run, Curve]) -> str:
    """Markdown; losses beside those of the first run."""
    level = next(iter(curves.values()))[-1][1]
    lines = ["| `--optimizer` | `--lr` | steps | final loss | of AdamW's | at AdamW's final loss after |"]
    lines.append("|---|---|---|---|---|---|")
    for run, curve in curves.items():
        step = reached(curve, level)
        final = curve[-1][1]
        at = "" if step is None else f"{step:.0f} steps"
        lines.append(f"| {run.optimizer} | {run.rate:g} | {run.steps} | {final:.4f} | {final / level:.4f} | {at} |")
    return "\n".join(lines)


def tuning(curves: Mapping[Run, Curve]) -> str:
    """Markdown: final losses by optimizer and learning rate."""
    rates = sorted({run.rate for run in curves})
    lines = ["| `--lr` | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---" * (len(rates) + 1) + "|"]
    for name in dict.fromkeys(run.optimizer for run in curves):
        finals = {run.rate: f"{curve[-1][1]:.4f}" for run, curve in curves.items() if run.optimizer == name}
        lines.append(f"| {name} | " + " | ".join(finals.get(rate, "") for rate in rates) + " |")
    return "\n".join(lines)


def draw(curves: Mapping[Run, Curve], path: Path) -> None:
    """The curves, and a line at the final loss of the first."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "curves"}  # small, and the same bytes every time
    styles = {"adamw": ("tab:blue", "-"), "adamw8bit": ("tab:cyan", "--"), "muon": ("tab:red", "-")}
    styles |= {"muon+adamw8bit": ("tab:orange", "--")}
    steps, level = next(iter(curves.values()))[-1]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for run, curve in curves.items():
        color, line = styles[run.optimizer]
        label = run.optimizer
        if run.steps != steps:
            line, label = ":", f"{label}, {run.steps} steps"
        axes.plot(*zip(*curve, strict=True), line, color=color, label=f"{label}: {curve[-1][1]:.3f}")
    axes.axhline(level, color="gray", linewidth=0.7)
    lowest = min(curve[-1][1] for curve in curves.values())
    ends = {"xlim": (0, steps), "ylim": (lowest - 0.1, level + 1.1)}
    axes.set(xlabel="step", ylabel="validation loss, nats per byte", **ends)
    axes.grid(alpha=0.2)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, help="(%(default)s)")
    add("--every", type=int, default=10, help="steps between validations (%(default)s)")
    add("--eval-batches", type=int, default=20, help="batches per validation (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--jobs", type=int, default=1, help="runs at a time (%(default)s)")
    add("--tune", action="store_true", help="AdamW and Muon at all learning rates that are tried, instead")
    add("--out", type=Path, default=Path("runs/curves"), help="for each run's files and curves.json (%(default)s)")
    add("--svg", type=Path, help="where to draw")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    tried = [Run(name, rate, args.steps) for name, rates in RATES.items() for rate in rates]
    runs = tried if args.tune else compared(args.steps)
    with ThreadPoolExecutor(args.jobs) as pool:
        curves = dict(zip(runs, pool.map(lambda run: train(run, args), runs), strict=True))
    print(tuning(curves) if args.tune else table(curves))
    file = args.out / ("tune.json" if args.tune else "curves.json")
    file.write_text(json.dumps({run.name: curve for run, curve in curves.items()}))
    if args.svg and not args.tune:
        draw(curves, args.svg)


if __name__ == "__main__":
    main()
