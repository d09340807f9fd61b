"""Hashes of the files of a checkpoint, by which it can be recognised later."""

from __future__ import annotations

from pathlib import Path

from onebasin.checkpoints.checkpoint import Checkpoint
from onebasin.engines import LOCAL, Engine
from onebasin.engines.clock import spent_on
from onebasin.engines.work_meter import HASHING
from onebasin.tensors import files


def hash_files(checkpoint: Checkpoint, engine: Engine = LOCAL) -> dict[str, str]:
    """The SHA-256 of each weight file, by its name or its place in a pipeline, as ``sha256sum`` prints it."""
    layout = checkpoint.layout
    found = {place: file for place, file in layout.weight_files.items() if file in layout.files}  # others are indices
    digests = engine.map(hash_file, list(found.values()), HASHING, lambda file: file.stat().st_size)
    return dict(zip(found, digests, strict=True))


def hash_file(file: Path) -> str:
    """The SHA-256 of a file."""
    with spent_on("read"):
        return files.hash_file(file)
