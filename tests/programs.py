"""Programs that tests run, started ahead: one after the other, beside the tests that leave a core idle.

Before a program does anything it imports torch, for seconds. So a module names the functions that run its programs:

    def trained(folder: Path) -> str:      # folder: an empty one of its own
        return execute("examples/train_gpt.py", "--out", str(folder)).stdout

    AHEAD = [trained]

    def test_training(ahead):              # the fixture in conftest.py
        assert "loss" in ahead(trained)    # what it returned; what it raised is raised here

They begin when the session does, if a test that is to run asks for `ahead`. So what they look at mustn't depend on
other tests: `execute` runs in the directory and with the variables that were there before any test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["ROOT", "Ahead", "execute"]

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
ENVIRONMENT |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
LONGEST = 600.0  # seconds that a test waits for its program and for those before it


def execute(
    *words: str, timeout: float = 120, code: int = 0, quiet: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Python with these words, warnings being errors; fails unless it ends with this code and (if quiet) no error."""
    command, env = [sys.executable, *words], ENVIRONMENT | variables
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert not quiet or done.stderr == ""
    return done


class Ahead:
    """What functions return that begin now, in one thread: a second program would take its core from the tests."""

    def __init__(self, functions: Iterable[Callable[[Path], Any]], folder: Path) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._started: dict[Callable[[Path], Any], Future[Any]] = {}
        for k, fn in enumerate(functions):
            own = folder / f"{k}"
            own.mkdir()
            self._started[fn] = self._thread.submit(fn, own)

    def __call__(self, fn: Callable[[Path], T]) -> T:
        result: T = self._started[fn].result(LONGEST)
        return result

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
