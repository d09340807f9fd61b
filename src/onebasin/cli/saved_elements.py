"""The folder into which `merge` writes what it did to each model: a permutation, or a transform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onebasin.checkpoints import Checkpoint, check_apart
from onebasin.checkpoints.checkpoint import TORCH_ENDINGS
from onebasin.checkpoints.input_protection import follow_links
from onebasin.cli.outputs import check_place, name_element
from onebasin.symmetries import Permutation, Transform
from onebasin.tensors.files import check_replaceable, check_writable, write_folder_atomically
from onebasin.tracing import Kinds

_LONGEST = 100
"""Characters of the name of a model in the name of a file."""


@dataclass(frozen=True)
class ElementFolder:
    """A folder with a file for each model.

    Attributes:
        path: the folder.
        files: the names of the files in it, in the order of the models.
    """

    path: Path
    files: tuple[str, ...]

    def check(self, inputs: Sequence[Path | Checkpoint], taken: Sequence[Path | None], force: bool) -> None:
        """Refuse, before any work, a folder that exists, that is or lies in an input, or is in the way of other outputs."""
        check_apart(self.path, inputs)
        check_writable(self.path, force, folder=True)
        if self.path.is_dir():
            check_replaceable(self.path, self.files)
        check_place(self.path, taken)

    def write(self, elements: Sequence[Permutation | Transform], force: bool) -> None:
        """Write all of them, or nothing."""

        def save(folder: Path) -> None:
            for name, element in zip(self.files, elements, strict=True):
                element.save(folder / name)

        write_folder_atomically(self.path, save, force)

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of the models."""
        return [self.path / name for name in self.files]


def place_elements(out: Path, is_folder: bool, kinds: Kinds, models: Sequence[Path], chosen: Path | None) -> ElementFolder:
    """The folder that the user chose, or one beside the output, with its file names."""
    beside = out.with_name(f"{out.name if is_folder else out.stem}.{name_element(kinds)}s")
    return ElementFolder(chosen or beside, tuple(f"{name}.safetensors" for name in name_models(models)))


def name_models(models: Sequence[Path]) -> list[str]:
    """A name for each model that a file can have, with its number if names are alike or long.

    >>> name_models([Path("a/x.pt"), Path("Llama-3.2")]), name_models([Path("a/x.pt"), Path("b/X.safetensors")])
    (['x', 'Llama-3.2'], ['1-x', '2-X'])
    """
    names = [path.absolute().name or follow_links(path).name for path in models]
    endings = (".safetensors", *TORCH_ENDINGS)
    names = [next((name.removesuffix(end) for end in endings if name.endswith(end)), name) for name in names]
    alike = len({name.lower() for name in names}) < len(names)  # some file systems do not tell case apart
    if alike or any(len(name.encode(errors="replace")) > _LONGEST or name in ("", "..") for name in names):
        return [f"{number}-{name[: _LONGEST // 4]}" for number, name in enumerate(names, 1)]
    return names
