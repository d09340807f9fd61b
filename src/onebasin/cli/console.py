"""What a command prints: results on standard output, notes and progress on standard error; or one JSON object."""

from __future__ import annotations

import contextlib
import shlex
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from onebasin.cli.standard_output import set_result
from onebasin.engines.work_meter import UNIT
from onebasin.tensors.progress import Progress

PYDANTIC = "Value error, "
"""What the library that reads options puts in front of some messages."""
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


def escape_controls(text: str, keep: str = "") -> str:
    r"""A text in which characters that steer a terminal or cannot be seen are written as escapes.

    The names of files, tensors and groups may come from a stranger: ESC begins commands to the terminal, other characters
    hide or reverse what follows.

    Args:
        text: any text.
        keep: characters to leave as they are.

    >>> print(escape_controls("a\x1b[2J\u202eb\n"))
    a\x1b[2J\u202eb\n
    """
    return "".join(char if char in keep or _is_visible(char) else char.encode("unicode_escape").decode() for char in text)


def _is_visible(char: str) -> bool:
    # Controls, formats such as reversed writing, halves of surrogates (bytes of a file name that are no text), separators of
    # lines and paragraphs.
    return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


class SafeConsole(Console):
    """A console on which only its own commands steer the terminal: in all that is printed, other controls are escaped."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """What to print, piece by piece; styles are not yet in the text."""
        for segment in super().render(renderable, options):
            # Line ends are here those of a layout too: `note` and the like escape them where they are part of a name.
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text, keep="\n"))


def make_console(stderr: bool = False) -> SafeConsole:
    """A console for text that may contain brackets and colons, which are not markup: names of files and tensors."""
    return SafeConsole(stderr=stderr, highlight=False, markup=False, emoji=False)


class Output:
    """Where a command's results go.

    With ``--json`` standard output gets one JSON object at the end and nothing else.
    """

    def __init__(self, as_json: bool = False):
        self.as_json = as_json
        self.out, self.err = make_console(), make_console(stderr=True)

    def note(self, *texts: str) -> None:
        """Print remarks for the user on standard error."""
        for text in texts:
            self.err.print(Text(escape_controls(text), style="dim"), soft_wrap=True)

    def show(self, content: RenderableType) -> None:
        """Print a part of the result, unless the user asked for JSON."""
        if not self.as_json and isinstance(content, str):
            self.out.print(escape_controls(content), soft_wrap=True)  # so that paths in a sentence can be copied
        elif not self.as_json:
            self.out.print(content)

    def show_facts(self, facts: Mapping[str, Any]) -> None:
        """Print names and values in two columns; a list has a line for each entry."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column(overflow="fold")
        for name, value in facts.items():
            lines = value if isinstance(value, list) else str(value).split("\n")
            grid.add_row(Text(escape_controls(name)), Text("\n".join(escape_controls(str(line)) for line in lines)))
        self.show(grid)

    def finish(self, result: Mapping[str, Any]) -> None:
        """The whole result, which is printed as JSON if the user asked for that."""
        if self.as_json:
            set_result(result)

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
                counted = UNIT if what.endswith(UNIT) else what  # a meter counts on from stage to stage
                if counted != current:
                    bar.reset(task, visible=True)  # the time left is estimated from here on
                    current = counted
                bar.update(task, description=what, completed=done, total=total)

            yield report
