"""How many collectives a step needs, and where full parameters live while it runs."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdp import fold, gathered, value_and_grad
from optim import adamw, make_step
from ragged import P, collectives, init, make_mesh, plan, random
from tests.models import LAYERS, block, make_loss, make_params, tokens

UNITS = LAYERS + 2


def counts(keep: bool, tied: bool) -> list[Counter[str]]:
    params, f = make_params(), value_and_grad(make_loss(keep=keep, tied=tied))
    out = []
    for _ in range(4):
        with collectives.record() as events:
            f(params, tokens())
        out.append(Counter(e.kind for e in events))
    return out


@pytest.mark.parametrize("n", [2, 3])
def test_one_gather_one_refill_one_reduce_per_unit(run: Any, n: int) -> None:
    for steps in run(n, counts, False, False):
        # the last unit is still full when backward begins
        want = {"all_gather": UNITS + UNITS - 1, "reduce_scatter": UNITS}
        for step in steps:
            assert {k: v for k, v in step.items() if k in want} == want
        assert steps[-1] == Counter(
            want | {"all_reduce": 2}
        )  # at the start: same trees? at the end: the loss, and did anybody fail?


def test_without_reshard_after_forward_nothing_is_gathered_again(run: Any) -> None:
    for steps in run(2, counts, True, False):
        assert steps[-1] == {"all_gather": UNITS, "reduce_scatter": UNITS, "all_reduce": 2}


def test_a_tied_embedding_is_gathered_once_and_reduced_once(run: Any) -> None:
    units = LAYERS + 1
    for steps in run(2, counts, False, True):
        # the first step can't know that the embedding comes again
        assert steps[0]["all_gather"] == 2 * units
        assert steps[-1] == {"all_gather": 2 * units - 1, "reduce_scatter": units, "all_reduce": 2}


def full_after_forward(keep: bool) -> list[int]:
    """Bytes of each unit's full storage between forward and backward, in order of use."""
    storages: list[torch.UntypedStorage] = []
    seen: list[int] = []

    def spy(p: Any, x: Any) -> Any:
        storages.append(p["w"].untyped_storage())
        return block(p, x)

    def loss(params: Any, x: Any) -> Any:
        y = fold(gathered(spy, reshard_after_forward=not keep), params["layers"], x).sum()
        seen.extend(s.nbytes() for s in storages)
        return y

    params, f = make_params(), value_and_grad(loss)
    for _ in range(3):
        storages.clear()
        seen.clear()
        f(params, torch.ones(2, 16))
    assert all(s.nbytes() == 0 for s in storages)
    return seen


def test_after_forward_only_the_last_unit_is_full(run: Any) -> None:
    for seen in run(2, full_after_forward, False):
        assert seen[:-1] == [0] * (LAYERS - 1)
        assert seen[-1] > 0
    for seen in run(2, full_after_forward, True):
        assert all(n > 0 for n in seen)


def views_of_the_buffer() -> None:
    params = make_params()
    plan = params.plan

    def check(p: Any, x: Any) -> Any:
        for name, full in p.items():
            leaf = plan.leaves[f"layers.1.{name}"]
            bucket = plan.buckets[leaf.bucket]
            storage = full.untyped_storage()
            assert storage.nbytes() == bucket.length * full.itemsize
            assert full.data_ptr() == storage.data_ptr() + leaf.offset * full.itemsize
            assert storage.data_ptr() == p["w"].untyped_storage().data_ptr()
            assert full.shape == leaf.shape
            assert full.is_contiguous()
        return block(p, x)

    x = torch.ones(2, 16)
    with torch.no_grad():
        gathered(check)(params["layers"][1], x)
    f = value_and_grad(lambda p, x: gathered(check)(p["layers"][1], x).sum())
    for _ in range(3):
        f(params, x)


def test_full_parameters_are_views_of_the_gather_buffer(run: Any) -> None:
    run(2, views_of_the_buffer)


def copies_on_the_gather_path() -> tuple[list[str], list[Any], int]:
    params = make_params()
    call = gathered(lambda p, x: x + 1)
    x = torch.ones(1)
    with torch.no_grad():
        call(params["head"], x)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
            call(params["head"], x)
    events = prof.events()
    copied = [e.input_shapes[0] for e in events if e.name in ("aten::copy_", "aten::cat", "aten::clone")]
    return [e.name for e in events], copied, params["head"].tensors[0].numel()


def test_the_profiler_sees_no_copy_on_the_gather_path(run: Any) -> None:
    for names, copied, shard in run(2, copies_on_the_gather_path):
        assert "aten::add" in names  # the profiler did watch
        # the rank's own shard goes to its place in the buffer; nothing that was gathered moves again
        # (two numbers say beforehand that all ranks are at this gather)
        assert [shape for shape in copied if shape and shape != [2]] == [[shard]]


def live_tensors() -> list[tuple[int, int]]:
    """Tensors and live bytes after each step, without the help of the cycle collector."""
    import gc

    params, f = make_params(), value_and_grad(make_loss())
    out = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(12):
            f(params, tokens())
            # without the two numbers of the last loss message, which a gloo thread may still hold
            kinds = (torch.Tensor, torch.nn.Parameter)  # not what a compiler imagines
            found = [x for x in gc.get_objects() if type(x) in kinds and x.numel() > 2]
            out.append((len(found), sum(x.untyped_storage().nbytes() for x in found)))
    finally:
        gc.enable()
    return out


def test_memory_is_flat_from_the_third_step_on(run: Any) -> None:
    for seen in run(2, live_tensors):
        assert set(seen[2:]) == {seen[2]}


def resident_bytes() -> list[int]:
    """Resident memory after each step of a model of 16 MB per layer.

    malloc adapts its threshold for mapping memory and then keeps freed buffers or not, by tens of MB, in no
    pattern; with a fixed threshold what is freed goes back at once, and what stays is ours.
    """
    m_mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**20) == 1
    shapes = {"layers": [{"w": ((2048, 2048), torch.float32), "b": ((2048,), torch.float32)} for _ in range(3)]}
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = init(plan(shapes, mesh, P(ragged="fsdp"), units=["layers.*"]), random.normal(0.01), seed=0)
    f = value_and_grad(lambda p, x: fold(gathered(block), p["layers"], x).sum())
    tx = adamw(1e-3)
    state, step = tx.init(params), make_step(tx)
    out = []
    for _ in range(12):
        _, grads = f(params, torch.ones(4, 2048))
        params, state = step(params, grads, state)
        del grads
        with open("/proc/self/statm") as file:
            out.append(int(file.read().split()[1]) * 4096)
    return out


def test_resident_memory_is_flat_from_the_third_step_on(run: Any) -> None:
    for seen in run(2, resident_bytes):
        assert max(seen[3:]) - seen[2] < 2**20
