"""What a command prints: results on standard output, notes and progress on standard error; or one JSON object."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from onebasin.tensors.progress import Progress

_arguments: list[str] = []
"""The command line of this process, without the name of the program."""


def remember_arguments(arguments: list[str]) -> None:
    """Keep the command line, for reports and error messages."""
    _arguments[:] = arguments


def command_line() -> str:
    """The command as one would type it again."""
    return shlex.join(["onebasin", *_arguments])


def wants_json() -> bool:
    """Whether the user asked for JSON."""
    return "--json" in _arguments


class Output:
    """Where a command's results go.

    With ``--json`` standard output gets one JSON object at the end and nothing else.
    """

    def __init__(self, as_json: bool = False):
        self.as_json = as_json
        # The names of files and tensors may contain brackets and colons, which are not markup.
        self.out = Console(highlight=False, markup=False, emoji=False)
        self.err = Console(stderr=True, highlight=False, markup=False, emoji=False)

    def note(self, text: str) -> None:
        """Print a remark for the user on standard error."""
        self.err.print(Text(text, style="dim"), soft_wrap=True)

    def show(self, content: RenderableType) -> None:
        """Print a part of the result, unless the user asked for JSON."""
        if not self.as_json:
            self.out.print(content, soft_wrap=isinstance(content, str))  # so that paths in a sentence can be copied

    def show_facts(self, facts: Mapping[str, Any]) -> None:
        """Print names and values in two columns."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column(overflow="fold")
        for name, value in facts.items():
            grid.add_row(Text(name), Text(str(value)))
        self.show(grid)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Print the whole result as JSON, if the user asked for that."""
        if self.as_json:
            print(json.dumps(_to_json(result)))

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show what is being done, on standard error if that is a terminal."""
        with self.err.status(text) if self.err.is_terminal else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show a bar with the time left, on standard error if that is a terminal. Yields what to call as work is done."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with ProgressBar(
            *columns, TextColumn("left"), console=self.err, transient=True, disable=not self.err.is_terminal
        ) as bar:
            task = bar.add_task("", visible=False)
            current = ""

            def report(what: str, done: int, total: int) -> None:
                nonlocal current
                if what != current:
                    bar.reset(task, description=what, visible=True)  # the time left is estimated from here on
                    current = what
                bar.update(task, completed=done, total=total)

            yield report


def _to_json(value: Any) -> Any:
    """The same with types that JSON has: NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
