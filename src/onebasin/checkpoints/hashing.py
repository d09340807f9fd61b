"""Hashes of the files of a checkpoint, by which it can be recognised later."""

from __future__ import annotations

import hashlib
from pathlib import Path

from onebasin.checkpoints.checkpoint import Checkpoint
from onebasin.engines import LOCAL, Engine
from onebasin.engines.clock import spent_on


def hash_files(checkpoint: Checkpoint, engine: Engine = LOCAL) -> dict[str, str]:
    """The SHA-256 of each weight file, by its name or its place in a pipeline, as ``sha256sum`` prints it."""
    layout = checkpoint.layout
    files = {place: file for place, file in layout.weight_files.items() if file in layout.files}  # others are indices
    return dict(zip(files, engine.map(hash_file, list(files.values())), strict=True))


def hash_file(file: Path) -> str:
    """The SHA-256 of a file."""
    with spent_on("read"), file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
