"""Hashes of the files of a checkpoint, by which it can be recognised later."""

from __future__ import annotations

import hashlib
from pathlib import Path

from onebasin.checkpoints.checkpoint import Checkpoint
from onebasin.checkpoints.remote_files import RemoteFile
from onebasin.engines import LOCAL, Engine
from onebasin.engines.clock import spent_on
from onebasin.engines.work_meter import HASHING
from onebasin.tensors import files

_PIECE = 2**26
"""Bytes that are hashed at a time."""


def hash_files(checkpoint: Checkpoint, engine: Engine = LOCAL) -> dict[str, str]:
    """The SHA-256 of each weight file, by its name or its place in a pipeline, as ``sha256sum`` prints it."""
    layout = checkpoint.layout
    found = {place: file for place, file in layout.weight_files.items() if file in layout.files}  # others are indices
    if layout.origins:
        origins = [layout.origins[file] for file in found.values()]
        digests = engine.map(_hash_remote, origins, HASHING, lambda origin: origin.num_bytes)
    else:
        digests = engine.map(hash_file, list(found.values()), HASHING, lambda file: file.stat().st_size)
    return dict(zip(found, digests, strict=True))


def hash_file(file: Path) -> str:
    """The SHA-256 of a file."""
    with spent_on("read"):
        return files.hash_file(file)


def _hash_remote(file: RemoteFile) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with spent_on("read"):
        file.check()
        for start in range(0, file.num_bytes, _PIECE):
            piece = buffer[: min(_PIECE, file.num_bytes - start)]
            file.read(start, piece)
            digest.update(piece)
    return digest.hexdigest()
