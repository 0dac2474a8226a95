"""The worker pool itself: what tests rely on when something goes wrong."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist


def where(x: int = 0) -> tuple[int, int, int]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_rank(), int(total), x


@pytest.mark.parametrize("n", [1, 3, 2, 8])
def test_every_request_has_a_group_of_its_own(run: Any, n: int) -> None:
    assert run(n, where, x=7) == [(k, n, 7) for k in range(n)]


def misbehave(how: str) -> int:
    rank = dist.get_rank()
    if rank == 1:
        match how:
            case "raises":
                raise KeyError("no luck")
            case "warns":
                warnings.warn("careful", stacklevel=1)
            case "dies":
                os.abort()
            case "sleeps":
                time.sleep(600)
            case "unpicklable":
                return lambda: 0  # type: ignore[return-value]
            case "leaves early":
                return 0
    if rank == 0 and how not in ("leaves early", "warns"):
        dist.recv(torch.ones(1), 1)  # waits for a rank that will not come
    if how == "leaves early":
        time.sleep(0.5)
        if rank == 0:
            dist.recv(torch.ones(1), 2)
        if rank == 2:
            dist.send(torch.ones(1), 0)
    return rank


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", ["rank 1 of 3: Traceback", "KeyError: 'no luck'", "rank 0 of 3"]),
        ("warns", ["UserWarning: careful"]),
        ("dies", ["rank 1 of 3: the process died with exit code -6", "in misbehave"]),
        ("sleeps", ["rank 1 of 3: no answer in time; it was at", "in misbehave"]),
        ("unpicklable", ["rank 1 of 3", "lambda"]),
    ],
)
def test_failures_are_told_and_survived(run: Any, how: str, words: list[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        run(3, misbehave, how, timeout=3)
    for word in words:
        assert word in str(caught.value)
    assert run(3, where) == [(k, 3, 0) for k in range(3)]


def test_whoever_is_done_waits_for_the_others(run: Any) -> None:
    assert run(3, misbehave, "leaves early", timeout=20) == [0, 0, 2]


def refuse(ranks: tuple[int, ...]) -> int:
    if dist.get_rank() in ranks:
        raise ValueError(f"rank {dist.get_rank()} refuses")
    return 5


def test_expected_errors(run: Any) -> None:
    errors = run(3, refuse, (0, 1, 2), expect_error=True)
    assert [(type(e), str(e)) for e in errors] == [(ValueError, f"rank {k} refuses") for k in range(3)]
    with pytest.raises(AssertionError, match="rank 1 of 3: returned 5"):
        run(3, refuse, (0, 2), expect_error=True)
