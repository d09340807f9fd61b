"""Checkpoints of tied models, written untied: a tensor of its own for the head, and a configuration that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onebasin.checkpoints.checkpoint import Checkpoint
from onebasin.checkpoints.conversions import fit_to_model
from onebasin.checkpoints.factories import build_on_meta, find_configured, find_factory, read_configuration
from onebasin.matching.untying import TIES_WORDS, list_untied
from onebasin.tensors.states import Ties, find_ties


def untie_checkpoint(like: Checkpoint, keys: Sequence[str], ties: Ties) -> Checkpoint:
    """The same checkpoint as a layout to write in, with a name in its files for each key that is no longer tied.

    A tensor goes into the file that held the one it was tied to. In a folder, the configuration that is written says that
    the head is not the embedding. If that unties other tensors as well, they are written too.

    Args:
        like: under the names of the model, in which tied keys have one name.
        keys: that are to have tensors of their own.
        ties: of the model as it was.

    Raises:
        ValueError: if the configuration cannot say that these are untied, or it is a pipeline.
    """
    if not keys:
        return like
    if like.layout.parts:
        raise ValueError(f"{like.path} is a pipeline, which cannot be untied: untie the folder of the part by itself")
    untied = _find_untied(like, keys, ties)
    names, files = dict(like.names), {file: list(found) for file, found in like.layout.files.items()}
    for key in untied:
        shared, own = names[key], _name_in_files(like, key)
        others = [other for other in names if other != key and names[other] == shared]
        if not others:
            continue  # the files have it twice
        added = own
        if own == shared:  # they have it under the name of this key: the others get one of theirs
            others = [other for other in others if other not in untied]
            added = _name_in_files(like, others[0])
            names |= dict.fromkeys(others, added)
        names[key] = own
        next(found for found in files.values() if shared in found).append(added)
    layout = replace(like.layout, files={file: tuple(found) for file, found in files.items()}, untied=untied)
    return Checkpoint(like.shapes, like.read, layout, names, like.notes, like.original, like.conversions)


def untie_configuration(content: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that says that the head is not the embedding.

    >>> untie_configuration({"width": 8, "text_config": {"tie_word_embeddings": True}})
    {'width': 8, 'text_config': {'tie_word_embeddings': False}, 'tie_word_embeddings': False}
    """

    def untie(entries: Mapping[str, Any]) -> dict[str, Any]:
        changed = {key: untie(value) if isinstance(value, Mapping) else value for key, value in entries.items()}
        return {**changed, TIES_WORDS: False} if TIES_WORDS in changed else changed

    return {**untie(content), TIES_WORDS: False}


def complete_ties(checkpoints: Sequence[Checkpoint], ignore: Collection[str] = ()) -> tuple[list[Checkpoint], str | None]:
    """Checkpoints that one architecture can read, although the configurations of some say that they are untied.

    Args:
        checkpoints: under the names in their files.
        ignore: shell patterns for tensors that the model does not have.

    Returns:
        The checkpoints, with the names of all tied tensors if another is untied; and the folder of an untied one to take the
        architecture from. None if all are tied, or all untied.
    """
    folders = [checkpoint.layout.hugging_face_folder for checkpoint in checkpoints]
    untied = [folder for folder in folders if folder is not None and _is_untied(folder)]
    if not untied or len(untied) == len(checkpoints):
        return list(checkpoints), None
    filled = []
    for checkpoint, folder in zip(checkpoints, folders, strict=True):
        is_tied = folder is not None and folder not in untied
        make = find_factory(str(folder), checkpoint.original.shapes).make if is_tied else None
        filled.append(checkpoint if make is None else fit_to_model(checkpoint, make, ignore))
    return filled, str(untied[0])


def _is_untied(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and read_configuration(file).get(TIES_WORDS) is False


def _find_untied(like: Checkpoint, keys: Sequence[str], ties: Ties) -> tuple[str, ...]:
    """What is untied if the configuration says so: these keys, and perhaps more."""
    folder = like.layout.hugging_face_folder
    if folder is None:
        return tuple(keys)
    file = folder / "config.json"
    content = untie_configuration(read_configuration(file))
    model = build_on_meta(find_configured(content, file, like.original.shapes).make)
    found = list_untied(ties, find_ties(model))
    if not set(keys) <= set(found):
        tied = next(key for key in keys if key not in found)
        raise ValueError(
            f"{like.path} cannot be written untied: with {TIES_WORDS}: false in its configuration, its architecture still "
            f"ties {tied}. Leave out --untie"
        )
    return found


def _name_in_files(like: Checkpoint, key: str) -> str:
    """What a tensor of a key would be called in the files: as in the model, behind what all names there begin with."""
    counts = Counter(like.names.values())
    single = [(other, name) for other, name in like.names.items() if counts[name] == 1]
    prefixes = {name.removesuffix(other) if name.endswith(other) else "" for other, name in single}
    return f"{prefixes.pop() if len(prefixes) == 1 else ''}{key}"
