"""From a module and example inputs to its permutation symmetry."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch import nn

from onebasin.programs.calls import Call, read_calls
from onebasin.programs.failures import NotRecordable
from onebasin.programs.frontends import (
    differs_in_batch_only,
    read_program,
    read_redrawn_program,
    read_resized_program,
    read_training_program,
)
from onebasin.programs.graph import Program
from onebasin.programs.isolation import LOCK
from onebasin.symmetries import Symmetry
from onebasin.symmetries.transform import TransformedSymmetry
from onebasin.symmetries.verification import MAX_ENTRIES, CannotVerify, verify_programs
from onebasin.tensors.states import find_ties, read_state
from onebasin.tracing.axes.terms import forget_normal_forms
from onebasin.tracing.bases.rotary import add_rotary_bases
from onebasin.tracing.conversion import Kinds, to_symmetry
from onebasin.tracing.trace import Trace
from onebasin.tracing.walk import walk

_WITHOUT_VALUES = (
    "on the meta device the values of gains are not known, so that none counts as one and no basis behind a norm is found, "
    "and neither are rotary pairs, which are found by trial: trace a model with weights to find them"
)


def symmetry(model: nn.Module, example_inputs: Any, verify: bool = True, kinds: Kinds = "permutation") -> Symmetry:
    """Find which axes of which parameters and buffers can be permuted together without changing the function.

    The model is traced once for each call, in eval mode, and left as it was. An operation that no rule covers pins what it
    touches, so a symmetry may be missed but is never invented. The result is checked on random parameters in float64.

    It holds for these calls at all values of their inputs, and for the same calls at another batch size, with sequences of
    one more position and larger images, where the model takes them. What train mode requires is added, or `limits` says
    that it could not be traced; it also names the lines whose branches or sizes depend on values of integer inputs. Other
    threads must not use the model meanwhile.

    Args:
        model: any module, on any device (on the meta device only shapes are read, and nothing can be verified).
        example_inputs: a tensor, a tuple of tensors, a dict of keyword tensors, or a list of those for several calls.
        verify: check the result (see `Symmetry.verify` for a check on the model's own weights).
        kinds: "permutation"; "positive" to find positive scales of the units as well (`Symmetry.scales`); or "all" to find
            changes of basis too (`Symmetry.bases`). Gains of norms stand in the way of those, unless they are all one: see
            `onebasin.canonical`. Scales and bases hold in eval mode; in train mode dropout tells units apart, and scales
            before a batch norm change what it computes by as much as its eps does.

    Raises:
        TypeError: if these are not a module and inputs.
        ValueError: if the model cannot be traced with these inputs, or if the check fails.

    Warns:
        UnreachedWarning: if a parameter that no call used may read or write free units.

    >>> from torch import nn, zeros
    >>> import onebasin as ob
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> ob.symmetry(mlp, zeros(1, 4)).groups
    {'0.weight': Group(name='0.weight', size=8, parents=(), kind='permutation')}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if kinds not in get_args(Kinds):
        raise ValueError(f"kinds must be one of {', '.join(map(repr, get_args(Kinds)))}, got {kinds!r}")
    calls = read_calls(example_inputs)
    with LOCK:  # another thread that traces the same model may just have it in train mode, without counters of batches
        state = read_state(model)
        result, programs = _trace(model, calls, check=verify, kinds=kinds)
        if kinds == "all" and state.device.type != "meta":
            result = add_rotary_bases(result, programs.given, programs.derived, state)
        elif kinds == "all":
            result = replace(result, limits=(*result.limits, _WITHOUT_VALUES))
    if verify and state.device.type != "meta":
        is_large, is_permuted_only = state.num_entries > MAX_ENTRIES, not result.scales and not result.bases
        if is_permuted_only or not is_large:  # random transforms permute too
            verify_programs(result, programs.given, state)
        for program in (*(() if is_large else programs.derived), *programs.training):
            with contextlib.suppress(CannotVerify):  # statistics of few samples amplify rounding errors
                verify_programs(result, [program], state, draw=False)
        if not is_permuted_only:
            verify_programs(TransformedSymmetry(result), programs.given, state)
            for program in () if is_large else programs.derived:
                with contextlib.suppress(CannotVerify):
                    verify_programs(TransformedSymmetry(result), [program], state, draw=False)
    result.warn_of_unreached()
    return result


def trace_calls(model: nn.Module, calls: Sequence[Call], check: bool = True) -> tuple[Symmetry, list[Program]]:
    """The symmetry of a model under these calls, not verified, and the programs of the calls that it was found from."""
    with LOCK:
        result, programs = _trace(model, calls, check)
    return result, programs.given


@dataclass
class _Programs:
    """The programs that a symmetry is found from: of the calls as given, at other sizes and values, and in train mode."""

    given: list[Program]
    derived: list[Program]
    training: list[Program]


def _trace(model: nn.Module, calls: Sequence[Call], check: bool, kinds: Kinds = "permutation") -> tuple[Symmetry, _Programs]:
    given = [read_program(model, call, check) for call in calls]
    pairs = list(zip(calls, given, strict=True))
    result, added = _find_symmetry(model, given, kinds=kinds), []
    resized, limits = _read_resized_programs(model, pairs)
    training, more = _read_training_programs(model, pairs, result.unreached)
    redrawn = [read_redrawn_program(model, call, program) for call, program in pairs]
    unlike = [
        None if variant is None or differs_in_batch_only(program, variant) else variant
        for program, variant in zip(given, resized, strict=True)
    ]
    for variants in (unlike, redrawn, training):
        if not any(variants):
            continue
        # A walk over two programs of a call may find less than over each alone, so those that agree are not added.
        # Scales and bases are not promised in train mode.
        wanted: Kinds = "permutation" if variants is training else kinds
        alone = _find_symmetry(model, [v or program for program, v in zip(given, variants, strict=True)], kinds=wanted)
        if _differs(alone, result, wanted):
            added += filter(None, variants)
            result = _find_symmetry(model, given, added, kinds)
    forget_normal_forms()
    programs = _Programs(given, list(filter(None, (*resized, *redrawn))), list(filter(None, training)))
    front_ends = tuple(program.front_end for program in (*given, *programs.training))
    limits = (*_describe_reads(given), *limits, *more, *_describe_left_out(model, calls))
    return replace(result, front_ends=front_ends, limits=tuple(dict.fromkeys(limits))), programs


def _differs(found: Symmetry, other: Symmetry, kinds: Kinds) -> bool:
    """Whether a symmetry differs from another one, also in its scales and bases if those are wanted."""
    first, second = ((each.groups, each.layouts, each.unreached) for each in (found, other))
    if kinds == "permutation":
        return first != second
    return (*first, found.scales, found.bases) != (*second, other.scales, other.bases)


def _describe_reads(programs: Sequence[Program]) -> Iterator[str]:
    """What of the symmetry holds at some values of integer inputs only, in words."""
    for line in dict.fromkeys(line for program in programs for line in program.lines_reading_integers):
        yield (
            f"a branch or a size depends on values of integer inputs ({line}); it was traced at those of the example and at "
            "others, and may have less symmetry elsewhere"
        )


def _describe_left_out(model: nn.Module, calls: Sequence[Call]) -> Iterator[str]:
    """Optional arguments that none of the calls gives, in words."""
    signature = inspect.signature(model.forward)
    given = {name for call in calls for name in signature.bind(*call.args, **call.kwargs).arguments}
    optional = [p.name for p in signature.parameters.values() if p.default is not p.empty and p.name not in given]
    if optional:
        shown = ", ".join(optional[:3]) + (f" and {len(optional) - 3} more" if len(optional) > 3 else "")
        yield f"calls that give {shown} were not traced"


def _read_resized_programs(
    model: nn.Module, pairs: Sequence[tuple[Call, Program]]
) -> tuple[list[Program | None], tuple[str, ...]]:
    """The programs at other sizes, and what could not be traced, in words."""
    found: list[Program | None] = []
    limits: list[str] = []
    for call, program in pairs:
        try:
            found.append(read_resized_program(model, call, program))
        except NotRecordable as error:
            found.append(None)
            limits.append(f"no other batch size, length or image size could be traced: {error}")
    return found, tuple(limits)


def _find_symmetry(
    model: nn.Module, given: Sequence[Program], added: Sequence[Program] = (), kinds: Kinds = "permutation"
) -> Symmetry:
    trace = Trace(find_ties(model))
    for program in given:
        walk(program, trace)
    for program in added:
        walk(program, trace, with_sites=False)
    return to_symmetry(trace, model, given, kinds)


def _read_training_programs(
    model: nn.Module, pairs: Sequence[tuple[Call, Program]], unreached: Collection[str]
) -> tuple[list[Program | None], tuple[str, ...]]:
    """The programs in train mode that differ from those in eval mode, and what could not be traced, in words."""
    found: list[Program | None] = []
    limits: dict[str, None] = {}
    for call, program in pairs:
        try:
            training = read_training_program(model, call, program)
        except NotRecordable as error:
            training, reason = None, f"train mode could not be traced, and may have less symmetry: {error}"
            limits[reason] = None
        if training is not None and training.is_random and training.reads.isdisjoint(unreached):
            training = None
            limits["train mode draws random numbers of its own, and was not traced"] = None
        found.append(training)
    return found, tuple(limits)
