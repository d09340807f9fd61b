"""From a module and example inputs to its permutation symmetry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from onebasin.programs.frontends import read_program
from onebasin.programs.graph import Call, Program, read_calls
from onebasin.symmetries import Symmetry
from onebasin.symmetries.verification import verify_programs
from onebasin.tensors.states import find_ties, read_state
from onebasin.tracing.naming import build
from onebasin.tracing.rules import RULES, STATISTICS, pointwise
from onebasin.tracing.walk import Trace, Walker


def symmetry(model: nn.Module, example_inputs: Any, verify: bool = True) -> Symmetry:
    """Find which axes of which parameters and buffers can be permuted together without changing the function.

    The model is traced once for each call, in eval mode, and left as it was. An operation that no rule covers pins what it
    touches, so a symmetry may be missed but is never invented; and the result is checked on random parameters in float64.

    Args:
        model: any module, on any device (on the meta device only shapes are read, and nothing can be verified).
        example_inputs: a tensor, a tuple of tensors, a dict of keyword tensors, or a list of those for several calls.
        verify: check the result (see `Symmetry.verify` for a check on the model's own weights).

    Raises:
        TypeError: if these are not a module and inputs.
        ValueError: if the model cannot be traced with these inputs, or if the check fails.

    >>> from torch import nn, zeros
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> symmetry(mlp, zeros(1, 4)).groups
    {'0.weight': Group(name='0.weight', size=8, parents=())}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    calls = read_calls(example_inputs)
    result, programs = trace_calls(model, calls, confirm=verify)
    state = read_state(model)
    if verify and state.device.type != "meta":
        verify_programs(result, programs, state)
    return result


def trace_calls(model: nn.Module, calls: Sequence[Call], confirm: bool = True) -> tuple[Symmetry, list[Program]]:
    """The symmetry of a model under these calls, not verified, and the operations it was found from."""
    ties = find_ties(model)
    aliases = {key: keys[0] for keys in ties for key in keys}
    programs = [read_program(model, call, confirm) for call in calls]
    trace = Trace()
    walker = Walker(trace, RULES, pointwise, aliases, STATISTICS)
    for program in programs:
        walker.run(program)
    return build(trace, model, read_state(model).shapes, ties), programs
