"""The operations of a module: recorded, confirmed, or else exported."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.fx import Node

from onebasin.programs.exporting import export
from onebasin.programs.graph import Call, Program, evaluation_mode, quiet
from onebasin.programs.precision import UPDATING, Float64, compute_in_float64, promote
from onebasin.programs.recording import Caught, record
from onebasin.programs.shapes import iterate_leaves
from onebasin.programs.snapshots import Belongings
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import read_state
from onebasin.torch_internals import tree_leaves, tree_map


def read_program(model: nn.Module, call: Call, confirm: bool = True) -> Program:
    """The operations of one call: recorded if it can be followed, exported otherwise.

    Args:
        model: the module.
        call: its arguments.
        confirm: believe a recording only if it returns what the module does.

    Raises:
        ValueError: if the inputs do not fit the model, or its control flow depends on data.
    """
    try:
        program = record(model, call)
        if not confirm or returns_the_same(program, model, call):
            return program
    except Caught as error:
        raise ValueError(
            f"cannot trace {type(model).__name__}: it catches the error that values cannot be read ({error}), and goes on. "
            "Write the symmetry by hand with onebasin.Symmetry.from_axes and check it with verify."
        ) from error
    except Exception:
        pass
    return export(model, call)


def returns_the_same(program: Program, model: nn.Module, call: Call) -> bool:
    """Whether a program returns what the module does, on the module's own weights.

    It does the same operations in the same order: a difference is a fault. Types of less than 32 bits are promoted; some
    processors cannot do all operations in them. On the meta device a program is believed. It is not if a run would change
    something of the user's.
    """
    state = read_state(model)
    if any(isinstance(v, Tensor) and v.is_meta for v in (*state.values(), *program.given.values())):
        return True
    if any(_changes_something(node) for node in program.graph.nodes):
        return False
    values = [v for node in program.graph.nodes for v in iterate_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    types = {value.dtype for value in values if value.is_floating_point()}
    promoted = any(dtype.itemsize < 4 for dtype in types)
    belongings = Belongings(model, tree_leaves((call.args, call.kwargs)))
    args, kwargs = tree_map(lambda leaf: leaf, (call.args, call.kwargs))  # lists and dicts that may be written into
    with evaluation_mode(model), quiet(), belongings.restored(), torch.no_grad():
        numbers = seeded(0) if program.is_random else torch.random.fork_rng(devices=[])
        with numbers, Float64() if promoted else nullcontext():
            result = model(*args, **kwargs)
        found = program.run(state, compute_in_float64, promote) if promoted else program.run(state)
    expected = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    # Half of the digits: other kernels may be chosen, such as those of attention, and constants were rounded when recorded.
    tolerance = max((torch.finfo(dtype).eps for dtype in types), default=0.0) ** 0.5
    return len(expected) == len(found) and all(_are_close(e, f, tolerance) for e, f in zip(expected, found, strict=True))


def _changes_something(node: Node) -> bool:
    """Statistics of a norm, or a generator."""
    if node.target in UPDATING and node.args[5]:
        return True
    return any(isinstance(leaf, torch.Generator) for leaf in iterate_leaves((node.args, node.kwargs)))


def _are_close(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not expected.is_floating_point() or expected.numel() == 0:
        return torch.equal(expected, found)
    scale = float(expected.abs().nan_to_num(0.0, 0.0).max())
    return torch.allclose(expected, found, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
