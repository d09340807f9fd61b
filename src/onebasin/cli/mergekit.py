"""mergekit after an alignment: its configuration for the aligned models, and running it where it is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import typer
import yaml

from onebasin.checkpoints import Checkpoint
from onebasin.checkpoints.companion_files import copy_companion, find_texts
from onebasin.cli import outputs
from onebasin.cli.console import Output
from onebasin.reporting.model_card import ModelCard
from onebasin.tensors.files import write_atomically, write_folder_atomically

MergekitMethod = Literal[
    "linear", "slerp", "nuslerp", "multislerp", "karcher", "task_arithmetic", "ties", "dare_ties", "dare_linear",
    "breadcrumbs", "breadcrumbs_ties", "della", "della_linear", "sce", "model_stock", "nearswap", "arcee_fusion",
]  # fmt: skip


class _Form(NamedTuple):
    """What mergekit's method takes.

    Attributes:
        has_base: the first model is the base that the others are compared with.
        weights: whether models have a parameter `weight`; "t" for the place between two models.
        num_models: exactly so many, or None.
        defaults: parameters that differ from mergekit's own defaults.
    """

    has_base: bool
    weights: Literal["weight", "t", ""] = "weight"
    num_models: int | None = None
    defaults: Mapping[str, Any] = {}


# Not normalised, the first model plus the weighted differences of the others is their average if nothing is dropped.
_TASK_VECTORS = _Form(True, defaults={"normalize": False})
_FORMS: dict[str, _Form] = {
    "linear": _Form(False),
    "slerp": _Form(True, "t", 2),
    "nuslerp": _Form(False, num_models=2),
    "multislerp": _Form(False),
    "karcher": _Form(False, ""),
    "sce": _Form(True, ""),
    "model_stock": _Form(True, ""),
    "nearswap": _Form(True, "", 2),
    "arcee_fusion": _Form(True, "", 2),
}


def check_method(method: str, num_models: int) -> None:
    """Refuse a number of models that mergekit's method does not take.

    Raises:
        ValueError: naming the method.
    """
    needed = _FORMS.get(method, _TASK_VECTORS).num_models
    if needed is not None and num_models != needed:
        raise ValueError(f"mergekit's {method} takes {needed} models, not {num_models}")
    if method == "model_stock" and num_models < 3:
        raise ValueError(f"mergekit's model_stock takes a base and at least two others, not {num_models} models")


def check_folders(files: Sequence[Checkpoint]) -> None:
    """Refuse checkpoints that mergekit cannot read.

    Raises:
        ValueError: naming the checkpoint.
    """
    for file in files:
        if file.layout.hugging_face_folder is None or file.layout.parts:
            raise ValueError(f"mergekit merges folders of transformers, and {file.path} is none: leave out --then")
        if file.layout.origins:
            raise ValueError(f"mergekit reads local folders, and {file.path.name} is in an object store: copy it first")


def read_parameters(settings: Sequence[str] | None) -> dict[str, Any]:
    """Parameters of mergekit from NAME=VALUE; a value is YAML: a number, a word, or a list by layer.

    >>> read_parameters(["density=0.5", "t=[0, 0.5, 1]", "int8_mask=true"])
    {'density': 0.5, 't': [0, 0.5, 1], 'int8_mask': True}
    """
    found = {}
    for setting in settings or ():
        name, equals, text = setting.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = None
        if not (name.isidentifier() and equals and isinstance(value, str | int | float | list)):
            raise ValueError(f"cannot read --then-set {setting!r}: write NAME=VALUE, such as density=0.5 or t=[0, 0.5, 1]")
        found[name] = value
    return found


@dataclass(frozen=True)
class MergekitRun:
    """What mergekit is to do.

    Attributes:
        method: by mergekit's name.
        models: the folders of the aligned models, in their order.
        weights: of the models in the average.
        parameters: of the method.
        dtype: of the merge.
        file: where its configuration is written.
        out: the folder to write.
        seed: of what it drops at random.
    """

    method: str
    models: Sequence[Path]
    weights: Sequence[float]
    parameters: Mapping[str, Any]
    dtype: str
    file: Path
    out: Path
    seed: int = 0

    def configure(self, name: Callable[[Path], Any]) -> dict[str, Any]:
        """The YAML of mergekit as a value.

        Args:
            name: how a model is named in it.
        """
        form = _FORMS.get(self.method, _TASK_VECTORS)
        place = {"t": self.weights[1]} if form.weights == "t" else {}
        parameters = {**form.defaults, **place, **self.parameters}
        entries = []
        for number, (model, weight) in enumerate(zip(self.models, self.weights, strict=True)):
            own = form.weights == "weight" and not (form.has_base and number == 0) and "weight" not in self.parameters
            entries.append({"model": name(model), **({"parameters": {"weight": weight}} if own else {})})
        return {
            "merge_method": self.method,
            **({"base_model": name(self.models[0])} if form.has_base else {}),
            "models": entries,
            **({"parameters": parameters} if parameters else {}),
            "dtype": self.dtype,
        }

    @property
    def command(self) -> list[str]:
        """What to type, from the folder that this command was run in."""
        return ["mergekit-yaml", str(self.file), str(self.out), "--random-seed", str(self.seed)]

    def write(self) -> None:
        """Write the configuration."""
        text = yaml.safe_dump(self.configure(name_model), sort_keys=False)
        write_atomically(self.file, lambda file: file.write_text(text, encoding="utf-8"))

    def run(self, like: Checkpoint, card: ModelCard, force: bool = False) -> bool:
        """Run mergekit, if it is installed, and return whether it was. Its output appears when it is complete.

        Args:
            like: the first model, whose README and licence are copied.
            card: goes in front of the README.
            force: replace a folder that is there, if all in it is written anew.

        Raises:
            ValueError: if it failed, with the last line that it said.
        """
        program = find_program()
        if program is None:
            return False

        def fill(folder: Path) -> None:
            arguments = [program, *self.command[1:2], str(folder), *self.command[3:], "--quiet", "--no-write-model-card"]
            offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
            ran = subprocess.run(arguments, capture_output=True, text=True, env=offline, check=False)
            if ran.returncode:
                said = [line for line in ran.stderr.splitlines() if line.strip()] or [f"exit code {ran.returncode}"]
                raise ValueError(f"mergekit failed: {said[-1].strip()}; to see more, run {shlex.join(self.command)}")

            for name, source in find_texts(like).items():
                copy_companion(source, folder / name)
            for name, write in outputs.write_card(card).items():
                write(folder / name)

        write_folder_atomically(self.out, fill, force)
        return True


def write_and_run(output: Output, run: MergekitRun, like: Checkpoint, card: ModelCard, force: bool) -> dict[str, Any]:
    """Write mergekit's configuration and run it, or say how to."""
    run.write()
    with output.status("mergekit is merging"):
        ran = run.run(like, _add_configuration(card, run), force)
    command = shlex.join(run.command)
    if not ran:
        output.note(f"mergekit is not installed: pip install mergekit, and then run {command}")
    output.show_facts({"mergekit": f"wrote {run.out}" if ran else f"to be run: {command}", "its recipe": run.file})
    return {"configuration": run.file, "models": list(run.models), "command": command, "ran": ran}


