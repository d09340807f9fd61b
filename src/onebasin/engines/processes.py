"""Workers that are processes on this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from onebasin.engines.broadcasting import Broadcasts
from onebasin.engines.engine import Answer, Engine
from onebasin.engines.packing import check_portable
from onebasin.engines.worker import BOOT, read_answer, read_frame, write_frame
from onebasin.tensors.states import State

_MAX_DEATHS = 8
"""Of workers, one after another, by the same task."""


class ProcessEngine(Engine):
    """Workers are fresh processes, which are sent tasks through pipes. One that dies is replaced, and its task repeated.

    Args:
        workers: how many; one for each core if None.
        memory: bytes that all processes may hold together; what is free if None.
        threads: of PyTorch in each; the cores are shared out if None.
    """

    name = "processes"

    def __init__(self, workers: int | None = None, memory: int | None = None, threads: int | None = None):
        cores = count_cores()
        super().__init__(cores if workers is None else workers, memory)
        self.threads = max(1, cores // self.workers) if threads is None else threads
        self._broadcasts = Broadcasts()
        self._pool: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._processes: list[_Process] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def check_states(self, states: Mapping[str, State]) -> None:
        """See `Engine.check_states`."""
        for what, state in states.items():
            check_portable(state, what)

    @contextlib.contextmanager
    def broadcast(self, *values: Any) -> Iterator[None]:
        """See `Engine.broadcast`."""
        with self._broadcasts.hold(values):
            yield

    @property
    def process_ids(self) -> list[int]:
        """Of the workers that have been started."""
        with self._lock:
            return [each.process.pid for each in self._processes if each.process.poll() is None]

    def _submit(self, function: Callable[[Any], Any], item: Any) -> Future[bytearray]:
        if self._pool is None:
            self._is_closed = False
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="onebasin")
        return self._pool.submit(self._run_task, *self._broadcasts.pack((function, item)))

    def _wait(self, handle: Future[bytearray]) -> None:
        wait([handle])

    def _fetch(self, handle: Future[bytearray]) -> Answer:
        return read_answer(handle.result())

    def _cancel(self, handle: Future[bytearray]) -> None:
        handle.cancel()

    def _run_task(self, task: bytes, needed: dict[str, bytes]) -> bytearray:
        """In a thread for each worker: send a task, wait for the answer, and begin again if the worker dies."""
        code = None
        for _ in range(_MAX_DEATHS):
            process = self._local.__dict__.get("process")
            if process is None or process.process.poll() is not None:
                process = self._local.process = self._start()
            answer = process.ask(task, needed, self._broadcasts)
            if answer is not None:
                return answer
            process.end()
            code = process.process.returncode
            if self._is_closed:
                raise RuntimeError("the engine was closed")
        raise RuntimeError(
            f"{_MAX_DEATHS} workers died one after another at the same task (code {code}): if they "
            "were killed for their memory, take fewer of them"
        )

    def _start(self) -> _Process:
        with self._lock:
            self._processes = [each for each in self._processes if each.process.poll() is None]
            taken = {each.number for each in self._processes}
            number = min(set(range(len(taken) + 1)) - taken)
            started = _Process(number, self.threads)
            self._processes.append(started)
            return started

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for each in self._processes:
                each.end()
            self._processes = []
        self._pool = None


class _Process:
    """A worker, and what it holds."""

    def __init__(self, number: int, threads: int):
        self.number = number
        self.tokens: set[str] = set()
        path = [os.path.abspath(place) if place else os.getcwd() for place in sys.path]
        program = BOOT.format(path=path, threads=threads, number=number)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def ask(self, task: bytes, needed: dict[str, bytes], broadcasts: Broadcasts) -> bytearray | None:
        """The answer to a task; None if the worker died. Values that nobody holds any more are given up there, too."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        gone = {token for token in self.tokens if token not in broadcasts and token not in needed}
        new = {token: content for token, content in needed.items() if token not in self.tokens}
        self.tokens = (self.tokens - gone) | new.keys()
        try:
            write_frame(self.process.stdin, pickle.dumps((gone, new, task)))
            return read_frame(self.process.stdout)
        except (OSError, ValueError):  # a pipe that was closed
            return None

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
