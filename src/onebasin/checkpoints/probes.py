"""Inputs to compare models on, which range over the vocabulary, the positions and the token types of a model."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.checkpoints.diffusers_models import PipelineModel
from onebasin.programs.calls import Call, read_calls
from onebasin.programs.reach import ReachRecorder
from onebasin.symmetries.verification import CannotVerify, function_of
from onebasin.tensors.states import read_state
from onebasin.torch_internals import memory_id, tree_map

_NUM_DRAWS = 4
"""The least number of calls."""
_MAX_LENGTH = 1024
"""The longest sequence. The time and the memory of attention grow with its square."""
_USUAL_LENGTH = 256
"""The length to try if nothing tells how many positions a model has."""
_MAX_OPERATIONS = 10**11
"""About how many operations with weights one model may take for all calls."""
_MAX_SCORES = 6 * 10**7
"""The most entries of the scores that a call returns: half a gigabyte."""


def make_probes(model: nn.Module, example_inputs: Any) -> list[Call]:
    """Calls to compare models on: the example inputs, with floating numbers drawn, then inputs that range over the tables.

    The range of an integer input is the number of rows of the table that is looked up with it. Together the calls take every
    number in that range, and go through all positions, as far as `_MAX_OPERATIONS` allows. Sequences are made longer, and
    ``token_type_ids`` and ``position_ids`` are given, where the model takes that. An integer input that nothing is looked up
    with stays as it is. Calls may fail: a model may refuse some of the inputs in its range.

    The parts of a pipeline are called one by one.

    Args:
        model: in eval mode and float64, `isolated`.
        example_inputs: as for `onebasin.symmetry`.
    """
    if isinstance(model, PipelineModel):
        calls = [(name, inputs) for call in read_calls(example_inputs) for name, inputs in call.kwargs.items()]
        found = [(name, probe) for name, inputs in calls for probe in make_probes(model.get_submodule(name), inputs)]
        return [Call((), {name: probe.kwargs}) for name, probe in found]
    generator = torch.Generator().manual_seed(0)
    probes: list[Call] = []
    for call in read_calls(example_inputs):
        has_floats = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in call.leaves)
        probes += [_draw_floats(call, generator) for _ in range(_NUM_DRAWS if has_floats else 1)]
        probes += _Prober(model, generator).range_over(call)
    return probes


def _draw_floats(call: Call, generator: torch.Generator) -> Call:
    def draw(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)

    return Call(*tree_map(draw, (call.args, call.kwargs)))


@dataclass(frozen=True)
class _Trial:
    """What one run showed: the range of each integer input, by its number among the leaves, and the tables of positions."""

    ranges: dict[int, int]
    num_positions: int


@dataclass(frozen=True)
class _Prober:
    model: nn.Module
    generator: torch.Generator

    def range_over(self, call: Call) -> Iterator[Call]:
        """Calls whose integers range over the tables that they are looked up in; none if there are no such integers."""
        trial = self._try(call)
        if trial is None or not trial.ranges:
            return
        for name in ("token_type_ids", "position_ids"):
            call, trial = self._add_input(call, name, trial)
        ranges, places = dict(trial.ranges), _find_input(call, "position_ids")
        num_positions = max(trial.num_positions, read_num_positions(self.model))
        if places is not None:
            num_positions = max(num_positions, ranges.pop(places, 0))
        length = self._find_length(call, ranges, num_positions or _USUAL_LENGTH)
        wanted = max(*ranges.values(), num_positions if places is not None else 0)
        num_calls = max(_NUM_DRAWS, -(-min(wanted, self._num_affordable) // length))
        streams = {number: self._draw_all(size) for number, size in ranges.items()}
        starts = torch.linspace(0, max(0, num_positions - length), num_calls).round().long().tolist()
        for start in starts:
            values = {
                number: torch.tensor(list(itertools.islice(stream, _count(call, number, length))))
                for number, stream in streams.items()
            }
            if places is not None:
                values[places] = torch.arange(start, start + length)
            yield _draw_floats(_fill(call, values, length), self.generator)

    @property
    def _num_affordable(self) -> int:
        """How many tokens one model can be given in all."""
        return _MAX_OPERATIONS // (2 * max(1, sum(p.numel() for p in self.model.parameters())))

    def _try(self, call: Call) -> _Trial | None:
        """Run the model; None if it fails."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        copies = iter(leaves)
        call = Call(*tree_map(lambda _: next(copies), (call.args, call.kwargs)))
        integers = {number: leaf for number, leaf in enumerate(leaves) if _is_integer(leaf)}
        state = read_state(self.model).load()
        recorder = ReachRecorder(state, tuple(integers.values()))
        try:
            with recorder:
                function_of(self.model, call)(state)
        except CannotVerify:
            return None
        ranges = {number: recorder.ranges.get(memory_id(leaf), 0) for number, leaf in integers.items()}
        lengths = {integers[number].shape[-1] for number, size in ranges.items() if size}
        tables = [rows for num_indices, rows in recorder.others if num_indices in lengths]
        return _Trial({number: size for number, size in ranges.items() if size}, max(tables, default=0))

    def _add_input(self, call: Call, name: str, trial: _Trial) -> tuple[Call, _Trial]:
        """The call with an optional input of the shape of its tokens, if the model takes that."""
        tokens = call.kwargs.get("input_ids")
        if tokens is None or name in call.kwargs or name not in inspect.signature(self.model.forward).parameters:
            return call, trial
        first = (
            torch.arange(tokens.shape[-1], device=tokens.device)[None]
            if name == "position_ids"
            else torch.zeros_like(tokens)
        )
        extended = Call(call.args, {**call.kwargs, name: first})
        found = self._try(extended)
        if found is None or len(found.ranges) < len(trial.ranges):
            return call, trial
        return extended, _Trial(found.ranges, max(found.num_positions, trial.num_positions))

    def _find_length(self, call: Call, ranges: dict[int, int], num_positions: int) -> int:
        """The longest sequence that the model takes and that is affordable."""
        given = max(_length_of(call, number) for number in ranges)
        if any(_length_of(call, number) != given for number in ranges):
            return given
        longest = min(num_positions, _MAX_LENGTH, self._num_affordable // _NUM_DRAWS, _MAX_SCORES // max(ranges.values()))
        # Some models keep the first rows of their table of positions for other purposes.
        candidates = [longest, longest - 1, longest - 2]
        while candidates[-1] > given:
            candidates.append(candidates[-1] // 2)
        for length in (candidate for candidate in candidates if candidate > given):
            filled = {number: torch.zeros(_count(call, number, length), dtype=torch.long) for number in ranges}
            if (places := _find_input(call, "position_ids")) is not None:
                filled[places] = torch.arange(length)
            found = self._try(_fill(call, filled, length))
            if found is not None and found.ranges.keys() >= ranges.keys():
                return length
        return given

    def _draw_all(self, size: int) -> Iterator[int]:
        """All numbers below `size` in a random order, then again in another one."""
        while True:
            yield from torch.randperm(size, generator=self.generator).tolist()


def _is_integer(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.dtype in (torch.int64, torch.int32)


def _length_of(call: Call, number: int) -> int:
    return call.leaves[number].shape[-1]


def _count(call: Call, number: int, length: int) -> int:
    return call.leaves[number].shape[:-1].numel() * length


def _find_input(call: Call, name: str) -> int | None:
    """The number of an input among the leaves of a call."""
    found = [number for number, leaf in enumerate(call.leaves) if leaf is call.kwargs.get(name, call)]
    return found[0] if found else None


def _fill(call: Call, values: dict[int, Tensor], length: int) -> Call:
    """The call with new values, given as one row each, in some of its leaves."""
    numbers = itertools.count()

    def replace(leaf: Any) -> Any:
        number = next(numbers)
        if number not in values:
            return leaf
        return values[number].to(leaf.device, leaf.dtype).reshape(*leaf.shape[:-1], length)

    return Call(*tree_map(replace, (call.args, call.kwargs)))


def read_num_positions(model: nn.Module) -> int:
    """How many positions a Hugging Face model says it has; 0 if it does not."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else 0
