"""What the command ``onebasin`` does before PyTorch is imported, which takes seconds; nothing if it is not the command."""

import os
import sys

# Nothing else is imported here: until the working folder is out of the way, any other module might be found there.

INTERRUPTED = 130
"""The exit code of the command if it is interrupted."""
INTERRUPTION = "interrupted; no output was left incomplete"


def _prepare_command() -> None:
    """If this process is the command: import nothing from the working folder, and end on Ctrl-C without a traceback."""
    program = (getattr(sys, "argv", None) or [""])[0]  # an interpreter inside another program may have no arguments
    is_module = program == "-m" and _run_onebasin(sys.orig_argv)  # "-m" stands there while the module is looked for
    if is_module and not sys.flags.safe_path:
        del sys.path[0]  # the working folder, in which a torch.py may lie
    name = os.path.splitext(os.path.basename(program))[0]
    if is_module or name in ("onebasin", "onebasin-script"):
        end_on_interrupt()


def end_on_interrupt() -> None:
    """End the process on Ctrl-C, at once and with one sentence, until `raise_on_interrupt`. There is nothing to clean up."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Undo `end_on_interrupt`: from here on there may be temporary files to remove."""
    import signal

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_onebasin(words: list[str]) -> bool:
    """Whether arguments of Python are those of ``python -m onebasin``.

    >>> _run_onebasin(["python", "-um", "onebasin", "align"]), _run_onebasin(["python", "-m", "pytest", "onebasin"])
    (True, False)
    """
    before = [words[number - 1] for number, word in enumerate(words) if word == "onebasin" and number]
    return "-monebasin" in words or any(word[0] == "-" and word[-1] == "m" for word in before if word)


def _end(number: int, frame: object) -> None:
    os.write(2, f"error: {INTERRUPTION}\n".encode())
    if "--json" in sys.argv:
        os.write(1, f'{{"error": "{INTERRUPTION}", "code": {INTERRUPTED}}}\n'.encode())
    os._exit(INTERRUPTED)


_prepare_command()
