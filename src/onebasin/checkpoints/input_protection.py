"""Inputs are never changed: refuse an output that is one of them, lies in one, or holds one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from onebasin.checkpoints.checkpoint import Checkpoint


def check_apart(target: Path, inputs: Iterable[str | os.PathLike[str] | Checkpoint]) -> None:
    """Refuse a place for an output that is an input, lies in one or holds one, by whatever path, link or name.

    Args:
        target: the place.
        inputs: files and folders that the command reads. A checkpoint stands for each of its files.

    Raises:
        ValueError: naming the input.
    """
    above, own = _identify_all(target), _identify(target)
    for source in inputs:
        for file in _list_files(source):
            if _identify(file) in above or own in _identify_all(file):
                raise ValueError(f"{target} is, or lies in, or holds the input {file}: inputs are never changed")


def _list_files(source: str | os.PathLike[str] | Checkpoint) -> list[Path]:
    """A file or folder, and the files that it consists of, which may be links to other places."""
    if isinstance(source, Checkpoint):
        parts = [file for part in source.layout.parts.values() for file in _list_files(part.path)]
        return [*_list_files(source.path), *source.layout.weight_files.values(), *parts]
    path = Path(source)
    # A link to a folder is not followed: an output may lie in whatever it points to.
    return [path, *(entry for entry in path.iterdir() if entry.is_file())] if path.is_dir() else [path]


def _identify(path: Path) -> tuple[int, int] | None:
    """What the file system calls a file or folder, which is the same through every link; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _identify_all(path: Path) -> set[tuple[int, int]]:
    """The identities of a path, of what it points to if it is a link, and of all folders that the two lie in."""
    entry = path.absolute() if path.name in ("", "..") else follow_links(path.absolute().parent) / path.name
    places = {place for start in (entry, follow_links(path)) for place in (start, *start.parents)}
    return {identity for place in places if (identity := _identify(place)) is not None}


def follow_links(path: Path) -> Path:
    """The whole path without links, as far as there is one: a link that leads to itself stays, where pathlib fails."""
    return Path(os.path.realpath(path))
