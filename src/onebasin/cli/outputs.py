"""Checking and writing what a command produces, and describing it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from onebasin.checkpoints import (
    Checkpoint,
    CheckpointSet,
    TrainingEntries,
    check_apart,
    check_entries,
    check_output,
    find_companions,
    move_training_entries,
    note_left_entries,
)
from onebasin.checkpoints.companion_files import CARD_NAME
from onebasin.checkpoints.input_protection import follow_links
from onebasin.checkpoints.written_types import convert_to, convert_types
from onebasin.cli.console import Output
from onebasin.cli.run_record import RunRecord
from onebasin.matching.untying import TIES_WORDS
from onebasin.reporting import Report
from onebasin.reporting.model_card import MARK, ModelCard, put_in_front
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.symmetries.transform_sizes import count_kinds, measure_bases, measure_scales
from onebasin.tensors.files import check_writable, list_entries
from onebasin.tensors.states import LazyState, Model, read_state
from onebasin.tracing import Kinds

_COSTS = {
    "weight-distance": "squared distance of the weights",
    "midpoint": "loss at the midpoint between the networks",
    "random-point": "mean loss at points between the networks",
}


def name_element(kinds: Kinds) -> str:
    """What an alignment finds: a permutation, or a transform."""
    return "permutation" if kinds == "permutation" else "transform"


def place_element(out: Path, is_folder: bool, kinds: Kinds) -> Path:
    """Where a permutation or a transform is written if the user does not say."""
    what = name_element(kinds)
    return out / f"{what}.safetensors" if is_folder else out.with_name(f"{out.stem}.{what}.safetensors")


def check_outputs(
    out: Path,
    like: Checkpoint,
    inputs: Sequence[Path | Checkpoint],
    files: Sequence[Path | None],
    force: bool,
    dtype: torch.dtype | None = None,
    staged: int = 0,
) -> None:
    """Refuse, before any work, outputs that exist, that are or lie in inputs, or that are named twice.

    Of the output, `staged` bytes are on the disk already.
    """
    inside = list_inside(out, like, files)
    check_output(out, like, force, inputs, inside, dtype, staged)
    _check_different([out, *files])
    # Files in a folder replace what is there together with it.
    check_files([file for file in files if not list_inside(out, like, [file])], inputs, force)


def list_inside(out: Path, like: Checkpoint, files: Sequence[Path | None]) -> list[str]:
    """The names of those files that lie in the folder `out`, if it will be one."""
    if not like.layout.is_folder:
        return []
    return [file.name for file in files if file is not None and follow_links(file.parent) == follow_links(out)]


def check_further_output(
    out: Path, like: Checkpoint, inputs: Sequence[Path | Checkpoint], taken: Sequence[Path | None], force: bool
) -> None:
    """The same for a second checkpoint to write, which must not be in the way of the other outputs."""
    check_output(out, like, force, inputs, list_inside(out, like, [place_card(out, like)]))
    check_place(out, taken)


def check_place(out: Path, taken: Sequence[Path | None]) -> None:
    """Refuse an output that is another one, lies in it, or holds it."""
    place = follow_links(out)
    for path in (follow_links(path) for path in taken if path is not None):
        if place == path or place in path.parents or path in place.parents:
            raise ValueError(f"{out} is in the way of another output: every output needs a place of its own")


def check_files(files: Sequence[Path | None], inputs: Sequence[Path | Checkpoint], force: bool) -> None:
    """Refuse output files that exist, that are or lie in inputs, or that are named twice."""
    _check_different(files)
    for file in filter(None, files):
        check_apart(file, inputs)
        check_writable(file, force)


def _check_different(paths: Sequence[Path | None]) -> None:
    taken: set[Path] = set()
    for path in filter(None, paths):
        if follow_links(path) in taken:
            raise ValueError(f"{path} is named twice: every output needs a place of its own")
        taken.add(follow_links(path))


def note_companions(output: Output, *written: tuple[Path, Checkpoint]) -> list[str]:
    """Print, and return, which files of the input folders are not copied into the outputs that are written like them."""
    notes = [f"{path}: {note}" for path, like in written for note in find_companions(like).notes]
    output.note(*notes)
    return notes


def note_about(output: Output, path: Path, notes: Sequence[str]) -> list[str]:
    """Print, and return, remarks about a file."""
    found = [f"{path}: {note}" for note in notes]
    output.note(*found)
    return found


def note_left_out(output: Output, path: Path, like: Checkpoint) -> list[str]:
    """Print, and return, what an output like a checkpoint lacks: files of its folder, and entries beside the model."""
    return note_companions(output, (path, like)) + note_about(output, path, note_left_entries(like))


def check_training_entries(
    out: Path, model: Checkpoint, symmetry: Symmetry, kinds: Kinds, ignore: Sequence[str], model_only: bool
) -> TrainingEntries:
    """Refuse, before any work, what lies beside a model in a training checkpoint and cannot be moved with it.

    Returns:
        The entries as they are, and the places of those that will move.
    """
    if model_only:
        return TrainingEntries(notes=note_left_entries(model))
    entries = move_training_entries(symmetry.identity(), model, ignore)
    if kinds != "permutation" and entries.places:
        raise ValueError(
            f"{model.path} holds {', '.join(entries.places)} beside the model, which align moves by permutations alone: "
            "--model-only leaves out all but the model"
        )
    check_entries(out, model, entries.content)
    return entries


def check_drawing(*files: Path | None) -> None:
    """Refuse, before any work, a report or a picture that cannot be drawn."""
    if any(files) and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("reports and pictures need matplotlib: pip install 'onebasin[plots]'")


def describe_untied(out: Path, like: Checkpoint) -> str:
    """What --untie did to a checkpoint that is written like `like`, and what it needs to be loaded."""
    if not like.layout.untied:
        return "nothing: that would free no gain"
    is_configured = like.layout.hugging_face_folder is not None
    needed = f"{out / 'config.json'} says {TIES_WORDS}: false" if is_configured else "load it into an untied module"
    return f"{', '.join(like.layout.untied)} ({needed})"


def place_card(out: Path, like: Checkpoint) -> Path | None:
    """Where the model card is written: in a folder, not beside a file.

    Raises:
        ValueError: if a text that is no card of ours is there.
    """
    if not like.layout.is_folder:
        return None
    file = out / CARD_NAME
    if file.is_file() and MARK.encode() not in file.read_bytes():
        raise ValueError(f"{file} was not written by onebasin and would be lost: move it, or give another folder")
    return file


def describe_canonical(record: RunRecord, path: Path, out: Path, further: str = "") -> ModelCard:
    """The card of a model in canonical form, or with another text on how it was changed `further`."""
    how = further or "in canonical form, by onebasin: the gains of norms are folded"
    summary = f"{path.name} {how}, and it computes what it did."
    return record.make_card(out, summary, [(path, "the model")], {})


def write_card(card: ModelCard | None, like: Checkpoint | None = None) -> dict[str, Callable[[Path], None]]:
    """What to write into a folder beside the weights: a card in front of the text that is there already.

    Args:
        card: what it says.
        like: the checkpoint whose layout the folder has; the card says whether it is untied.
    """
    if card is None:
        return {}
    if like is not None and like.layout.untied:
        untied = f"{', '.join(like.layout.untied)} is a tensor of its own: {TIES_WORDS}: false in the configuration."
        card = replace(card, summary=f"{card.summary} {untied}")
    return {CARD_NAME: lambda file: _put_in_front(card, file)}


def _put_in_front(card: ModelCard, file: Path) -> None:
    file.write_bytes(put_in_front(card, file.read_bytes() if file.exists() else b""))


def cast_like(like: Checkpoint, model: Model, dtype: torch.dtype | None = None) -> LazyState:
    """The state of a model in the types of a checkpoint, or its floating tensors in another type."""
    state = read_state(model).lazily()
    shapes = like.shapes if dtype is None else convert_types(like, dtype).shapes
    return convert_to(state, shapes)


def save_report(path: Path | None, title: str, facts: dict[str, Any], record: RunRecord | None, **parts: Any) -> None:
    """Write the HTML report, if the user asked for one."""
    if path is not None and record is not None:
        whole = {**facts, **record.facts, **record.hash_facts}
        Report(title, record.command, facts=[(name, str(value)) for name, value in whole.items()], **parts).save(path)


def finish_dry_run(output: Output, result: dict[str, Any], paths: Sequence[Path | None]) -> None:
    """Say which files would be written, and which would be replaced."""
    replaced = list_replaced(paths)
    gone = f"; would replace {_join(replaced)}" if replaced else ""
    output.show(f"would write {_join([path for path in paths if path is not None])}{gone}; nothing was written")
    output.finish({**result, "dry_run": True, "would_replace": replaced})


def list_replaced(paths: Sequence[Path | None]) -> list[Path]:
    """The files that are where outputs will be, those in a folder one by one."""
    found = []
    for path in filter(None, paths):
        if path.is_dir():
            found += [entry for entry in list_entries(path) if entry.is_symlink() or not entry.is_dir()]
        elif os.path.lexists(path):
            found.append(path)
    return list({follow_links(path.parent) / path.name: path for path in found}.values())


def _join(paths: Sequence[Path]) -> str:
    """Several paths in a sentence.

    >>> _join([Path("a"), Path("b"), Path("c")])
    'a, b and c'
    """
    *others, last = map(str, paths)
    return f"{', '.join(others)} and {last}" if others else last


def show_inputs(output: Output, paths: Sequence[Path], models: CheckpointSet) -> None:
    """Print what the checkpoints are."""
    rows = {str(path): describe_checkpoint(checkpoint) for path, checkpoint in zip(paths, models.checkpoints, strict=True)}
    output.show_facts({**rows, "symmetry": models.symmetry.summary()})


def describe_checkpoint(checkpoint: Checkpoint) -> str:
    """One line: tensors, bytes, types, files."""
    whole, files = checkpoint.original, len(checkpoint.layout.files)
    size, types = format_bytes(whole.num_bytes), ", ".join(whole.dtypes)
    return f"{len(whole)} tensors, {size}, {types}, {files} file{'s' if files > 1 else ''}"


def format_bytes(count: int) -> str:
    """A number of bytes with a unit.

    >>> format_bytes(2_470_000_000), format_bytes(12_300)
    ('2.47 GB', '12.3 kB')
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def describe_element(element: Permutation | Transform) -> str:
    """One line: how many units moved, and how many scales and changes of basis there are."""
    permutation = element.permutation if isinstance(element, Transform) else element
    moved = repr(permutation).removeprefix("Permutation(").removesuffix(")")
    if not isinstance(element, Transform):
        return moved
    kinds = ", ".join(f"{count} {kind}" for kind, count in count_kinds(element).items())
    bases = f"changes of basis: {len(element.matrices)}" + (f" ({kinds})" if kinds else "")
    return f"{moved}, positive scales: {len(element.logarithms)}, {bases}"


