"""What a person reads of a plan: the facts that must be there, whatever the wording."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optim import adamw, sgd
from ragged import ELEMENT, P, Plan, plan, rules, typeof, visualize
from ragged.planner import Item, lower_bound
from ragged.report import state_bytes

F32, BF16 = torch.float32, torch.bfloat16
RAGGED = P(ragged="fsdp")


def one(ranks: int, shape: tuple[int, ...] = (96, 8), **options: Any) -> Plan:
    """PL-01: 768 elements in blocks of 256."""
    return plan({"w": (shape, F32)}, {"fsdp": ranks}, P(ragged="fsdp", block=(32, None)), **options)


def layered(layers: int = 3, ranks: int = 2) -> Plan:
    tree = {
        "embed": ((100, 8), F32),
        "layers": [{"w": ((96, 8), BF16), "b": ((8,), F32)} for _ in range(layers)],
        "norm": ((8,), F32),
    }
    spec = rules({"**.w": P(ragged="fsdp", block=(32, None)), "norm": None, "**": RAGGED})
    return plan(tree, {"fsdp": ranks}, spec, units=["layers.*"], frozen=rules({"embed": True, "**": False}))


def row(text: str, name: str) -> list[str]:
    """The cells of the one row that begins with a name."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


# --- explain --------------------------------------------------------------------------------


def test_explain_says_who_asked_and_what_it_costs() -> None:
    text = one(2).explain("w")
    assert text.startswith("w: shape (96, 8), spec P(ragged='fsdp', block=(32, None))")
    assert "[0, 768) of 1,024" in text
    assert "spec asks for blocks of 256 elements" in text
    assert "3 blocks of 256 elements" in text
    assert "S = 512 elements per rank in 1 buffer" in text
    assert "S would be 384 without it, so it costs 128 elements per rank" in text
    assert "optimizer" not in text


def test_explain_a_block_that_costs_nothing() -> None:
    assert "blocks of 256 elements: costs nothing" in one(3).explain("w")


def test_explain_optimizer_blocks() -> None:
    optimizer = SimpleNamespace(blocks=lambda path, shape, dtype: (384, 1))
    text = one(2, optimizer=optimizer).explain("w")
    assert "spec asks for blocks of 256" in text
    assert "optimizer asks for blocks of 384" in text
    assert "1 blocks of 768" in text
    # either block alone allows S = 512 or 384
    assert "blocks of 256 elements: S would be 384 without it, so it costs 384 elements per rank" in text
    assert "blocks of 384 elements: S would be 512 without it, so it costs 256 elements per rank" in text


def test_explain_start_alignment() -> None:
    shapes = {"m": dict.fromkeys("ab", ((100,), F32))}
    optimizer = SimpleNamespace(blocks=lambda path, shape, dtype: (1, 256) if path == "m.a" else None)
    text = plan(shapes, {"fsdp": 1}, P(ragged="fsdp", block=ELEMENT), optimizer=optimizer).explain("m.a")
    assert "optimizer asks for blocks of 1 elements and a start at a multiple of 256: S would be 256 without" in text
    assert "alignment starts every leaf at a multiple of 64 elements: costs nothing" in text  # 256 stands anyway
    text = plan(shapes, {"fsdp": 1}, P(ragged="fsdp", block=ELEMENT)).explain("m.a")
    assert "multiple of 64 elements: S would be 200 without it, so it costs 56 elements per rank" in text


def test_explain_shares() -> None:
    p = plan({"w": ((10, 4), F32)}, {"fsdp": 4}, P(ragged="fsdp", shares=(2, 3, 0, 5)))
    assert "shares (2, 3, 0, 5) set the runs: [8, 12, 0, 20]" in p.explain("w")


