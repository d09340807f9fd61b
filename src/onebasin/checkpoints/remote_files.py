"""Files in object stores, by URLs that fsspec reads.

fsspec comes with PyTorch; what reads a kind of store is a package of its own, such as s3fs for ``s3://``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)")
_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified", "updated", "created")
"""What stores call that which changes with the content of a file."""
_PIECE = 2**26
"""Bytes that are asked for at once: what was received is copied, so a tensor as a whole would be held twice."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL. A local file of that name comes first.

    >>> is_remote("s3://bucket/llama"), is_remote("models/llama")
    (True, False)
    """
    return _URL.fullmatch(str(path)) is not None and not os.path.lexists(path)


def write_url(path: str | os.PathLike[str]) -> str:
    """A URL as it was given: a `Path` keeps one of its slashes.

    >>> write_url("s3:/bucket/llama"), write_url("file:///models/llama")
    ('s3://bucket/llama', 'file:///models/llama')
    """
    found = _URL.fullmatch(str(path))
    assert found is not None, f"{path} is no URL"
    scheme, rest = found.groups()
    return f"{scheme}://{'/' if scheme in ('file', 'local') else ''}{rest}".rstrip("/")


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store, in the version in which it was opened.

    Attributes:
        url: where it is.
        num_bytes: its size.
        version: changes with its content; "" if the store tells nothing.
    """

    url: str
    num_bytes: int
    version: str

    @classmethod
    def of(cls, url: str) -> RemoteFile:
        """The present version."""
        filesystem, path = connect(url)
        with explained(url):
            filesystem.invalidate_cache(path)
            entry = filesystem.info(path)  # lists of files may tell the same in other words
        version = next((str(entry[name]) for name in _VERSIONS if entry.get(name) is not None), "")
        return cls(url, int(entry["size"]), version)

    def check(self) -> None:
        """Refuse to read on in another version.

        Raises:
            ValueError: if the file has been changed.
        """
        if RemoteFile.of(self.url) != self:
            raise ValueError(f"{self.url} was changed while it was read")

    def read(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes behind a place.

        Raises:
            ValueError: if there are fewer.
            OSError: with what the store says.
        """
        filesystem, path = connect(self.url)
        for place in range(0, len(buffer), _PIECE):
            piece = buffer[place : place + _PIECE]
            with explained(self.url):
                content = filesystem.cat_file(path, start + place, start + place + len(piece))
            if len(content) != len(piece):
                raise ValueError(f"{self.url} became shorter while it was read")
            piece[:] = content


def connect(url: str) -> tuple[Any, str]:
    """What reads a store, and what it calls the file or folder."""
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except (ImportError, ValueError) as error:  # "Install s3fs to access S3", "Protocol not known"
        raise ValueError(f"cannot read {url}: {error}. See what pip package of fsspec reads it, or copy it") from None


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Errors of stores have types of their own, which other processes may not know."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file or folder {url}") from None
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise OSError(f"cannot read {url}: {type(error).__name__} {reason}".rstrip()) from None
