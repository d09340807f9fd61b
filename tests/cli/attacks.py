"""What every attack on the command must come to: a refusal in one sentence, nothing run, changed, left behind or leaked."""

import contextlib
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

SECRET = "a password that must not leave"
MARKER = "executed"
"""A file that hostile content would make if any of it were run."""
SECONDS = 60


def look(folder: Path) -> dict[str, object]:
    """Everything in a folder: contents of files, targets of links, and that other things are there. Nothing is followed."""
    found: dict[str, object] = {}
    for root, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(root, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                content: object = path.read_bytes() if path.stat().st_size < 2**24 else path.stat().st_size
            else:
                content = os.readlink(path) if stat.S_ISLNK(mode) else stat.S_IFMT(mode)
            found[str(path.relative_to(folder))] = content
    return found


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """End what takes forever."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError("it took too long")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def check_refused(onebasin, folder: Path, *command: str) -> str:
    """Run a command and look at everything; returns the sentence of the refusal."""
    before = look(folder)
    with time_limit():
        ran = onebasin(*command)
    assert ran.code in (2, 3), (ran.code, ran.out, ran.err)
    (line,) = (text for text in ran.err.splitlines() if text.startswith("error: "))
    assert ran.err.splitlines()[-1] == line
    assert line.removeprefix("error: ").strip()
    assert len(line) < 1000, "a sentence, not the content of a file"
    assert SECRET not in ran.out + ran.err
    assert look(folder) == before
    assert not (folder / MARKER).exists()
    return line
