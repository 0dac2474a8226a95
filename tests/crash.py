"""Kill training runs at random moments, and check that every checkpoint in sight is whole and exact.

    python -m tests.crash --kills 50 --ranks 3

A small model is trained and saved after every step, in turn with `async_=True` and without, with `keep=2`. At a random
moment a random rank is killed by SIGKILL, and the others soon after it, as a launcher does. Then, every time:

- every folder in sight is a complete checkpoint, and has exactly the parameters, moments and counts of its step;
- the last one is no older than the last step that `save` or `wait` had reported as complete;
- the next start resumes from it, and all of its steps have the bits of a run without interruption;
- what the kill left is gone when the next save has returned.

Workers are forked from a process that has imported torch and started nothing, so starting them takes little. The seed
decides which rank is killed and when, in parts of the time that a save takes.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import os
import random
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist

import optim
import ragged
from ragged import P, ShardedTree, checkpoint, make_mesh, plan, unshard

__all__ = ["main"]

SHAPES = {"layers": [{"w": (96, 64), "b": (96,)}, {"w": (96, 64), "b": (96,)}], "e": (5, 24, 16), "z": (0, 4), "s": ()}
STEPS, KEEP = 24, 2
PATIENCE = 60.0  # seconds without a word from workers that should have something to say

Say = Callable[..., None]


def digest(*trees: Any) -> str:
    """Of all that some trees hold, as full tensors, on rank 0."""
    found = hashlib.sha256()
    for leaf in optree.tree_leaves(trees, is_leaf=lambda x: isinstance(x, ShardedTree)):
        for x in optree.tree_leaves(unshard(leaf, dst=0) if isinstance(leaf, ShardedTree) else leaf):
            found.update(f"{tuple(x.shape)} {x.dtype}".encode() + bytes(x.reshape(-1).view(torch.uint8).numpy()))
    return found.hexdigest()


def start(rank: int, ranks: int, store: str) -> tuple[Any, Any, Any]:
    """Transformation, parameters, state: those before the first step."""
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    tx = optim.adamw(lambda count: 0.05 / (1 + count), weight_decay=0.1)
    shapes = optree.tree_map(lambda s: (s, torch.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    layout = plan(shapes, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=["layers.*"])
    params = ragged.init(layout, ragged.random.normal(1.0), seed=0)
    return tx, params, tx.init(params)


def like(params: Any, state: Any) -> dict[str, Any]:
    return {"params": params.plan, "opt": state, "step": 0}


def work(rank: int, ranks: int, store: str, say: Say, folder: Path | None) -> None:
    """Resume, train and save to the end; without a folder just train."""
    tx, params, state = start(rank, ranks, store)
    tell: Say = say if rank == 0 else lambda *words: None
    last, first = checkpoint.latest(folder) if folder else None, 0
    if last is not None:
        found = checkpoint.load(last, like(params, state))
        params, state, first = found["params"], found["opt"], found["step"]
    tell("at", first, digest(params, state))
    step, flying = optim.make_step(tx, donate=True), None
    for k in range(first + 1, STEPS + 1):
        grads = ragged.tree_map(lambda x, k=k: torch.sin(x * k), params)
        params, state = step(params, grads, state)
        tell("did", k, digest(params, state))
        if folder is None:
            continue
        trees = {"params": params, "opt": state, "step": k}
        saving = checkpoint.save(folder / f"step-{k}", trees, keep=KEEP, async_=k % 2 == 1)
        if flying is not None:
            tell("saved", flying)  # a save waits for the one before it
        if k % 4 == 3:
            saving.wait()
        flying = k if k % 4 == 1 else None
        if flying is None:
            left = [p.name for p in folder.iterdir() if p.name.startswith(".")] if rank == 0 else []
            tell("left" if left else "saved", k, *left)
    if folder is not None and flying is not None:
        saving.wait()
    say("end", rank)
    signal.pause()  # others may still read from this rank's sockets


def look(rank: int, ranks: int, store: str, say: Say, folder: Path) -> None:
    """Tell what the checkpoints hold, read by one process."""
    _, params, state = start(rank, ranks, store)
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        if not path.name.startswith("."):
            found = checkpoint.load(path, like(params, state))
            assert path.name == f"step-{found['step']}" == f"step-{checkpoint.metadata(path).values['step']}"
            say("holds", found["step"], digest(found["params"], found["opt"]))
    last = checkpoint.latest(folder)
    say("latest", 0 if last is None else last.name.removeprefix("step-"))
    say("end", rank)
    signal.pause()


class Crew:
    """Forked workers, one per rank, and what they say."""

    count = itertools.count()

    def __init__(self, work: Callable[..., None], ranks: int, scratch: Path, *args: Any) -> None:
        self.log = scratch / "log"
        self.ranks, self.ended, self.dead = ranks, 0, False
        store = str(scratch / f"store-{next(self.count)}")
        self._pipe, theirs = os.pipe()
        self._text = b""
        self._pids = [self._fork(theirs, work, rank, ranks, store, *args) for rank in range(ranks)]
        os.close(theirs)

    def _fork(self, pipe: int, work: Callable[..., None], rank: int, ranks: int, store: str, *args: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            os.close(self._pipe)

            def say(*words: Any) -> None:
                os.write(pipe, (" ".join(map(str, words)) + "\n").encode())  # short, so it arrives whole or not at all

            try:
                work(rank, ranks, store, say, *args)
            except BaseException as error:
                traceback.print_exc()
                say("failed", rank, f"{error!r}"[:500].replace("\n", " "))
        finally:
            os._exit(1)

    def hear(self, until: float) -> list[str] | None:
        """The words of the next line, or None when time is up or nobody is left to speak."""
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._pipe], [], [], max(until - time.monotonic(), 0))
            more = os.read(self._pipe, 1 << 16) if ready else b""
            if not more:
                return None
            self._text += more
        line, self._text = self._text.split(b"\n", 1)
        return line.decode().split()

    def all(self) -> list[list[str]]:
        """All that they say until every one of them has come to its end."""
        lines: list[list[str]] = []
        try:
            while sum(words[0] == "end" for words in lines) < self.ranks:
                words = self.hear(time.monotonic() + PATIENCE) or ["silence"]
                assert words[0] not in ("silence", "failed"), f"{words}\n{self.log.read_text()[-5000:]}"
                lines.append(words)
        finally:
            self.close()
        return [words for words in lines if words[0] != "end"]

    def kill(self, first: int, lag: float) -> list[list[str]]:
        """Kill one, and after a while the others; what was still on its way."""
        os.kill(self._pids[first], signal.SIGKILL)
        time.sleep(lag)
        self.close()
        lines = []
        while (words := self.hear(time.monotonic())) is not None:
            lines.append(words)
        os.close(self._pipe)
        return lines

    def close(self) -> None:
        if not self.dead:
            self.dead = True
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)
            for pid in self._pids:
                os.waitpid(pid, 0)


class Trials:
    """A folder of checkpoints under fire."""

    def __init__(self, directory: Path, ranks: int, seed: int) -> None:
        self.folder, self.ranks, self.draw = directory / "checkpoints", ranks, random.Random(seed)
        self.scratch = directory / "scratch"
        self.scratch.mkdir(parents=True)
        self.want = {int(k): text for _, k, text in self.crew(work, ranks, None).all()}
        assert sorted(self.want) == list(range(STEPS + 1))
        self.starts, self.saves = [0.5], [0.1]  # seconds seen so far
        self.latest, self.seen = 0, collections.Counter[str]()

    def crew(self, what: Callable[..., None], ranks: int, *args: Any) -> Crew:
        return Crew(what, ranks, self.scratch, *args)

    def kill_once(self) -> None:
        if self.latest > STEPS - 8:
            shutil.rmtree(self.folder)
            self.latest = 0
        victim, lag = self.draw.randrange(self.ranks), self.draw.uniform(0, 0.05)
        steps, part = self.draw.choice([0, 1, 1, 2, 2, 3, 3, 4]), self.draw.random()
        crew, begun = self.crew(work, self.ranks, self.folder), time.monotonic()
        try:
            lines, times = [], []
            until = begun + part * statistics.median(self.starts) if not steps else begun + PATIENCE
            while words := crew.hear(until):
                lines.append(words)
                times += [time.monotonic()] if words[0] in ("at", "did") else []
                if steps and len(times) == 1 + steps:
                    steps, until = 0, times[-1] + 1.2 * part * statistics.median(self.saves)
            self.check(lines, crew, alive=True)
            assert not steps, f"no step in {PATIENCE} s\n{crew.log.read_text()[-5000:]}"
            self.starts += [t - begun for t in times[:1]]
            self.saves += [b - a for a, b in itertools.pairwise(times[1:])]
            lines += crew.kill(victim, lag)
        finally:
            crew.close()
        self.check(lines, crew, alive=False)
        self.look(max([int(k) for what, k, *_ in lines if what == "saved"], default=self.latest))
        self.seen[f"rank {victim}"] += 1

    def check(self, lines: list[list[str]], crew: Crew, alive: bool) -> None:
        """Every state that was told is that of the run without interruption."""
        for what, k, *rest in lines:
            if what in ("at", "did"):
                assert rest == [self.want[int(k)]], f"another state than without interruption: {what} {k}"
            if what == "at":
                assert int(k) == self.latest, f"resumed at {k} where {self.latest} was the last"
            assert what != "left", f"{rest} left after step {k}"
            assert what != "failed" or not alive, f"{k} {rest}\n{crew.log.read_text()[-5000:]}"

    def look(self, reported: int) -> None:
        hidden = [p for p in self.folder.iterdir() if p.name.startswith(".")] if self.folder.exists() else []
        self.seen["found whole"] += not hidden
        for p in hidden:
            written = p.suffix == ".partial" and (p / "manifest.json").exists()
            self.seen[
                f"{'complete' if written else 'unfinished'} but not renamed"
                if p.suffix == ".partial"
                else "removal unfinished"
            ] += 1
        *held, (_, last) = self.crew(look, 1, self.folder).all()
        for _, k, text in held:
            assert text == self.want[int(k)], f"step-{k} holds something else"
        self.latest = int(last)
        assert self.latest == max([int(k) for _, k, _ in held], default=0)
        assert self.latest >= reported, f"step {reported} was reported as saved, {self.latest} is the last"
        assert len(held) <= KEEP + 1, f"{len(held)} checkpoints"
        self.seen["old ones not yet removed"] += len(held) > KEEP

    def finish(self) -> None:
        """To the end, without a kill."""
        crew = self.crew(work, self.ranks, self.folder)
        self.check(crew.all(), crew, alive=True)
        self.look(STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where to work; by default a temporary directory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        trials = Trials(Path(directory), args.ranks, args.seed)
        for k in range(args.kills):
            try:
                trials.kill_once()
            except BaseException:
                print(f"kill {k + 1} with seed {args.seed}: {dict(trials.seen)}", file=sys.stderr)
                raise
        trials.finish()
    print(f"{args.kills} kills of {args.ranks} ranks in {time.monotonic() - begun:.0f} s: nothing lost, nothing mixed")
    print(", ".join(f"{name}: {count}" for name, count in sorted(trials.seen.items()) if count))


if __name__ == "__main__":
    main()
