"""Where the time goes: spans of time, by what they were spent on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """A stretch of time; seconds since the epoch, so that those of different processes can be put side by side.

    Attributes:
        what: it was spent on.
        start: when it began.
        end: when it ended.
    """

    what: str
    start: float
    end: float


class _Running(threading.local):
    """What this thread is doing: the spans so far, what it is now, and since when."""

    def __init__(self) -> None:
        self.spans: list[Span] | None = None
        self.what = ""
        self.since = 0.0


_running = _Running()
_EPOCH = time.time() - time.perf_counter()
"""From the clock that never goes back to the time of day."""


@contextlib.contextmanager
def recording() -> Iterator[list[Span]]:
    """Yields the spans of this thread, complete at the end; "other" is what nothing names.

    One inside another yields nothing: all is recorded outside.
    """
    if _running.spans is not None:
        yield []  # the one around it records
        return
    spans: list[Span] = []
    _running.spans, _running.what, _running.since = spans, "other", _now()
    try:
        yield spans
    finally:
        _switch("")
        _running.spans = None


@contextlib.contextmanager
def spent_on(what: str) -> Iterator[None]:
    """Count the time inside for `what`, and not for what is going on around it.

    >>> with recording() as spans, spent_on("score"):
    ...     with spent_on("read"):
    ...         pass
    >>> sorted({span.what for span in spans})
    ['other', 'read', 'score']
    """
    if _running.spans is None:
        yield
        return
    around = _running.what
    _switch(what)
    try:
        yield
    finally:
        _switch(around)


def _now() -> float:
    return _EPOCH + time.perf_counter()


def _switch(what: str) -> None:
    now, spans = _now(), _running.spans
    if spans is not None and _running.what:
        if spans and spans[-1].what == _running.what and spans[-1].end == _running.since:
            spans[-1] = spans[-1]._replace(end=now)
        else:
            spans.append(Span(_running.what, _running.since, now))
    _running.what, _running.since = what, now
