"""The table of commands; errors become one sentence and an exit code."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import warnings
from typing import Any

import typer
from rich.text import Text

from onebasin import __version__
from onebasin.cli.commands.align import align
from onebasin.cli.commands.apply import apply
from onebasin.cli.commands.barrier import barrier
from onebasin.cli.commands.canonical import canonical
from onebasin.cli.commands.demo import demo
from onebasin.cli.commands.doctor import doctor
from onebasin.cli.commands.inspect import inspect
from onebasin.cli.commands.merge import merge
from onebasin.cli.commands.port import port
from onebasin.cli.commands.provenance import provenance
from onebasin.cli.commands.verify import verify
from onebasin.cli.commands.widen import widen
from onebasin.cli.console import PYDANTIC, escape_controls, make_console, remember_arguments, wants_json
from onebasin.cli.engine_choice import close_engines
from onebasin.cli.standard_output import reserved_for_result, set_result
from onebasin.startup import INTERRUPTED, INTERRUPTION, raise_on_interrupt

REFUSED, INTERNAL = 3, 70
_LONGEST = 800
"""Characters of a sentence: a name from a file can have any length."""

_HELP = """Bring independently trained neural networks into one basin of the loss landscape, from their checkpoints.

\b
Start here:
  onebasin inspect torchvision:resnet50
  onebasin align llama-a llama-b -o llama-b-aligned
  onebasin align a.pt b.pt -o c.pt --model nets:make --input-shape 1,3,32,32
  onebasin merge llama-a llama-b -o merged --report merged.html

Checkpoints are safetensors files, .pt, .pth, .bin or .ckpt files, shards with an index, or Hugging Face folders. \
No code in them is run, and inputs are never changed. \
An output appears under its name when it is complete, and replaces an existing one only with --force.
""".replace("\\\n", "")
_EPILOG = (
    "Exit codes: 0 done, 1 the answer is no (verify, provenance, doctor), 2 usage, 3 refused (the reason is on standard "
    "error), 4 cannot tell (provenance), 130 interrupted."
)

app = typer.Typer(
    name="onebasin",
    help=_HELP,
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    # Boxes cut off words if the terminal is narrow.
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= 80 else None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (inspect, align, merge, barrier, apply, port, canonical, widen, verify, provenance, demo, doctor):
    app.command(no_args_is_help=command not in (demo, doctor))(command)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        print(f"onebasin {__version__}")
        raise typer.Exit


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code; an error is one sentence on standard error."""
    remember_arguments(arguments)
    raise_on_interrupt()
    with reserved_for_result() if wants_json() else contextlib.nullcontext():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    previous = signal.signal(signal.SIGTERM, _interrupt)  # so that temporary files are removed
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")  # those of other libraries mean nothing to a user of the command
            code = int(app(arguments, standalone_mode=False, prog_name="onebasin") or 0)
        if code == INTERRUPTED:  # typer turns the exception into this code
            raise KeyboardInterrupt
        return code
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _fail(INTERRUPTION, INTERRUPTED)
    except SystemExit as error:
        return _fail(f"the code of a model, its data or its loss called sys.exit({error.code!r})", REFUSED)
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        if os.environ.get("ONEBASIN_TRACEBACK"):
            raise
        return _fail(_describe(error), REFUSED)
    except BaseException as error:  # libraries in Rust raise such ones that are no Exception
        if isinstance(error, RuntimeError) and "memory" in str(error):
            return _fail(f"there is not enough memory: {str(error).splitlines()[0]}", REFUSED)
        return _fail_unexpectedly(error)
    finally:
        close_engines()
        signal.signal(signal.SIGTERM, previous)


def _fail_unexpectedly(error: BaseException) -> int:
    message = getattr(error, "format_message", None)  # click's exceptions have it; typer does not export their class
    if message is not None:
        command = getattr(getattr(error, "ctx", None), "command_path", "onebasin")
        # If there are no arguments at all, the message is empty and the help has been printed.
        said = message().replace(PYDANTIC, "").rstrip(".")
        text = f"{said} (see {command} --help)" if said else f"{command} needs arguments"
        return _fail(text, getattr(error, "exit_code", 2))
    if os.environ.get("ONEBASIN_TRACEBACK"):
        raise error
    return _fail(
        f"an error of onebasin's own, please report it: {type(error).__name__}: {error} (ONEBASIN_TRACEBACK=1 shows where)",
        INTERNAL,
    )


def _describe(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the file'}: {error.strerror}"
    return str(error) or type(error).__name__


def _fail(text: str, code: int) -> int:
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    shown = escape_controls(text.strip())  # one line, whatever is in the name of a file
    make_console(stderr=True).print(Text.assemble(("error: ", "bold red"), shown), soft_wrap=True)
    if wants_json():
        set_result({"error": text, "code": code})
    return code


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
