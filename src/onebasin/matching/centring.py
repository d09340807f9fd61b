"""Offsets of units: where a layer norm subtracts the mean over units, a constant that all units share changes nothing.

Whether a tensor may have such an offset is not read from the architecture but from a gradient: f does not depend on a
constant c that is added to all units i of a tensor w if the sum over i of df/dw_i is zero at random weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.programs.calls import Call, list_outputs, read_calls
from onebasin.programs.isolation import UnfusedAttention, isolated, run_module
from onebasin.programs.precision import Float64, promote
from onebasin.symmetries import Symmetry
from onebasin.symmetries.agreement import relative_difference
from onebasin.symmetries.unrolling import Block, roll, unroll
from onebasin.symmetries.verification import CannotVerify, Function, function_of, is_stable, random_states
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import LazyState, StateDict, read_state
from onebasin.torch_internals import tree_map

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Offsets:
    """Where a constant can be added to all units of a group without changing the function.

    Attributes:
        symmetry: of the model.
        axes: for state keys, each tied tensor once, the number of a block of the tensor and an axis of that block.
    """

    symmetry: Symmetry
    axes: Mapping[str, tuple[tuple[int, int], ...]]

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


def find_offsets(model: nn.Module, symmetry: Symmetry, example_inputs: Any) -> Offsets:
    """Where a constant can be added to all units, whatever the weights are; nowhere, if the model has no gradients.

    Args:
        model: left untouched.
        symmetry: of this model.
        example_inputs: as for `onebasin.symmetry`.
    """
    symmetry = replace(symmetry, fixed={})  # a gain of one is as random as the others
    calls = [Call(*tree_map(promote, (call.args, call.kwargs))) for call in read_calls(example_inputs)]
    state = read_state(model).lazily()
    buffers = {key for key, _ in model.named_buffers()}
    with isolated(model, calls[0]):
        functions = [function_of(model, call) for call in calls]
        for make_state in random_states(symmetry, state, buffers):
            try:
                drawn = make_state()
                if is_stable(functions, drawn):
                    found = _find_at(model, symmetry, calls, drawn)
                    return found if _holds(found, functions, drawn) else Offsets(symmetry, {})
            except CannotVerify:
                continue
    return Offsets(symmetry, {})


def _find_at(model: nn.Module, symmetry: Symmetry, calls: Sequence[Call], state: LazyState) -> Offsets:
    axes = {}
    for key, gradient in _differentiate(model, symmetry, calls, state).items():
        blocks = enumerate(_unroll(symmetry, key, gradient))
        axes[key] = tuple((number, axis) for number, block in blocks for axis in _find_axes(symmetry, block))
    return Offsets(symmetry, {key: found for key, found in axes.items() if found})


def _find_axes(symmetry: Symmetry, block: Block) -> Iterator[int]:
    """The axes of a group along which a gradient has the sum zero, but is not zero."""
    (gradient,) = block.tensors
    size = float(gradient.abs().max()) if gradient.numel() else 0.0
    for axis, label in enumerate(block.labels):
        sums, sizes = gradient.sum(axis).abs(), gradient.abs().sum(axis)
        if label in symmetry.groups and size > 0 and bool((sums <= _TOLERANCE * sizes + 1e-3 * _TOLERANCE * size).all()):
            yield axis


def _differentiate(model: nn.Module, symmetry: Symmetry, calls: Sequence[Call], state: LazyState) -> dict[str, Tensor]:
    """The gradient of a random mixture of all outputs in float64, in every tensor that has units and reaches them."""
    aliases = {key for keys in symmetry.ties for key in keys[1:]}
    values = {key: promote(state[key]).detach() for key in state if key not in aliases}
    wanted = [key for key, value in values.items() if value.is_floating_point() and symmetry.layouts.get(key)]
    for key in wanted:
        values[key] = values[key].clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    gradients: dict[str, Tensor] = {}
    for call in calls:
        try:
            with torch.enable_grad(), UnfusedAttention(), seeded(0), Float64():
                outputs = list_outputs(run_module(model, call, state=values))
                mixed = [
                    (value * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)).sum()
                    for value in outputs
                    if isinstance(value, Tensor) and value.requires_grad
                ]
                if not mixed:
                    continue
                loss = torch.stack([value.real for value in mixed]).sum()
                found = torch.autograd.grad(loss, [values[key] for key in wanted], allow_unused=True)
        except Exception as error:  # the code of a model may raise anything
            raise CannotVerify(f"the model cannot be differentiated: {error}") from error
        for key, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                gradients[key] = gradients[key] + gradient if key in gradients else gradient
    return gradients


def _holds(offsets: Offsets, functions: Sequence[Function], state: LazyState) -> bool:
    """Whether the function stays as it is when the means are subtracted: a gradient does not see steps."""
    centred = StateDict({key: offsets.subtract_means(key, promote(value)) for key, value in state.items()})
    return all(relative_difference(function(state), function(centred)) < _TOLERANCE for function in functions)


def _unroll(symmetry: Symmetry, key: str, tensor: Tensor) -> Iterator[Block]:
    return unroll(symmetry.layouts[key], symmetry.groups, tensor)
