"""Whether two checkpoints compute the same function: on inputs over the whole range, and in entries that none reached."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onebasin.checkpoints.architectures import Architecture
from onebasin.checkpoints.checkpoint import Checkpoint
from onebasin.checkpoints.checkpoint_set import CheckpointSet
from onebasin.checkpoints.probes import make_probes
from onebasin.landscape.batches import move_to
from onebasin.programs.calls import Call
from onebasin.programs.isolation import isolated
from onebasin.programs.reach import ReachRecorder
from onebasin.symmetries.agreement import relative_difference
from onebasin.symmetries.verification import CannotVerify, function_of
from onebasin.tensors.states import read_state

_COUNTERS = "num_batches_tracked"
"""How many batches a norm has seen: it has a part in training alone."""


@dataclass(frozen=True)
class Equivalence:
    """What a comparison of two models found.

    Attributes:
        difference: the largest difference of the outputs, relative to their size.
        num_inputs: on how many inputs the models were run.
        longest: the longest sequence of integers among them; 0 if there is none.
        rows: for each table that rows were looked up in, how many were, and how many it has.
        unreached: tensors of which no input reached some entries.
        different: those of them that differ in such entries.
        rounding: if the outputs differ, how much those of the first model change where they differ most, if its numbers are
            off by half of their last digit in the files: a transform that was rounded to the types of the files changes
            less, and a few entries of a tensor that are off by more may change less too.
    """

    difference: float
    num_inputs: int
    longest: int
    rows: dict[str, tuple[int, int]]
    unreached: tuple[str, ...]
    different: tuple[str, ...]
    rounding: float = 0.0

    @property
    def may_be_rounding(self) -> bool:
        """Whether the outputs differ by no more than they do if the numbers in the files are rounded."""
        return self.difference <= self.rounding

    def describe_inputs(self) -> str:
        """What the inputs covered, in a few words."""
        lengths = f", up to {self.longest} long" if self.longest else ""
        parts = [f"{self.num_inputs}{lengths}"]
        whole = [key for key, (looked_up, size) in self.rows.items() if looked_up == size]
        if whole:
            parts.append(f"every row of {', '.join(whole[:3])}{f' and {len(whole) - 3} others' if len(whole) > 3 else ''}")
        parts += [f"{found} of {size} rows of {key}" for key, (found, size) in self.rows.items() if key not in whole]
        return "; ".join(parts)


def compare_checkpoints(
    models: CheckpointSet, architectures: Sequence[Architecture], tolerance: float, device: str = "cpu"
) -> Equivalence:
    """Compare two checkpoints, each in a model of its own architecture, in float64.

    The inputs are those of `make_probes`. Entries that none of them reached are compared directly. Rows of tables need not
    be equal if the linear map that takes the reached rows of the first model to those of the second takes the others too:
    then the models treat both alike.

    Args:
        models: the two checkpoints.
        architectures: of each.
        tolerance: the largest difference of such entries, relative to the largest one of the tensor.
        device: where to run them; it must have float64.

    Raises:
        ValueError: if a checkpoint does not fit its own architecture, or its model cannot be run.
    """
    pairs = zip(models.checkpoints, architectures, strict=True)
    first, second = (_load(checkpoint, architecture).to(device) for checkpoint, architecture in pairs)
    inputs = move_to(first, architectures[0].example_inputs)
    states = [read_state(model).load() for model in (first, second)]
    recorders = [ReachRecorder(state) for state in states]
    difference, rounding, num_inputs, longest = 0.0, 0.0, 0, 0
    worst: tuple[Call, list[Tensor]] | None = None
    with isolated(first, Call((), {})), isolated(second, Call((), {})):
        for number, call in enumerate(make_probes(first, inputs)):
            try:
                with recorders[0]:
                    expected = function_of(first, call)(states[0])
            except CannotVerify:
                if number == 0:
                    raise
                continue  # not every number in range is an input, such as tokens that must be there
            found: list[Tensor] = []
            with contextlib.suppress(CannotVerify), recorders[1]:
                found = function_of(second, call)(states[1])
            alike = len(found) == len(expected)
            apart = relative_difference(expected, found) if alike else math.inf
            if apart > difference:
                difference, worst = apart, (call, expected)
            num_inputs, longest = num_inputs + 1, max(longest, _measure(call))
        if worst is not None and tolerance < difference < math.inf:
            call, expected = worst
            rounding = relative_difference(expected, function_of(first, call)(_round_anew(states[0], models.checkpoints)))
    rows = {key: (recorders[0].num_looked_up(key), size) for key, size in recorders[0].num_rows.items()}
    unreached, different = [], []
    for key in models.checkpoints[0]:
        reached = (recorders[0].reached(key) & recorders[1].reached(key)).cpu()
        if bool(reached.all()) or key.rpartition(".")[2] == _COUNTERS:
            continue
        unreached.append(key)
        if not _agree(states[0][key].cpu(), states[1][key].cpu(), reached, tolerance):
            different.append(key)
    return Equivalence(difference, num_inputs, longest, rows, tuple(unreached), tuple(different), rounding)


def _load(checkpoint: Checkpoint, architecture: Architecture) -> nn.Module:
    model = architecture.build().double()
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    for key in shapes.keys() ^ checkpoint.shapes.keys():
        raise ValueError(f"{architecture.name} and {checkpoint.path} do not both have {key!r}")
    for key, shape in shapes.items():
        if shape != checkpoint.shapes[key].shape:
            raise ValueError(
                f"{key!r} in {checkpoint.path} has shape {tuple(checkpoint.shapes[key].shape)}, "
                f"{architecture.name} has {tuple(shape)}"
            )
    model.load_state_dict(checkpoint.load())
    return model


def _round_anew(state: Mapping[str, Tensor], checkpoints: Sequence[Checkpoint]) -> dict[str, Tensor]:
    """A state whose numbers are off by half of the last digit that they have in both checkpoints."""
    generator = torch.Generator().manual_seed(0)
    result = dict(state)
    for key, value in state.items():
        types = [checkpoint.shapes[key].dtype for checkpoint in checkpoints]
        if value.is_floating_point() and all(dtype.is_floating_point for dtype in types):
            digit = max(torch.finfo(dtype).eps for dtype in types)
            errors = digit / 2 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            result[key] = value * (1 + errors.to(value.device))
    return result


def _measure(call: Call) -> int:
    integers = [leaf for leaf in call.leaves if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.dim()]
    return max((leaf.shape[-1] for leaf in integers), default=0)


def _agree(first: Tensor, second: Tensor, reached: Tensor, tolerance: float) -> bool:
    """Whether two tensors agree in the entries that were not reached, directly or by the linear map of the other rows."""
    left, right = first[~reached], second[~reached]
    if not relative_difference([left], [right]) > tolerance:
        return True
    if not first.is_floating_point() or first.dim() < 2:
        return False
    is_reached = reached.flatten(1).all(1)
    if not bool(is_reached.any()) or not torch.equal(is_reached, reached.flatten(1).any(1)):
        return False
    known, other = first.flatten(1), second.flatten(1)
    # The shortest solution: it is wrong for rows outside of the span of those that were reached, so that these differ.
    solution = torch.linalg.lstsq(known[is_reached], other[is_reached], driver="gelsd").solution
    return relative_difference([other], [known @ solution]) <= tolerance
