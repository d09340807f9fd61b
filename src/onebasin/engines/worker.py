"""What a worker does: take a task, run it, send back the result, until the driver is gone."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import warnings
from typing import IO, Any

import torch

from onebasin.engines.clock import recording
from onebasin.engines.engine import Answer
from onebasin.engines.packing import pack, unpack

BOOT = "import sys; sys.path[:] = {path!r}; from onebasin.engines.worker import serve; serve({threads}, {number})"
"""The program of a worker process."""
_held: dict[str, Any] = {}
"""Values that several tasks need, by their tokens."""


def write_frame(stream: IO[bytes], content: bytes) -> None:
    """Send bytes, with their number in front."""
    stream.write(len(content).to_bytes(8, "little"))
    stream.write(content)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytearray | None:
    """Receive bytes; None if the other side is gone."""
    size = stream.read(8)
    if len(size) < 8:
        return None
    content = bytearray(int.from_bytes(size, "little"))
    view, done = memoryview(content), 0
    while done < len(content):
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            return None
        done += count
    return content


def run_task(task: bytes, fetch: Any, worker: str) -> bytes:
    """The packed answer to a packed (function, item); or the exception."""
    with recording() as spans:
        try:
            function, item = unpack(task, fetch)
            is_done, result = True, function(item)
        except Exception as error:
            is_done, result = False, error
    try:
        return pack((is_done, result, [(worker, spans)]))[0]
    except Exception as error:  # an exception of a library may be none that can be sent
        said = error if is_done else result
        return pack((False, RuntimeError(f"{type(said).__name__}: {said}"), [(worker, spans)]))[0]


def read_answer(content: bytes | bytearray) -> Answer:
    """What `run_task` packed; raises what the task raised."""
    is_done, result, spent = unpack(content)
    if not is_done:
        raise result
    return Answer(result, spent)


def prepare(threads: int) -> None:
    """Settings of a process that does the work of another one."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # what there is to say about a model the driver has said


def serve(threads: int, number: int) -> None:
    """Run tasks that come on standard input; answers go to standard output, and what tasks print to standard error.

    Args:
        threads: of PyTorch.
        number: of this worker, by which it takes one of several GPUs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver, which ends its workers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    prepare(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    tasks: queue.Queue[bytearray] = queue.Queue()
    threading.Thread(target=_receive, args=(tasks,), daemon=True).start()
    while True:
        released, sent, task = pickle.loads(tasks.get())
        for token in released:
            _held.pop(token, None)
        _held.update(sent)
        write_frame(answers, run_task(task, _fetch, f"worker {number + 1}"))


def _receive(tasks: queue.Queue[bytearray]) -> None:
    """Take tasks while another thread computes: so the end of the driver is the end of its workers, at once."""
    while (task := read_frame(sys.stdin.buffer)) is not None:
        tasks.put(task)
    os._exit(0)


def _fetch(token: str) -> Any:
    """A value by its token; it was sent as bytes, and is unpacked when it is first needed."""
    if isinstance(_held[token], bytes):
        _held[token] = unpack(_held[token], _fetch)
    return _held[token]
