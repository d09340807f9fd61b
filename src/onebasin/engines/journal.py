"""What a run has decided, kept beside its output so that the same run can go on after it was killed.

A run is deterministic: the n-th thing it decides is the same each time. So results are kept by their number, and a run that
goes on takes the ones it finds in place of computing them. No code in a journal is run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from onebasin.tensors.files import load_tensors, read_json, save_tensors, write_atomically

Values = dict[str, Any]
"""Tensors, and other values that JSON can hold, by name."""


class Journal:
    """A folder of results, which belongs to one run.

    Args:
        folder: beside the output; made if it is not there.
        fingerprint: what the results depend on: inputs and options.
        resume: go on from what is there, instead of beginning anew.

    Raises:
        ValueError: to go on, if there is nothing, or if it is from another run, naming what differs; to begin, if something
            else is in its place.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any], resume: bool = False):
        self.folder, self.fingerprint = folder, json.loads(json.dumps(dict(fingerprint)))
        self.num_recalled = self._number = 0
        if resume:
            self._check()
        else:
            if folder.exists():
                if not (folder / "run.json").is_file():
                    raise ValueError(f"{folder} is where a journal would be, and is none: move it away")
                shutil.rmtree(folder)
            folder.mkdir()
            write_atomically(folder / "run.json", lambda file: file.write_text(json.dumps(self.fingerprint)))

    def _check(self) -> None:
        if not (self.folder / "run.json").is_file():
            raise ValueError(f"there is no journal {self.folder} to go on from: leave out --resume")
        known = read_json(self.folder / "run.json")
        for name in {**known, **self.fingerprint} if isinstance(known, dict) else ["content"]:
            if not isinstance(known, dict) or known.get(name) != self.fingerprint.get(name):
                raise ValueError(
                    f"the journal {self.folder} is of another run: its {name} differs. Run the same command on the same "
                    "files, or begin anew without --resume"
                )

    def stage(self, target: Path) -> Path:
        """A folder for finished files of an output that is a folder."""
        return self.folder / f"files of {target.name}"

    def next(self) -> int:
        """The number of the next result of this run."""
        self._number += 1
        return self._number

    def recall(self, number: int) -> Values | None:
        """A result, if it has been kept."""
        file = self.folder / f"{number:06}.safetensors"
        if not file.is_file():
            return None
        tensors, header = load_tensors(file)
        self.num_recalled += 1
        return {**header, **tensors}

    def keep(self, number: int, values: Values) -> None:
        """Keep a result."""
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in values.items() if name not in tensors}
        save_tensors(self.folder / f"{number:06}.safetensors", tensors, others)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to go on from."""
        return not any(each.name != "run.json" for each in self.folder.glob("*"))

    def remove(self) -> None:
        """The run is done."""
        shutil.rmtree(self.folder, ignore_errors=True)
