"""Dropout by element of the global batch: any share of it, any number of times, the same."""

from __future__ import annotations

import pytest
import torch

from ragged.random import dropout


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_that_share_a_batch_get_its_mask(ranks: int) -> None:
    x = torch.randn(12, 5, 3, dtype=torch.float64)
    whole = dropout(x, 0.3, 1, "mlp/7")
    each = 12 // ranks
    parts = [dropout(x[k * each : (k + 1) * each], 0.3, 1, "mlp/7", start=k * each) for k in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole[whole != 0], x[whole != 0] / 0.7)


def test_rates_places_and_gradients() -> None:
    x = torch.ones(1000, 100, requires_grad=True)
    y = dropout(x, 0.25, 0, "a")
    assert abs((y == 0).float().mean().item() - 0.25) < 0.01
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert not torch.equal(dropout(x, 0.25, 0, "b"), y)
    assert not torch.equal(dropout(x, 0.25, 1, "a"), y)
    assert dropout(x, 0.0, 0, "a") is x
    assert not dropout(x, 1.0, 0, "a").any()
    assert dropout(x.bfloat16(), 0.5, 0, "a").dtype == torch.bfloat16
    for bad in ((x, -0.1, 0, "a"), (torch.ones(()), 0.5, 0, "a")):
        with pytest.raises(ValueError, match="dropout"):
            dropout(*bad)
