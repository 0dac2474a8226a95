"""Fixtures: the worker pool, and no process group left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


@pytest.fixture
def run(pool: Pool) -> Callable[..., list[Any]]:
    """`run(n, fn, *args, timeout=60, expect_error=False)`: fn on n gloo ranks, see tests/pool.py."""
    return pool.run


@pytest.fixture(scope="module", autouse=True)
def _no_group_left_behind() -> Iterator[None]:
    """A mesh of one made in this process ends with its module, whatever runs before or after."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
