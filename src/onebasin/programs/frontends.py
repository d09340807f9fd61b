"""The program of a call: recorded and checked against the module, or else exported."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from onebasin.programs.calls import Call, list_outputs
from onebasin.programs.derivation import find_limits, redraw, resize
from onebasin.programs.exporting import export
from onebasin.programs.failures import (
    ModuleFails,
    NotExportable,
    NotRecordable,
    NotTraceable,
    ReadsIntegers,
    SwallowedError,
    describe_error,
    explain_failure,
)
from onebasin.programs.graph import Program, ReplayError
from onebasin.programs.isolation import UnfusedAttention, isolated, run_module
from onebasin.programs.noise import MODE_ARGUMENTS, disable_dropout
from onebasin.programs.precision import STATISTICS_NORMS, Float64, compute_in_float64, compute_on_copies, promote
from onebasin.programs.recording import record
from onebasin.programs.shapes import bind_arguments, iterate_leaves
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import read_state
from onebasin.torch_internals import find_schema, memory_id


def read_program(model: nn.Module, call: Call, check: bool = True) -> Program:
    """Read the operations of one call: recorded if that is possible, exported otherwise.

    Args:
        model: the module.
        call: its arguments.
        check: use a recording only if it returns what the module returns.

    Raises:
        ValueError: if the inputs do not fit the model, or its control flow depends on values.
    """
    _check_state(model)
    try:
        program = record(model, call)
        if check:
            check_recording(program, model, call)
        return program
    except (SwallowedError, NotTraceable) as error:
        raise ValueError(explain_failure(model, error)) from error
    except NotRecordable as error:
        reason = error
    try:
        return export(model, call, str(reason))
    except NotExportable as error:
        raise ValueError(explain_failure(model, reason, error)) from error


def _check_state(model: nn.Module) -> None:
    """Refuse a module whose state dict has something else than its parameters under their names: that is what would move."""
    state = model.state_dict(keep_vars=True)
    for key, parameter in model.named_parameters(remove_duplicate=False):
        if not _is_same_memory(parameter, state.get(key)):
            raise ValueError(
                f"cannot trace {type(model).__name__}: its state dict does not hold the parameter {key}, or not in the same "
                "form; trace it without the hooks of its state dict"
            )


def _is_same_memory(parameter: Tensor, value: Any) -> bool:
    if parameter is value or not isinstance(value, Tensor) or parameter.layout != torch.strided:
        return parameter is value
    places = [
        (t.shape, t.stride(), t.storage_offset(), memory_id(t)) for t in (parameter, value) if t.layout == torch.strided
    ]
    return len(places) == 2 and places[0] == places[1]


def read_resized_program(model: nn.Module, call: Call, program: Program) -> Program | None:
    """Read the operations of a call at other sizes of its inputs.

    None if the module does not read sizes: then its operations are the same at all of them. The recording is not checked:
    it only adds to what the program requires.

    Raises:
        NotRecordable: if the module cannot be recorded at other sizes.
    """
    failure: Exception | None = None
    for candidate in resize(call, find_limits(program)) if program.reads_sizes else ():
        try:
            if program.front_end.name == "export":
                return export(model, candidate, program.front_end.reason)
            return record(model, candidate)
        except (NotRecordable, NotExportable) as error:
            failure = failure or error
    if failure is not None:
        raise NotRecordable(str(failure)) from failure
    return None


def differs_in_batch_only(program: Program, resized: Program) -> bool:
    """Whether two programs are one at two batch sizes: their numbers are the same, or proportional to the batch.

    Not if they have constants, which may depend on sizes in other ways.
    """
    shapes = _list_input_shapes(program), _list_input_shapes(resized)
    batches = {(one[:1], other[:1]) for one, other in zip(*shapes, strict=False)}
    has_constants = any(kind == InputKind.CONSTANT_TENSOR for p in (program, resized) for kind, _ in p.inputs.values())
    if has_constants or len(batches) != 1 or [s[1:] for s in shapes[0]] != [s[1:] for s in shapes[1]]:
        return False
    ((before, after),) = batches

    def is_alike(one: Any, other: Any) -> bool:
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
            return len(one) == len(other) and all(map(is_alike, one, other))
        is_scaled = type(one) is type(other) is int and [one * n for n in after] == [other * n for n in before]
        return is_scaled or (type(one) is type(other) and one == other)

    return is_alike(_number_operations(program), _number_operations(resized))


def _list_input_shapes(program: Program) -> list[tuple[int, ...]]:
    nodes = [n for n in program.graph.nodes if program.inputs.get(n.name, (None, ""))[0] == InputKind.USER_INPUT]
    return [tuple(node.meta["val"].shape) for node in nodes]


def _number_operations(program: Program) -> list[Any]:
    """The operations with their arguments, in which results are named by their number."""
    numbers: dict[Node, Any] = {}
    found = []
    for number, node in enumerate(program.graph.nodes):
        numbers[node] = f"%{number}"
        arguments = map_arg((node.args, tuple(node.kwargs.items())), numbers.__getitem__)
        found.append((node.target if node.op == "call_function" else program.inputs.get(node.name, node.op), arguments))
    return found


def read_redrawn_program(model: nn.Module, call: Call, program: Program) -> Program | None:
    """Read the operations of a call at other values of its inputs; None if they do not depend on values.

    Raises:
        ValueError: if the module does not take the values that are drawn: nothing is known of others than the example's.
    """
    if not program.lines_reading_integers:
        return None
    try:
        return record(model, redraw(call, find_limits(program)))
    except NotRecordable as error:
        raise ValueError(explain_failure(model, ReadsIntegers(program.lines_reading_integers[0], error))) from error


def read_training_program(model: nn.Module, call: Call, program: Program) -> Program | None:
    """Read the operations of a call in train mode, with dropout off; None if they are those of its program in eval mode.

    Norms refuse a single value per channel in train mode, so a call that fails is tried with one more sample.

    Raises:
        NotRecordable: if it cannot be recorded.
    """
    failure: NotRecordable | None = None
    for candidate in itertools.chain([call], resize(call)):
        try:
            found = record(model, candidate, training=True)
        except NotRecordable as error:
            failure = failure or error
            if not isinstance(error, ModuleFails):
                break  # an operation that cannot be recorded, whatever the sizes
            continue
        disable_dropout(found.graph)
        return None if _list_operations(found) == _list_operations(program) else replace(found)
    assert failure is not None
    raise failure


def _list_operations(program: Program) -> list[Any]:
    """The operations and their arguments, in a form that does not depend on dropout and on whose statistics norms use."""
    numbers: dict[Node, Any] = {}
    found = []
    for node in program.graph.nodes:
        numbers[node] = program.inputs.get(node.name, len(numbers))
        arguments = bind_arguments(node) if find_schema(node.target) is not None else {"args": node.args}
        kept = {name: value for name, value in arguments.items() if name not in MODE_ARGUMENTS}
        found.append((node.target if node.op == "call_function" else node.op, repr(map_arg(kept, numbers.__getitem__))))
    return found


def check_recording(program: Program, model: nn.Module, call: Call) -> None:
    """Check that a recording returns what the module returns, on the module's own weights.

    It runs the same operations in the same order, so a difference is a fault of the recording. Types of less than 32 bits
    are promoted, because some processors lack operations in them. On the meta device nothing can be checked.

    Raises:
        NotRecordable: if the results differ, or cannot be compared.
    """
    state = read_state(model)
    if any(isinstance(v, Tensor) and v.is_meta for v in (*state.values(), *program.given.values())):
        return
    leaves = [leaf for n in program.graph.nodes for leaf in iterate_leaves((n.args, n.kwargs, n.meta.get("val")))]
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise NotRecordable("it draws numbers from a generator of its own")
    types = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    promoted = any(dtype.itemsize < 4 for dtype in types)
    with isolated(model, call), torch.no_grad(), UnfusedAttention():
        try:
            with seeded(0) if program.is_random else nullcontext(), Float64() if promoted else nullcontext():
                result = run_module(model, call, program.training, _copy_statistics(program, model))
        except NotRecordable:
            raise
        except Exception as error:
            raise NotRecordable(f"it cannot be run: {describe_error(error)}") from error
        try:
            found = program.run(state, compute_in_float64, promote) if promoted else program.run(state, compute_on_copies)
        except ReplayError as error:
            raise NotRecordable(f"its recording cannot be replayed: {error}") from error
    expected = [leaf.detach() for leaf in list_outputs(result) if isinstance(leaf, Tensor)]
    # Half of the digits, because other kernels may be chosen, and constants were rounded when they were recorded.
    tolerance = max((torch.finfo(dtype).eps for dtype in types), default=0.0) ** 0.5
    if len(expected) != len(found) or not all(_are_close(e, f, tolerance) for e, f in zip(expected, found, strict=True)):
        raise NotRecordable("its recording returns something else than the module")


def _copy_statistics(program: Program, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the running statistics that norms update when the module is run."""
    norms = [node for node in program.graph.nodes if node.target in STATISTICS_NORMS and node.args[5]]
    updated = {arg.name for node in norms for arg in node.args[3:5] if isinstance(arg, Node) and arg.op == "placeholder"}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    copies = {}
    for _, key in map(program.inputs.__getitem__, updated):
        if key not in buffers:
            raise NotRecordable("it updates statistics that are not buffers")
        copies[key] = buffers[key].clone()
    return copies


def _are_close(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not expected.is_floating_point() or expected.numel() == 0:
        return torch.equal(expected, found)
    scale = float(expected.abs().nan_to_num(0.0, 0.0).max())
    return torch.allclose(expected, found, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
