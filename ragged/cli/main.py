"""The two commands, from arguments to printed text and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ragged.cli.advise import advice, rows_of
from ragged.cli.arguments import make_parser
from ragged.cli.blocks import blocks_of, parse_block
from ragged.cli.candidates import Costs
from ragged.cli.headers import Tensors
from ragged.cli.models import load_model
from ragged.cli.units import layer_patterns
from ragged.picture import visualize
from ragged.planning import plan
from ragged.spec import P

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
      argv: the arguments; by default the process's.

    Returns:
      The exit code: 0, or 2 after an error, which is one line on standard error.

    Example:
      >>> main(["plan", "gpt2", "--ranks", "0"])  # prints to standard error
      2
    """
    try:
        args = make_parser().parse_args(argv)
        print(_plan(args) if args.command == "plan" else _advise(args), flush=True)
    except BrokenPipeError:  # the reader of a pipe has seen enough; nor may Python's own last flush complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def _plan(args: argparse.Namespace) -> str:
    """What `plan` prints, after writing the files it was asked for."""
    tensors = load_model(args.model, args.dtype)
    blocks = blocks_of({path: shape for path, (shape, _) in tensors.items()}, args.block)
    specs = {block: P(ragged="fsdp", block=block) for block in blocks.values()}
    spec = {path: specs[block] for path, block in blocks.items()}
    units = args.units or layer_patterns(tensors)
    made = plan(tensors, {"fsdp": args.ranks}, spec, units=units, align=args.align, price=args.price)
    if args.svg is not None:
        Path(args.svg).write_text(visualize(made, format="svg"), encoding="utf-8")
    if args.json == "-":
        return made.to_json()
    if args.json is not None:
        Path(args.json).write_text(made.to_json() + "\n", encoding="utf-8")
    return made.summary()


def _advise(args: argparse.Namespace) -> str:
    tensors = load_model(args.model, args.dtype)
    blocks = list(dict.fromkeys(args.block))
    if all(rule.pattern is not None for rule in blocks):
        blocks += [parse_block(text) for text in ("32r", "32x32", "256")]
    costs = Costs(args.align, args.price, args.state_bytes)
    rows = rows_of(
        tensors,
        args.ranks,
        blocks,
        args.units or layer_patterns(tensors),
        groups=sorted(set(args.groups)),
        layers=sorted(set(args.layers_per_unit)),
        costs=costs,
    )
    return advice(_title(args.model, args.ranks, tensors, rows[0].elements), rows, args.memory, costs)


def _title(model: str, ranks: int, tensors: Tensors, elements: int) -> str:
    dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for _, dtype in tensors.values())
    return f"{model}: {elements:,} elements in {len(tensors):,} leaves, {', '.join(dtypes)}; {ranks:,} ranks"
