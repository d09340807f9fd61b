"""From options to the library's arguments: what `align`, `merge` and `barrier` share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onebasin.cli.console import Output, Track, command_line, gigabytes
from onebasin.cli.options import read_settings

if TYPE_CHECKING:
    from onebasin.checkpoints import Checkpoint, Opened
    from onebasin.symmetries import Permutation
    from onebasin.tensors.states import LazyState


def open_files(paths: Sequence[Path]) -> list[Checkpoint]:
    """Open checkpoints; what is in them is looked at later."""
    from onebasin.checkpoints import open_checkpoint

    return [open_checkpoint(path) for path in paths]


def read_inputs(
    output: Output, files: Sequence[Checkpoint], model: str | None, shapes: Any, ignore: Any, check: bool | None,
    data: Any = None,
) -> Opened:  # fmt: skip
    """Find the architecture and the symmetry of checkpoints, check that all fits, and tell what was found.

    Where nothing else says what the inputs look like, the first batch of the data does.
    """
    from onebasin.checkpoints import open_models
    from onebasin.landscape.batches import take_example

    with output.status("reading and tracing"):
        example = take_example(data) if data is not None and not shapes else None
        opened = open_models(files, model, shapes or (), ignore or (), check, example)
    for text in opened.architecture.notes:
        output.note(text)
    for checkpoint in opened.checkpoints:
        for text in checkpoint.notes:
            output.note(f"{checkpoint.layout.path}: {text}")
    return opened


def read_data(name: str | None, split: Literal["train", "test"]) -> Any:
    """Batches by name: the embedded digits, or what a function returns."""
    if name is None:
        return None
    if name == "digits":
        from onebasin.datasets import digits

        images, labels = digits(split)
        return list(zip(images.split(128), labels.split(128), strict=True))
    function = _call(name, "--data")
    try:
        data = function()
    except Exception as error:
        raise ValueError(f"{name} failed: {type(error).__name__}: {error}") from error
    from onebasin.landscape.batches import check_data

    check_data(data)
    return data


@contextlib.contextmanager
def blame_data(data: Any) -> Iterator[None]:
    """Where the user's data and loss meet the networks, what is raised is about their shapes and types."""
    try:
        yield
    except (RuntimeError, TypeError, AttributeError, LookupError) as error:
        if data is None or "memory" in str(error):
            raise
        raise ValueError(f"the networks cannot be run on this data with this loss: {error}") from error


def read_loss(name: str) -> Any:
    """A loss by name."""
    from onebasin.landscape.evaluation import LOSSES

    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ValueError(f"there is no loss {name!r}: {', '.join(LOSSES)}, or package.module:function")
    return _call(name, "--loss")


def _call(name: str, option: str) -> Any:
    from onebasin.checkpoints.architectures import import_object

    package, colon, attribute = name.partition(":")
    if not (package and colon and attribute):
        raise ValueError(f"cannot read {option} {name!r}: write package.module:function")
    found = import_object(package, attribute)
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}, not a function")
    return found


def read_objective(name: str, loss: str, data: Any) -> Any:
    """An objective by name."""
    import onebasin as ob

    if name == "weight-distance":
        return ob.WeightDistance()
    if data is None:
        raise ValueError(f"the objective {name} runs the networks: give --data")
    return (ob.Midpoint if name == "midpoint" else ob.RandomPoint)(read_loss(loss))


def read_init(text: str | None) -> Any:
    """A method's name, or a saved permutation."""
    from onebasin.matching import METHODS
    from onebasin.symmetries import Permutation

    if text is None or text in METHODS:
        return text
    if not Path(text).exists():
        raise ValueError(f"--init {text!r} is neither a file nor one of {', '.join(METHODS)}")
    return Permutation.load(text)


def check_options(method: str, settings: dict[str, Any]) -> None:
    """Refuse options that the method does not have."""
    import inspect

    from onebasin.matching import METHODS

    known = list(inspect.signature(METHODS[method]).parameters)[1:]
    for name in settings:
        if name not in known:
            raise ValueError(f"{method} has no option {name!r}; it has {', '.join(known)}")


def check_device(name: str) -> None:
    """Refuse a device that is not there."""
    import torch

    try:
        torch.empty(1, device=name)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"cannot compute on {name!r}: {reason}") from None


@dataclass(frozen=True)
class Choices:
    """How to align, as the options say it."""

    method: str
    objective: str
    loss: str
    data: Any
    init: Any
    groups: list[str] | None
    seed: int
    restarts: int
    settings: dict[str, Any]
    device: str

    @property
    def runs_networks(self) -> bool:
        """Whether the method or the objective looks at more than weights."""
        return "activation-matching" in (self.method, self.init) or self.objective != "weight-distance"

    def arguments(self, track: Track) -> dict[str, Any]:
        """For `onebasin.align`."""
        # From the outside in: then scores mean something from the first group on, and sweeps are few.
        order = {"order": "anchored"} if self.method == "weight-matching" else {}
        return {
            "method": self.method, "objective": read_objective(self.objective, self.loss, self.data), "data": self.data,
            "init": self.init, "groups": self.groups, "seed": self.seed, "restarts": self.restarts, "track": track,
            **order, **self.settings,
        }  # fmt: skip

    def models(self, opened: Opened) -> list[Any]:
        """What to align: the networks where they are run, else the checkpoints themselves; the first on the device."""
        first, *others = opened.load() if self.runs_networks else opened.checkpoints
        return [first.to(self.device), *others]


