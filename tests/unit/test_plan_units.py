"""Units, buckets and what is refused, each error with the leaf and the remedy in its text."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragged import ELEMENT, TENSOR, P, Plan, plan, rules
from ragged.layout import Request

F32, BF16 = torch.float32, torch.bfloat16
AXES, RAGGED = {"fsdp": 2}, P(ragged="fsdp")
W = ((4, 4), F32)
MODEL = {"embed": W, "layers": [{"b": W, "mlp": {"w": W}} for _ in range(11)], "head": {"norm": W, "w": W}}
LAYERS = [f"layers.{i}" for i in range(11)]


def units_of(p: Plan) -> list[str]:
    return [u.name for u in p.units]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ((), ["embed", "head", "layers"]),
        (["layers.*"], ["embed", "head", *LAYERS]),
        ([re.compile(r"layers\.\d+")], ["embed", "head", *LAYERS]),
        (["layers.*.mlp"], ["embed", "head", "layers", *[f"{n}.mlp" for n in LAYERS]]),
        (["layers.3", "layers"], ["embed", "head", "layers", "layers.3"]),
        (["head.**", "layers"], ["embed", "head.norm", "head.w", "layers"]),
        (["layers", "layers.3"], ["embed", "head", "layers"]),  # the second matches leaves, if too late
    ],
    ids=repr,
)
def test_units(patterns: Any, names: list[str]) -> None:
    p = plan(MODEL, AXES, RAGGED, units=patterns)
    assert units_of(p) == names
    assert sorted(f.path for u in p.units for f in u.leaves) == sorted(p.leaves)
    for unit in p.units:
        assert p.unit[unit.name] is unit
        assert all(f.path.startswith(unit.name) and f.unit == unit.name for f in unit.leaves)
        assert p.leaves[unit.leaves[0].path] is unit.leaves[0]


def test_the_first_unit_pattern_wins() -> None:
    p = plan(MODEL, AXES, RAGGED, units=["layers.*.mlp", "layers.*"])
    assert [f.path for f in p.unit["layers.10"].leaves] == ["layers.10.b"]
    assert [f.path for f in p.unit["layers.10.mlp"].leaves] == ["layers.10.mlp.w"]


def test_equal_units_have_equal_layouts() -> None:
    p = plan(MODEL, AXES, RAGGED, units=["layers.*"])
    assert len({(b.bounds, tuple(f.offset for f in b.leaves)) for n in LAYERS for b in p.unit[n].buckets}) == 1


def test_trees_of_one_leaf_or_none() -> None:
    p = plan(W, AXES, RAGGED)
    assert (list(p.leaves), units_of(p), p.leaves[""].runs) == ([""], [""], ((0, 16), (16, 16)))
    for empty in ({}, [], None, {"a": None}):
        p = plan(empty, AXES, RAGGED)
        assert (p.leaves, p.units, p.buckets) == ({}, (), ())
        assert (p.padding, p.bytes_per_rank()) == (0, 0)


def test_a_bucket_has_one_dtype_one_set_of_axes_and_one_temperature() -> None:
    tree = {"m": {"a": W, "b": ((4, 4), BF16), "c": W, "d": W, "e": W, "f": W, "g": ((4, 4), torch.int64)}}
    specs = {"a": RAGGED, "b": RAGGED, "c": P("tp", ragged="fsdp"), "d": None, "e": RAGGED, "f": RAGGED, "g": RAGGED}
    p = plan(tree, {"fsdp": 2, "tp": 2}, {"m": specs}, frozen=rules({"m.f": True, "**": False}))
    assert {frozenset(f.path[-1] for f in b.leaves) for b in p.buckets} == {frozenset(s) for s in ("ae", *"bcdfg")}
    assert [b.name for b in p.buckets] == ["m", *[f"m#{i}" for i in range(1, 6)]]
    assert [b.index for b in p.buckets] == list(range(6))
    for b in p.buckets:
        assert {f.dtype for f in b.leaves} == {b.dtype}
        assert b.frozen == (b.leaves[0].path == "m.f")
        assert b.even == (("tp",) if b.leaves[0].path == "m.c" else ())
        assert b.ragged == (() if b.leaves[0].path == "m.d" else ("fsdp",))
    # 64 is the alignment; the replicated leaf has one shard, the int64 leaf 8 bytes per element.
    assert p.bytes_per_rank() == 64 * (4 + 2 + 4 + 4 + 4 + 8)
    # Five buckets of two shards and one of one; seven leaves of 16, of which tp halves one.
    assert p.padding == (5 * 128 + 64) / (6 * 16 + 8) - 1


@pytest.mark.parametrize("frozen", [True, {"embed": True, "layers": True, "head": True}, lambda path, leaf: True])
def test_frozen_takes_all_that_the_resolver_takes(frozen: Any) -> None:
    assert all(b.frozen for b in plan(MODEL, AXES, RAGGED, frozen=frozen).buckets)
    assert not any(b.frozen for b in plan(MODEL, AXES, RAGGED).buckets)


def test_describe_tells_frozen_plans_apart() -> None:
    """Ranks compare it: one that reduces a bucket and one that doesn't would wait for each other."""
    cold, warm = (plan({"w": W}, AXES, RAGGED, frozen=frozen).describe() for frozen in (True, False))
    assert cold != warm


