"""The example with Hugging Face's Llama: the plain script and the sharded one differ in few lines and in no loss."""

from __future__ import annotations

import contextlib
import difflib
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

FOLDER = Path(__file__).parents[2] / "examples"
TINY = ["--steps=6", "--batch=4", "--context=16", "--width=16", "--layers=2"]


def executed(name: str, out: str) -> list[float]:
    """The script's losses; it saves into the folder `out`."""
    with (
        mock.patch.object(sys, "argv", [name, *TINY]),
        mock.patch.object(sys, "path", [str(FOLDER), *sys.path]),
        mock.patch.object(dist, "destroy_process_group"),  # others need it
        contextlib.chdir(out),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        losses: list[float] = runpy.run_path(str(FOLDER / name))["main"]()
        return losses


def test_two_processes_train_what_one_does(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name in ("plain", "sharded"):
        (tmp_path / name).mkdir()
    want = executed("train_module_plain.py", str(tmp_path / "plain"))
    for losses in run(2, executed, "train_module.py", str(tmp_path / "sharded")):
        assert losses == pytest.approx(want, abs=1e-5)
    a, b = (torch.load(tmp_path / name / "train_module.pt", weights_only=True) for name in ("plain", "sharded"))
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[k], b[k], rtol=0, atol=1e-5) for k in a)


def test_twenty_lines_make_the_difference() -> None:
    plain, sharded = ((FOLDER / f"train_module{end}.py").read_text().splitlines() for end in ("_plain", ""))
    changed = [line for line in difflib.ndiff(plain, sharded) if line.startswith("+ ") and line.strip() != "+"]
    assert 10 < len(changed) <= 20
