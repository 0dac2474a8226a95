"""The README: its Python blocks run, its picture is what they print, its shell blocks are where they should be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
OPTIMIZERS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/optimizers.md").read_text(), re.DOTALL | re.MULTILINE)
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
PICTURES = [text for kind, text in BLOCKS if kind == "text"]
COMMANDS = [text for kind, text in BLOCKS if kind in ("sh", "bash")]


def run(program: str) -> str:
    """In a fresh process, without a launcher; warnings are errors."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def printed() -> list[str]:
    assert PROGRAMS
    return [run(program) for program in PROGRAMS]


def test_programs_run(printed: list[str]) -> None:
    assert printed[0] == "torch.Size([64, 10])\n"


def test_pictures_are_real(printed: list[str]) -> None:
    assert PICTURES
    for picture in PICTURES:
        assert any(picture in text for text in printed)


def test_the_page_on_optimizers_runs() -> None:
    assert [run(program) for program in OPTIMIZERS] == [""]


def test_commands() -> None:
    """The first trains the example, the second tests (continuous integration runs that one)."""
    train, test = COMMANDS[:2]
    for command, words in (
        (train, ("pip", "torchrun", "examples/train_gpt.py")),
        (test, ("pip", '".[test]"', "pytest")),
    ):
        assert len(command.splitlines()) == 1
        assert all(word in command for word in words)
