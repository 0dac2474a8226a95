"""The one collectives module: any sizes, any dtypes, a fixed order of sums, counted bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ragged import collectives as c
from ragged import make_mesh
from ragged.mesh import Comm


def group() -> c.Group:
    return Comm(make_mesh((-1,), ("fsdp",), device_type="cpu")).everyone


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int16, torch.uint16, torch.bool, torch.complex64]


def gathers(sizes: list[int]) -> None:
    g = group()
    for dtype in DTYPES:
        shards = [(torch.arange(n) % 7 + k).to(dtype) for k, n in enumerate(sizes)]
        out = torch.empty(sum(sizes), dtype=dtype)
        with c.record() as events:
            got = c.all_gather(out, shards[g.rank], g, sizes).wait()
        assert got is out
        assert torch.equal(out.view(torch.uint8), torch.cat(shards).view(torch.uint8))
        want = shards[g.rank].nbytes * (g.size - 1)
        assert events == [c.Event("all_gather", want, g.size)]


@pytest.mark.parametrize("sizes", [[5, 5, 5], [4, 0, 3], [0, 0, 6], [7, 1]])
def test_gathers_of_any_sizes_and_dtypes(run: Any, sizes: list[int]) -> None:
    run(len(sizes), gathers, sizes)


def reduces(sizes: list[int], dtype: torch.dtype) -> None:
    g = group()
    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(sum(sizes), generator=generator).to(dtype) for _ in sizes]
    total = fulls[0].float() if dtype == torch.bfloat16 else fulls[0].clone()
    for x in fulls[1:]:
        total += x
    want = total.to(dtype).split(sizes)[g.rank]
    for _ in range(3):
        with c.record() as events:
            got = c.reduce_scatter(fulls[g.rank].clone(), g, sizes).wait()
        assert torch.equal(got, want)  # bitwise: in rank order, bf16 summed in fp32 and rounded once
        sent = (sum(sizes) - sizes[g.rank]) * dtype.itemsize
        assert events == [c.Event("reduce_scatter", sent, g.size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("sizes", [[5, 5, 5], [4, 0, 3], [0, 0, 0, 6]])
def test_reduce_scatter_sums_in_rank_order(run: Any, sizes: list[int], dtype: torch.dtype) -> None:
    run(len(sizes), reduces, sizes, dtype)


def uneven(counts: list[int]) -> list[int]:
    """Rank r sends 10 (r + 1) + j to target j, counts[j] elements in all: NVIDIA/Megatron-LM#6587."""
    g = group()
    full = torch.cat([torch.full((n,), 10 * (g.rank + 1)) for n in counts])
    return c.reduce_scatter(full, g, counts).wait().tolist()  # type: ignore[no-any-return]


def test_uneven_targets(run: Any) -> None:
    assert run(3, uneven, [5, 0, 3]) == [[60] * 5, [], [60] * 3]
    assert run(4, uneven, [0, 0, 0, 6]) == [[], [], [], [100] * 6]


def exchanges() -> None:
    g = group()
    sends = [torch.full(((g.rank + k) % 3,), 16 * g.rank + k, dtype=torch.uint8) for k in range(g.size)]
    wants = [torch.full(((g.rank + k) % 3,), 16 * k + g.rank, dtype=torch.uint8) for k in range(g.size)]
    out = torch.empty(sum(map(len, wants)), dtype=torch.uint8)
    with c.record() as events:
        c.exchange(sends, out.split(list(map(len, wants))), g).wait()
    assert torch.equal(out, torch.cat(wants))
    assert sum(e.sent for e in events) == sum(len(s) for k, s in enumerate(sends) if k != g.rank)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_exchange(run: Any, n: int) -> None:
    run(n, exchanges)


def many_in_flight() -> None:
    """Collectives that overlap keep apart, whatever their sizes."""
    g = group()
    shards = [torch.full((n + 1,), 100.0 * n + g.rank) for n in range(20)]
    outs = [torch.empty(len(s) * g.size) for s in shards]
    gathers = [c.all_gather(o, s, g) for o, s in zip(outs, shards, strict=True)]
    sums = [c.reduce_scatter(s.repeat(g.size), g) for s in shards]
    for n in reversed(range(20)):
        want = torch.cat([torch.full((n + 1,), 100.0 * n + k) for k in range(g.size)])
        assert torch.equal(gathers[n].wait(), want)
        assert torch.equal(sums[n].wait(), sum(100.0 * n + k for k in range(g.size)) * torch.ones(n + 1))


def test_many_in_flight(run: Any) -> None:
    run(3, many_in_flight)


def small_values() -> None:
    g = group()
    assert c.all_gather_object({"rank": dist.get_rank(), "x": "y" * g.rank}, g) == [
        {"rank": k, "x": "y" * k} for k in range(g.size)
    ]
    assert c.all_reduce(torch.tensor([1.0, float(g.rank)]), g).wait()[0] == g.size
    assert c.all_reduce(torch.tensor([float(g.rank)]), g, "max").wait()[0] == g.size - 1


def test_objects_and_all_reduce(run: Any) -> None:
    run(3, small_values)
