"""The command ``onebasin``: what the library does, for people who have checkpoints.

Exit codes: 0 done; 1 the answer is no (`verify`); 2 the command line could not be read; 3 refused, because a file or a
value does not fit, in one sentence on standard error; 70 an error of ours; 130 interrupted.
"""

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with its code."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("the command line needs typer and rich: pip install 'onebasin[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    from onebasin.cli.app import run  # stands below: it has the commands

    raise SystemExit(run(sys.argv[1:] if arguments is None else arguments))
