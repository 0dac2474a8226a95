"""The arguments of both commands and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

from ragged.cli.blocks import parse_block, parse_pattern
from ragged.cli.builtin import BUILT_IN
from ragged.cli.families import FAMILIES
from ragged.cli.models import parse_dtype
from ragged.planner import PRICE
from ragged.report import MOMENTS

__all__ = ["make_parser"]

T = TypeVar("T")

_MODEL = f"""\
MODEL comes first, before options that take several values. It is one of
  a built-in name   {", ".join(sorted(BUILT_IN)[:7])},
                    {", ".join(sorted(BUILT_IN)[7:])}
  a config.json     of Hugging Face, of model_type {", ".join(sorted(FAMILIES)[:6])},
                    {", ".join(sorted(FAMILIES)[6:])}
  *.safetensors     or model.safetensors.index.json: any model; only headers are read

"""

_BLOCKS = """\
SPEC is BLOCK, for all leaves of two dims or more, or PATTERN=BLOCK, for the leaves whose dotted path matches;
the first that claims a leaf wins, and leaves of fewer dims are cut anywhere unless a pattern claims them.
BLOCK is what no boundary between ranks may cut:
  row               one index of dim 0
  32r               32 rows of a matrix; a leaf of three dims or more is a stack of matrices
  32x32             tiles of a matrix
  256               so many flat elements
  tensor            a whole leaf
  element           nothing: cut anywhere
In PATTERN, * is one component and ** any number; re: before it makes it a regular expression.

"""

_PLAN = (
    "Lay a model out over ranks and print the plan: buffers, shard sizes and padding of each kind of unit. "
    "Shapes only: no processes, no weights, no memory."
)
_ADVISE = (
    "Compare shard groups (the other ranks hold replicas), blocks, and layers per unit, by padding, bytes per rank and "
    "gathered bytes per step, and recommend one."
)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit, so that all errors look the same."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _value(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The parser of an option; what it refuses keeps its own message."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or not least <= int(text) < 2**40:
        raise ValueError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _natural(text: str) -> int:
    return _whole(text, 0)


def _amount(scale: int) -> Callable[[str], int]:
    """Bytes, from a number of MiB or GiB."""

    def parse(text: str) -> int:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 2**40:
            raise ValueError(f"expected a number of zero or more, got {text!r}")
        return int(value * scale)

    return parse


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m ragged`.

    Raises:
      ValueError: by the parser's `parse_args`, for arguments that it refuses.

    Example:
      >>> args = make_parser().parse_args(["plan", "gpt2", "--ranks", "8", "--block", "32r"])
      >>> args.command, args.model, args.ranks, args.block[0].tile
      ('plan', 'gpt2', 8, (32, None))
    """
    parser = _Parser(
        prog="python -m ragged",
        description="Layouts of sharded models, from their shapes alone.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="plan | advise")
    plan = _command(commands, "plan", _PLAN, "plan llama3-70b --ranks 256 --block 32r --svg plan.svg", "default: row")
    plan.add_argument("--svg", metavar="FILE", help="draw the plan into a file")
    text = "write the plan as JSON, to FILE or in place of the summary"
    plan.add_argument("--json", metavar="FILE", nargs="?", const="-", help=text)
    advise = _command(
        commands,
        "advise",
        _ADVISE,
        "advise llama3-70b --ranks 1024 --memory 80",
        "those for all leaves are compared, those by pattern belong to each; default: 32r 32x32 256",
    )
    text = "memory of one rank, without what activations need"
    advise.add_argument("--memory", type=_value(_amount(2**30)), metavar="GIB", help=text)
    text = "sizes of shard groups, divisors of the ranks (default: up to eight of them)"
    advise.add_argument("--groups", nargs="+", type=_value(_positive), default=[], metavar="N", help=text)
    text = "consecutive layers gathered together (default: 1 2)"
    advise.add_argument("--layers-per-unit", nargs="+", type=_value(_positive), default=[1, 2], metavar="K", help=text)
    text = f"bytes of optimizer state per element (default: {MOMENTS}, two moments in float32)"
    advise.add_argument("--state-bytes", type=_value(_natural), default=MOMENTS, metavar="N", help=text)
    return parser


def _command(
    commands: argparse._SubParsersAction[_Parser], name: str, about: str, example: str, blocks: str
) -> argparse.ArgumentParser:
    """A command and the arguments that both have."""
    parser = commands.add_parser(
        name,
        # MODEL first: after an option that takes several values it would be one of them.
        usage=f"python -m ragged {name} MODEL --ranks N [options]",
        help=about.split(".")[0],
        description=about,
        epilog=f"{_MODEL}{_BLOCKS}Example: python -m ragged {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a built-in name, a config.json, or safetensors: see below")
    add("--ranks", type=_value(_positive), required=True, metavar="N", help="the number of ranks")
    add(
        "--block", nargs="+", action="extend", type=_value(parse_block), default=[], metavar="SPEC",
        help=f"what no rank boundary may cut, see below ({blocks})",
    )  # fmt: skip
    add(
        "--units", nargs="+", action="extend", type=_value(parse_pattern), default=[], metavar="PATTERN",
        help="what is gathered together: each distinct beginning of a path that matches (default: the layers); "
        "the other leaves by the first component of their path",
    )  # fmt: skip
    add(
        "--dtype", type=_value(parse_dtype), metavar="DTYPE",
        help="of all floating-point parameters: bf16, fp16, fp32 or fp64 (default: the file's own, or bf16)",
    )  # fmt: skip
    text = "leaves start at multiples of so many elements (default: 64)"
    add("--align", type=_value(_positive), default=64, metavar="N", help=text)
    text = "elements of padding, over all ranks, that one collective less is worth; 0: as little padding as possible"
    add("--price", type=_value(_natural), default=PRICE, metavar="N", help=f"{text} (default: {PRICE})")
    return parser
