"""Aligned models as folders beside the output, for a tool that merges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onebasin.checkpoints import Checkpoint, check_apart, write_checkpoint
from onebasin.cli import outputs
from onebasin.cli.run_record import RunRecord
from onebasin.engines import LOCAL, Engine
from onebasin.tensors.files import check_writable
from onebasin.tensors.progress import Progress
from onebasin.tensors.states import State


@dataclass(frozen=True)
class AlignedFolders:
    """Where the aligned models of a merge are.

    Attributes:
        out: the folder of the merge.
        models: for each model its folder, as it was given.
        first_changes: the first model is written too, because alignment changes it.
    """

    out: Path
    models: Sequence[Path]
    first_changes: bool = False

    @property
    def places(self) -> list[Path]:
        """For each model its folder in the merge: the one that was given, or one beside `out` with its number."""
        return [
            path if number == 1 and not self.first_changes else self.out.with_name(f"{self.out.name}-aligned-{number}")
            for number, path in enumerate(self.models, start=1)
        ]

    @property
    def written(self) -> list[Path]:
        """The folders to write."""
        return self.places[0 if self.first_changes else 1 :]

    @property
    def configuration(self) -> Path:
        """The file that tells the other tool what to do."""
        return self.out.with_name(f"{self.out.name}.mergekit.yaml")

    def check(
        self, files: Sequence[Checkpoint], sources: Sequence[Path | Checkpoint], report: Path | None, force: bool
    ) -> None:
        """Refuse, before any work, what cannot or should not be written."""
        check_apart(self.out, sources)
        check_writable(self.out, force, folder=True)
        taken = [self.out, report, self.configuration]
        for folder, like in zip(reversed(self.written), reversed(files), strict=False):
            outputs.check_further_output(folder, like, sources, taken, force)
        outputs.check_files([report, self.configuration], sources, force)

    def write(
        self,
        states: Sequence[State],
        likes: Sequence[Checkpoint],
        record: RunRecord,
        force: bool,
        progress: Progress,
        engine: Engine = LOCAL,
    ) -> None:
        """Write the aligned models.

        Args:
            states: of all models, aligned.
            likes: the checkpoints that they were made from.
            record: of this run, for their cards.
            force: replace what exists.
            progress: called with what is being done.
            engine: by which they are written.
        """
        first = self.models[0]
        for folder, path, state, like in zip(self.places, self.models, states, likes, strict=True):
            if folder not in self.written:
                continue
            how = f"aligned to {first.name}" if path != first else "in canonical form, which the others are aligned to"
            summary = f"{path.name}, {how} by onebasin for a merge; it computes what it did."
            roles = [(path, "the model"), *([(first, "what it was aligned to")] if path != first else [])]
            card = record.make_card(folder, summary, roles, {})
            write_checkpoint(folder, state, like, force, progress, outputs.write_card(card, like), engine=engine)
