"""A training step played through in bytes: what is alive on one rank, moment by moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ragged.ahead import Ahead

__all__ = ["Buffer", "Call", "Moment", "play"]


@dataclass(frozen=True)
class Buffer:
    """One bucket in a step, in bytes.

    Attributes:
      name: the bucket's; `unit`: that of its unit.
      nbytes: of its full parameters; `full`: what these take, nothing where the shard is all of them.
      trains: it has gradients.
      leaves: gradients of its leaves, as separate tensors; `largest`: of one of them; `sent`: of those that are sent
        from where they are, until they have arrived.
      apart: contributions to the reduction, where they don't lie on the storage of the full parameters.
      parts: what arrives from other ranks.
      summing: the most that is needed beside them to sum them up, the result included.
      grad: the reduced gradient; 0 without.
      goes_on: replicas are summed after the reduction: then no other unit's is on its way beside it.
    """

    name: str
    unit: str
    nbytes: int
    full: int
    trains: bool
    leaves: int
    largest: int
    sent: int
    apart: int
    parts: int
    summing: int
    grad: int
    goes_on: bool


@dataclass(frozen=True)
class Call:
    """A call of a gathered function: its buckets, and the bytes of a footprint."""

    name: str
    buckets: tuple[str, ...]
    saved: int
    forward: int
    backward: int
    passed: int


class Moment(NamedTuple):
    """What is alive at one time: (what, bytes) in `alive`."""

    what: str
    alive: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(n for _, n in self.alive)


class _Live:
    """What is alive now, by kind and owner, and the largest moment of every name."""

    def __init__(self) -> None:
        self.moments: dict[str, Moment] = {}
        self._bytes: dict[str, dict[object, int]] = {}

    def put(self, kind: str, owner: object, n: int) -> None:
        self._bytes.setdefault(kind, {})[owner] = n

    def drop(self, kind: str, owner: object) -> None:
        self._bytes.get(kind, {}).pop(owner, None)

    def holds(self, kind: str, owner: object) -> bool:
        return owner in self._bytes.get(kind, {})

    def note(self, what: str, kind: str, extra: int = 0) -> None:
        """A moment at which something is alive that is gone afterwards."""
        found = {k: sum(own.values()) for k, own in self._bytes.items()}
        found[kind] = found.get(kind, 0) + extra
        moment = Moment(what, tuple((k, n) for k, n in found.items() if n))
        if what not in self.moments or self.moments[what].total < moment.total:
            self.moments[what] = moment


_FULL, _LEAVES, _WIRE = "full parameters", "gradients of leaves", "gradients on their way"
_GRADS, _SAVED, _WORK = "reduced gradients", "activations", "work of the call"


def play(
    buffers: Mapping[str, Buffer],
    calls: Sequence[Call],
    static: Sequence[tuple[str, int]],
    update: int,
    budget: float,
    ahead: int,
    lone: bool = False,
) -> tuple[Moment, ...]:
    """The moments of one step, in order of their first time: `fsdp`'s executor (`Step`, `Reducer`) with bytes only.

    Args:
      buffers: by bucket name.
      static: what is there all the time, as (what, bytes).
      update: what the optimizer allocates.
      budget: bytes of full parameters that stay after forward, beside those of the last call.
      ahead: bytes of full buffers up to which gathers run ahead and reductions stay in flight, beyond one unit's.
      lone: there is one rank, on a CPU, so forward starts nothing ahead.
    """
    live = _Live()
    for what, n in static:
        live.put(what, None, n)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, call in enumerate(calls):
        for name in call.buckets:
            first.setdefault(name, i)
            last[name] = i
    learns = [any(buffers[b].trains for call in calls[: i + 1] for b in call.buckets) for i in range(len(calls))]
    runs = Ahead([_size(call, buffers) for call in calls], ahead)
    due = [range(0) if lone else runs.due(turn) for turn in range(len(calls))]
    _forward(live, buffers, calls, learns, last, budget, due)
    _backward(live, buffers, calls, learns, first, ahead)
    live.note("optimizer", "what the optimizer makes", update)
    return tuple(live.moments.values())


def _size(call: Call, buffers: Mapping[str, Buffer]) -> int:
    return sum(buffers[b].nbytes for b in call.buckets)


def _forward(
    live: _Live,
    buffers: Mapping[str, Buffer],
    calls: Sequence[Call],
    learns: Sequence[bool],
    last: Mapping[str, int],
    budget: float,
    due: Sequence[range],
) -> None:
    """Every call waits for its buckets, starts those that follow, and frees idle ones of earlier calls."""
    warm: list[str] = []
    for i, call in enumerate(calls):
        kept = 0
        for b in reversed(warm.copy()):
            if b in call.buckets or last[b] >= i:
                continue
            kept += buffers[b].nbytes
            if kept > budget:
                kept -= buffers[b].nbytes
                warm.remove(b)
                live.drop(_FULL, b)
        for b in (*call.buckets, *(b for j in due[i] for b in calls[j].buckets)):
            live.put(_FULL, b, buffers[b].full)
        warm = [b for b in warm if b not in call.buckets] + list(call.buckets)
        live.note(f"forward of {call.name}", _WORK, call.forward)
        if learns[i]:
            live.put(_SAVED, i, call.saved)


def _backward(
    live: _Live,
    buffers: Mapping[str, Buffer],
    calls: Sequence[Call],
    learns: Sequence[bool],
    first: Mapping[str, int],
    ahead: int,
) -> None:
    """From the last call to the first: refill, start what comes next, reduce what is complete."""
    route = [i for i in reversed(range(len(calls))) if learns[i]]
    runs = Ahead([_size(calls[i], buffers) for i in route], ahead)
    due = {i: runs.due(turn) for turn, i in enumerate(route)}
    reduced: set[str] = set()
    flying: deque[Buffer] = deque()

    def land() -> None:
        b = flying[0]
        live.note(f"sum of {b.name}", _WIRE, b.summing)
        live.put(_GRADS, b.name, b.grad)
        for part in ("parts", "contributions"):
            live.drop(_WIRE, (part, b.name))
        live.drop(_FULL, b.name)
        live.drop(_LEAVES, b.name)
        flying.popleft()

    def collect(b: Buffer) -> None:
        """All gradients of a bucket are there: small ones are copied next to each other, and all are sent."""
        what = f"reduce of {b.name}"
        live.put(_WIRE, ("contributions", b.name), b.apart)
        live.note(what, _WIRE)
        if b.apart or b.sent:
            live.drop(_FULL, b.name)
        reduced.add(b.name)
        while flying and flying[0].unit != b.unit:
            if sum(f.nbytes for f in flying) + b.nbytes <= ahead and not any(f.goes_on for f in flying):
                break
            land()
        live.put(_WIRE, ("parts", b.name), b.parts)
        flying.append(b)
        live.note(what, _WIRE)
        live.put(_LEAVES, b.name, b.sent)

    for i in reversed(range(len(calls))):
        if i + 1 < len(calls):
            for name in calls[i + 1].buckets:
                if not buffers[name].trains and first[name] == i + 1:
                    live.drop(_FULL, name)
        if not learns[i]:
            break
        for name in (*calls[i].buckets, *(name for turn in due[i] for name in calls[route[turn]].buckets)):
            if name not in reduced:
                live.put(_FULL, name, buffers[name].full)
        live.drop(_SAVED, i)
        live.drop(_SAVED, "passed")
        live.note(f"backward of {calls[i].name}", _WORK, calls[i].backward)
        mine = [buffers[b] for b in calls[i].buckets if buffers[b].trains]
        again = [b for b in mine if live.holds(_LEAVES, b.name)]
        if again:  # gradients of a later call wait: autograd adds leaf by leaf, both and their sum are alive
            new = sum(b.leaves for b in mine if b not in again) + 2 * max(b.largest for b in again)
            live.note(f"backward of {calls[i].name}", _WORK, calls[i].passed + new)
        for b in mine:
            live.put(_LEAVES, b.name, b.leaves)
        live.put(_SAVED, "passed", calls[i].passed if i != route[-1] else 0)
        for b in reversed(mine):
            if first[b.name] == i:
                collect(b)
    live.drop(_SAVED, "passed")
    while flying:
        land()
    for name, b in buffers.items():
        live.drop(_FULL, name)
        live.put(_GRADS, name, b.grad)  # zeros for those that no call reached