def list_changes(element: Permutation | Transform) -> dict[str, Any]:
    """The scales and changes of basis of a transform, for JSON; none of a permutation."""
    if not isinstance(element, Transform):
        return {"scales": [], "bases": []}
    return {
        "scales": [asdict(each) for each in measure_scales(element)],
        "bases": [asdict(each) for each in measure_bases(element)],
    }


def describe_cost(objective: str | None) -> str:
    """What the number is that an alignment minimises, by the name of its objective."""
    return _COSTS[objective or "weight-distance"]


def note_rounding(
    path: Path, checkpoint: Checkpoint, multiplied: bool = True, dtype: torch.dtype | None = None
) -> list[str]:
    """A note if weights are rounded to a narrow type: those that were multiplied, and not only moved, or are converted."""
    kinds = [str(dtype).removeprefix("torch.")] if dtype is not None else checkpoint.dtypes
    is_rounded = multiplied or any(v.is_floating_point() and v.dtype != dtype for v in checkpoint.shapes.values())
    narrow = [kind for kind in kinds if kind in ("bfloat16", "float16") and is_rounded]
    return [f"{path} is rounded to {narrow[0]}, and computes what it did up to that rounding"] if narrow else []


def short_names(paths: Sequence[Path]) -> list[str]:
    """A different name for each path: file names if they differ, else paths, else numbered paths.

    >>> short_names([Path("a/x.pt"), Path("b/y.pt")]), short_names([Path("a/x.pt"), Path("b/x.pt"), Path("a/x.pt")])
    (['x.pt', 'y.pt'], ['a/x.pt (1)', 'b/x.pt (2)', 'a/x.pt (3)'])
    """
    for names in ([path.name for path in paths], [str(path) for path in paths]):
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, 1)]
