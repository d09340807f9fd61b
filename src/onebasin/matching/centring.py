"""Offsets of units: where a layer norm subtracts the mean over units, a constant that all units share changes nothing.

Whether a tensor may have such an offset is not read from the architecture but from a gradient: f does not depend on a
constant c that is added to all units i of a tensor w if the sum over i of df/dw_i is zero at random weights. Gains that
the canonical form has made one are one there: a gain on what a block adds to a stream would hide that its mean is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebasin.programs.gradients import iterate_gradients
from onebasin.programs.graph import Program, ReplayError
from onebasin.programs.precision import promote
from onebasin.symmetries import Symmetry
from onebasin.symmetries.unrolling import Block, roll, unroll
from onebasin.symmetries.verification import (
    CannotVerify,
    compare,
    find_buffers,
    function_of_program,
    is_stable,
    random_states,
)
from onebasin.tensors.states import LazyState, State

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Offsets:
    """Where a constant can be added to all units of a group without changing the function.

    Attributes:
        symmetry: of the model.
        axes: for state keys, each tied tensor once, the number of a block of the tensor and an axis of that block.
        obstacle: why none could be looked for, if so.
    """

    symmetry: Symmetry
    axes: Mapping[str, tuple[tuple[int, int], ...]]
    obstacle: str = ""

    @property
    def groups(self) -> frozenset[str]:
        """The groups of the units."""
        found = set()
        for key, axes in self.axes.items():
            shape = [term.size for term in self.symmetry.layouts[key]]
            blocks = list(_unroll(self.symmetry, key, torch.empty(shape, device="meta")))
            found |= {blocks[number].labels[axis] for number, axis in axes}
        return frozenset(label for label in found if label is not None)

    def subtract_means(self, key: str, tensor: Tensor) -> Tensor:
        """A tensor whose units have the mean zero wherever a constant can be added to them."""
        if key not in self.axes:
            return tensor
        centred = []
        for number, block in enumerate(_unroll(self.symmetry, key, tensor)):
            (part,) = block.tensors
            for axis in (axis for where, axis in self.axes[key] if where == number):
                part = part - part.mean(axis, keepdim=True)
            centred.append(part)
        return roll(self.symmetry.layouts[key], self.symmetry.groups, iter(centred))


def find_offsets(programs: Sequence[Program], symmetry: Symmetry, state: State, held: Mapping[str, float]) -> Offsets:
    """Where a constant can be added to all units, whatever the other weights are; nowhere, if the model has no gradients.

    One tensor and its gradient are in memory at a time.

    Args:
        programs: calls of a model.
        symmetry: of this model.
        state: of the model, for the shapes.
        held: vectors that are filled with one number, and that number. All others are random.
    """
    symmetry = replace(symmetry, fixed=dict(held))
    state = state.map(lambda key, value: torch.full_like(value, held[key]) if key in held else value)
    functions = [function_of_program(program) for program in programs]
    obstacle = "at random weights the outputs are not finite, or rounding decides them"
    for make_state in random_states(symmetry, state, find_buffers(programs)):
        try:
            drawn = make_state()
            if is_stable(functions, drawn):
                found = _find_at(programs, symmetry, drawn)
                centred = drawn.map(lambda key, value, at=found: at.subtract_means(key, promote(value)))
                if compare(functions, drawn, centred) < _TOLERANCE:
                    return found
                return Offsets(symmetry, {}, "without the means that gradients allow to subtract the outputs differ")
        except (CannotVerify, ReplayError) as error:
            obstacle = str(error).rstrip(".")
    return Offsets(symmetry, {}, obstacle)


def _find_at(programs: Sequence[Program], symmetry: Symmetry, state: LazyState) -> Offsets:
    generator = torch.Generator().manual_seed(0)

    def start(output: Tensor) -> Tensor:
        """A random mixture of all outputs."""
        return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)

    aliases = {key: keys[0] for keys in symmetry.ties for key in keys[1:]}
    axes: dict[str, set[tuple[int, int]]] = {}
    for program in programs:
        for name, gradient in _iterate(program, state, start):
            key = aliases.get(name, name)
            if bool(gradient.any()) and symmetry.layouts.get(key):
                blocks = enumerate(_unroll(symmetry, key, gradient))
                found = {(number, axis) for number, block in blocks for axis in _find_axes(symmetry, block)}
                axes[key] = axes[key] & found if key in axes else found
    return Offsets(symmetry, {key: tuple(sorted(axes[key])) for key in state if axes.get(key)})


def _iterate(program: Program, state: LazyState, start: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    try:
        yield from iterate_gradients(program, state, start)
    except Exception as error:  # an operation may have no gradient, or any other fault
        raise CannotVerify(f"the model cannot be differentiated: {error}") from error


def _find_axes(symmetry: Symmetry, block: Block) -> Iterator[int]:
    """The axes of a group along which a gradient has the sum zero, but is not zero."""
    (gradient,) = block.tensors
    size = float(gradient.abs().max()) if gradient.numel() else 0.0
    for axis, label in enumerate(block.labels):
        sums, sizes = gradient.sum(axis).abs(), gradient.abs().sum(axis)
        if label in symmetry.groups and size > 0 and bool((sums <= _TOLERANCE * sizes + 1e-3 * _TOLERANCE * size).all()):
            yield axis


def _unroll(symmetry: Symmetry, key: str, tensor: Tensor) -> Iterator[Block]:
    return unroll(symmetry.layouts[key], symmetry.groups, tensor)