def read_options(
    then: str | None, settings: Sequence[str] | None, num_models: int, others: Mapping[str, Any]
) -> dict[str, Any]:
    """The parameters for mergekit.

    Args:
        then: its method, if it is to be run.
        settings: as NAME=VALUE.
        num_models: to merge.
        others: values of options that belong to our own average.

    Raises:
        ValueError: if the method does not take so many models, or a parameter cannot be read.
        typer.BadParameter: for options that do not go together.
    """
    if then is None:
        if settings:
            raise typer.BadParameter("these are parameters of mergekit: give --then too", param_hint="--then-set")
        return {}
    for option, value in others.items():
        if value:
            raise typer.BadParameter(
                f"mergekit merges the models with --then {then}: leave out {option}", param_hint="--then"
            )
    check_method(then, num_models)
    return read_parameters(settings)


def _add_configuration(card: ModelCard, run: MergekitRun) -> ModelCard:
    """The card of a merge by mergekit; folders are named without the path to them."""
    short = yaml.safe_dump(run.configure(lambda path: path.name), sort_keys=False)
    summary = f"{card.summary} They were merged by mergekit ({run.method})."
    text = f"{card.recipe.rstrip()}\n---\n{short}" if card.recipe else short
    return replace(card, summary=summary, recipe=text)


def find_program() -> str | None:
    """The command of mergekit, beside this Python or on the path."""
    beside = Path(sys.executable).with_name("mergekit-yaml")
    return str(beside) if beside.is_file() else shutil.which("mergekit-yaml")


def name_model(path: Path) -> Any:
    """A path as mergekit reads it: a short one could be a name on the hub; in plain text, @ begins a revision, + a LoRA."""
    text = str(path.absolute())
    return {"model": {"path": text}} if "@" in text or "+" in text else text


assert set(_FORMS) < set(get_args(MergekitMethod))
