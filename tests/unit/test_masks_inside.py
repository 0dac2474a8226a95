"""Parts of trees: masks that speak of other parts, parts joined after one was donated, bf16 decay."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import optim
from ragged import P, combine, make_mesh, partition, rules, shard, unshard


def params() -> dict[str, Any]:
    return {"x": {"w": torch.ones(3, 2), "b": torch.ones(2)}}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("mask", [{"x": {"w": True, "b": False}}, rules({"**.w": True, "**.b": False})])
def test_masks_inside_a_partition_may_speak_of_other_leaves(mask: Any, sharded: bool) -> None:
    p: Any = params()
    if sharded:
        p = shard(p, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"))
    wide = {"x": {"w": "m n -> m n", "b": None}}
    for adam in (optim.adamw(0.1, mask=mask), optim.adamw8bit(0.1, mask=mask, min_size=1)):
        tx = optim.partition({"m": optim.muon(0.1, matrix=wide, mask=mask), "a": adam}, rules({"**.w": "m", "**": "a"}))
        updates, _ = tx.update(p, tx.init(p), p)
        got = unshard(updates) if sharded else updates
        torch.testing.assert_close(got["x"]["b"], torch.full((2,), -0.1), rtol=1e-3, atol=0)  # no decay
        assert got["x"]["w"].mean() < -0.01
    typo = optim.adamw(0.1, mask=rules({"**.w": True, "**.c": False, "**": False}))
    with pytest.raises(ValueError, match="mask rule"):
        typo.update(p, typo.init(p), p)  # a whole tree has all there is to speak of


def test_parts_join_after_one_was_donated() -> None:
    tree = shard(
        {"a": torch.ones(4), "b": torch.ones(4)}, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp")
    )
    some, rest = partition(tree, lambda path, leaf: path == "a")
    tx = optim.sgd(0.1)
    new, _ = optim.make_step(tx)(some, optree.tree_map(torch.ones_like, some), tx.init(some))
    both = combine(new, rest)
    assert unshard(both)["a"][0] == pytest.approx(0.9)
    with pytest.raises(ValueError, match="donated"):
        combine(some, rest)
    newer, _ = optim.make_step(tx)(both, optree.tree_map(torch.ones_like, both), tx.init(both))
    for dead in (both, rest, new, tree):
        with pytest.raises(ValueError, match="donated"):
            _ = dead.tensors
    assert unshard(newer)["a"][0] == pytest.approx(0.8)


def test_the_decay_of_bf16_parameters_is_not_rounded_away() -> None:
    def run(dtype: torch.dtype, fused: bool) -> float:
        draw, p = torch.Generator().manual_seed(0), torch.ones(4, 4, dtype=dtype)
        tx = optim.muon(0.02, weight_decay=0.1, mu_dtype=torch.float32)
        state = tx.init(p)
        for _ in range(200):
            g = torch.randn(4, 4, generator=draw)
            if fused:
                p, state = optim.make_step(tx)(p, g.to(dtype), state)
            else:
                updates, state = tx.update(g.to(dtype), state, p)
                p = optim.apply_updates(p, updates)
        return p.float().mean().item()

    want = run(torch.float32, True)
    for fused in (False, True):
        assert run(torch.bfloat16, fused) == pytest.approx(want, abs=0.03)
