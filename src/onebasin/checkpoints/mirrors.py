"""A folder in an object store as a local one: small files are copied, and of safetensors files the headers."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from onebasin.checkpoints.companion_files import MAX_COMPANION_BYTES, is_companion
from onebasin.checkpoints.remote_files import RemoteFile, connect, explained

_MAX_HEADER = 2**27
"""Bytes of a header that are copied: safetensors allows 100 million."""


@dataclass(frozen=True)
class Mirror:
    """A local folder that stands for one in a store.

    Attributes:
        path: what to open in place of the URL.
        files: all files in it, and those that they stand for.
    """

    path: Path
    files: Mapping[Path, RemoteFile]


@contextlib.contextmanager
def mirror(url: str) -> Iterator[Mirror]:
    """Copy the small files of a folder in a store, and of its safetensors files the headers, each in front of a hole.

    Files with holes are removed at the end, so that nobody takes them for weights; the others when the process ends.

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: if there are no safetensors, or it is a pipeline; if what reads this kind of store is not installed.
    """
    filesystem, path = connect(url)
    with explained(url):
        filesystem.invalidate_cache(path)
        is_file = filesystem.isfile(path)
        name = url.rpartition("/")[2]
        is_alone = is_file and name.endswith(".safetensors")
        base = url.rpartition("/")[0] if is_file else url
        places = [path] if is_alone else filesystem.find(connect(base)[1], maxdepth=1)
    found = [place.rpartition("/")[2] for place in places]
    weights = [each for each in found if each.endswith(".safetensors")]
    _check_readable(url, found, weights, None if not is_file else name)
    holder = Path(tempfile.mkdtemp(prefix="onebasin-"))
    atexit.register(shutil.rmtree, holder, ignore_errors=True)
    folder = holder / (base.rpartition("/")[2] or "checkpoint")
    folder.mkdir()
    files = {}
    for each in filter(lambda name: name in weights or is_companion(name), found):
        remote = RemoteFile.of(f"{base}/{each}")
        if each in weights:
            _copy_header(remote, folder / each)
        elif remote.num_bytes > MAX_COMPANION_BYTES:
            continue
        else:
            (folder / each).write_bytes(_read(remote, remote.num_bytes))
        files[folder / each] = remote
    try:
        yield Mirror(folder / name if is_file else folder, files)
    finally:
        for each in weights:
            (folder / each).unlink()


def _check_readable(url: str, names: list[str], weights: list[str], file: str | None) -> None:
    if not names:
        raise FileNotFoundError(f"there is no file or folder {url}")
    if "model_index.json" in names:
        raise ValueError(f"{url} is a pipeline, which is not read from a store: give the folder of one part, or copy it")
    is_known = file is None or file in weights or file.endswith(".safetensors.index.json")
    if not weights or not is_known:
        raise ValueError(f"{url} holds no safetensors, and nothing else is read from a store: copy it to a local folder")


def _copy_header(remote: RemoteFile, file: Path) -> None:
    start = _read(remote, min(8, remote.num_bytes))
    length = min(int.from_bytes(start, "little"), remote.num_bytes - len(start), _MAX_HEADER)
    with file.open("wb") as stream:
        stream.write(_read(remote, len(start) + length))
        stream.truncate(remote.num_bytes)


def _read(remote: RemoteFile, size: int) -> bytearray:
    content = bytearray(size)
    remote.read(0, memoryview(content))
    return content
