"""From the options of a command to what the library takes: checkpoints, data, a loss, and how to align."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import typer

import onebasin as ob
from onebasin.checkpoints import Checkpoint, CheckpointSet, open_checkpoint, open_models
from onebasin.checkpoints.configurations import check_differences, find_differences
from onebasin.checkpoints.factories import describe_call_error, import_object
from onebasin.checkpoints.written_types import widen, widen_to
from onebasin.cli.console import Output
from onebasin.datasets import digits
from onebasin.engines import LOCAL, Engine
from onebasin.landscape.batches import check_data, take_example
from onebasin.landscape.evaluation import LOSSES
from onebasin.matching.methods import METHODS, make_method
from onebasin.matching.recommendation import AUTO
from onebasin.symmetries.transform import load_element
from onebasin.torch_internals import tree_map
from onebasin.tracing import Kinds

_LEARNED_UP_TO = 5 * 10**7
"""Parameters. Larger models are not loaded: their scales and bases are those of weight matching, and nothing is learned."""


def open_files(paths: Sequence[Path]) -> list[Checkpoint]:
    """Open checkpoints. What is in them is checked later."""
    return [open_checkpoint(path) for path in paths]


def list_input_files(paths: Sequence[str | Path | None], functions: Sequence[str | None] = ()) -> list[Path]:
    """The files and folders that options name, which no output may replace.

    Args:
        paths: values of options; those that are no paths are left out.
        functions: values such as package.module:function. The files of modules in the working folder are found.
    """
    found = [Path(path) for path in paths if path is not None and str(path) not in METHODS]
    for name in functions:
        package, colon, _ = (name or "").partition(":")
        module = Path(*package.split("."))
        found += [module.with_name(f"{module.name}.py"), module / "__init__.py"] if package and colon else []
    return [path for path in found if path.exists()]


def read_models(
    output: Output,
    files: Sequence[Checkpoint],
    architecture: str | None,
    shapes: Sequence[str] | None,
    ignore: Sequence[str] | None,
    check: bool | None,
    data: Any = None,
    allow: bool = True,
    engine: Engine = LOCAL,
    before_reading: Callable[[CheckpointSet], None] | None = None,
) -> CheckpointSet:
    """Find the architecture and the symmetry of checkpoints, check that they fit, and print the notes about them.

    If nothing else tells the shapes of the inputs, the first batch of the data does. Configurations and tokenizers that
    differ are refused, or noted with `allow`. What is called `before_reading` can refuse more.
    """
    with output.progress() as progress, engine.meter.reporting(progress):
        progress("reading and tracing", 0, 1)
        example = take_example(data) if data is not None and not shapes else None
        models = open_models(files, architecture, shapes or (), ignore or (), check, example, engine, before_reading)
        differences = find_differences(files, architecture)
        if not allow:
            check_differences(differences)
        models = dataclasses.replace(models, remarks=tuple(differences))
    output.note(*models.notes)
    return models


def read_data(name: str | None, split: Literal["train", "test"], option: str = "--data") -> Any:
    """Batches by name, the value of an option: the embedded digits, or what a function of the user returns."""
    if name is None:
        return None
    if name == "digits":
        return check_data(digits(split))
    function = _import_function(name, option)
    try:
        data = function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} failed: {describe_call_error(error)}") from error
    return check_data(data)


@contextlib.contextmanager
def explain_data_errors(data: Any) -> Iterator[None]:
    """If networks run on the user's data, report errors of PyTorch as a mistake in the data or the loss."""
    try:
        yield
    except (RuntimeError, TypeError, AttributeError, LookupError) as error:
        if data is None or "memory" in str(error):
            raise
        raise ValueError(f"the networks cannot be run on this data with this loss: {error}") from error


