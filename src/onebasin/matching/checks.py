"""What `align` and `merge` refuse before any work is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from onebasin.landscape.batches import check_data, take_example
from onebasin.matching.methods import METHODS, Method
from onebasin.relaxation.objectives import Objective
from onebasin.symmetries import Permutation, Symmetry
from onebasin.tensors.comparison import check_alike, check_finite
from onebasin.tensors.states import Model, read_state
from onebasin.tracing import symmetry as trace


def check_models(source: Model, target: Model) -> None:
    """Refuse models that differ in keys or shapes, or hold NaN.

    Raises:
        ValueError: naming the first difference.
    """
    states = {"the model to permute": read_state(source), "the model to align to": read_state(target)}
    names = list(states)
    check_alike(states[names[0]], states[names[1]], *names)
    check_finite(states)


def check_method_data(method: Method, model: Model, data: Any) -> None:
    """Refuse a method that runs the networks where there are no modules or no data.

    Raises:
        ValueError: saying what is missing.
    """
    if method.looks_at_activations and (data is None or not isinstance(model, nn.Module)):
        raise ValueError(f"{method.name} looks at activations: it needs modules, and data= with batches of inputs")


def read_data(objective: Objective, data: Any) -> Iterable[Any] | None:
    """The batches of the call, or those that came with the objective.

    Raises:
        ValueError: if the objective needs data and there is none, or the data is empty.
    """
    data = objective.data if data is None else data
    if data is None and objective.needs_data:
        raise ValueError(f"{type(objective).__name__} needs data: give data=, an iterable of (inputs, target) batches")
    return None if data is None else check_data(data)


def check_init(init: Any) -> None:
    """Refuse what a start cannot be.

    Raises:
        ValueError: with what it can be.
    """
    if init is not None and not isinstance(init, Permutation | Method) and init not in METHODS:
        raise ValueError(f"init must be a Permutation or one of {', '.join(map(repr, METHODS))}, got {init!r}")


def find_symmetry(model: Model, example_inputs: Any, symmetry: Symmetry | None, data: Iterable[Any] | None) -> Symmetry:
    """The symmetry of a model: traced, or as given. One written by hand is verified if inputs are known.

    Args:
        model: whose symmetry.
        example_inputs: to trace or verify it with; those of the first batch of the data if None.
        symmetry: if it is known.
        data: batches, if any.

    Raises:
        ValueError: if there is neither a symmetry nor anything to trace, or if it does not hold.
    """
    if example_inputs is None and data is not None:
        example_inputs = take_example(data)
    if symmetry is not None:
        symmetry = symmetry.bind(model)
        if not symmetry.is_traced and isinstance(model, nn.Module) and example_inputs is not None:
            symmetry.verify(model, example_inputs)
        return symmetry
    if example_inputs is None or not isinstance(model, nn.Module):
        raise ValueError("give example_inputs= to trace the model with, or symmetry=")
    return trace(model, example_inputs)
