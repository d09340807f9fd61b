"""Hashes of the files of a checkpoint, by which it can be recognised later."""

from __future__ import annotations

import hashlib
from pathlib import Path

from onebasin.checkpoints.checkpoint import Checkpoint


def hash_files(checkpoint: Checkpoint) -> dict[str, str]:
    """The SHA-256 of each weight file, by its name or its place in a pipeline, as ``sha256sum`` prints it."""
    found = {}
    for place, file in checkpoint.layout.weight_files.items():
        if file not in checkpoint.layout.files:
            continue  # an index
        found[place] = hash_file(file)
    return found


def hash_file(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
