"""The engine of a command: where it works, what it keeps to go on from, and what it says about itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onebasin import __version__
from onebasin.checkpoints import Checkpoint
from onebasin.cli.console import Output, list_arguments
from onebasin.engines import LOCAL, Engine, EngineName, Journal, make_engine
from onebasin.engines.memory_limits import read_bytes

_WITHOUT_EFFECT = {"--resume": 0, "--force": 0, "--json": 0, "--engine": 1, "--workers": 1, "--address": 1, "--memory": 1}
"""Options that change no result, and how many values each takes."""
_WORK = {"read": "read", "score": "scored", "assign": "assigned", "write": "wrote", "other": "rest"}
_opened: list[Engine] = []
"""Engines to be closed when the command ends."""


def choose_engine(
    name: EngineName | None,
    workers: int | None = None,
    address: str | None = None,
    memory: str | None = None,
    device: str = "cpu",
) -> Engine:
    """The engine that options name; the local one, without limits, if they name none.

    Raises:
        ValueError: if options do not fit together.
    """
    limit = None if memory is None else read_bytes(memory)
    if name is None:
        given = {"--workers": workers, "--address": address}
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option} is for workers: give --engine processes or --engine ray")
        return LOCAL if limit is None else _keep(make_engine("local", memory=limit))
    return _keep(make_engine(name, workers, limit, address, device))


def _keep(engine: Engine) -> Engine:
    _opened.append(engine)
    return engine


def close_engines() -> None:
    """End the workers of a command. A journal stays only if there is something to go on from."""
    while _opened:
        engine = _opened.pop()
        engine.close()
        if engine.journal is not None and engine.journal.is_empty:
            engine.journal.remove()


def open_journal(output: Output, engine: Engine, out: Path, files: Sequence[Checkpoint | Path], resume: bool) -> Engine:
    """An engine that keeps what it decides beside the output, if the user named an engine or wants to go on.

    Args:
        output: for a remark.
        engine: of the command.
        out: the output.
        files: the inputs.
        resume: go on from what a run that was killed has kept.

    Raises:
        ValueError: to go on, if there is nothing to go on from, or if it is from another run.
    """
    if engine is LOCAL and not resume:
        return engine
    engine = _keep(make_engine("local")) if engine is LOCAL else engine
    folder = out.with_name(f".{out.name}.resume")
    if folder.exists() and not resume:
        output.note(f"{folder} is of a run that did not end, and is begun anew: --resume would have gone on from it")
    engine.journal = Journal(folder, _take_fingerprint(files), resume)
    return engine


def _take_fingerprint(files: Sequence[Checkpoint | Path]) -> dict[str, Any]:
    """What the results of a command depend on."""
    paths = [path for file in files for path in ([file] if isinstance(file, Path) else file.layout.files)]
    versions = {str(path.absolute()): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
    return {"version of onebasin": __version__, "command": _strip(list_arguments()), "inputs": versions}


def _strip(arguments: Sequence[str]) -> list[str]:
    """Arguments without those that change no result.

    >>> _strip(["align", "a", "b", "--engine", "ray", "--workers=3", "-o", "c", "--resume"])
    ['align', 'a', 'b', '-o', 'c']
    """
    kept, skipped = [], 0
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if skipped:
            skipped -= 1
        elif option in _WITHOUT_EFFECT:
            skipped = 0 if equals else _WITHOUT_EFFECT[option]
        else:
            kept.append(argument)
    return kept


def finish_journal(engine: Engine) -> None:
    """The command is done: nothing is left to go on from."""
    if engine.journal is not None:
        engine.journal.remove()


def list_engine_facts(engine: Engine) -> dict[str, Any]:
    """For people: where the work was done, and where the time went. Nothing if the user named no engine."""
    if engine is LOCAL:
        return {}
    spent = ", ".join(f"{word} {engine.seconds[what]:.1f} s" for what, word in _WORK.items() if what in engine.seconds)
    recalled = engine.journal.num_recalled if engine.journal is not None else 0
    workers = f"{engine.name}, {engine.workers} worker{'s' if engine.workers > 1 else ''}"
    facts = {"engine": workers, "memory": "; ".join(engine.notes), "time of all workers": spent}
    facts |= {"taken over": f"{recalled} results of the run before"} if recalled else {}
    return {name: value for name, value in facts.items() if value}


def list_engine_values(engine: Engine) -> dict[str, Any]:
    """The same for programs."""
    if engine is LOCAL:
        return {}
    rounded = {what: round(seconds, 3) for what, seconds in engine.seconds.items()}
    recalled = engine.journal.num_recalled if engine.journal is not None else 0
    return {"engine": {"name": engine.name, "workers": engine.workers, "seconds": rounded, "recalled": recalled,
                       "notes": list(engine.notes)}}  # fmt: skip
