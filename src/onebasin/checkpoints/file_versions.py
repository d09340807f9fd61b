"""Has a file been changed since it was opened?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileVersion:
    """What tells whether a file has been changed since it was opened."""

    file: Path
    num_bytes: int
    time: int

    @classmethod
    def of(cls, file: Path) -> FileVersion:
        """The present one."""
        status = file.stat()
        return cls(file, status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """Refuse to read on in another version.

        Raises:
            ValueError: if the file has been changed.
        """
        if FileVersion.of(self.file) != self:
            raise ValueError(f"{self.file} was changed while it was read")

    def read(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes behind a place.

        Raises:
            ValueError: if there are fewer.
        """
        with self.file.open("rb") as stream:
            stream.seek(start)
            if stream.readinto(buffer) < len(buffer):
                raise ValueError(f"{self.file} became shorter while it was read")
