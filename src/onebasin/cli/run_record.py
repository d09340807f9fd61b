"""What a report and a model card say about a run: when, by what versions, from which files."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from onebasin import __version__
from onebasin.checkpoints import Checkpoint
from onebasin.checkpoints.hashing import hash_file, hash_files
from onebasin.cli.console import Output, command_line
from onebasin.engines import LOCAL, Engine
from onebasin.reporting.model_card import Ingredient, ModelCard

_PACKAGES = ("torch", "transformers", "diffusers", "timm", "torchvision")


@dataclass(frozen=True)
class RunRecord:
    """One run of the command line.

    Attributes:
        command: as one would type it again.
        date: when it began, to the minute.
        versions: of onebasin, Python and what models are built with.
        seed: of random numbers, if there are any.
        hashes: for each input, by its path, the SHA-256 of its weight files.
    """

    command: str
    date: str
    versions: str
    seed: int | None
    hashes: Mapping[str, Mapping[str, str]]

    @property
    def facts(self) -> dict[str, str]:
        """All but the command, by names for people."""
        seed = {} if self.seed is None else {"seed": str(self.seed)}
        return {"date": self.date, **seed, "versions": self.versions}

    @property
    def hash_facts(self) -> dict[str, str]:
        """The hashes, a line for each input."""
        return {
            f"SHA-256 of {path}": next(iter(files.values())) if len(files) == 1 else _join(files)
            for path, files in self.hashes.items()
        }

    def make_card(self, out: Path, summary: str, roles: Sequence[tuple[Path, str]], facts: Mapping[str, str]) -> ModelCard:
        """The card of a folder that this run writes.

        Args:
            out: the folder.
            summary: what is in it.
            roles: of the inputs.
            facts: further values by name.
        """
        made_from = [Ingredient(str(path), role, self.hashes[str(path)]) for path, role in roles]
        return ModelCard(out.name, summary, made_from, self.command, {**facts, **self.facts})


def record_run(
    output: Output,
    paths: Sequence[Path],
    files: Sequence[Checkpoint | Path],
    seed: int | None = None,
    engine: Engine = LOCAL,
) -> RunRecord:
    """Note how this command was run; the files are read for their hashes, which a progress bar shows if there is one."""
    with output.status("hashing the inputs") if engine.meter.report is None else contextlib.nullcontext():
        hashes = {
            str(path): {file.name: hash_file(file)} if isinstance(file, Path) else hash_files(file, engine)
            for path, file in zip(paths, files, strict=True)
        }
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return RunRecord(command_line(), date, _list_versions(), seed, hashes)


def _list_versions() -> str:
    found = [f"onebasin {__version__}", f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _join(files: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in files.items())
