"""Fixtures: the worker pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

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