def test_explain_an_unknown_leaf() -> None:
    with pytest.raises(ValueError, match=r"no leaf 'layers\.0\.x'.*'layers\.0\.w'"):
        layered().explain("layers.0.x")


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_leaf_can_be_explained(ranks: int) -> None:
    p = layered(ranks=ranks)
    for path, leaf in p.leaves.items():
        text = p.explain(path)
        assert text.startswith(f"{path}: shape {leaf.shape}")
        assert f"unit {leaf.unit!r}" in text
        for line in text.splitlines()[4:]:  # a request per line, with its cost
            found = re.search(r"costs (nothing|[\d,]+ elements|a collective)|no cheaper layout", line)
            assert found is not None


# --- summary, repr --------------------------------------------------------------------------


HEADS = "unit leaves dtype ranks elements buffers S m*S padding at_least params grads states"


def test_summary_has_a_row_per_kind_of_unit_and_dtype() -> None:
    p = layered()
    text = p.summary()
    lines = text.splitlines()
    assert lines[0].replace("at least", "at_least").split() == HEADS.split()
    # 100 rows of 8 in two shards; 2-byte elements in three blocks; the replicated one has one rank.
    kib = ["1.8", "KiB", "0", "B", "0", "B"]  # a frozen leaf has no gradient and no state
    assert row(text, "embed frozen") == ["1", "float32", "2", "800", "1", "448", "896", "12.00%", "12.00%", *kib]
    kib = ["1.0", "KiB", "1.0", "KiB", "4.0", "KiB"]
    three = ["1", "bfloat16", "2", "768", "1", "512", "1,024", "33.33%", "33.33%", *kib]
    assert row(text, "layers.0#1 .. layers.2#1 (3x)") == three
    assert row(text, "layers.0 .. layers.2 (3x)")[:7] == ["1", "float32", "2", "8", "1", "64", "128"]
    assert row(text, "norm")[:7] == ["1", "float32", "1", "8", "1", "64", "64"]
    assert len(lines) == 7
    assert lines[-2].startswith("8 leaves in 5 units on fsdp 2: 3,136 elements")
    assert f"padding {p.padding:.2%}" in lines[-2]
    assert p.bytes_per_rank() == 448 * 4 + 3 * (512 * 2 + 64 * 4) + 64 * 4
    assert lines[-1].startswith(f"per rank: {p.bytes_per_rank() / 1024:.1f} KiB of parameters")


def test_summary_shows_buffers_and_what_no_layout_can_avoid() -> None:
    """Blocks of 3 and 4 rows on 32 ranks: one buffer needs 12 rows per rank, two need 7."""
    shapes = {"pair": {"a": ((96, 64), F32), "b": ((128, 64), F32)}}
    spec = rules({"pair.a": P(ragged="fsdp", block=(3, None)), "pair.b": P(ragged="fsdp", block=(4, None))})
    one, two = (plan(shapes, {"fsdp": 32}, spec, price=price).summary() for price in (1 << 60, 0))
    assert row(one, "pair")[4:9] == ["1", "768", "24,576", "71.43%", "0.00%"]
    assert row(two, "pair")[4:9] == ["2", "448", "14,336", "0.00%", "0.00%"]


def test_certificates_of_units_with_other_blocks() -> None:
    """Equal layouts, but not equal problems: each has its own bound, and a row of its own."""
    tree = {"l": [{"w0": ((6, 64), F32), "w1": ((8, 64), F32)} for _ in range(2)]}
    spec = rules({"l.0.*": P(ragged="fsdp", block=(4, None)), "l.1.*": P(ragged="fsdp", block=(5, None))})
    p = plan(tree, {"fsdp": 2}, spec, units=["l.*"])
    least = [2 * lower_bound([Item(f.size, f.block) for f in unit.leaves], 2) / (14 * 64) - 1 for unit in p.units]
    for name, share in zip(("l.0", "l.1"), least, strict=True):
        assert row(p.summary(), name)[8] == f"{share:.2%}"
    assert f"unavoidable at least {sum(least) / 2:.2%}" in p.summary()


