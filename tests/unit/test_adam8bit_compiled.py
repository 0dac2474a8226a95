"""adamw8bit(compile=True): the bits of the eager path but for square roots, wherever a block lies.

Most tests run the kernel's arithmetic without the compiler, which takes long; one compiles it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor

import optim
from optim import codes_compiled
from tests.unit.test_adam8bit import equal, grads, params, sharded

BLOCK = 256


@pytest.fixture
def eagerly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels as they are written."""
    codes_compiled._kernel.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    yield
    codes_compiled._kernel.cache_clear()


@pytest.fixture
def right_roots(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Eager fp32 square roots correctly rounded, which torch's on the CPU are not."""
    others = torch.Tensor.sqrt_

    def sqrt_(x: Tensor) -> Tensor:
        return x.copy_(torch.from_numpy(np.sqrt(x.numpy()))) if x.dtype == torch.float32 else others(x)

    monkeypatch.setattr(torch.Tensor, "sqrt_", sqrt_)
    return monkeypatch


def pair(**options: Any) -> tuple[Any, Any]:
    def schedule(count: Tensor) -> Tensor:
        return 0.1 / (count + 1)

    made = {"weight_decay": 0.1, "mask": lambda path, x: x.ndim > 1, "min_size": 20, **options}
    return optim.adamw8bit(schedule, **made), optim.adamw8bit(schedule, compile=True, **made)


@pytest.mark.parametrize("block", [256, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("place", ["plain", "sharded"])
@pytest.mark.usefixtures("eagerly")
def test_arithmetic_of_the_eager_path(block: int, dtype: torch.dtype, place: str) -> None:
    """Masks, schedules, small leaves, short last blocks, both paths of a transformation."""
    txs = pair(block=block)

    def put(tree: Any) -> Any:
        tree = optree.tree_map(lambda x: x.to(dtype), tree)
        return sharded(tree, txs[0]) if place == "sharded" else tree

    held = [(put(params()), tx.init(put(params()))) for tx in txs]
    for k in range(3):
        seen = []
        for i, (tx, (p, s)) in enumerate(zip(txs, held, strict=True)):
            before = optree.tree_map(torch.clone, (p, s))
            seen.append(tx.update(put(grads(k)), s, p))
            assert equal((p, s), before)
            held[i] = optim.make_step(tx)(p, put(grads(k)), s)
            seen.append(held[i])
        assert equal(seen[0], seen[2])
        assert equal(seen[1], seen[3])


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("offset", [0, 2, 4])
@pytest.mark.usefixtures("eagerly")
def test_blocks_alone_and_codes_between_words(blocks: int, offset: int) -> None:
    tx = pair()[1]
    n = blocks * BLOCK
    p, g = torch.linspace(-1, 1, n), torch.linspace(1, -2, n)
    (want, wants), s = optim.make_step(tx)(p.clone(), g, tx.init(p)), tx.init(p)
    for moment in ("mu", "nu"):
        kept = getattr(s[0], moment)
        codes = torch.zeros(offset + n, dtype=torch.uint8)[offset:]
        s = (s[0]._replace(**{moment: kept._replace(codes=codes)}), *s[1:])
    got, after = optim.make_step(tx)(p, g, s)
    assert got.data_ptr() == p.data_ptr()
    assert equal((got, after), (want, wants))
    assert equal(g, torch.linspace(1, -2, n))


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="torch.compile needs a C++ compiler here")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own import
def test_compiled_bits(right_roots: pytest.MonkeyPatch) -> None:
    """Two halves of a buffer, with something that isn't finite in it, against the whole by the eager path."""
    n, half, bad = 12 * BLOCK, 6 * BLOCK, 7
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(n, generator=draw)
    gs = [torch.randn(n, generator=draw) * torch.exp(torch.randn(n, generator=draw)) for _ in range(3)]
    gs[0][:BLOCK] = 0.0
    gs[1][BLOCK : 2 * BLOCK] *= 1e-33
    gs[1][2 * BLOCK + 5] = 1e9
    gs[2][bad * BLOCK + 3], gs[2][(bad + 1) * BLOCK] = torch.nan, -torch.inf
    eager, compiled = pair(mask=None)

    def trained(tx: Any, cut: slice) -> Any:
        p = start[cut].clone()
        s = tx.init(p)
        for g in gs:
            p, s = optim.make_step(tx)(p, g[cut].clone(), s)
        return [p, *s[0].mu[:2], *s[0].nu[:2]]

    want = trained(eager, slice(0, n))
    right_roots.undo()
    first, second = trained(compiled, slice(0, half)), trained(compiled, slice(half, n))  # one size: it compiles once
    for x, *parts in zip(want, first, second, strict=True):
        torch.testing.assert_close(torch.cat(parts), x, rtol=0, atol=0, equal_nan=True)
    broken = ~torch.cat([first[0], second[0]]).view(-1, BLOCK).isfinite().all(1)
    assert broken.nonzero().flatten().tolist() == [bad, bad + 1]


def test_refusals() -> None:
    for block in ((32, 32), 4, 100):
        with pytest.raises(ValueError, match=r"compile=True needs flat blocks .* such as block=256"):
            optim.adamw8bit(0.1, block=block, compile=True)
