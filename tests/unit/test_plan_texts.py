"""What a person reads of a plan: the facts that must be there, whatever the wording."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragged import ELEMENT, P, Plan, plan, rules, typeof, visualize

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
    assert "S = 512; with this leaf cut anywhere it would be 384" in text
    assert "costs 128 elements per rank" in text
    assert "optimizer" not in text


def test_explain_a_block_that_costs_nothing() -> None:
    assert "costs 0 elements per rank" in one(3).explain("w")


def test_explain_optimizer_blocks() -> None:
    optimizer = SimpleNamespace(blocks=lambda path, shape, dtype: (384, 1))
    text = one(2, optimizer=optimizer).explain("w")
    assert "spec asks for blocks of 256" in text
    assert "optimizer asks for blocks of 384" in text
    assert "together: 1 blocks of 768" in text
    assert "costs 384 elements per rank" in text


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
        cost = int(re.search(r"costs (-?[\d,]+) elements", text).group(1).replace(",", ""))  # type: ignore[union-attr]
        assert cost >= 0


# --- summary, repr --------------------------------------------------------------------------


def test_summary_has_a_row_per_kind_of_bucket() -> None:
    p = layered()
    text = p.summary()
    lines = text.splitlines()
    assert lines[0].split() == ["unit", "leaves", "dtype", "ranks", "elements", "S", "m*S", "padding", "bytes/rank"]
    # 100 rows of 8 in two shards; 2-byte elements in three blocks; the replicated one has one rank.
    assert row(text, "embed frozen") == ["1", "float32", "2", "800", "448", "896", "12.00%", "1.8", "KiB"]
    assert row(text, "layers.0#1 .. layers.2#1 (3x)")[:6] == ["1", "bfloat16", "2", "768", "512", "1,024"]
    assert row(text, "layers.0 .. layers.2 (3x)")[:6] == ["1", "float32", "2", "8", "64", "128"]
    assert row(text, "norm")[:6] == ["1", "float32", "1", "8", "64", "64"]
    assert len(lines) == 6
    assert lines[-1].startswith("8 leaves in 5 units on fsdp 2: 3,136 elements")
    assert f"padding {p.padding:.2%}" in lines[-1]
    assert p.bytes_per_rank() == 448 * 4 + 3 * (512 * 2 + 64 * 4) + 64 * 4
    assert f"{p.bytes_per_rank() / 1024:.1f} KiB per rank" in lines[-1]


def test_units_of_other_layouts_are_rows_of_their_own() -> None:
    tree = {"a": ((8, 8), F32), "b": ((8, 8), F32), "c": ((8, 9), F32), "d": ((8, 8), BF16)}
    rows = plan(tree, {"fsdp": 2}, RAGGED).summary().splitlines()[1:-1]
    assert [re.split(r"\s{2,}", line)[0] for line in rows] == ["a .. b (2x)", "c", "d"]


def test_a_large_plan_has_a_short_summary() -> None:
    p = layered(layers=80, ranks=1024)
    assert "(80x)" in p.summary()
    assert len(p.summary().splitlines()) == 6


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
    p = layered()
    drawings = visualize(p).split("\n\n")
    assert len(drawings) == len(p.buckets)
    for drawing, bucket in zip(drawings, p.buckets, strict=True):
        assert drawing.startswith(f"{bucket.name}  {str(bucket.dtype)[6:]}, S = {bucket.shard:,}")
        assert [line.split()[0] for line in drawing.splitlines()[2:-2]] == [f.path for f in bucket.leaves]
    assert "over every rank" in drawings[-1]


def test_visualize_an_unknown_format() -> None:
    with pytest.raises(ValueError, match="format='pdf'"):
        visualize(one(2), format="pdf")
