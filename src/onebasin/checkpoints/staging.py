"""Files of an output folder that a run has finished, kept by its journal until the folder is complete."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from onebasin.checkpoints.hashing import hash_file
from onebasin.engines import Engine, Journal
from onebasin.engines.journal import Values
from onebasin.tensors.files import list_entries


class Staging:
    """The folder in which an output is put together, if there is a journal.

    Args:
        journal: of the run.
        target: the output, a folder.
    """

    def __init__(self, journal: Journal, target: Path):
        self.journal, self.target = journal, target
        self.folder = journal.stage(target)

    @property
    def num_bytes(self) -> int:
        """Of the files in it."""
        if self.folder.is_symlink() or not self.folder.is_dir():
            return 0
        return sum(entry.lstat().st_size for entry in list_entries(self.folder) if not entry.is_dir())

    def clean(self, names: Collection[str], engine: Engine) -> set[str]:
        """Remove all but the files that a killed run has finished.

        Args:
            names: the places of all files of the output.
            engine: by which the files are compared with what was written.

        Returns:
            The places of the files that need not be written again.

        Raises:
            ValueError: if there is anything that no run has written, or a finished file is not what was written.
        """
        if self.folder.is_symlink() or not self.folder.is_dir():
            if self.folder.is_symlink() or self.folder.exists():
                raise self.journal.damage(f"{self.folder.name} in it is no folder")
            return set()
        kept: dict[str, str] = {}
        for entry in list_entries(self.folder):
            place = entry.relative_to(self.folder).as_posix()
            if entry.is_symlink():
                raise self.journal.damage(f"{place} is a link")
            if entry.is_dir():
                if not any(name.startswith(f"{place}/") for name in names):
                    raise self.journal.damage(f"the folder {place} was not written by a run")
                continue
            is_temporary = entry.name.startswith(".") and entry.suffix == ".tmp"
            if place not in names and not is_temporary:
                raise self.journal.damage(f"{place} was not written by a run")
            digest = None if is_temporary else self._recall(place)
            if digest is None:
                entry.unlink()  # it may be half a file
            else:
                kept[place] = digest
        found = engine.map(hash_file, [self.folder / place for place in kept])
        for (place, digest), own in zip(kept.items(), found, strict=True):
            if own != digest:
                raise self.journal.damage(f"{place} is not what was written")
        return set(kept)

    def keep(self, place: str, digest: str) -> None:
        """A file is finished."""
        self.journal.keep(self._name(place), {"place": place, "sha256": digest})

    def _recall(self, place: str) -> str | None:
        def check(values: Values) -> None:
            if values["place"] != place or not isinstance(values["sha256"], str):
                raise ValueError(f"it is not of {place}")

        found = self.journal.recall(self._name(place), check)
        return None if found is None else found["sha256"]

    def _name(self, place: str) -> str:
        return f"file {self.target.name}/{place}"

    def promise(self) -> None:
        """All files are there: the folder is about to have its name."""
        known = {entry.relative_to(self.folder).as_posix(): entry for entry in list_entries(self.folder)}
        files = {place: entry for place, entry in known.items() if not entry.is_dir()}
        digests = {place: self._recall(place) or hash_file(entry) for place, entry in files.items()}
        self.journal.promise(self.target, digests)


def is_finished(journal: Journal | None, target: Path) -> bool:
    """Whether an output is there because the run that goes on was killed behind it."""
    return journal is not None and journal.is_resumed and journal.is_finished(target)