def test_bytes_of_a_state_for_some_leaves_only() -> None:
    """One unit has state and the other hasn't; part of a buffer counts with its share of the mean."""
    shapes = {"a": {"w": ((64, 4), F32)}, "b": {"w": ((64, 4), F32), "v": ((64, 4), F32)}}
    p = plan(shapes, {"fsdp": 2}, RAGGED)
    for key, total in ((("a",), 512), (("b",), 1024), (("b", "w"), 512)):
        state = SimpleNamespace(init=lambda params, key=key: functools.reduce(lambda t, k: t[k], key, params))
        assert sum(state_bytes(p, state).values()) == total
    assert p.bytes_per_rank() == 3 * 512


def test_integer_leaves_have_no_gradient() -> None:
    p = plan({"w": ((64,), torch.int8)}, {"fsdp": 1}, RAGGED)
    assert p.summary().splitlines()[-1].startswith("per rank: 64 B of parameters, 0 B of gradients, 0 B of optimizer")


def test_explain_weighs_collectives_too() -> None:
    """Without its block, or without alignment, the leaves would fit into one buffer."""
    shapes = {"m": {"a": ((88, 48), F32), "b": ((76, 64), F32)}}
    spec = rules({"m.a": P(ragged="fsdp", block=(7, None)), "m.b": P(ragged="fsdp", block=(5, None))})
    text = plan(shapes, {"fsdp": 8}, spec, price=500).explain("m.a")
    assert "S = 1,984 elements per rank in 2 buffers" in text
    assert "336 elements: S would be 1,280 in 1 buffer without it, so it costs 704 elements per rank" in text
    shapes = {"m": {"a": ((144, 16), F32), "b": ((56, 48), F32), "c": ((156, 48), F32)}}
    rows = {"m.a": 3, "m.b": 5, "m.c": 7}
    spec = rules({path: P(ragged="fsdp", block=(n, None)) for path, n in rows.items()})
    text = plan(shapes, {"fsdp": 4}, spec, price=500).explain("m.a")
    assert "64 elements: S would be 3,360 in 1 buffer without it, so it costs a collective" in text


def test_bytes_of_an_optimizers_state() -> None:
    shapes = {"m": {"a": ((64, 4), BF16), "b": ((64, 4), BF16)}}
    p = plan(shapes, {"fsdp": 2}, RAGGED, frozen=rules({"m.a": True, "m.b": False}))
    assert "256 B of parameters" not in p.summary()
    per_rank = "per rank: 512 B of parameters, 256 B of gradients, "
    assert p.summary().endswith(per_rank + "1.0 KiB of optimizer state (at 8 bytes per element)")
    assert p.summary(adamw(1e-3)).endswith(per_rank + "1.0 KiB of optimizer state")
    assert p.summary(adamw(1e-3, mu_dtype=BF16)).endswith(per_rank + "768 B of optimizer state")
    assert p.summary(sgd(1e-3)).endswith(per_rank + "0 B of optimizer state")


def test_units_of_other_layouts_are_rows_of_their_own() -> None:
    tree = {"a1": ((8, 8), F32), "a2": ((8, 8), F32), "b": ((8, 8), F32), "a3": ((8, 9), F32), "a4": ((8, 8), BF16)}
    rows = plan(tree, {"fsdp": 2}, RAGGED).summary().splitlines()[1:-2]
    assert [re.split(r"\s{2,}", line)[0] for line in rows] == ["a1 .. a2 (2x)", "a3", "a4", "b"]


def test_a_large_plan_has_a_short_summary() -> None:
    p = layered(layers=80, ranks=1024)
    assert "(80x)" in p.summary()
    assert len(p.summary().splitlines()) == 7


def test_repr_is_one_line() -> None:
    p = layered()
    assert repr(p) == f"Plan(8 leaves, 5 units, fsdp 2, padding {p.padding:.2%}, {p.fingerprint[:8]})"
    assert repr(plan({}, {}, None)).startswith("Plan(0 leaves, 0 units")


