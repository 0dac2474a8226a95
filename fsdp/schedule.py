"""The order of a step's collectives: learnt once, compared across ranks, followed afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from fsdp.precision import Cast
from ragged.agree import agree
from ragged.layout import Bucket
from ragged.mesh import Comm

__all__ = ["Event", "Recorder", "Schedule"]


class Event(NamedTuple):
    """One collective of a step: "gather" or "reduce" of a bucket, "scatter" of one that was computed, or "sum" over
    replicas of its shard."""

    kind: str
    key: str
    bucket: Bucket
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} of {self.key} ({self.bucket.length} elements, {dtype})"

    def matches(self, other: Event) -> bool:
        """Whether messages of the two match."""
        same = self.kind == other.kind and self.key == other.key and self.dtype == other.dtype
        return same and (self.bucket is other.bucket or self.bucket.bounds == other.bucket.bounds)


@dataclass(frozen=True)
class Schedule:
    """What a step does on every rank.

    Attributes:
      calls: buckets of each gathered call, in forward order.
      events: all collectives in order; None while only the calls are known.
      casts: the dtypes in which buckets are gathered and reduced.
      sizes: bytes of the full buffers of each call.
      spare: buckets that stay after forward though this rank's backward can't read them, to be freed there. No
        collective depends on it, so ranks may differ.
    """

    calls: tuple[tuple[str, ...], ...]
    events: tuple[Event, ...] | None
    casts: Mapping[str, Cast]
    sizes: tuple[int, ...]
    spare: frozenset[str] = frozenset()

    @cached_property
    def last_call(self) -> dict[str, int]:
        """Index of the last call that uses a bucket."""
        return {key: i for i, call in enumerate(self.calls) for key in call}

    @staticmethod
    def learn(
        calls: Sequence[tuple[str, ...]],
        events: Sequence[Event],
        forward: int,
        casts: Mapping[str, Cast],
        nbytes: Mapping[str, int],
        spare: Iterable[str] = (),
    ) -> Schedule:
        """The schedule after a step that was compared event by event.

        A bucket gathered twice in forward (a tied embedding) was not known to come again; the
        next step keeps it filled between its uses, and its events are learnt anew.

        Args:
          forward: how many of the events belong to forward.
          nbytes: of the full buffers of each bucket.
          spare: as in the schedule.
        """
        gathered = [event.key for event in events[:forward]]
        twice = len(set(gathered)) < len(gathered)
        sizes = tuple(sum(nbytes[key] for key in call) for call in calls)
        return Schedule(tuple(calls), None if twice else tuple(events), casts, sizes, frozenset(spare))


class Recorder:
    """Watches one step's collectives.

    While learning, every collective is compared across ranks before it is launched: slow, and
    safe whatever the ranks do. Afterwards it is compared with the schedule, on the host, at no
    cost; a rank that deviates or fails still takes part in what the others wait for
    (`remaining`), and the end of the step tells everyone.
    """

    def __init__(self, schedule: Schedule | None, comm: Comm, otherwise: str = "another value_and_grad") -> None:
        self.otherwise = otherwise
        self.expected = None if schedule is None else schedule.events
        self.comm = comm
        self.seen: list[Event] = []
        self.lost = False

    @property
    def learning(self) -> bool:
        return self.expected is None

    def issue(self, event: Event) -> None:
        """Announce a collective.

        Raises:
          ValueError: another rank announces another one, or the schedule has another one here.
        """
        if self.expected is None:
            try:
                agree("the order of collectives", {f"collective {len(self.seen)}": str(event)}, self.comm.everyone)
            except ValueError:
                self.lost = True
                raise
        else:
            planned = self.expected[len(self.seen)] if len(self.seen) < len(self.expected) else None
            if planned is None or not planned.matches(event):
                raise ValueError(
                    f"this step wants {event} where earlier steps had {planned or 'no further collective'}; "
                    "units must be used in the same order in every step and on every rank. For another "
                    f"order use {self.otherwise}"
                )
        self.seen.append(event)

    def remaining(self) -> tuple[Event, ...]:
        """Collectives that other ranks still expect of this one."""
        return () if self.expected is None else self.expected[len(self.seen) :]