def read_loss(name: str) -> Any:
    """A loss by name."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ValueError(f"there is no loss {name!r}: {', '.join(LOSSES)}, or package.module:function")
    return _import_function(name, "--loss")


def _import_function(name: str, option: str) -> Any:
    package, colon, attribute = name.partition(":")
    if not (package and colon and attribute):
        raise ValueError(f"cannot read {option} {name!r}: write package.module:function")
    found = import_object(package, attribute)
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}, not a function")
    return found


@dataclass(frozen=True)
class AlignmentOptions:
    """How to align, as the command line says it.

    Attributes:
        arguments: for `onebasin.align`.
        data: the batches of ``--data``, whether or not the alignment uses them.
        runs_networks: whether the alignment runs the networks, so that it needs modules.
        device: where to compute.
    """

    arguments: dict[str, Any]
    data: Any
    runs_networks: bool
    device: str

    @property
    def moves_both(self) -> bool:
        """Whether scales and bases of the target are learned as well."""
        scaling = self.arguments.get("scaling")
        return scaling is not None and scaling.both

    def holds_models(self, models: CheckpointSet, kinds: Kinds, run: bool = False) -> bool:
        """Whether networks are loaded: they are run, or scales and bases are learned, as asked for or of small ones.

        Other checkpoints are read tensor by tensor, if the method reads them so.

        Args:
            models: the checkpoints.
            kinds: what the alignment is to find.
            run: something else than the alignment runs them.
        """
        scaling = self.arguments.get("scaling")
        is_wanted = self.data is not None or (scaling is not None and scaling.steps > 0)
        is_learned = is_wanted or models.checkpoints[0].num_entries <= _LEARNED_UP_TO
        return run or self.runs_networks or (kinds != "permutation" and is_learned)

    def prepare(
        self,
        models: CheckpointSet,
        kinds: Kinds,
        run: bool = False,
        wide: bool = False,
        untie: bool = False,
        dtype: torch.dtype | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """What to align, and the arguments of `onebasin.align`.

        Args:
            models: the checkpoints.
            kinds: what the alignment is to find; checkpoints that are multiplied are in the type to compute in.
            run: something else than the alignment runs them too: all are on the device.
            wide: the first, whose types a merge has, is in the type to compute in.
            untie: give a tied head a tensor of its own where a gain can be folded only then.
            dtype: what will be written of modules that are run; see `CheckpointSet.load_model`.
        """
        given = self._load(models, kinds, run, wide, dtype)
        return given, {**self._find_symmetry(models, kinds, run, untie, dtype), **self.arguments}

    def _load(self, models: CheckpointSet, kinds: Kinds, run: bool, wide: bool, dtype: torch.dtype | None) -> list[Any]:
        """Modules if they are held, else the checkpoints themselves. The first is on the device."""
        is_held = self.holds_models(models, kinds, run)
        if run or (kinds != "permutation" and is_held):
            return [model.to(self.device) for model in models.load(dtype)]
        if is_held:
            found: list[Any] = models.load()
        elif kinds == "permutation":
            found = list(models.checkpoints)
        else:
            found = [widen_to(each, dtype) for each in models.checkpoints]
        first, *others = found
        first = widen(first) if wide and isinstance(first, Checkpoint) else first
        return [first.to(self.device), *others]

    def _find_symmetry(
        self, models: CheckpointSet, kinds: Kinds, run: bool, untie: bool, dtype: torch.dtype | None
    ) -> dict[str, Any]:
        """The arguments of `onebasin.align` that tell it the symmetry, or how to trace what is more than permutations."""
        if kinds == "permutation":
            return {"symmetry": models.symmetry}
        found: dict[str, Any] = {"kinds": kinds, **({"untie": True} if untie else {})}
        if self.holds_models(models, kinds, run):
            return {"example_inputs": find_inputs(models, dtype, self.device), **found}
        return {"example_inputs": find_inputs(models), "module": models.architecture.build_hollow(), **found}


def find_inputs(models: CheckpointSet, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
    """The example inputs on a device, in the type in which `CheckpointSet.load_model` loads models of that type."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, torch.float64 if dtype == torch.float64 and value.is_floating_point() else value.dtype)

    return tree_map(move, models.architecture.example_inputs)


def check_untie(untie: bool, kinds: Kinds) -> None:
    """Refuse --untie where no gains are folded."""
    if untie and kinds != "all":
        raise typer.BadParameter("gains are folded with --symmetry all alone, and nothing is untied", param_hint="--untie")


def read_alignment_options(
    *,
    method: str,
    objective: str | None,
    data: str | None,
    loss: str,
    settings: Sequence[str] | None,
    device: str,
    init: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    repaired: bool | None = None,
    **arguments: Any,
) -> AlignmentOptions:
    """Read the options of an alignment, and refuse those that do not fit together.

    Args:
        method: by name.
        objective: by name; None for the library's default.
        data: by name.
        loss: by name.
        settings: options of the method, as NAME=VALUE.
        device: where to compute.
        init: names of methods, or files with permutations or transforms; one, or one for each model that is moved.
        low: the smallest weight of the moved network in the points of the objective; None for the library's default.
        high: the largest, likewise.
        repaired: take the loss of an objective with the statistics put right; None where `merge` repairs.
        **arguments: of `onebasin.align`, as they are.

    Raises:
        ValueError: naming the option.
    """
    check_device(device)
    options, starts, batches = read_settings(settings), [_read_init(text) for text in init], read_data(data, "train")
    goal = _read_objective(objective, read_loss(loss), low, high, repaired)
    # The library takes options without a method as those of "sinkhorn".
    chosen = make_method("sinkhorn" if method == AUTO else method, options)
    methods = (chosen, *(METHODS[text] for text in init if text in METHODS))
    runs_networks = any(each.looks_at_activations for each in methods) or (goal is not None and goal.uses_data)
    if runs_networks and batches is None:
        raise ValueError("this method or objective runs the networks: give --data")
    runs_networks = runs_networks or (method == AUTO and batches is not None)
    used = batches if runs_networks else None
    arguments = {"method": method, "objective": goal, "data": used, **_pass_starts(starts), **arguments, **options}
    return AlignmentOptions(arguments, batches, runs_networks, device)


