"""Work in processes of their own, a few at a time: one that dies or takes too long is a result, not the end of the run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Item = TypeVar("Item")
Report = Callable[[dict[str, Any]], None]
"""What a process tells: entries of its record, each as soon as it is known."""


def run_isolated(
    items: Iterable[Item], work: Callable[[Item, Report], None], jobs: int, seconds: float
) -> Iterator[tuple[Item, dict[str, Any], str]]:
    """Run `work(item, report)` in a fork for each item.

    Args:
        items: what to work on.
        work: reports entries of its record.
        jobs: processes at a time.
        seconds: after which a process is ended.

    Yields:
        The item, the entries that were reported, and why the process did not finish ("" if it did).
    """
    context = multiprocessing.get_context("fork")
    left, running = iter(items), {}
    while True:
        while len(running) < jobs and (item := next(left, None)) is not None:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_enter, args=(work, item, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = (item, process, {}, time.monotonic() + seconds)
        if not running:
            return
        deadline = min(end for *_, end in running.values())
        ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        for pipe in [pipe for pipe in running if pipe in ready or running[pipe][3] <= time.monotonic()]:
            item, process, record, _ = running[pipe]
            failure = _receive(pipe, record) if pipe in ready else f"not done in {seconds:.0f} s"
            if failure is None:
                continue
            process.kill()
            process.join()
            pipe.close()
            del running[pipe]
            yield item, record, record.pop("_end", failure)


def _receive(pipe: Connection, record: dict[str, Any]) -> str | None:
    """Take one report; the reason of the end if there are no more."""
    try:
        record |= pipe.recv()
        return None
    except EOFError:
        return "the process died"


def _enter(work: Callable[[Any, Report], None], item: Any, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        work(item, pipe.send)
        pipe.send({"_end": ""})
    except Exception as error:
        pipe.send({"_end": f"{type(error).__name__}: {error}"[:300]})
    os._exit(0)
