"""The examples of all docstrings run, in this process, on a mesh of one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator

import pytest
import torch

import fsdp
import optim
import ragged

MODULES = sorted(
    name
    for package in (ragged, fsdp, optim)
    for name in (
        package.__name__,
        *(found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")),
    )
)
EXAMPLES = 20


@pytest.fixture(scope="module", autouse=True)
def _same_default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    assert torch.get_default_dtype() is before


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0, capsys.readouterr().out


def test_there_are_examples() -> None:
    """Counted, so that a change of markup can't turn all of them off unnoticed."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) >= EXAMPLES
