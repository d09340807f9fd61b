"""The command ``onebasin``: what the library does, for people who have checkpoints.

Exit codes: 0 done; 1 the answer is no (`verify`, `provenance`, `doctor`); 2 the command line could not be read; 3 refused,
because a file or a value does not fit, with one sentence on standard error; 4 it cannot be told (`provenance`); 70 an error
of ours; 130 interrupted.
"""

import importlib
import sys

from onebasin.cli.standard_output import close_standard_output
from onebasin.cli.torchvision_operators import declare_missing_operators
from onebasin.startup import INTERRUPTED, end_on_interrupt


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with its code."""
    end_on_interrupt()
    # Imported here and by name: without the extra, `onebasin.cli.app` cannot be imported, and the command should say so in
    # one sentence. Everything else imports at the top of its file.
    try:
        for library in ("typer", "rich"):
            importlib.import_module(library)
    except ImportError:
        print("the command line needs typer and rich: pip install 'onebasin[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    app = importlib.import_module("onebasin.cli.app")
    declare_missing_operators()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = app.run(words)
    except KeyboardInterrupt:  # a second one, while the first was dealt with
        code = INTERRUPTED
    if "--json" in words:
        close_standard_output()
    raise SystemExit(code)
