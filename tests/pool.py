"""A pool of gloo worker processes, started once and shared by all distributed tests.

    def check(x):                 # a module-level function: it runs on every rank
        assert dist.get_world_size() == 3
        return x + dist.get_rank()

    def test_check(run):          # the fixture in conftest.py
        assert run(3, check, 10) == [10, 11, 12]

`run(n, fn, *args, timeout=60, **kwargs)` runs `fn` on ranks 0..n-1 of a fresh process group and
returns what they return, in rank order. If a rank raises, dies or takes too long, the test fails with
the tracebacks of all ranks; hung workers show where they are, and are replaced.
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
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Pool"]

MOST = 8


class Pool:
    """Workers by rank; more are started when a request needs them."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._count = 0

    def run(self, n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
        """`fn(*args, **kwargs)` on n ranks; its values in rank order."""
        assert 1 <= n <= MOST
        while len(self._workers) < n:
            self._workers.append(_Worker(self._context, self._store.port))
        workers = self._workers[:n]
        self._count += 1
        for rank, worker in enumerate(workers):
            worker.send(sys.path, (self._count, rank, n, fn, args, kwargs))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < n:
            left = {w.pipe: k for k, w in enumerate(workers) if k not in answers}
            ready = wait(list(left), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answers[left[pipe]] = workers[left[pipe]].receive()
            if any(not good for good, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + 10)  # the others may wait for it in vain
        late = [k for k in range(n) if k not in answers]
        for k in late:
            answers[k] = False, f"no answer in time; it was at\n{workers[k].where()}"
        for k in range(n):
            if k in late or not workers[k].alive():
                workers[k].kill()
                self._workers[k] = _Worker(self._context, self._store.port)
        bad = [f"rank {k} of {n}: {answers[k][1]}" for k in range(n) if not answers[k][0]]
        assert not bad, "\n\n".join(bad)
        return [answers[k][1] for k in range(n)]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()


class _Worker:
    def __init__(self, context: Any, port: int) -> None:
        self.pipe, theirs = context.Pipe()
        self._log = tempfile.NamedTemporaryFile(mode="r", suffix=".log")  # noqa: SIM115  # lives as long as the worker
        self._process = context.Process(target=_serve, args=(theirs, port, self._log.name), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, path: list[str], request: Any) -> None:
        self.pipe.send_bytes(pickle.dumps(path))  # first, so that the function's module can be imported
        self.pipe.send_bytes(pickle.dumps(request))

    def receive(self) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return False, f"the process died with exit code {self._process.exitcode}\n{self._log.read()[-3000:]}"
        return answer

    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def where(self) -> str:
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self._log.read()[-3000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._log.close()


def _serve(pipe: Connection, port: int, log: str) -> None:
    """The worker's loop."""
    with open(log, "a") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        faulthandler.enable(file=file)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        warnings.simplefilter("error")
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        while True:
            try:
                sys.path[:] = pickle.loads(pipe.recv_bytes())
                request = pipe.recv_bytes()
            except (EOFError, KeyboardInterrupt):
                return
            pipe.send_bytes(_answer(request, client))


def _answer(request: bytes, client: Any) -> bytes:
    import torch.distributed as dist

    try:
        count, rank, n, fn, args, kwargs = pickle.loads(request)
        store = dist.PrefixStore(str(count), client)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=50))
        answer = True, fn(*args, **kwargs)
        dist.barrier()  # nobody leaves while another still needs its connections
    except BaseException:
        answer = False, traceback.format_exc()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    try:
        return pickle.dumps(answer)
    except Exception:
        return pickle.dumps((False, f"the result can't be sent: {traceback.format_exc()}"))
