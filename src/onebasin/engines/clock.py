"""Where the time goes: seconds by what they were spent on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

Seconds = dict[str, float]
"""By what they were spent on."""


class _Running(threading.local):
    """What this thread is doing: the seconds so far, what it is now, and since when."""

    def __init__(self) -> None:
        self.seconds: Seconds | None = None
        self.what = ""
        self.since = 0.0


_running = _Running()


@contextlib.contextmanager
def recording() -> Iterator[Seconds]:
    """Yields seconds by what they were spent on in this thread, complete at the end; "other" is what nothing names.

    One inside another yields nothing: all is counted outside.
    """
    if _running.seconds is not None:
        yield {}  # the one around it counts
        return
    seconds: Seconds = {}
    _running.seconds, _running.what, _running.since = seconds, "other", time.perf_counter()
    try:
        yield seconds
    finally:
        _switch("")
        _running.seconds = None


@contextlib.contextmanager
def spent_on(what: str) -> Iterator[None]:
    """Count the time inside for `what`, and not for what is going on around it.

    >>> with recording() as seconds, spent_on("score"):
    ...     with spent_on("read"):
    ...         pass
    >>> sorted(seconds)
    ['other', 'read', 'score']
    """
    if _running.seconds is None:
        yield
        return
    around = _running.what
    _switch(what)
    try:
        yield
    finally:
        _switch(around)


def _switch(what: str) -> None:
    now, seconds = time.perf_counter(), _running.seconds
    if seconds is not None and _running.what:
        seconds[_running.what] = seconds.get(_running.what, 0.0) + now - _running.since
    _running.what, _running.since = what, now