def test_optimizer_blocks() -> None:
    def blocks(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, int] | None:
        assert (shape, dtype) == ((10, 6), F32)
        return {"m.a": (4, 48), "m.b": (TENSOR, 1)}.get(path)

    tree = {"m": dict.fromkeys("abc", ((10, 6), F32))}
    p = plan(tree, AXES, RAGGED, optimizer=SimpleNamespace(blocks=blocks), align=32)
    assert {k: f.block for k, f in p.leaves.items()} == {"m.a": 12, "m.b": 60, "m.c": 6}
    assert p.leaves["m.a"].requests == (Request("spec", 6, 1), Request("optimizer", 4, 48))
    assert p.leaves["m.c"].requests == (Request("spec", 6, 1),)
    step = math.lcm(48, 32)
    assert p.buckets[0].shard % step == 0
    assert [f.offset % step for f in p.buckets[0].leaves] == [0, 0, 0]
    without = plan(tree, AXES, RAGGED, optimizer=SimpleNamespace(blocks=None), align=32)
    assert without == plan(tree, AXES, RAGGED, align=32)


def asks(what: Any) -> Any:
    """An optimizer that asks for the same of every leaf."""
    return SimpleNamespace(blocks=lambda path, shape, dtype: what)


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "axes", "spec", "options", "words"),
    [
        # ER-03, pytorch/pytorch#191472: shares
        ({"w": ((7, 2), F32)}, 2, P(ragged="fsdp", shares=(1, 2)), {}, ["(7, 2)", "sum(shares) = 3", "7 blocks"]),
        ({"w": ((6, 2), F32)}, 2, P(ragged="fsdp", shares=(1, 1, 1)), {}, ["'w'", "3 shares for 2 ranks", "(1, 1, 1)"]),
        ({"w": ((6, 2), F32)}, 2, P(ragged="fsdp", shares=(6,)), {}, ["'w'", "1 shares for 2 ranks"]),
        # even dims
        ({"w": ((7, 2), F32)}, 2, P("fsdp"), {}, ["'w'", "(7, 2)", "size 7", "2 ranks", "ragged='fsdp'"]),
        ({"w": ((4, 6), F32)}, {"a": 2, "b": 2}, P(None, ("a", "b")), {}, ["size 6", "4 ranks", "ragged=('a', 'b')"]),
        ({"w": ((4,), F32)}, 2, P(None, "fsdp"), {}, ["'w'", "(4,)", "1 dims", "P(None, 'fsdp')", "names 2"]),
        ({"w": ((), F32)}, 2, P("fsdp"), {}, ["'w'", "0 dims"]),
        ({"w": ((4,), F32)}, 2, P(ragged="fsdp", block=(1, 2)), {}, ["'w'", "(4,)", "block=(1, 2) has 2 entries"]),
        # meshes
        ({"w": W}, {"fsdp": 0}, RAGGED, {}, ["'fsdp': 0", "positive"]),
        ({"w": W}, {"fsdp": -2}, RAGGED, {}, ["'fsdp': -2", "positive"]),
        ({"w": W}, {"fsdp": 2.0}, RAGGED, {}, ["'fsdp': 2.0", "positive"]),
        # trees
        ({"w": 3}, 2, RAGGED, {}, ["'w'", "int", "expected a tensor"]),
        ({"w": {"v": "text"}}, 2, RAGGED, {}, ["'w.v'", "str"]),
        ({"w": ((-2, -2), F32)}, 2, RAGGED, {}, ["'w'", "(-2, -2)", "sizes >= 0"]),
        ({"w": (4, F32)}, 2, RAGGED, {}, ["'w'", "shape 4", "expected a tuple"]),
        ({"w": ((2.5,), F32)}, 2, RAGGED, {}, ["'w'", "(2.5,)"]),
        ({"a.b": W, "a": {"b": W}}, 2, RAGGED, {}, ["two leaves", "'a.b'"]),
        # specs
        ({"w": W}, 2, {"v": RAGGED}, {}, ["no spec for leaf 'w'"]),
        ({"w": W}, 2, {"w": RAGGED, "v": RAGGED}, {}, ["spec tree", "'v'", "matches no leaf"]),
        ({"w": W}, 2, {"w": "fsdp"}, {}, ["'w'", "'fsdp'", "not a spec"]),
        ({"w": W}, 2, rules({"**": "fsdp"}), {}, ["'w'", "'fsdp'", "expected P(...) or None"]),
        ({"w": W}, 2, lambda path, leaf: "fsdp" * 999, {}, ["'w'", "expected P(...) or None"]),
        ({"w": W}, 2, rules({"w": RAGGED, "v": RAGGED}), {}, ["spec rule 'v' matches no leaf"]),
        # options
        ({"w": W}, 2, RAGGED, {"units": ["w", "v.*"]}, ["units pattern 'v.*' matches no leaf"]),
        ({"w": W}, 2, RAGGED, {"units": [3]}, ["units pattern 3", "glob", "regex"]),
        ({"w": W}, 2, RAGGED, {"units": "layers.*"}, ["'layers.*'", "sequence of patterns"]),
        ({"w": W}, 2, RAGGED, {"units": rules({"w": 1})}, ["sequence of patterns"]),
        ({"w": W}, 2, RAGGED, {"frozen": {"v": True}}, ["no frozen mask for leaf 'w'"]),
        ({"w": W}, 2, RAGGED, {"units": None}, ["units=None", "sequence of patterns"]),
        ({"w": W}, 2, RAGGED, {"frozen": lambda path, leaf: 1}, ["frozen mask", "'w'", "True or False"]),
        ({"w": W}, 2, RAGGED, {"price": 1e12}, ["price=1000000000000.0", "1 << 60"]),
        ({"w": W}, 2, RAGGED, {"price": True}, ["price=True"]),
        ({"w": W}, 2, RAGGED, {"optimizer": 3}, ["optimizer=3", "GradientTransformation"]),
        ({"w": W}, 2, RAGGED, {"optimizer": asks((256, -4))}, ["'w'", "(256, -4)", "start alignment"]),
        ({"w": W}, 2, RAGGED, {"optimizer": asks((0, 1))}, ["'w'", "(0, 1)"]),
        ({"w": W}, 2, RAGGED, {"optimizer": asks((256,))}, ["'w'", "(256,)"]),
        ({"w": W}, None, RAGGED, {}, ["mesh=None", "DeviceMesh"]),
        ({"w": W}, "fsdp", RAGGED, {}, ["mesh='fsdp'", "DeviceMesh"]),
        ({"w": W}, {3: 2}, RAGGED, {}, ["names must be strings"]),
        ({"w": W}, 2, RAGGED, {"align": 0}, ["align=0", "at least 1"]),
        ({"w": W}, 2, RAGGED, {"align": 6.4}, ["align=6.4", "whole number"]),
    ],
)  # fmt: skip
def test_refusals(tree: Any, axes: Any, spec: Any, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the words are looked at below
        plan(tree, {"fsdp": axes} if isinstance(axes, int) else axes, spec, **options)
    text = str(error.value)
    assert [word for word in words if word not in text] == [], text
    assert len(text) < 500


def test_a_plan_from_sizes_is_not_bound() -> None:
    p = plan({"w": W}, AXES, RAGGED)
    assert p.mesh is None
    with pytest.raises(ValueError, match=r"plan\.bind\(mesh\)"):
        p.bound()


# --- JSON -----------------------------------------------------------------------------------


def test_json_keeps_every_kind_of_spec() -> None:
    specs = [P("tp", ragged="fsdp"), P(ragged=("fsdp", "tp"), block=(2, None)), P(ragged="fsdp", block=TENSOR)]
    specs += [P(ragged="fsdp", shares=(1, 3)), P(ragged="fsdp", block=ELEMENT), P(ragged="fsdp", block=3), P()]
    tree = {f"w{i}": W for i in range(len(specs))}
    axes = {"fsdp": 2, "tp": 2}
    p = plan(tree, axes, dict(zip(tree, specs, strict=True)), frozen=rules({"w4": True, "**": False}))
    again = Plan.from_json(p.to_json(), like=tree)
    assert [f.spec for f in again.leaves.values()] == specs
    assert (again.leaves, again.units, again.structure) == (p.leaves, p.units, p.structure)
    assert (again, again.axes, again.mesh) == (p, axes, None)


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"a": W}, ["'b'", "only plan has it"]),
        ({"a": W, "b": W, "c": W}, ["'c'", "only tree has it"]),
        ({"a": W, "b": ((4, 5), F32)}, ["'b'", "(4, 5)", "(4, 4)"]),
        ({"a": ((4, 4), BF16), "b": W}, ["'a'", "bfloat16", "float32"]),
        ({"a": W, "b": 3}, ["'b'", "int"]),
    ],
)
def test_json_of_another_tree(like: Any, words: list[str]) -> None:
    text = plan({"a": W, "b": W}, AXES, RAGGED).to_json()
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the words are looked at below
        Plan.from_json(text, like=like)
    assert [word for word in words if word not in str(error.value)] == [], error.value


