"""Fixtures: the worker pool, programs started ahead, no process group left behind. Modules that need workers last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.pool import AHEAD, MOST, Pool
from tests.programs import Ahead


def modules_with(fixture: str, items: list[pytest.Item]) -> dict[Path, Any]:
    """The modules of tests that use a fixture, by path."""
    return {item.path: getattr(item, "module", None) for item in items if fixture in getattr(item, "fixturenames", ())}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take seconds to import torch, on all cores; what does without them takes one core, and goes first.

    What kills workers goes last: the new ones would have to import again what others' tests had them import.
    """
    modules = modules_with("pool", items)
    items.sort(key=lambda item: (item.path in modules, item.path.name == "test_pool.py"))


@pytest.fixture(scope="session", autouse=True)
def _workers_and_programs_start_ahead(request: pytest.FixtureRequest) -> None:
    for fixture in ("pool", "ahead"):
        if modules_with(fixture, request.session.items):
            request.getfixturevalue(fixture)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    items = request.session.items
    found = Pool(ahead=MOST if {item.path for item in items} - modules_with("pool", items).keys() else AHEAD)
    yield found
    found.close()


@pytest.fixture(scope="session")
def ahead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    """`ahead(fn)`: what a function returned that has run a program in the background, see tests/programs.py."""
    modules = modules_with("ahead", request.session.items).values()
    found = Ahead([fn for module in modules for fn in module.AHEAD], tmp_path_factory.mktemp("programs"))
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
