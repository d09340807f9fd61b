"""The engine of a command: where it works, what it keeps to go on from, and what it says about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from onebasin import __version__
from onebasin.checkpoints import Checkpoint, CheckpointSet
from onebasin.checkpoints.companion_files import find_companions
from onebasin.checkpoints.staging import Staging, is_finished
from onebasin.checkpoints.writing import estimate_writing
from onebasin.cli.console import Output
from onebasin.engines import LOCAL, Engine, EngineName, Journal, make_engine
from onebasin.engines.memory_limits import read_bytes
from onebasin.matching.methods import WeightMatching
from onebasin.matching.problem import estimate_need, make_problem
from onebasin.relaxation.objectives import WeightDistance

_WITHOUT_EFFECT = ("engine", "workers", "address", "memory", "resume", "force", "json", "dry_run")
"""Options that change no result."""
_WORK = {"read": "read", "score": "scored", "reduce": "summed", "assign": "assigned", "write": "wrote", "other": "rest"}
_opened: list[Engine] = []
"""Engines to be closed when the command ends."""


def choose_engine(
    output: Output,
    name: EngineName | None,
    workers: int | None = None,
    address: str | None = None,
    memory: str | None = None,
    device: str = "cpu",
    resume: bool = False,
) -> Engine:
    """The engine that options name; the local one, without limits, if they name none.

    Args:
        output: for what the work needs, which is printed before it begins.
        name: of the engine.
        workers: how many.
        address: of a cluster.
        memory: a limit, with a unit.
        device: where to compute.
        resume: go on from a journal, which the engine without limits does not keep.

    Raises:
        ValueError: if options do not fit together.
    """
    limit = None if memory is None else read_bytes(memory)
    if name is None:
        given = {"--workers": workers, "--address": address}
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option} is for workers: give --engine processes or --engine ray")
        if limit is None and not resume:
            return LOCAL
    engine = make_engine(name or "local", workers, limit, address, device)
    engine.tell = output.note
    _opened.append(engine)
    return engine


def close_engines() -> None:
    """End the workers of a command. A journal stays only if there is something to go on from."""
    while _opened:
        engine = _opened.pop()
        engine.close()
        if engine.journal is not None and engine.journal.is_empty:
            engine.journal.remove()


def open_journal(
    engine: Engine,
    out: Path,
    files: Sequence[Checkpoint | Path],
    options: Mapping[str, Any],
    device: str = "cpu",
    resume: bool = False,
) -> None:
    """Have an engine keep what it decides beside the output, if the user named an engine; `begin_journal` makes the folder.

    Args:
        engine: of the command.
        out: the output.
        files: all inputs: checkpoints, other files, the code of a model.
        options: of the command, by name, as they were read.
        device: where to compute.
        resume: go on from what a run that was killed has kept.

    Raises:
        ValueError: to go on, if there is nothing to go on from, or if it is damaged or from another run.
    """
    if engine is not LOCAL:
        folder = out.absolute().with_name(f".{out.name}.resume")
        engine.journal = Journal(folder, _take_fingerprint(files, options, device), resume)


def begin_journal(output: Output, engine: Engine) -> None:
    """Make the folder of the journal: the inputs and outputs have been checked."""
    journal = engine.journal
    if journal is None:
        return
    if not journal.is_resumed and journal.folder.exists():
        output.note(f"{journal.folder} is of a run that did not end, and is begun anew: --resume would have gone on from it")
    journal.begin()


def check_needs(
    engine: Engine,
    models: CheckpointSet,
    out: Path,
    like: Checkpoint,
    method: str,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Say what matching by weights and writing will hold, and refuse what does not fit, before anything is read.

    Raises:
        ValueError: with what is needed, and what there is.
    """
    if engine is LOCAL:
        return
    if engine.is_remote or method == WeightMatching.name:
        first, second, *_ = models.checkpoints
        problem = make_problem(
            second, first.to(device), models.symmetry, WeightDistance(), None, lazily=True, in_blocks=True
        )
        engine.check_memory(estimate_need(replace(problem, engine=engine)))
    engine.check_memory(estimate_writing(out, like, dtype, models.symmetry.row_keys))


def count_staged(engine: Engine, out: Path) -> int:
    """Bytes of an output folder that a killed run has written already."""
    journal = engine.journal
    return Staging(journal, out).num_bytes if journal is not None and journal.is_resumed else 0


def may_replace(engine: Engine, force: bool, *outputs: Path) -> bool:
    """Whether outputs may be replaced: by force, or because they are those of the run that goes on."""
    return force or any(is_finished(engine.journal, out.absolute()) for out in outputs)


def _take_fingerprint(files: Sequence[Checkpoint | Path], options: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What the results of a command depend on."""
    stored = [file.layout.origins for file in files if isinstance(file, Checkpoint)]
    versions: dict[str, list[Any]] = {
        each.url: [each.num_bytes, each.version] for origins in stored for each in origins.values()
    }
    local = [file for file in files if not isinstance(file, Checkpoint) or not file.layout.origins]
    for path in sorted({each.absolute() for file in local for each in _list_files(file)}):
        status = path.stat()
        versions[str(path)] = [status.st_size, status.st_mtime_ns]
    chosen = {f"option {name}": value for name, value in options.items() if name not in _WITHOUT_EFFECT}
    return {
        "version of onebasin": __version__, "version of torch": metadata.version("torch"), "device": device,
        "record of the inputs": versions, **chosen,
    }  # fmt: skip


def _list_files(file: Checkpoint | Path) -> list[Path]:
    if isinstance(file, Checkpoint):
        return [*file.layout.weight_files.values(), *find_companions(file).copied.values()]
    return [each for each in file.iterdir() if each.is_file()] if file.is_dir() else [file]


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


def take_timeline(engine: Engine) -> dict[str, Any]:
    """What a report shows of it. Nothing if the user named no engine."""
    return {} if engine is LOCAL else {"timeline": engine.timeline}


def list_engine_values(engine: Engine) -> dict[str, Any]:
    """The same for programs."""
    if engine is LOCAL:
        return {}
    rounded = {what: round(seconds, 3) for what, seconds in engine.seconds.items()}
    recalled = engine.journal.num_recalled if engine.journal is not None else 0
    return {"engine": {"name": engine.name, "workers": engine.workers, "seconds": rounded, "recalled": recalled,
                       "notes": list(engine.notes)}}  # fmt: skip
