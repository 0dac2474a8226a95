"""`fully_shard`: loops around `loss.backward()` and torch's optimizers, on parameters that hold runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import (
    MixedPrecision,
    ShardedLeaf,
    ShardedModule,
    fully_shard,
)
from ragged import collectives
from tests.sharded_modules import batch, differ, loss_of, mesh, mine, model, sharded


def accumulated() -> float:
    """As with FSDP2: `set_requires_gradient_sync(False)` for all micro-batches but the last."""
    a, b = sharded(model()), model()
    for _ in range(2):
        for step, sync in enumerate((False, True, False, True)):
            a.set_requires_gradient_sync(sync)
            with collectives.record() as events:
                loss_of(a, mine(batch(step))).backward()
            reduces = [e for e in events if e.kind == "reduce_scatter"]
            assert len(reduces) == (4 if sync else 0)
            loss_of(b, batch(step)).backward()
    return max(
        (p.grad.full_tensor() - q.grad).abs().max().item()  # type: ignore[union-attr]
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


def test_gradients_that_wait_for_a_later_pass(run: Any) -> None:
    assert all(x < 2e-6 for x in run(2, accumulated))


def kept_whole() -> None:
    """State dicts have full tensors under plain names, whatever the nesting, and load into any sharding."""
    a, b = model(), model()
    fully_shard(a[2], mesh=mesh())
    fully_shard(a, mesh=mesh())
    names = dict(b.named_parameters())
    assert dict(a.named_parameters()).keys() == names.keys()
    assert all(p.shape == names[k].shape and p.ndim == names[k].ndim for k, p in a.named_parameters())
    assert sum(p.numel() for p in a.parameters()) == sum(p.numel() for p in b.parameters())
    found = a.state_dict()
    assert found.keys() == b.state_dict().keys()
    assert all(type(x) is Tensor and torch.equal(x, names[k]) for k, x in found.items())
    changed = {k: x + 1 for k, x in found.items()}
    other = sharded(model())
    for module in (a, other):
        module.load_state_dict(changed)
        assert all(torch.equal(x, changed[k]) for k, x in module.state_dict().items())
    assert torch.equal(a[0].weight, changed["0.weight"])
    with torch.no_grad():
        b.load_state_dict(changed)
        assert torch.allclose(other(batch(0)), b(batch(0)))


def test_state_dicts_are_plain(run: Any) -> None:
    run(3, kept_whole)


def from_meta() -> list[str]:
    with torch.device("meta"):
        a = model()
    sharded(a)
    said = []

    def fails() -> None:
        with pytest.raises(ValueError, match="has no values") as error:
            a(batch(0))
        said.append(str(error.value).split(" has")[0])

    fails()
    a.to_empty(device="cpu")
    torch.manual_seed(3)
    for i in (0, 1, 2):
        a[i].reset_parameters()
    fails()
    a[4].reset_parameters()
    b = model()
    torch.manual_seed(3)
    for i in (0, 1, 2, 4):
        b[i].reset_parameters()
    assert differ(a, b) == 0.0
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)
    loss_of(a, mine(batch(0))).backward()
    optimizer.step()
    return said


def test_modules_on_the_meta_device_get_values_from_their_own_initializers(run: Any) -> None:
    assert run(2, from_meta) == [["parameter '0.bias'", "parameter '4.bias'"]] * 2


def precisely() -> tuple[Any, ...]:
    seen = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.weight.dtype, x.dtype))
            return super().forward(x)

    a = model()
    a[2] = Spy(8, 7)
    torch.manual_seed(0)
    a[2].reset_parameters()
    sharded(a, mp_policy=MixedPrecision(torch.bfloat16, torch.float32, torch.float32))
    out = a(batch(0))
    out.sum().backward()
    return out.dtype, seen, {p.grad.dtype for p in a.parameters()}


def test_mixed_precision(run: Any) -> None:
    for out, seen, grads in run(2, precisely):
        assert (out, seen, grads) == (torch.float32, [(torch.bfloat16, torch.bfloat16)], {torch.float32})


def partly_frozen() -> float:
    """Frozen at first, trained later, and the other way round."""
    a, b = model(), model()
    for m in (a, b):
        m[0].requires_grad_(False)
    sharded(a)
    for step, frozen in enumerate((0, 2, 4)):
        for m in (a, b):
            m.requires_grad_(True)
            m[frozen].requires_grad_(False)
            m.zero_grad()
        loss_of(a, mine(batch(step))).backward()
        loss_of(b, batch(step)).backward()
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert q.grad is None or torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6)  # type: ignore
    return 0.0


def test_parameters_that_are_frozen_and_thaw(run: Any) -> None:
    run(2, partly_frozen)


def replicated(*shape: int) -> float:
    a, b = sharded(model(), mesh=mesh(*shape)), model()
    loss_of(a, mine(batch(0))).backward()
    loss_of(b, batch(0)).backward()
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3).item() for m in (a, b)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    return max(
        (p.grad.full_tensor() - q.grad).abs().max().item()  # type: ignore[union-attr]
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_hybrid_sharding(run: Any, shape: tuple[int, int]) -> None:
    assert all(x < 1e-6 for x in run(4, replicated, *shape))


def two_passes_before_backward() -> None:
    """Two forward passes, then one backward through both; and one that is thrown away."""
    a, b = sharded(model()), model()
    for step in range(3):
        for m in (a, b):
            m.zero_grad()
        a(batch(9))
        (loss_of(a, mine(batch(step))) + 2 * loss_of(a, mine(batch(step + 1)))).backward()
        (loss_of(b, batch(step)) + 2 * loss_of(b, batch(step + 1))).backward()
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6)  # type: ignore


def test_several_passes_before_backward(run: Any) -> None:
    run(2, two_passes_before_backward)


def fails_on_one(where: str) -> str:
    """An error in one rank's forward, or in its backward where the library can see it."""

    class Bad(nn.Module):
        on = False

        def forward(self, x: Tensor) -> Tensor:
            if self.on and dist.get_rank() == 1:
                raise RuntimeError("broken here")
            return x

    bad = Bad()

    def fresh() -> ShardedModule:
        torch.manual_seed(0)
        return sharded(nn.Sequential(nn.Linear(6, 4), bad, nn.Linear(4, 3)))

    a = fresh()
    for step in range(2):
        loss_of(a, mine(batch(step))).backward()
    if where == "first":
        a = fresh()
    bad.on = True
    try:
        loss_of(a, mine(batch(0))).backward()
    except (RuntimeError, ValueError) as error:
        bad.on = False
        loss_of(a, mine(batch(0))).backward()  # and afterwards all is well
        return str(error)
    return "nothing"


@pytest.mark.parametrize("where", ["first", "later"])
def test_an_error_on_one_rank_is_one_on_all(run: Any, where: str) -> None:
    said = run(2, fails_on_one, where, timeout=60)
    assert said[1] == "broken here"
    assert "broken here" in said[0]


def test_leaves_say_what_they_are() -> None:
    a = fully_shard(nn.Linear(4, 2))
    leaf = a.weight
    assert isinstance(leaf, ShardedLeaf)
    assert isinstance(leaf, nn.Parameter)
    assert repr(leaf) == "ShardedLeaf('weight', (2, 4), float32, 8 elements here)"
    assert torch.equal(leaf.full_tensor().flatten(), leaf.to_local())
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(a)
    with pytest.raises(ValueError, match="no parameters"):
        fully_shard(nn.ReLU())
