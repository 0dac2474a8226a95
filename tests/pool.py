"""A pool of gloo worker processes, started once and shared by all distributed tests.

    def check(x):                 # a module-level function: it runs on every rank
        assert dist.get_world_size() == 3
        return x + dist.get_rank()

    def test_check(run):          # the fixture in conftest.py
        assert run(3, check, 10) == [10, 11, 12]

`run(n, fn, *args, timeout=60, **kwargs)` runs `fn` on ranks 0..n-1 (n <= 8) of a fresh process group and
returns what they return, in rank order. If a rank raises, dies or takes too long, the test fails with
the tracebacks of all ranks; hung workers show where they are, and are replaced.

`run(n, fn, ..., expect_error=True)` is for what must fail everywhere: it returns the exceptions of all
ranks, and the test fails if any rank returned, died or took too long.

`timeout` counts from the moment the workers are up, so a short one is a statement about the library.
Arguments and results are pickled; workers run one thread each and turn warnings into errors. Every worker hashes
text in its own way (PYTHONHASHSEED is its rank), so ranks that went by the order of a set would go different ways.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

__all__ = ["AHEAD", "MOST", "Pool"]

MOST = 8
AHEAD = 4  # workers that are started at once, before anyone asks: they import torch beside each other
START = 120.0  # seconds for a worker to import torch
GRACE = 10.0  # seconds that the others get once a rank has failed: they may wait for it in vain


class Answer(NamedTuple):
    """What a rank has to say: a value, or an exception and its traceback as text."""

    value: Any = None
    error: BaseException | None = None
    text: str = ""

    @property
    def good(self) -> bool:
        return not self.text


class Pool:
    """Workers by rank; more are started when a request needs them."""

    def __init__(self, ahead: int = AHEAD) -> None:
        import torch.distributed as dist

        self._context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._count = 0
        self._start(ahead)

    def run(
        self,
        n: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        expect_error: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """`fn(*args, **kwargs)` on n ranks; its values (or its errors) in rank order."""
        answers = self._ask(self._ready(n), fn, args, kwargs, timeout)
        bad = [f"rank {k} of {n}: {a.text}" for k, a in enumerate(answers) if not a.good]
        if not expect_error:
            assert not bad, "\n\n".join(bad)
            return [a.value for a in answers]
        fine = [f"rank {k} of {n}: returned {a.value!r}" for k, a in enumerate(answers) if a.good]
        lost = any(a.error is None for a in answers)
        assert not lost, "expected an exception on every rank\n\n" + "\n\n".join([*fine, *bad])
        return [a.error for a in answers]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _ready(self, n: int) -> list[_Worker]:
        """The first n workers: alive, and with torch imported."""
        assert 1 <= n <= MOST
        self._start(max(n, AHEAD))
        workers = self._workers[:n]
        for worker in workers:
            worker.wait_until_up()
        return workers

    def _start(self, n: int) -> None:
        """Have n workers, replacing the dead; doesn't wait for them."""
        for k in range(n):
            if k < len(self._workers) and not self._workers[k].alive():
                self._workers[k].close()
                self._workers[k] = _Worker(self._context, self._store.port, k)
            elif k == len(self._workers):
                self._workers.append(_Worker(self._context, self._store.port, k))

    def _ask(self, workers: list[_Worker], fn: Any, args: Any, kwargs: Any, timeout: float) -> list[Answer]:
        n = len(workers)
        self._count += 1
        request = pickle.dumps((fn, args, kwargs))
        for rank, worker in enumerate(workers):
            worker.send((sys.path, self._count, rank, n, timeout), request)
        answers: dict[int, Answer] = {}
        held: list[_Worker] = []
        deadline, failed = time.monotonic() + timeout, False
        while len(answers) < n:
            left = {w.pipe: k for k, w in enumerate(workers) if k not in answers}
            ready = wait(list(left), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = left[pipe]
                answers[rank] = workers[rank].receive()
                held.append(workers[rank])
                if not answers[rank].good and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE)
            if failed or len(answers) == n:
                # Until now whoever was done kept its connections open, as others may still read from them.
                # After a failure closed connections are what wakes the ranks that wait for it.
                while held:
                    held.pop().release()
        late = [k for k in range(n) if k not in answers]
        for k in late:
            answers[k] = Answer(text=f"no answer in time; it was at\n{workers[k].where()}")
        for k in late:
            workers[k].close()
        while held:
            held.pop().release()
        return [answers[k] for k in range(n)]


