"""A collective that has failed says so again, without waiting again."""

from __future__ import annotations

import pytest
import torch

from ragged.collectives import Pending


class _Broken:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        raise RuntimeError("connection closed")


def test_a_failure_is_raised_again() -> None:
    work = _Broken()
    pending = Pending([work], lambda: torch.zeros(()))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="connection closed"):
            pending.wait()
    assert work.waits == 1
    assert not pending.done
