"""The example: the same training on any number of ranks as unsharded in plain torch, and the program itself."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples import train_gpt as gpt
from fsdp import value_and_grad
from optim import adamw, make_step
from ragged import TENSOR, ShardedTree, init, make_mesh, plan, unshard
from tests.pool import Pool
from tests.programs import Ahead, execute

SCRIPT = Path(gpt.__file__)
SIZES: dict[str, Any] = {"d": 32, "layers": 3, "heads": 2}
BATCH, CONTEXT, RATE, DECAY = 12, 32, 1e-3, 0.1
STEPS = {torch.float32: 20, torch.float64: 5}  # without rounding a few show whether the mathematics is the same

EPS = 1e-8  # torch's default: where a gradient is rounding error alone, Adam makes a step of it all the same
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10}

Run = tuple[list[float], dict[str, Tensor]]  # losses, and final parameters by path


def make_params(
    dtype: torch.dtype, block: Any, shape: tuple[int, ...], axes: tuple[str, ...], **options: Any
) -> ShardedTree:
    mesh = make_mesh(shape, axes, device_type="cpu")
    made = plan(gpt.shapes(**SIZES, dtype=dtype), mesh, gpt.specs(block), units=["layers.*"], **options)
    return init(made, gpt.INITIALIZERS, seed=0)


def draw(step: int, share: tuple[int, int]) -> Tensor:
    text = (torch.arange(10_000) ** 2 % 251 % 96 + 32).to(torch.uint8)
    return gpt.batch(text, (0, "train"), step, BATCH, CONTEXT + 1, share)


def by_path(tree: Any) -> dict[str, Tensor]:
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return {".".join(map(str, path)): leaf.detach() for path, leaf in zip(paths, leaves, strict=True)}


def sharded(
    dtype: torch.dtype,
    block: Any = 1,
    shape: tuple[int, ...] = (-1,),
    axes: tuple[str, ...] = ("fsdp",),
    buffers: Sequence[int] = (1, 1, 1, 1),
    name: str = "",
    steps: int = 0,
    **options: Any,
) -> Run:
    """On every rank of the pool: the library's loop, with AdamW as torch has it or one of the example's optimizers."""
    tx = gpt.optimizer(name, lambda count: RATE, DECAY) if name else adamw(RATE, eps=EPS, weight_decay=DECAY)
    params = make_params(dtype, block, shape, axes, optimizer=tx, **options)
    assert [len(unit.buckets) for unit in params.plan.units] == list(buffers)
    state, step_fn, loss_and_grad = tx.init(params), make_step(tx), value_and_grad(gpt.loss_fn)
    losses = []
    for step in range(steps or STEPS[dtype]):
        loss, grads = loss_and_grad(params, draw(step, (dist.get_rank(), dist.get_world_size())))
        params, state = step_fn(params, grads, state)
        losses.append(loss.item())
    return losses, by_path(unshard(params))


def plain(dtype: torch.dtype) -> Run:
    """The same functions on plain tensors, with torch's own optimizer and autograd."""
    params = unshard(make_params(dtype, 1, (-1,), ("fsdp",)))
    leaves = [x.requires_grad_() for x in optree.tree_leaves(params)]
    optimizer = torch.optim.AdamW(leaves, lr=RATE, eps=EPS, weight_decay=DECAY)
    losses = []
    for step in range(STEPS[dtype]):
        optimizer.zero_grad()
        loss = gpt.loss_fn(params, draw(step, (0, 1)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, by_path(params)


def gap(a: Run, b: Run) -> tuple[float, float]:
    """The largest differences of losses and of parameters."""
    assert a[1].keys() == b[1].keys()
    return (
        max(abs(x - y) for x, y in zip(a[0], b[0], strict=True)),
        max((a[1][path] - b[1][path]).abs().max().item() for path in a[1]),
    )


@pytest.fixture(scope="module")
def reference(pool: Pool) -> dict[torch.dtype, Run]:
    runs: dict[torch.dtype, Run] = {dtype: pool.run(1, plain, dtype)[0] for dtype in CLOSE}
    losses, _ = runs[torch.float32]
    assert losses[-1] < losses[0] - len(losses) / 40
    return runs


RANKS: list[tuple[int, dict[str, Any]]] = [(n, {}) for n in (1, 2, 3, 4)]
LAYOUTS: list[tuple[int, dict[str, Any]]] = [  # in fp32 with replicas: test_hsdp.py
    (3, {"block": TENSOR}),
    (4, {"block": (8, 8), "shape": (2, 2), "axes": ("replica", "fsdp")}),
    (2, {"axes": ("replica",)}),
]


@pytest.mark.parametrize(
    ("dtype", "ranks", "options"),
    [(torch.float32, *case) for case in RANKS] + [(torch.float64, *case) for case in RANKS + LAYOUTS],
    ids=str,
)
def test_training_is_the_same_on_any_mesh(
    run: Callable[..., list[Run]],
    reference: dict[torch.dtype, Run],
    dtype: torch.dtype,
    ranks: int,
    options: dict[str, Any],
) -> None:
    results = run(ranks, sharded, dtype, **options)
    for result in results:
        assert gap(result, results[0]) == (0, 0)  # ranks agree bit by bit
    losses, params = gap(results[0], reference[dtype])
    assert losses < CLOSE[dtype]
    assert params < CLOSE[dtype]


@pytest.mark.parametrize(
    ("ranks", "block", "buffers"), [(2, (8, 8), (1, 2, 2, 2)), (4, (16, None), (2, 1, 1, 1))], ids=str
)
def test_several_buffers_per_unit_train_as_one(
    run: Callable[..., list[Run]], ranks: int, block: Any, buffers: tuple[int, ...]
) -> None:
    """Where the planner's price for a collective is nothing, units get several buffers: bitwise the same."""
    one = run(ranks, sharded, torch.float32, block, steps=6)
    several = run(ranks, sharded, torch.float32, block, price=0, buffers=buffers, steps=6)
    assert all(gap(a, b) == (0, 0) for a, b in zip(one, several, strict=True))


@pytest.mark.parametrize("name", gpt.OPTIMIZERS)
def test_optimizers_train_the_same_on_any_mesh(run: Callable[..., list[Run]], name: str) -> None:
    """Cut wherever the optimizer allows it, with rounding that no code of eight bits sees."""
    one = run(1, sharded, torch.float64, name=name)[0]
    assert one[0][-1] < one[0][0] - len(one[0]) / 60
    for ranks, options in ((3, {}), (4, {"shape": (2, 2), "axes": ("replica", "fsdp")})):
        losses, params = gap(run(ranks, sharded, torch.float64, name=name, **options)[0], one)
        assert losses < 1e-6
        assert params < 1e-6


def test_batches_do_not_depend_on_ranks() -> None:
    text = gpt.read_text(SCRIPT)
    whole = gpt.batch(text, (5, "train"), 3, 12, 9, (0, 1))
    assert whole.shape == (12, 9)
    for ranks in (2, 3, 4):
        parts = [gpt.batch(text, (5, "train"), 3, 12, 9, (k, ranks)) for k in range(ranks)]
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(gpt.batch(text, (6, "train"), 3, 12, 9, (0, 1)), whole)
    assert not torch.equal(gpt.batch(text, (5, "train"), 4, 12, 9, (0, 1)), whole)


def test_the_last_window_ends_with_the_text() -> None:
    text = torch.arange(6, dtype=torch.uint8)
    found = gpt.batch(text, (0, "train"), 0, 200, 5, (0, 1))
    assert {tuple(w) for w in found.tolist()} == {(0, 1, 2, 3, 4), (1, 2, 3, 4, 5)}


@pytest.mark.parametrize(("size", "length"), [(10, 5), (12, 7)])
def test_impossible_batches(size: int, length: int) -> None:
    with pytest.raises(ValueError, match="can't draw"):
        gpt.batch(torch.zeros(6, dtype=torch.uint8), (0, "train"), 0, size, length, (0, 3))


def test_future_bytes_do_not_leak() -> None:
    generator = torch.Generator().manual_seed(0)
    params = optree.tree_map(
        lambda leaf: torch.randn(leaf[0], generator=generator) / 4,
        gpt.shapes(16, 1, 2),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tokens = torch.randint(0, 256, (1, 8), generator=generator)
    before = gpt.logits_fn(params, tokens)
    tokens[0, 5:] = 7
    after = gpt.logits_fn(params, tokens)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


FLAGS = {"width": 32, "layers": 2, "heads": 2, "context": 32, "batch": 6}
FLAGS |= {"steps": 30, "every": 10, "eval-batches": 2, "sample": 20, "threads": 1}
TINY = [f"--{name}={value}" for name, value in FLAGS.items()]


def arguments(out: Path, *flags: str) -> list[str]:
    return [*TINY, "--device", "cpu", "--out", str(out), *flags]


def rows_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main(given: list[str]) -> str:
    """What a rank of the pool prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        gpt.main(given)
    return out.getvalue()


def launcher(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{processes}"]


def launched(out: Path) -> tuple[str, list[dict[str, float]]]:
    return execute(*launcher(2), str(SCRIPT), *arguments(out)).stdout, rows_of(out)


AHEAD = [launched]


def test_program(run: Callable[..., list[str]], ahead: Ahead, tmp_path: Path) -> None:
    """One process and two of the launcher print and write the same training. By plain python: test_train_moe.py."""
    (text,) = run(1, main, arguments(tmp_path))
    one, (said, two) = rows_of(tmp_path), ahead(launched)
    assert generated(text) == generated(said) != ""
    for rows in (one, two):
        assert [row["step"] for row in rows] == [1, 10, 20, 30]
        names = {"step", "loss", "val_loss", "tokens_per_second", "peak_memory_mib", "seconds"}
        assert all(row.keys() == names for row in rows)
        assert rows[-1]["loss"] < rows[0]["loss"] - 1
        assert rows[-1]["val_loss"] < rows[0]["val_loss"] - 1
    for a, b in zip(one, two, strict=True):
        assert (a["loss"], a["val_loss"]) == pytest.approx((b["loss"], b["val_loss"]), abs=1e-4)
    assert "layers.0 .. layers.1 (2x)" in text  # the plan
    assert "layers.0.qkv" in text  # the picture
    assert len(generated(text)) > 10
    assert "\x1b" not in text  # no control codes in a log file


def generated(text: str) -> str:
    return text.partition("\n\ndef ")[2].partition("\nsee ")[0]


def test_main_repeats_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Main is a function: same flags, same numbers and text; it leaves no process group."""
    text = tmp_path / "text"
    text.write_text("All work and no play makes Jack a dull boy.\n" * 200)
    flags = ["--text", str(text), "--mesh", "1,-1", "--axes", "replica,fsdp", "--block", "8,8", "--seed", "7"]
    threads = torch.get_num_threads()
    try:
        first = gpt.main([*TINY, *flags, "--device", "cpu", "--out", str(tmp_path)])
        said = capsys.readouterr().out
        again = gpt.main([*TINY, *flags, "--device", "cpu", "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert first == again == json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
    assert generated(said) == generated(capsys.readouterr().out) != ""
    assert not dist.is_initialized()
