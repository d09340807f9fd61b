"""What the configurations and the tokenizers of two folders differ in, where the shapes of tensors do not show it.

The number of heads, a rotary base, an activation: with another value the same tensors compute another function. With another
tokenizer the same rows of an embedding mean other words.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onebasin.checkpoints.checkpoint import WEIGHT_FILES, Checkpoint
from onebasin.checkpoints.diffusers_models import CLASS_ENTRY, fill_in, find_class
from onebasin.checkpoints.pipeline_parts import find_parts, is_pipeline
from onebasin.matching.untying import TIES_WORDS
from onebasin.programs.isolation import quiet
from onebasin.tensors.files import check_regular, read_json

_WITHOUT_EFFECT = (
    "_name_or_path",  # where the model came from
    "name_or_path",
    "transformers_version",  # what wrote the file
    "_diffusers_version",
    "_attn_implementation_autoset",
    "torch_dtype",  # the type in which to load; the tensors have their own
    "dtype",
    "use_cache",  # saves time
    "task_specific_params",  # how to generate text
)
"""Names of entries that do not change what a model computes."""
_OF_TRAINING = ("dropout", "dropout_prob", "dropout_rate", "pdrop", "initializer_range")
"""Endings of the names of entries that have an effect in training alone."""
_VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Files that define a tokenizer, if there is no tokenizer.json."""
_TOKENIZER_PARTS = ("model", "normalizer", "pre_tokenizer")
"""Entries of a tokenizer.json that decide which tokens a text is cut into. Vocabularies are compared by themselves."""
_CONFIGURATION, _SCHEDULE = "config.json", "scheduler_config.json"
_UNTIE = "onebasin canonical --untie folds the gains of the tied model, and gives its head a tensor of its own; "
_NUM_SHOWN = 5
_MISSING = "not set"


def find_differences(checkpoints: Sequence[Checkpoint], model: str | None = None) -> list[str]:
    """What configurations and tokenizers differ in from the first one, a sentence part for each difference.

    Args:
        checkpoints: those without a configuration beside them are left out.
        model: a Hugging Face folder that the architecture is taken from; anything else is left out.

    Raises:
        ValueError: if a file is damaged.
    """
    folders = [Path(model)] if model is not None and find_folder(Path(model)) is not None else []
    folders += [folder for checkpoint in checkpoints if (folder := find_folder(checkpoint.path)) is not None]
    if not folders:
        return []
    first, *others = dict.fromkeys(folders)
    found = [difference for other in others for difference in compare_configurations(first, other)]
    pairs = [pair for other in others for pair in _pair_parts(first, other)]
    return found + [difference for pair in pairs for difference in compare_tokenizers(*pair)]


def find_differences_of_folders(first: Path, checkpoint: Path) -> list[str]:
    """What the configuration of a checkpoint differs in from that of a folder; nothing if one of the two has none."""
    folders = [find_folder(path) for path in (first, checkpoint)]
    return compare_configurations(folders[0], folders[1]) if folders[0] is not None and folders[1] is not None else []


def check_differences(differences: Sequence[str]) -> None:
    """Refuse models that differ in what shapes do not show.

    Raises:
        ValueError: naming what they differ in.
    """
    if differences:
        more = f"; and {len(differences) - _NUM_SHOWN} others" if len(differences) > _NUM_SHOWN else ""
        raise ValueError(
            f"the models do not belong together: {'; '.join(differences[:_NUM_SHOWN])}{more}; "
            + (_UNTIE if any(TIES_WORDS in each for each in differences) else "")
            + "--allow takes them together all the same"
        )


def find_folder(path: Path) -> Path | None:
    """The folder whose configuration belongs to a checkpoint: itself, or the one that it is the weight file of."""
    if is_pipeline(path):
        return path
    folder = path if path.is_dir() else path.parent
    is_known = path.is_dir() or path.name in WEIGHT_FILES
    return folder if is_known and (folder / "config.json").is_file() else None


def compare_configurations(first: Path, second: Path) -> list[str]:
    """The entries of two folders' ``config.json`` that differ, each with both values; in pipelines, those of all parts."""
    if not is_pipeline(first) and not is_pipeline(second):
        return _compare_files(first, second, _CONFIGURATION)
    parts = [{name: part.class_name for name, part in find_parts(path).items() if part.is_moved} for path in (first, second)]
    found = [_describe(name, pair, first, second) for name, pair in _differ(*parts).items()]
    for pair in _pair_parts(first, second):
        for name in (_CONFIGURATION, _SCHEDULE):
            found += _compare_files(*pair, name) if all((folder / name).is_file() for folder in pair) else []
    return found


def _pair_parts(first: Path, second: Path) -> list[tuple[Path, Path]]:
    """The folders of two pipelines that are the same part of both; two folders that are no pipelines are a pair."""
    if not is_pipeline(first) or not is_pipeline(second):
        return [(first, second)]
    return [(first / name, second / name) for name in find_parts(first) if name in find_parts(second)]


