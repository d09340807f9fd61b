"""What a run says: tables and results on standard output, notes and progress on standard error, or one JSON object."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Track = Callable[[str, int, int], None]

# The arguments of the run in progress, for the report; and whether it speaks JSON.
_arguments: list[str] = []


def begin(arguments: list[str]) -> None:
    """Remember the arguments of a run."""
    _arguments[:] = arguments


def command_line() -> str:
    """The run as one would type it again."""
    return shlex.join(["onebasin", *_arguments])


def speaks_json() -> bool:
    """Whether the run was asked for JSON."""
    return "--json" in _arguments


class Output:
    """Where a command's results go.

    With ``--json`` standard output gets one JSON object at the end and nothing else.
    """

    def __init__(self, as_json: bool = False):
        self.as_json = as_json
        # What we print has names of files and tensors in it, whose brackets and colons are not markup.
        self.out = Console(highlight=False, markup=False, emoji=False)
        self.err = Console(stderr=True, highlight=False, markup=False, emoji=False)

    def note(self, text: str) -> None:
        """Something a person should know, on standard error."""
        self.err.print(Text(text, style="dim"), soft_wrap=True)

    def show(self, content: RenderableType) -> None:
        """Part of the result, for people."""
        if not self.as_json:
            self.out.print(content, soft_wrap=isinstance(content, str))  # a sentence may hold a path, to be copied

    def facts(self, rows: Mapping[str, Any]) -> None:
        """Names and values in two columns."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column(overflow="fold")
        for name, value in rows.items():
            grid.add_row(Text(name), Text(str(value)))
        self.show(grid)

    def finish(self, record: Mapping[str, Any]) -> None:
        """The result for machines."""
        if self.as_json:
            print(json.dumps(_plain(record)))

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Say what is being done, on standard error if that is a terminal."""
        with self.err.status(text) if self.err.is_terminal else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def progress(self) -> Iterator[Track]:
        """A bar with the time left, on standard error if that is a terminal; yields what to call as work is done."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        with Progress(*columns, console=self.err, transient=True, disable=not self.err.is_terminal) as bars:
            tasks: dict[str, Any] = {}

            def track(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    for task in tasks.values():
                        bars.update(task, visible=False)
                    tasks[what] = bars.add_task(what, total=total)
                bars.update(tasks[what], completed=done, total=total)

            yield track


def _plain(value: Any) -> Any:
    """Only what JSON has: NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def gigabytes(num_bytes: int) -> str:
    """Bytes as a person writes them.

    >>> gigabytes(2_470_000_000), gigabytes(12_300)
    ('2.47 GB', '12.3 kB')
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
