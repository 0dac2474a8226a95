"""The planner on small cases whose answer is known, and its edges."""

import ast
import doctest
import importlib
import sys
from pathlib import Path

import pytest

import ragged.planner
from ragged.planner import Item, Packing, UnitPacking, lower_bound, pack, pack_in_order
from ragged.planner.one_buffer import first_fit
from ragged.planner.reference import exhaustive_any_order, problems, scan_shard

FOLDER = Path(ragged.planner.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))

ATTENTION = [Item(4096, 2048), Item(1024, 1024), Item(1024, 1024), Item(4096, 2048), Item(64, 1)]


def assert_sound(items: list[Item], plan: UnitPacking, ranks: int, align: int) -> None:
    """Every item once, every buffer legal."""
    assert sorted(i for buffer in plan.buffers for i in buffer.members) == list(range(len(items)))
    for buffer in plan.buffers:
        members = [items[i] for i in buffer.members]
        assert problems(members, buffer.starts, buffer.shard, ranks, align) == []
        assert list(buffer.starts) == sorted(buffer.starts)


@pytest.mark.parametrize(("ranks", "shard"), [(1, 768), (2, 512), (3, 256), (4, 256)])
def test_no_boundary_inside_a_block(ranks: int, shard: int) -> None:
    """PL-01: at two ranks the even cut, 384, would cut a block of 256."""
    assert pack_in_order([Item(768, 256)], ranks, align=1).shard == shard


