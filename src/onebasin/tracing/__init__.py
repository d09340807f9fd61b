"""From a module and example inputs to its permutation symmetry."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from onebasin.programs.calls import Call, read_calls
from onebasin.programs.frontends import read_program, read_training_programs
from onebasin.programs.graph import Program
from onebasin.symmetries import Pin, Symmetry
from onebasin.symmetries.verification import CannotVerify, find_guilty_groups, verify_programs
from onebasin.tensors.states import State, find_ties, read_state
from onebasin.tracing.axes.terms import forget_normal_forms
from onebasin.tracing.conversion import find_unreached, pin_groups, to_symmetry
from onebasin.tracing.trace import Trace
from onebasin.tracing.walk import walk

MAX_ENTRIES = 10**7
"""Models with more parameters are not run at other sizes of the inputs: that would take as long as the trace itself."""


def symmetry(model: nn.Module, example_inputs: Any, verify: bool = True) -> Symmetry:
    """Find which axes of which parameters and buffers can be permuted together without changing the function.

    The model is traced once for each call, in eval mode, and left as it was. An operation that no rule covers pins what it
    touches, so a symmetry may be missed but is never invented. The result is checked on random parameters in float64.

    It holds for these calls. If they leave parameters unused, the calls are traced in train mode as well. A model of up to
    ten million parameters that reads the sizes of tensors is also run at another batch size and sequence length: groups that
    change the function there are pinned. Other threads must not use the model meanwhile.

    Args:
        model: any module, on any device (on the meta device only shapes are read, and nothing can be verified).
        example_inputs: a tensor, a tuple of tensors, a dict of keyword tensors, or a list of those for several calls.
        verify: check the result (see `Symmetry.verify` for a check on the model's own weights).

    Raises:
        TypeError: if these are not a module and inputs.
        ValueError: if the model cannot be traced with these inputs, or if the check fails.

    Warns:
        UnreachedWarning: if a parameter that no call used may read or write free units.

    >>> from torch import nn, zeros
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> symmetry(mlp, zeros(1, 4)).groups
    {'0.weight': Group(name='0.weight', size=8, parents=())}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    calls, state = read_calls(example_inputs), read_state(model)
    trace, programs = _walk_calls(model, calls, check=verify)
    result = to_symmetry(trace, model, programs)
    if verify and state.device.type != "meta":
        verify_programs(result, [program for program in programs if not program.training], state)
        training = [program for program in programs if program.training]
        with contextlib.suppress(CannotVerify):  # statistics of few samples amplify rounding errors
            verify_programs(result, training, state)
        if result.groups and state.num_entries <= MAX_ENTRIES:
            result = _check_other_sizes(result, trace, model, calls, programs, state)
    forget_normal_forms()
    result.warn_of_unreached(stacklevel=2)
    return result


def trace_calls(model: nn.Module, calls: Sequence[Call], check: bool = True) -> tuple[Symmetry, list[Program]]:
    """The symmetry of a model under these calls, not verified, and the programs it was found from."""
    trace, programs = _walk_calls(model, calls, check)
    result = to_symmetry(trace, model, programs)
    forget_normal_forms()
    return result, programs


def _walk_calls(model: nn.Module, calls: Sequence[Call], check: bool) -> tuple[Trace, list[Program]]:
    trace = Trace(find_ties(model))
    programs = [read_program(model, call, check) for call in calls]
    for program in programs:
        walk(program, trace)
    unreached = find_unreached(trace, model)
    for program in read_training_programs(model, calls, check) if unreached else ():
        if not program.reads.isdisjoint(unreached):
            walk(program, trace)
            programs.append(program)
    return trace, programs


def _check_other_sizes(
    result: Symmetry, trace: Trace, model: nn.Module, calls: Sequence[Call], programs: Sequence[Program], state: State
) -> Symmetry:
    """Pin the groups that change the function at another batch size or sequence length, if the module reads sizes at all."""
    sized = [call for call, program in zip(calls, programs, strict=False) if program.reads_sizes]
    for call in sized:
        while guilty := find_guilty_groups(result, model, call, programs, state):
            reason = Pin("permuting it changes the function at another batch size or sequence length")
            pin_groups(trace, model, guilty, reason)
            result = to_symmetry(trace, model, programs)
    return result