def _describe(name: str, values: tuple[Any, Any], first: Path, second: Path) -> str:
    return f"{_show(name)} is {_show(values[0])} in {first} and {_show(values[1])} in {second}"


def _compare_files(first: Path, second: Path, name: str) -> list[str]:
    contents = [_read_mapping(folder / name, "configuration") for folder in (first, second)]
    if name == _SCHEDULE:  # what a model predicts is its own matter, all else is how to use it
        contents = [{key: content.get(key, "epsilon") for key in ("prediction_type",)} for content in contents]
    for content in contents:
        if isinstance(content.get("architectures"), list):
            content["architectures"] = sorted(map(str, content["architectures"]))
    if not _differ(*contents):
        return []
    return [_describe(key, pair, first, second) for key, pair in _differ(*map(_fill_in, contents)).items()]


def compare_tokenizers(first: Path, second: Path) -> list[str]:
    """What the tokenizers of two folders differ in. A folder without one is not compared."""
    files = [folder / "tokenizer.json" for folder in (first, second)]
    if not all(file.is_file() for file in files):
        shared = [name for name in _VOCABULARIES if all((folder / name).is_file() for folder in (first, second))]
        return [
            f"the tokenizers differ in {name} of {first} and {second}"
            for name in shared
            if _read_bytes(first / name) != _read_bytes(second / name)
        ]
    contents = [_read_mapping(file, "tokenizer") for file in files]
    left, right = (_read_vocabulary(content) for content in contents)
    tokens = [token for token in dict.fromkeys([*left, *right]) if left.get(token) != right.get(token)]
    if tokens:
        ids = [_show(vocabulary.get(tokens[0])) for vocabulary in (left, right)]
        return [
            f"the tokenizers differ in {len(tokens)} tokens, such as {_show(tokens[0])}, which is {ids[0]} in {first} and "
            f"{ids[1]} in {second}"
        ]
    return [
        f"the tokenizers of {first} and {second} differ in {part}"
        for part in _TOKENIZER_PARTS
        if _without_vocabulary(contents[0], part) != _without_vocabulary(contents[1], part)
    ]


def _differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The entries that differ and have an effect, by their paths, with both values."""
    left, right = dict(_flatten(first)), dict(_flatten(second))
    pairs = {key: (left.get(key), right.get(key)) for key in dict.fromkeys([*left, *right]) if _has_effect(key)}
    # A configuration that was saved without a model does not tell its class.
    pairs = {key: pair for key, pair in pairs.items() if key != "architectures" or None not in pair}
    return {key: (one, other) for key, (one, other) in pairs.items() if one != other}


def _fill_in(content: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of entries that are not set, if its library is installed and knows the model."""
    try:
        with quiet():
            if CLASS_ENTRY in content:
                kind = find_class(importlib.import_module("diffusers"), content[CLASS_ENTRY])
                filled = {CLASS_ENTRY: content[CLASS_ENTRY], **fill_in(content, kind)}
                return json.loads(json.dumps(filled))  # lists in place of tuples
            known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
            return known[content["model_type"]].from_dict(content).to_dict()
    except (
        Exception
    ):  # it is not installed, does not know the model, or refuses a value: the entries themselves are compared
        return content


def _read_mapping(file: Path, what: str) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (ValueError, OSError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a {what}, or it is damaged")
    return content


def _read_bytes(file: Path) -> bytes:
    check_regular(file)
    return file.read_bytes()


def _read_vocabulary(content: Mapping[str, Any]) -> dict[str, Any]:
    """The number of each token, as a tokenizer.json gives it."""
    model = content.get("model")
    entries = model.get("vocab") if isinstance(model, dict) else None
    found: dict[str, Any] = dict(entries) if isinstance(entries, dict) else {}
    if isinstance(entries, list):  # of tokens with their scores
        found = {str(entry[0] if isinstance(entry, list) and entry else entry): n for n, entry in enumerate(entries)}
    for entry in content.get("added_tokens") or ():
        if isinstance(entry, dict) and "content" in entry:
            found[str(entry["content"])] = entry.get("id")
    return found


def _without_vocabulary(content: Mapping[str, Any], part: str) -> Any:
    value = content.get(part)
    return {key: entry for key, entry in value.items() if key != "vocab"} if isinstance(value, dict) else value


def _flatten(entries: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries by their path, such as rope_parameters.rope_theta."""
    for key, value in entries.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _has_effect(key: str) -> bool:
    names = key.split(".")
    return not any(name in _WITHOUT_EFFECT for name in names) and not names[-1].endswith(_OF_TRAINING)


def _show(value: Any) -> str:
    """A value on one line, without control characters, and not long."""
    if value is None:
        return _MISSING
    text = json.dumps(value, default=str)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text[1:-1] if isinstance(value, str) and value.replace("_", "").replace(".", "").isalnum() else text
