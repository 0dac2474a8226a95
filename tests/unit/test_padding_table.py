"""The rules of other systems that `benchmarks.padding` compares with, and the planner's page."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import padding as table
from benchmarks import padding_rules
from benchmarks.padding import ALL, SHOWN, SYSTEMS, Case, padding, percent
from benchmarks.padding_rules import lcm_shard, prefix_shard, row_shard
from benchmarks.planner import MODELS, items_of
from ragged.cli import main
from ragged.planner import Item, lower_bound, pack_in_order
from ragged.planner.reference import scan_shard

ROOT = Path(__file__).parents[2]
TARGETS = json.loads((ROOT / "tests" / "data" / "planner" / "targets.json").read_text())
PAGE = (ROOT / "docs" / "planner.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [text for kind, text in BLOCKS if kind == "sh" and text.startswith("python -m ragged")]
TEXTS = [text for kind, text in BLOCKS if kind == "text"]


@pytest.mark.parametrize("module", [table, padding_rules])
def test_docstrings(module: ModuleType) -> None:
    done = doctest.testmod(module)
    assert done.attempted
    assert not done.failed


def test_prefixes_give_the_targets() -> None:
    """The column `paper` was made with another program."""
    found = {}
    for key in TARGETS:
        model, unit, blocks, m = key.split("|")
        found[key] = prefix_shard(items_of(MODELS[model][unit]["leaves"], blocks), int(m), align=8)
    assert found == {key: TARGETS[key]["paper"] for key in found}


def test_prefixes_by_hand() -> None:
    # Both leaves must span at S < 7 on many ranks: the largest one's block first, so multiples of 4, then of 12.
    pair = [Item(128, 4), Item(96, 3)]
    assert prefix_shard(pair, 32, align=1) == scan_shard(pair, 32) == 12
    assert prefix_shard([], 4) == 0
    assert prefix_shard([Item(0, 1)], 4) == 0
    assert prefix_shard([Item(7, 7)], 4, align=1) == 7


def test_prefixes_are_not_exact() -> None:
    """21 fits and 22 doesn't, so doubling steps from 19 and bisection find 23."""
    leaves = [Item(11, 3), Item(32, 3), Item(35, 6), Item(31, 6)]
    assert scan_shard(leaves, 6) == 21
    assert prefix_shard(leaves, 6, align=1) == 23


def test_prefixes_find_the_optimum_of_the_order_on_these_layers() -> None:
    """As the page says; so what it loses, it loses to other orders and to several buffers."""
    for case in ALL[::3]:
        assert prefix_shard(case.items, case.ranks) == pack_in_order(case.items, case.ranks).shard


@pytest.mark.parametrize(
    ("shape", "block", "ranks", "shard"),
    [
        ((8, 4), 4, 4, 8),  # divides
        ((9, 4), 4, 4, 12),  # three rows each, the last rank has none
        ((2, 4), 4, 4, 4),  # fewer rows than ranks
        ((9, 4), 8, 2, 24),  # two-row blocks: five of them, three on the first rank
        ((3, 4), 32, 2, 12),  # one short block: the whole tensor
        ((3, 8, 4), 4, 2, 64),  # dim 0 is cut, whatever the block: two of three matrices
        ((10,), 1, 4, 3),
        ((), 1, 4, 1),
        ((0, 4), 4, 4, 0),
    ],
)
def test_rows_by_hand(shape: tuple[int, ...], block: int, ranks: int, shard: int) -> None:
    size = 1
    for n in shape:
        size *= n
    assert row_shard([shape], [Item(size, block)], ranks) == shard


def test_rows_add_up() -> None:
    assert row_shard([(9, 4), (10,)], [Item(36, 4), Item(10, 1)], 4) == 12 + 3


@pytest.mark.parametrize(
    ("items", "ranks", "shard"),
    [
        ([Item(24, 3), Item(24, 4)], 2, 24),  # four cells of 12
        ([Item(24, 3), Item(24, 4)], 3, 24),  # two per rank, the last half empty
        ([Item(27, 3), Item(32, 4)], 1, 60),  # 3 and 8 left over share a cell
        ([Item(30, 3), Item(32, 4)], 1, 72),  # 6 and 8 don't
        ([Item(15, 3), Item(15, 3), Item(15, 3), Item(12, 4)], 1, 72),  # three ends of 3: a cell has two borders
        ([Item(14, 3), Item(14, 4)], 1, 48),  # both have a short last block: neither may end at a border
        ([Item(14, 3), Item(16, 4)], 1, 36),  # the second may
        ([Item(4, 4), Item(3, 3), Item(3, 3), Item(2, 1)], 1, 12),  # small leaves lie within one cell
        ([Item(10, 1)], 4, 3),
        ([], 4, 0),
    ],
)
def test_cells_by_hand(items: list[Item], ranks: int, shard: int) -> None:
    assert lcm_shard(items, ranks) == shard


@pytest.mark.parametrize("case", ALL[::5], ids=lambda case: f"{case} {case.ranks}")
def test_no_rule_is_below_a_certificate(case: Case) -> None:
    items, m = case.items, case.ranks
    assert lower_bound(items, m) <= prefix_shard(items, m)
    assert lower_bound(items, m, align=1, buffers=1) <= lcm_shard(items, m)
    assert lower_bound(items, m, align=1) <= row_shard(case.shapes, items, m)


def test_percent() -> None:
    case = Case("llama3_70b", "layer", "R32", 1024)
    assert percent(padding(case, SYSTEMS["one buffer"](case))) == "119.6 %"


def test_page_shows_the_table() -> None:
    """Every chosen case has its row in the page, with the numbers of today."""
    for row in table.comparison(SHOWN[::3]):
        assert f"| {' | '.join(row)} |" in PAGE


def test_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """What its blocks print is in the page."""
    names: dict[str, object] = {}
    assert PROGRAMS
    for program in PROGRAMS:
        exec(program, names)
        assert capsys.readouterr().out in TEXTS


def test_page_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS
    for command in COMMANDS:
        assert main(command.split()[3:]) == 0
        assert capsys.readouterr().out in TEXTS