def test_texts_of_an_empty_plan() -> None:
    p = plan({}, {}, None)
    assert "0 leaves in 0 units on no mesh axes" in p.summary()
    assert (typeof(p), visualize(p)) == ("{}", "")


# --- typeof, visualize ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape", "spec", "text"),
    [
        (F32, (96, 8), P(ragged="fsdp", block=(32, None)), "f32[96,8] ragged fsdp, blocks of 256"),
        (BF16, (96, 8), P("tp", ragged=("dp", "fsdp")), "bf16[96@tp,8] ragged dp+fsdp, blocks of 8"),
        (torch.int64, (4,), P(("tp", "dp")), "i64[4@tp+dp]"),
        (torch.bool, (), P(), "bool[] replicated"),
        (torch.complex64, (0, 3), P(ragged="fsdp", block=ELEMENT), "c64[0,3] ragged fsdp, blocks of 1"),
        (torch.float8_e4m3fn, (2,), P(), "float8_e4m3fn[2] replicated"),
    ],
)
def test_typeof_leaves(dtype: torch.dtype, shape: tuple[int, ...], spec: P, text: str) -> None:
    p = plan({"deep": {"er": (shape, dtype)}}, {"dp": 2, "fsdp": 2, "tp": 2}, spec)
    assert typeof(p) == f"deep.er  {text}"


def test_typeof_plans_tensors_and_others() -> None:
    p = layered()
    assert [line.split()[0] for line in typeof(p).splitlines()] == list(p.leaves)
    assert typeof(torch.ones(4, 2)) == "f32[4,2]"
    with pytest.raises(ValueError, match="a Plan or a tensor, got list"):
        typeof([1])


def test_visualize_has_a_row_per_leaf_and_a_column_per_rank() -> None:
    text = visualize(one(2))
    assert text.splitlines()[0] == "w  float32, S = 512 over fsdp"
    assert text.splitlines()[1].split() == ["block", "rank", "0", "rank", "1"]
    assert [line.split() for line in text.splitlines()[2:4]] == [["w", "256", "512", "256"], ["(padding)", "·", "256"]]
    assert row(text, "(filled)") == ["████████", "████░░░░"]
    assert [line.split()[2:] for line in visualize(one(4)).splitlines()[2:3]] == [["256", "256", "256", "·"]]


@pytest.mark.parametrize(("ranks", "heads"), [(16, "rank 15"), (32, "30-31"), (40, "39"), (1024, "960-1023")])
def test_many_ranks_share_columns(ranks: int, heads: str) -> None:
    p = one(ranks, shape=(32 * 40, 8))
    _, head, leaf, padding, _ = visualize(p).splitlines()
    assert head.endswith(heads)
    assert len(re.findall(r"rank \d+|\d+-\d+", head)) == len(leaf.split()) - 2 <= 16
    cells = [int(cell.replace(",", "")) for cell in leaf.split()[2:] if cell != "·"]
    pads = [int(cell.replace(",", "")) for cell in padding.split()[1:] if cell != "·"]
    assert sum(cells) == 32 * 40 * 8
    assert sum(cells) + sum(pads) == p.buckets[0].length


def test_every_bucket_is_drawn() -> None:
    p = layered(1)
    drawings = visualize(p).split("\n\n")
    assert len(drawings) == len(p.buckets)
    for drawing, bucket in zip(drawings, p.buckets, strict=True):
        assert drawing.startswith(f"{bucket.name}  {str(bucket.dtype)[6:]}, S = {bucket.shard:,}")
        assert [line.split()[0] for line in drawing.splitlines()[2:-2]] == [f.path for f in bucket.leaves]
    assert "over every rank" in drawings[-1]


def test_visualize_an_unknown_format() -> None:
    with pytest.raises(ValueError, match="format='pdf'"):
        visualize(one(2), format="pdf")
