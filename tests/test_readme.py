"""The README: its Python blocks run, its picture is what they print, its shell blocks are where they should be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import ROOT, Ahead, execute

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
PAGES = [(ROOT / f"docs/{name}.md").read_text() for name in ("optimizers", "modules", "performance")]
DOCS = [text for page in PAGES for text in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)]
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
PICTURES = [text for kind, text in BLOCKS if kind == "text"]
COMMANDS = [text for kind, text in BLOCKS if kind in ("sh", "bash")]


PRELUDE = """
import os, sys, torch, ragged, fsdp, optim
for program in sys.argv[1:]:
    if not (pid := os.fork()):
        exec(compile(program, "<block>", "exec"), {"__name__": "__main__"})
        print(end="\\0", flush=True)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(1)
"""


def run(_: Path) -> list[str]:
    """What each program prints, in a process of its own without a launcher; warnings are errors.

    They are forked from one that has imported the library and done nothing with it: importing takes most of the time.
    """
    assert PROGRAMS
    assert DOCS
    *printed, rest = execute("-c", PRELUDE, *PROGRAMS, *DOCS).stdout.split("\0")
    assert len(printed) == len(PROGRAMS + DOCS)
    assert rest == ""
    return printed


AHEAD = [run]


@pytest.fixture(scope="module")
def all_printed(ahead: Ahead) -> list[str]:
    return ahead(run)


@pytest.fixture(scope="module")
def printed(all_printed: list[str]) -> list[str]:
    return all_printed[: len(PROGRAMS)]


def test_programs_run(printed: list[str]) -> None:
    assert printed[0] == "torch.Size([64, 10])\n"


def test_pictures_are_real(printed: list[str]) -> None:
    assert PICTURES
    for picture in PICTURES:
        assert any(picture in text for text in printed)


def test_the_pages_in_docs_run(all_printed: list[str]) -> None:
    """What they print stands there, in a block of its own."""
    for text in filter(None, all_printed[len(PROGRAMS) :]):
        assert any(f"```text\n{text}```\n" in page for page in PAGES), text


def test_commands() -> None:
    """The first trains the example, the second tests (continuous integration runs that one)."""
    train, test = COMMANDS[:2]
    for command, words in (
        (train, ("pip", "torchrun", "examples/train_gpt.py")),
        (test, ("pip", '".[test]"', "pytest")),
    ):
        assert len(command.splitlines()) == 1
        assert all(word in command for word in words)