def read_scaling(settings: Sequence[str] | None, kinds: Kinds, objective: str | None) -> ob.Scaling | None:
    """How scales and bases are learned, from NAME=VALUE; None if nothing is said.

    Args:
        settings: the values of ``--scaling``.
        kinds: what the alignment is to find.
        objective: by name; None for the library's default.

    Raises:
        ValueError: naming what is no such setting, or has no such value.
    """
    if not settings:
        return None
    if kinds == "permutation":
        raise typer.BadParameter("there are no scales to learn: give --symmetry positive or all", param_hint="--scaling")
    values, names = read_settings(settings, "--scaling"), [field.name for field in dataclasses.fields(ob.Scaling)]
    for name in values:
        if name not in names:
            raise ValueError(f"--scaling has no {name!r}; it has {', '.join(names)}")
    try:
        scaling = ob.Scaling(**values)
    except ValueError as error:
        raise ValueError(f"--scaling: {error}") from None
    if scaling.both and objective not in ("midpoint", "random-point"):
        why = "both=true moves both ends on a loss between them: give --objective midpoint or random-point, and --data"
        raise typer.BadParameter(why, param_hint="--scaling")
    return scaling


def read_settings(settings: Sequence[str] | None, option: str = "--set") -> dict[str, Any]:
    """Settings from NAME=VALUE, the values of an option: numbers, true, false and none as such, everything else as text.

    >>> read_settings(["steps=50", "lr=1e-2", "capture=false", "order=anchored"])
    {'steps': 50, 'lr': 0.01, 'capture': False, 'order': 'anchored'}
    """
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    result: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, text = setting.partition("=")
        if not (name.isidentifier() and equals and text):
            raise typer.BadParameter(f"cannot read {setting!r}: write NAME=VALUE", param_hint=option)
        value: Any = words.get(text.lower(), text)
        for kind in (int, float):
            if isinstance(value, str):
                with contextlib.suppress(ValueError):
                    value = kind(value)
        result[name] = value
    return result


def _read_objective(
    name: str | None, loss: Any, low: float | None, high: float | None, repaired: bool | None
) -> ob.Objective | None:
    if name != "random-point" and not (low is None and high is None):
        why = "only --objective random-point draws points between two weights"
        option = "--high" if low is None else "--low"
        raise typer.BadParameter(f"{why}, and it is {name or 'not given'}", param_hint=option)
    if name is None or name == "weight-distance":
        if repaired is not None:
            why = "only --objective midpoint and random-point take the loss of networks"
            raise typer.BadParameter(f"{why}, and it is {name or 'not given'}", param_hint="--repaired")
        return None if name is None else ob.WeightDistance()
    if name == "midpoint":
        return ob.Midpoint(loss, repaired=repaired)
    low, high = ob.RandomPoint.low if low is None else low, ob.RandomPoint.high if high is None else high
    return ob.RandomPoint(loss, repaired=repaired, low=low, high=high)


def _pass_starts(starts: Sequence[str | ob.Permutation | ob.Transform]) -> dict[str, Any]:
    """The argument of `onebasin.align` or, for several starts, of `onebasin.merge`."""
    return {} if not starts else {"init": starts[0] if len(starts) == 1 else list(starts)}


def _read_init(text: str) -> str | ob.Permutation | ob.Transform:
    if text in METHODS:
        return text
    if not Path(text).exists():
        raise ValueError(f"--init {text!r} is neither a file nor one of {', '.join(METHODS)}")
    return load_element(text)


def check_device(name: str) -> None:
    """Refuse a device that is not there.

    Raises:
        ValueError: saying so.
    """
    try:
        torch.empty(1, device=name)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"cannot compute on {name!r}: {reason}") from None