class _Worker:
    def __init__(self, context: Any, port: int, rank: int) -> None:
        self.pipe, theirs = context.Pipe()
        self._log = tempfile.NamedTemporaryFile(mode="r", suffix=".log")  # noqa: SIM115  # lives as long as the worker
        self._process = context.Process(target=_serve, args=(theirs, port, self._log.name), daemon=True)
        with _environment("PYTHONHASHSEED", f"{rank}"):
            self._process.start()
        self._up = self._closed = False
        theirs.close()

    def wait_until_up(self) -> None:
        if not self._up:
            assert self.pipe.poll(START), f"a worker did not start within {START} s: {self.where()}"
            assert self.pipe.recv_bytes() == b"up"
            self._up = True

    def send(self, header: Any, request: bytes) -> None:
        self.pipe.send_bytes(pickle.dumps(header))  # its sys.path is needed to read the request
        self.pipe.send_bytes(request)

    def receive(self) -> Answer:
        try:
            answer: Answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return Answer(text=f"the process died with exit code {self._process.exitcode}\n{self._log.read()[-3000:]}")
        return answer

    def release(self) -> None:
        """Let it leave the process group."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(b"release")

    def alive(self) -> bool:
        return not self._closed and bool(self._process.is_alive())

    def where(self) -> str:
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self._log.read()[-3000:]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._process.kill()
            self._process.join()
            self._process.close()
            self.pipe.close()
            self._log.close()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable for the processes that are started here."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _serve(pipe: Connection, port: int, log: str) -> None:
    """The worker's loop."""
    with open(log, "a") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        faulthandler.enable(file=file)
        import torch
        import torch.distributed as dist

        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # a rank that fails at once would leave others connecting to it
        torch.set_num_threads(1)
        warnings.simplefilter("error")
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        pipe.send_bytes(b"up")
        while True:
            try:
                header = pickle.loads(pipe.recv_bytes())
                answer = _answer(header, pipe.recv_bytes(), client)
                pipe.send_bytes(answer)
                pipe.recv_bytes()
                with contextlib.suppress(Exception):
                    _leave()
            except (EOFError, BrokenPipeError, KeyboardInterrupt):
                return


def _leave() -> None:
    """Leave all process groups, and drop them half a second later, in a thread: by then nobody else holds most of them.

    Gloo sleeps some 10 ms per connection that it closes, in whoever drops a group last; the next request needn't wait.
    """
    import torch.distributed as dist

    groups = list(dist.distributed_c10d._world.pg_map)
    try:
        dist.destroy_process_group()
    finally:
        timer = threading.Timer(0.5, groups.clear)
        timer.daemon = True
        timer.start()


def _answer(header: Any, request: bytes, client: Any) -> bytes:
    import torch.distributed as dist

    try:
        sys.path[:], count, rank, n, timeout = header
        fn, args, kwargs = pickle.loads(request)
        store = dist.PrefixStore(str(count), client)
        # Longer than the pool waits, so that a hang shows where it is and not that it was long.
        seconds = timedelta(seconds=timeout + 60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=seconds)
        return pickle.dumps(Answer(fn(*args, **kwargs)))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            return pickle.dumps(Answer(error=pickle.loads(pickle.dumps(error)), text=text))
        except Exception:
            return pickle.dumps(Answer(error=RuntimeError(repr(error)), text=text))
