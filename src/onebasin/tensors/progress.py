"""Telling how far a long computation has come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@contextlib.contextmanager
def show_progress(progress: bool | Progress) -> Iterator[Progress]:
    """What to call as work is done: the user's own function, a line on standard error if True, nothing if False."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda what, done, total: None
    else:
        try:
            yield _print_line
        finally:
            print(file=sys.stderr)


def _print_line(what: str, done: int, total: int) -> None:
    print(f"\r\033[K{what}: {done} of {total}", end="", file=sys.stderr, flush=True)