def test_json_of_another_version() -> None:
    data = json.loads(plan({"a": W}, AXES, RAGGED).to_json())
    with pytest.raises(ValueError, match="plan format version 99, this library reads 3"):
        Plan.from_json(json.dumps({**data, "version": 99}), like={"a": W})


@pytest.mark.parametrize("text", ["", "not json", "{}", "[]", "3", "null", '"x"', '{"version": 2}', None])
def test_texts_that_are_no_plan(text: Any) -> None:
    with pytest.raises(ValueError, match="no plan"):
        Plan.from_json(text, like={"a": W})


def test_a_changed_text_is_refused() -> None:
    text = plan({"a": W, "b": W}, AXES, RAGGED).to_json()
    data = json.loads(text)
    changed = 0
    for line in {line for line in text.splitlines() if re.search(r": \d+,?$", line)}:
        other = text.replace(line, re.sub(r": \d+", ": 7", line), 1)
        if json.loads(other)["version"] == 3 and json.loads(other) != data:
            changed += 1
            with pytest.raises(ValueError, match="was changed after it was written"):
                Plan.from_json(other, like={"a": W, "b": W})
    assert changed > 5
    with pytest.raises(ValueError, match="no plan"):
        Plan.from_json(text[:-40], like={"a": W, "b": W})
