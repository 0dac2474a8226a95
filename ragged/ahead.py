"""How far gathers run ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["AHEAD", "Ahead"]

# Bytes of full buffers up to which gathers run ahead of their use, and reductions stay in flight, beyond those of one
# unit: what small units wait for is not bandwidth but the time that a message takes to arrive.
AHEAD = 2 << 20


class Ahead:
    """Decides which calls' buckets are started while another call runs.

    Those of a given number of calls, and of further ones while all that is ahead stays within a number of bytes.

    Args:
      sizes: bytes of full buffers, by turn.
      within: the number; `AHEAD` by default.

    Example:
      >>> ahead = Ahead([1 << 20] * 6)
      >>> list(ahead.due(0)), list(ahead.due(1)), list(ahead.due(2))
      ([1, 2], [3], [4])
    """

    def __init__(self, sizes: Sequence[int], within: int | None = None) -> None:
        self._sizes = sizes
        self._within = AHEAD if within is None else within
        self._next = 0
        self._started: deque[int] = deque()  # turns that are yet to come
        self._bytes = 0  # of these

    def due(self, turn: int, depth: int = 1, ready: Callable[[int], bool] | None = None) -> range:
        """The turns to start now that one begins.

        Args:
          depth: so many turns are started whatever their size; 0 for none.
          ready: whether a turn can be started yet. Those after one that can't have to wait too, to keep the order.
        """
        started, sizes = self._started, self._sizes
        while started and started[0] <= turn:
            self._bytes -= sizes[started.popleft()]
        begin = new = max(self._next, turn + 1)
        while depth and new < len(sizes) and (new <= turn + depth or self._bytes + sizes[new] <= self._within):
            if ready is not None and not ready(new):
                break
            started.append(new)
            self._bytes += sizes[new]
            new += 1
        self._next = new
        return range(begin, new)
