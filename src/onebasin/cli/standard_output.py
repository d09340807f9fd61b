"""With ``--json``, standard output holds one JSON object: what other code prints there goes to standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_results: list[str] = []
"""The object to print when the command has ended: at most one."""


def set_result(result: Mapping[str, Any]) -> None:
    """Keep the JSON object that the command will print; a later one takes the place of an earlier one."""
    _results[:] = [json.dumps(_to_json(result))]


@contextlib.contextmanager
def reserved_for_result() -> Iterator[None]:
    """Send to standard error what is printed in this block, by whatever code, and print the result after it.

    The modules of a user and the libraries that they call may print to ``sys.stdout``, to the file descriptor, or in other
    processes, which inherit it.
    """
    _results.clear()
    with contextlib.redirect_stdout(sys.stderr), _descriptor_to_error():
        yield
    for result in _results:
        print(result, flush=True)


def close_standard_output() -> None:
    """Send all that is printed from here on to standard error: by handlers at exit, and by C code, which buffers."""
    with contextlib.suppress(OSError):
        os.dup2(2, 1)


@contextlib.contextmanager
def _descriptor_to_error() -> Iterator[None]:
    try:
        kept = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    try:
        _flush()
        close_standard_output()
        yield
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(kept)


def _flush() -> None:
    """Write what Python holds for the descriptor to where it belongs."""
    if sys.__stdout__ is not None and not sys.__stdout__.closed:
        sys.__stdout__.flush()


def _to_json(value: Any) -> Any:
    """The same with types that JSON has: NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
