"""The example after a crash, and on other numbers of ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.dist.test_train_gpt import SCRIPT, arguments, launcher, main, rows_of
from tests.programs import Ahead, execute

FLAGS = ["--optimizer", "muon+adamw8bit", "--save-every", "10", "--steps", "60"]


def killed(folder: Path) -> tuple[Path, str]:
    """Two workers, one of which is killed after 20 steps; the launcher starts both again."""
    out, saved = folder / "out", folder / "saved"
    with ThreadPoolExecutor(1) as threads:
        killer = threads.submit(kill_one, saved, 20)
        command = [*launcher(2), "--max-restarts", "1", str(SCRIPT), *arguments(out, *FLAGS, "--resume", str(saved))]
        # torch's launcher lets restarted workers find the addresses of dead ones, unless told so (pytorch#135712)
        text = execute(*command, quiet=False, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1").stdout
        killer.result()
    return folder, text


AHEAD = [killed]


def test_resume_after_a_worker_died(run: Callable[..., list[str]], ahead: Ahead, tmp_path: Path) -> None:
    """They end as if nothing had happened."""
    run(2, main, arguments(tmp_path, *FLAGS))
    want, (folder, text) = rows_of(tmp_path), ahead(killed)
    out, saved = folder / "out", folder / "saved"
    flags, rows = [*FLAGS, "--resume", str(saved)], rows_of(out)
    assert "resumed after step" in text
    assert [row["step"] for row in rows] == [row["step"] for row in want]
    assert rows[-1]["val_loss"] == want[-1]["val_loss"]  # bitwise: on as many ranks as before
    assert sorted(p.name for p in saved.iterdir()) == ["step-50", "step-60"]
    (again,) = run(1, main, arguments(out, *flags))  # nothing to do, on one process
    assert "resumed after step 60" in again
    assert rows_of(out) == rows
    run(1, main, arguments(out, *flags, "--steps", "70", "--lr", "1e-9"))
    more = rows_of(out)
    assert more[-1]["step"] == 70
    assert more[-1]["val_loss"] == pytest.approx(rows[-1]["val_loss"], abs=1e-4)


def kill_one(saved: Path, step: int) -> None:
    """Kill one of the workers that save here, as soon as a checkpoint of this step or a later one is complete."""
    deadline = time.monotonic() + 100
    while not any(int(p.name.removeprefix("step-")) >= step for p in saved.glob("step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            environ = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(saved).encode() in words and b"RANK=1" in environ:
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise AssertionError("no worker to kill")