def read_choices(
    method: str, objective: str, data: str | None, loss: str, init: str | None, groups: Any, seed: int, restarts: int,
    settings: Any, device: str,
) -> Choices:  # fmt: skip
    """Read the options of the method, and refuse those that do not fit together."""
    check_device(device)
    choices = Choices(
        method,
        objective,
        loss,
        read_data(data, "train"),
        read_init(init),
        groups or None,
        seed,
        restarts,
        read_settings(settings),
        device,
    )
    if choices.runs_networks and choices.data is None:
        raise ValueError(f"{method} with the objective {objective} runs the networks: give --data")
    read_objective(objective, loss, choices.data)
    check_options(method, choices.settings)
    return choices


def permutation_beside(out: Path, is_folder: bool) -> Path:
    """Where the permutation goes if nobody said."""
    return out / "permutation.safetensors" if is_folder else out.with_name(f"{out.stem}.permutation.safetensors")


def check_outputs(out: Path, like: Checkpoint, inputs: Sequence[Path], files: Sequence[Path | None], force: bool) -> None:
    """Refuse, before any work, outputs that exist, that are inputs, or that are each other."""
    from onebasin.checkpoints import check_output

    check_output(out, like, force, inputs)
    inside = out if like.layout.is_folder else None  # what goes into a folder is new with it
    check_files([out, *inputs], [file for file in files if file is not None and file.parent != inside], force)


def check_files(taken_paths: Sequence[Path], files: Sequence[Path | None], force: bool) -> None:
    """Refuse files to be written that exist, that are inputs, or that are each other."""
    from onebasin.tensors.files import check_writable

    taken = {path.resolve() for path in taken_paths}
    for file in filter(None, files):
        if file.resolve() in taken:
            raise ValueError(f"{file} is an input, or named twice: every output needs a place of its own")
        taken.add(file.resolve())
        check_writable(file, force)


def check_drawing(*files: Path | None) -> None:
    """Refuse, before any work, a report or a picture that could not be drawn."""
    from importlib.util import find_spec

    if any(files) and find_spec("matplotlib") is None:
        raise ValueError("reports and pictures need matplotlib: pip install 'onebasin[plots]'")


def write_moved(
    out: Path, state: Any, like: Checkpoint, force: bool, track: Track, permutation: Any = None, file: Path | None = None
) -> None:
    """Write a state in the layout of a checkpoint and, with it, the permutation it was moved by."""
    from onebasin.checkpoints import write_checkpoint

    if permutation is None or file is None:
        write_checkpoint(out, state, like, force, track)
    elif like.layout.is_folder and file.parent == out:
        write_checkpoint(out, state, like, force, track, beside={file.name: permutation.save})
    else:
        write_checkpoint(out, state, like, force, track)
        permutation.save(file)


def describe_checkpoint(checkpoint: Checkpoint) -> str:
    """One line: parameters, bytes, types, files."""
    kinds = ", ".join(checkpoint.original.dtypes)
    files = len(checkpoint.layout.files)
    size = gigabytes(checkpoint.original.num_bytes)
    return f"{len(checkpoint.original)} tensors, {size}, {kinds}, {files} file{'s' if files > 1 else ''}"


def in_types_of(like: Checkpoint, merged: Any) -> LazyState:
    """A merged network or state in the types of a checkpoint."""
    from onebasin.tensors.states import LazyState, read_state

    state = read_state(merged).lazily()
    return LazyState(like.shapes, lambda key: state[key].to(like.shapes[key].dtype))


def list_paths(*paths: Path | None) -> str:
    """Those that are there, as part of a sentence.

    >>> list_paths(Path("a"), None, Path("b"), Path("c"))
    'a, b and c'
    """
    *others, last = [str(path) for path in paths if path is not None]
    return f"{', '.join(others)} and {last}" if others else last


def short_names(paths: Sequence[Path]) -> list[str]:
    """A name for each path that no other has, as short as that allows.

    >>> short_names([Path("a/x.pt"), Path("b/y.pt")]), short_names([Path("a/x.pt"), Path("b/x.pt"), Path("a/x.pt")])
    (['x.pt', 'y.pt'], ['a/x.pt (1)', 'b/x.pt (2)', 'a/x.pt (3)'])
    """
    for names in ([path.name for path in paths], [str(path) for path in paths]):
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, 1)]


def describe_moves(permutation: Permutation) -> str:
    """One line: how many units moved."""
    return repr(permutation).removeprefix("Permutation(").removesuffix(")")


def show_inputs(output: Output, paths: Sequence[Path], opened: Opened) -> None:
    """What was found, for people."""
    rows = {str(path): describe_checkpoint(checkpoint) for path, checkpoint in zip(paths, opened.checkpoints, strict=True)}
    output.facts({**rows, "symmetry": opened.symmetry.summary()})


def all_notes(opened: Opened) -> list[str]:
    """The notes of the architecture and of all checkpoints."""
    return [*opened.architecture.notes] + [note for checkpoint in opened.checkpoints for note in checkpoint.notes]


def save_report(path: Path | None, title: str, facts: dict[str, Any], **parts: Any) -> None:
    """Write the HTML report, if one was asked for."""
    if path is None:
        return
    from onebasin.reporting.report import Report

    Report(title, command_line(), facts=[(name, str(value)) for name, value in facts.items()], **parts).save(path)
