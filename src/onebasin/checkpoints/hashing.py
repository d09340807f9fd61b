"""Hashes of the files of a checkpoint, by which it can be recognised later."""

from __future__ import annotations

import hashlib

from onebasin.checkpoints.checkpoint import Checkpoint


def hash_files(checkpoint: Checkpoint) -> dict[str, str]:
    """The SHA-256 of each weight file, by its name, as ``sha256sum`` prints it."""
    found = {}
    for file in checkpoint.layout.files:
        with file.open("rb") as stream:
            found[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found
