"""What a run has decided, kept beside its output so that the same run can go on after it was killed.

A run is deterministic: the n-th thing it decides is the same each time. So results are kept by their number, and a run that
goes on takes the ones it finds in place of computing them. Each is one file, whose name has the SHA-256 of its content; it
is on the disk before it has that name. No code in a journal is run.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from onebasin.tensors.files import (
    hash_file,
    list_entries,
    load_tensors,
    pack_tensors,
    read_json,
    remove_temporaries,
    write_atomically,
)

Values = dict[str, Any]
"""Tensors, and other values that JSON can hold, by name."""
Check = Callable[[Values], None]
"""Raises a ValueError if values are not what they should be."""
_RUN = "run.json"
_RECORD = re.compile(r"([0-9]{6}|[a-z]+-[0-9a-f]{16})-([0-9a-f]{64})\.safetensors")
_STAGE = "files of "


class Journal:
    """A folder of results, which belongs to one run.

    Args:
        folder: beside the output.
        fingerprint: what the results depend on: inputs and options.
        resume: go on from what is there, instead of beginning anew.

    Attributes:
        num_recalled: results that were taken over.

    Raises:
        ValueError: to go on, if there is nothing, if it is from another run, naming what differs, or if it is damaged.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any], resume: bool = False):
        self.folder, self.fingerprint = folder.absolute(), json.loads(json.dumps(dict(fingerprint), default=str))
        self.num_recalled = self._number = 0
        self.is_resumed = resume
        self._records: dict[str, str] = {}
        if resume:
            self._check()

    def begin(self) -> None:
        """Make the folder, unless the run goes on from one.

        Raises:
            ValueError: if something else is in its place.
        """
        if self.is_resumed:
            return
        if self.folder.is_symlink() or (self.folder.exists() and not (self.folder / _RUN).is_file()):
            raise ValueError(f"{self.folder} is where a journal would be, and is none: move it away")
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir()
        text = json.dumps(self.fingerprint)
        write_atomically(self.folder / _RUN, lambda file: file.write_text(text), durable=True)

    def _check(self) -> None:
        """Refuse to go on from a journal of another run, or a damaged one."""
        if self.folder.is_symlink() or not (self.folder / _RUN).is_file():
            raise ValueError(f"there is no journal {self.folder} to go on from: leave out --resume")
        remove_temporaries(self.folder)
        for entry in self.folder.iterdir():
            found = _RECORD.fullmatch(entry.name)
            is_staged = entry.name.startswith(_STAGE) and entry.is_dir()
            if entry.is_symlink() or not (found or is_staged or entry.name == _RUN) or (found and not entry.is_file()):
                raise self.damage(f"{entry.name} in it was not written by a run")
            if found is not None and found[1] in self._records:
                raise self.damage(f"it has {found[1]} twice")
            if found is not None:
                self._records[found[1]] = found[2]
        try:
            known = read_json(self.folder / _RUN)
        except ValueError:
            raise self.damage(f"{_RUN} cannot be read") from None
        for name in {**known, **self.fingerprint} if isinstance(known, dict) else ["content"]:
            if not isinstance(known, dict) or known.get(name) != self.fingerprint.get(name):
                raise ValueError(
                    f"the journal {self.folder} is of another run: its {name} differs. Run the same command on the same "
                    "files, or begin anew without --resume"
                )

    def damage(self, why: str) -> ValueError:
        """The error of a journal that is not as a run left it."""
        return ValueError(f"the journal {self.folder} is damaged ({why}): begin anew without --resume")

    def stage(self, target: Path) -> Path:
        """A folder for finished files of an output that is a folder."""
        return self.folder / f"{_STAGE}{target.name}"

    def next(self) -> int:
        """The number of the next result of this run."""
        self._number += 1
        return self._number

    def recall(self, name: int | str, check: Check) -> Values | None:
        """A result, if it has been kept.

        Raises:
            ValueError: if it is damaged, or `check` raises one.
        """
        own = _write_name(name)
        if own not in self._records:
            return None
        digest = self._records[own]
        file = self.folder / f"{own}-{digest}.safetensors"
        if file.is_symlink() or not file.is_file() or hash_file(file) != digest:
            raise self.damage(f"{own} is not what was written")
        try:
            tensors, header = load_tensors(file)
            values = {**header, **tensors}
            check(values)
        except (ValueError, KeyError, TypeError) as error:
            raise self.damage(f"{own}: {error}") from None
        self.num_recalled += isinstance(name, int)
        return values

    def keep(self, name: int | str, values: Values) -> None:
        """Keep a result."""
        tensors = {each: value for each, value in values.items() if isinstance(value, Tensor)}
        content = pack_tensors(tensors, {each: value for each, value in values.items() if each not in tensors})
        own, digest = _write_name(name), hashlib.sha256(content).hexdigest()
        file = self.folder / f"{own}-{digest}.safetensors"
        write_atomically(file, lambda temporary: temporary.write_bytes(content), durable=True)
        if self._records.get(own, digest) != digest:  # it was kept before, with another content
            (self.folder / f"{own}-{self._records[own]}.safetensors").unlink()
        self._records[own] = digest

    def promise(self, target: Path, digests: Mapping[str, str]) -> None:
        """An output is complete, and will have its name at once.

        Args:
            target: the output.
            digests: the SHA-256 of each of its files, by their places in it; by "" if it is a file itself.
        """
        self.keep(f"output {target.name}", {"files": dict(digests)})

    def is_finished(self, target: Path) -> bool:
        """Whether an output is there, and is the one that this run made before it was killed."""
        promised = self.recall(f"output {target.name}", _check_files) if target.exists() else None
        # What a run writes later, such as a report, may lie in a folder too.
        return promised is not None and promised["files"].items() <= hash_output(target).items()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to go on from."""
        return not any(each.name != _RUN for each in self.folder.glob("*"))

    def remove(self) -> None:
        """The run is done."""
        shutil.rmtree(self.folder, ignore_errors=True)


def hash_output(target: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder, by its place; of a file by ""."""
    if not target.is_dir():
        return {"": hash_file(target)}
    files = [entry for entry in list_entries(target) if entry.is_symlink() or not entry.is_dir()]
    return {file.relative_to(target).as_posix(): "" if file.is_symlink() else hash_file(file) for file in files}


def _check_files(values: Values) -> None:
    if not isinstance(values["files"], dict):
        raise ValueError("it has no files")


def _write_name(name: int | str) -> str:
    """Of a record.

    >>> _write_name(3)
    '000003'
    """
    if isinstance(name, int):
        return f"{name:06}"
    return f"{name.partition(' ')[0]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
