"""Recipes: the options of a command in a YAML file, each under its name on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml

from onebasin.cli.console import PYDANTIC
from onebasin.tensors.files import check_regular

MAX_RECIPE_BYTES = 2**20
_MODELS = "models"
"""The field for the checkpoints, which have no option name."""
_OF_NAMES = ("set", "scaling", "then-set")
"""Fields that hold values by name."""
_OF_WEIGHTS = "layer-weights"


def use_recipe(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a recipe as defaults: options that are on the command line as well have the last word.

    Raises:
        ValueError: naming the file, the line and the field.
    """
    if path is not None:
        context.default_map = {**(context.default_map or {}), **read_recipe(path, _list_fields(context), context)}
    return path


def read_recipe(path: Path, fields: Mapping[str, Any], context: typer.Context) -> dict[str, Any]:
    """The values of a recipe as the command line would give them, by the names of the command's parameters.

    Args:
        path: of the recipe.
        fields: the parameters of the command by the name that they have in a recipe.
        context: of the command, in which a value is read as that of an option is.

    Raises:
        ValueError: naming the file, the line and the field.
    """
    values: dict[str, Any] = {}
    for name, (value, line) in _read_fields(path).items():
        where = f"{path}, line {line}: {name}"
        if name not in fields:
            raise ValueError(f"{where} is no field of a recipe: {', '.join(sorted(fields))}")
        parameter = fields[name]
        values[parameter.name] = _convert(name, value, parameter, where)
        _check_value(parameter, values[parameter.name], context, where)
        if name == _MODELS:
            values[parameter.name], weights = _split_models(value, where)
            if weights is not None and "weights" in _read_fields(path):
                raise ValueError(f"{where} have weights already: give them there or in the field weights")
            values |= {"weights": weights} if weights is not None else {}
    return values


def _list_fields(context: typer.Context) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for parameter in context.command.params:
        names = [option[2:] for option in parameter.opts if option.startswith("--")]
        if parameter.param_type_name == "argument":
            fields[_MODELS] = parameter
        elif names and names[0] not in ("recipe", "help"):
            fields[names[0]] = parameter
    return fields


def _read_fields(path: Path) -> dict[str, tuple[Any, int]]:
    """Each field of a recipe with its value and the line that it begins on."""
    check_regular(path)
    with path.open("rb") as stream:
        content = stream.read(MAX_RECIPE_BYTES + 1)
    if len(content) > MAX_RECIPE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_RECIPE_BYTES / 1e6:.0f} MB, which no recipe is")
    loader = None
    try:
        loader = yaml.SafeLoader(content)  # makes plain values alone, and runs nothing
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{path} is not a recipe: it needs fields, such as models: [a, b]")
        found: dict[str, tuple[Any, int]] = {}
        for key, value in node.value:
            name, line = str(loader.construct_object(key, deep=True)), key.start_mark.line + 1
            if name in found:
                raise ValueError(f"{path}, line {line}: {name} is there twice")
            found[name] = loader.construct_object(value, deep=True), line
        return found
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path}{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {next(iter(str(error).splitlines()), 'too deep')}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _convert(name: str, value: Any, parameter: Any, where: str) -> Any:
    """A value as the command line would give it."""
    if name == _MODELS:
        return value
    if name in _OF_NAMES:
        return [f"{key}={_write(entry)}" for key, entry in _expect(value, dict, where, "values by name").items()]
    if name == _OF_WEIGHTS:
        entries = _expect(value, dict, where, "lists of weights by pattern").items()
        return [f"{pattern}={_join(weights, f'{where}, {pattern}')}" for pattern, weights in entries]
    if name == "weights":
        return _join(value, where)
    if getattr(parameter, "is_flag", False):
        return _expect(value, bool, where, "true or false")
    if getattr(parameter, "multiple", False):
        return [_scalar(entry, where) for entry in (value if isinstance(value, list) else [value])]
    return _scalar(value, where)


def _check_value(parameter: Any, value: Any, context: typer.Context, where: str) -> None:
    """Refuse a value that the option of this name does not take."""
    try:
        if isinstance(value, str):  # lists of texts, and flags, are checked already
            parameter.process_value(context, value)
    except typer.BadParameter as error:
        raise ValueError(f"{where} cannot be {_write(value)[:40]!r}: {error.message.removeprefix(PYDANTIC)}") from None


def _split_models(value: Any, where: str) -> tuple[list[str], str | None]:
    """The paths of models, and their weights as the command line takes them, if they have any."""
    paths, weights = [], []
    for number, entry in enumerate(_expect(value, list, where, "a list of models"), start=1):
        if isinstance(entry, str):
            paths.append(entry)
            continue
        if not (isinstance(entry, dict) and isinstance(entry.get("path"), str) and entry.keys() <= {"path", "weight"}):
            raise ValueError(f"{where}: entry {number} must be a path, or a path and a weight: {{path: a, weight: 0.5}}")
        paths.append(entry["path"])
        weights += [entry["weight"]] if "weight" in entry else []
    if weights and len(weights) != len(paths):
        raise ValueError(f"{where}: {len(weights)} of {len(paths)} have a weight; give one to each or to none")
    return paths, _join(weights, where) if weights else None


def _expect(value: Any, kind: type | tuple[type, ...], where: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be {what}, not {_write(value)[:40]}")
    return value


def _scalar(value: Any, where: str) -> str:
    return _write(_expect(value, (str, int, float, bool), where, "one value"))


def _join(weights: Any, where: str) -> str:
    numbers = _expect(weights, list, where, "a list of weights")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{where}: a weight must be a number, not {_write(number)[:40]}")
    return ",".join(str(number) for number in numbers)


def _write(value: Any) -> str:
    """A value as one would type it: lists and words as YAML writes them on one line."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