@pytest.mark.parametrize(("ranks", "shard"), [(2, 512), (3, 512), (4, 256), (8, 256)])
def test_short_last_block(ranks: int, shard: int) -> None:
    """PL-02: 100 rows of 8 in blocks of 32 rows; the last block has 4 rows and stays whole."""
    packing = pack_in_order([Item(800, 256)], ranks, align=1)
    assert packing == Packing(shard, (0,))
    assert max(0, ranks - -(-800 // shard)) == {2: 0, 3: 1, 4: 0, 8: 4}[ranks], "ranks that own nothing"


@pytest.mark.parametrize(("ranks", "best"), [(1, 10304), (2, 5152), (3, 4096), (4, 3072), (8, 2048)])
def test_heads_of_different_size(ranks: int, best: int) -> None:
    """PL-05: q, k, v, o and a norm; the best of all orders, in one buffer."""
    plan = pack(ATTENTION, ranks, align=1, max_buffers=1)
    assert plan.shard == best
    assert len(plan.buffers) == 1
    assert_sound(ATTENTION, plan, ranks, 1)


def test_sizes_beyond_32_bits() -> None:
    """PL-10: offsets are Python ints."""
    items = [Item(65536 * 65536, 128 * 65536), Item(3 * (2**31 - 1), 1)]
    packing = pack_in_order(items, 8, align=1)
    assert problems(items, packing.starts, packing.shard, 8) == []
    assert packing.starts[1] >= 2**32
    assert packing.shard == -(-(2**32 + 3 * (2**31 - 1)) // 8)
    assert_sound(items, pack(items, 8), 8, 64)


def test_exact_far_beyond_floats() -> None:
    items = [Item(2**70 + 1, 1), Item(3 * 2**66, 2**66)]
    packing = pack_in_order(items, 2, align=1)
    assert problems(items, packing.starts, packing.shard, 2) == []
    assert packing.shard == pack(items, 2, align=1).shard == -(-(2**70 + 1 + 3 * 2**66) // 2)


def test_the_largest_leaves_alone_do_not_decide() -> None:
    """The lcm of the blocks of the largest leaves, 5 and then 10, misses S = 6: the leaf of 9 spans, not that of 11."""
    items = [Item(4, 4), Item(9, 2), Item(11, 5)]
    assert pack_in_order(items, 4, align=1).shard == scan_shard(items, 4) == 6


def test_feasibility_is_not_monotone() -> None:
    """A leaf of five blocks of 4 on 5 ranks: legal at S = 4, at 5 no more."""
    feasible = [S for S in range(1, 14) if first_fit([(20, 4)], 5, S, S) is not None]
    assert feasible == [4, 8, 12, 13]
    assert pack_in_order([Item(20, 4)], 5, align=1).shard == 4
    assert pack_in_order([Item(20, 4)], 4, align=1).shard == 8


@pytest.mark.parametrize("align", [1, 8, 64])
def test_start_alignment(align: int) -> None:
    items = [Item(100, 1), Item(96, 24), Item(7, 7), Item(300, 100)]
    for ranks in (1, 2, 3, 7):
        packing = pack_in_order(items, ranks, align)
        assert problems(items, packing.starts, packing.shard, ranks, align) == []
        assert packing.shard == scan_shard(items, ranks, align)


def test_empty_leaves_and_no_leaves() -> None:
    assert pack_in_order([], 4) == Packing(0, ())
    assert pack([], 4) == UnitPacking((), 4, 0)
    assert pack([], 4).padding == 0.0
    assert pack_in_order([Item(0, 1), Item(0, 5)], 4) == Packing(0, (0, 0))
    assert pack([Item(0, 1), Item(0, 5)], 4).shard == 0
    items = [Item(0, 3), Item(10, 5), Item(0, 1), Item(20, 1), Item(0, 2)]
    packing = pack_in_order(items, 3, align=1)
    assert problems(items, packing.starts, packing.shard, 3) == []
    assert packing.shard == 10
    assert_sound(items, pack(items, 3, align=1, price=0), 3, 1)


def test_whole_leaves_and_idle_ranks() -> None:
    items = [Item(10, 10**9), Item(6, 6)]
    assert pack_in_order(items, 100, align=1) == Packing(10, (0, 10))
    assert pack_in_order(items, 1, align=1) == Packing(16, (0, 10))


def test_two_buffers_where_the_blocks_differ() -> None:
    items = [Item(96, 3), Item(128, 4)]
    assert pack(items, 32, align=1, max_buffers=1, price=0).shard == 12
    plan = pack(items, 32, align=1, price=0)
    assert (plan.shard, len(plan.buffers), plan.padding) == (7, 2, 0.0)
    # 5 elements on each of 32 ranks are worth 160, no more.
    assert len(pack(items, 32, align=1, price=159).buffers) == 2
    assert len(pack(items, 32, align=1, price=160).buffers) == 1


def test_stray_elements_do_not_overflow_exact_buffers() -> None:
    """Three buffers: two exact ones and one for the element-wise leaf."""
    items = [Item(96, 3), Item(128, 4), Item(32, 1)]
    plan = pack(items, 32, align=1, price=0)
    assert plan.padding == 0.0
    assert [len(b.members) for b in plan.buffers] == [1, 1, 1]


def test_few_leaves_in_any_order_are_exact() -> None:
    items = [Item(7, 7), Item(5, 2), Item(9, 3), Item(4, 1), Item(6, 6)]
    for ranks in (2, 3, 4, 5):
        assert pack(items, ranks, align=1, max_buffers=1).shard == exhaustive_any_order(items, ranks)


def test_small_leaves_close_the_hole_before_a_boundary() -> None:
    """Two ranks without padding, which neither the order given nor one sorted by block reaches."""
    items = [Item(64, 1), Item(48, 1), Item(256, 16), Item(64, 1), Item(128, 128), Item(512, 128)]
    assert pack_in_order(items, 2, align=1).shard == 560
    plan = pack(items, 2, align=1, max_buffers=1)
    assert plan.shard == 536
    assert_sound(items, plan, 2, 1)


def test_a_hole_ends_at_the_boundary() -> None:
    """A leaf that can't start in this shard at all leaves a hole in this one and another in the next."""
    items = [Item(40, 9), Item(39, 11), Item(9, 4)]
    assert_sound(items, pack(items, 4, align=1, price=0), 4, 1)


def test_certificates() -> None:
    items = [Item(96, 3), Item(128, 4)]
    assert lower_bound(items, 32, align=1, buffers=1) == 12
    assert lower_bound(items, 32, align=1) == 7
    assert lower_bound([Item(20, 4)], 3, align=1) == 8  # 5 blocks on 3 ranks: one has 2
    assert lower_bound([], 3) == 0
    assert lower_bound([Item(5, 9)], 3) == 64


def test_a_label_is_one_interval_of_a_buffer() -> None:
    items = [Item(96, 3), Item(64, 1), Item(128, 4), Item(0, 1), Item(96, 3), Item(64, 1), Item(128, 4)]
    labels = ["muon", "adam", "muon", "muon", "frozen", "adam", "frozen"]
    for ranks, most in [(2, 1), (5, 1), (32, 3), (7, 2)]:
        plan = pack(items, ranks, align=1, max_buffers=most, price=0, labels=labels)
        assert_sound(items, plan, ranks, 1)
        for buffer in plan.buffers:
            seen = [labels[i] for i in buffer.members]
            assert seen == sorted(seen, key=["muon", "adam", "frozen"].index)
        assert plan.shard >= pack(items, ranks, align=1, max_buffers=most, price=0).shard


def test_equal_units_are_solved_once() -> None:
    items = [Item(300, 7), Item(301, 8)]
    assert pack(items, 5) is pack(list(items), 5)


def test_equal_leaves_keep_their_order() -> None:
    assert pack([Item(64, 8)] * 6, 3).buffers[0].members == tuple(range(6))


@pytest.mark.parametrize(
    ("call", "stated"),
    [
        (lambda: Item(-1, 1), "size=-1"),
        (lambda: Item(4, 0), "block=0"),
        (lambda: pack_in_order([Item(4, 1)], 0), "ranks=0"),
        (lambda: pack_in_order([Item(4, 1)], 2, align=0), "align=0"),
        (lambda: pack([Item(4, 1)], -3), "ranks=-3"),
        (lambda: pack([Item(4, 1)], 3, align=-8), "align=-8"),
        (lambda: pack([Item(4, 1)], 3, max_buffers=0), "max_buffers=0"),
        (lambda: pack([Item(4, 1)], 3, price=-1), "price=-1"),
        (lambda: pack([Item(4, 1)], 3, labels=[]), "0 labels for 1 items"),
        (lambda: lower_bound([Item(4, 1)], 0), "ranks=0"),
        (lambda: lower_bound([Item(4, 1)], 3, buffers=2), "got 2"),
    ],
)
def test_errors_state_the_value(call, stated: str) -> None:
    with pytest.raises(ValueError, match=stated):
        call()


@pytest.mark.parametrize("name", MODULES)
def test_module_is_pure_integers(name: str) -> None:
    """Only the standard library and the planner itself; and every module says what it exports."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    imported = {
        found
        for node in ast.walk(tree)
        for found in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    allowed = sys.stdlib_module_names
    assert not {x for x in imported if not x.startswith("ragged.planner") and x.split(".")[0] not in allowed}
    assert any(isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__" for n in tree.body)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module("ragged.planner" if name == "__init__" else f"ragged.planner.{name}")
    results = doctest.testmod(module)
    assert results.failed == 0
    if name in ("items", "one_buffer", "bounds", "buffers", "fill"):
        assert results.attempted > 0


def test_legality_is_checked_by_the_reference() -> None:
    """`problems` is the judge in these tests, so it must see each kind of fault."""
    items = [Item(8, 4), Item(6, 3)]
    assert problems(items, [0, 8], 8, 2) == []
    assert "no multiple of 4" in problems(items, [0, 8], 6, 4, align=4)[0]
    assert "start 2 " in problems(items, [2, 12], 8, 4, align=4)[0]
    assert "inside its predecessor" in problems(items, [0, 7], 8, 2)[0]
    assert "outside" in problems(items, [0, 11], 8, 2)[0]
    assert "cut by a rank boundary" in problems(items, [1, 9], 8, 2)[0]
    assert "1 starts" in problems(items, [0], 8, 2)[0]
