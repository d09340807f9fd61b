"""An alignment problem, checked and ready: what every method works on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.landscape.normalised_twin import make_twin
from onebasin.relaxation.objectives import Objective, each_tied_once, parameter_keys
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.tensors.progress import Progress
from onebasin.tensors.states import Model, State, StateDict, read_state
from onebasin.torch_internals import tree_map

Entry = dict[str, Any]
"""One entry of the history of an alignment."""
_NUM_COMPARED = 4
"""Batches that hard permutations are compared on."""


def ignore(*_: Any) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Problem:
    """Find the permutation of `source` that costs least beside `target`. Methods start from the identity.

    Attributes:
        symmetry: its groups are the ones to decide.
        source: the tensors to permute, in the computing type, on the computing device; both or neither are lazy.
        target: the tensors they are to match.
        keys: the parameters, each tied tensor once.
        objective: bound to the architecture.
        batches: the data, if any, on the computing device; read again from the start each time.
        compared: the batches that hard permutations are compared on; empty if the objective uses no data.
        model: the architecture, for methods that look at activations.
        seed: for everything random.
        report: called with every entry of the history.
        progress: called within a sweep or a descent with what is being done, how much of it is done, and how much there is.
        is_started: whether the source was moved to where scales or bases are to start, so that none are to be found anew.
    """

    symmetry: Symmetry
    source: State
    target: State
    keys: tuple[str, ...]
    objective: Objective
    batches: Iterable[Any] | None = None
    compared: Sequence[Any] = ()
    model: nn.Module | None = None
    seed: int = 0
    report: Callable[[Entry], None] = ignore
    progress: Progress = ignore
    is_started: bool = False

    @property
    def device(self) -> torch.device:
        """Where to compute."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """What to compute in."""
        return self.target.dtype

    def starting_from(self, start: Permutation | Transform) -> Problem:
        """The same problem with the source moved beforehand."""
        if start.is_identity:
            return self
        if isinstance(start, Permutation):
            return replace(self, source=self.permuted(start))
        return replace(self, source=self.source.map(self._fit(start).move))

    def _fit(self, start: Transform) -> Transform:
        """A transform that knows the tensors of this problem, which may be those of normalised twins."""
        if start.symmetry.layouts.keys() == self.symmetry.layouts.keys():
            return start
        if start.symmetry.groups != self.symmetry.groups:
            raise ValueError(
                "an objective with repaired=True looks at normalised twins, which can start from scales of all groups only: "
                "leave out groups=, or start from a permutation"
            )
        return Transform(Permutation(self.symmetry, start.permutation.indices), start.logarithms, start.matrices)

    def permuted(self, permutation: Permutation) -> State:
        """The source, permuted hard; only tensors that move are new."""
        layouts = self.symmetry.layouts
        return self.source.map(lambda key, value: permutation.move(value, layouts[key]))

    def advance(self, current: State, update: Permutation, total: Permutation, keys: Iterable[str]) -> State:
        """The source permuted by `total`, computed from an earlier permuted source where that is in memory.

        Args:
            current: the source as it was permuted before the update.
            update: the last permutation in `total`.
            total: all permutations so far, with the update.
            keys: the tensors that the update moves.
        """
        if current.is_lazy:  # it keeps no tensors: each reading permutes the source again
            return self.permuted(total)
        return StateDict({**current, **{key: update.move(current[key], self.symmetry.layouts[key]) for key in keys}})

    def stream(self) -> Iterator[Any]:
        """Batches for the objective, without end; None each time if it uses no data."""
        if self.batches is None or not self.objective.uses_data:
            yield from itertools.repeat(None)
        while True:
            yield from self.batches or ()

    def fresh(self, params: Mapping[str, Any]) -> StateDict:
        """The same parameters with buffers of their own: a batch norm in train mode writes into its statistics."""
        counted = {key for tied in self.symmetry.ties for key in tied} | set(self.keys)
        return StateDict({k: v.clone() if isinstance(v, Tensor) and k not in counted else v for k, v in params.items()})

    def substitute(self, state: Mapping[str, Any], live: Mapping[str, Tensor]) -> StateDict:
        """A state with other tensors in place of some of its own, everywhere they are tied, and buffers of its own."""
        first = {key: keys[0] for keys in self.symmetry.ties for key in keys}
        return self.fresh({key: live.get(key, live.get(first.get(key, key), value)) for key, value in state.items()})

    def cost(self, permutation: Permutation) -> float:
        """The cost of a hard permutation."""
        if self.objective.uses_data:
            return self.cost_of(self.permuted(permutation))
        lazy = replace(self, source=self.source.lazily())  # a distance reads each tensor once: one at a time is held
        return self.cost_of(lazy.permuted(permutation))

    def cost_of_copy(self, permutation: Permutation) -> float:
        """The cost of a permutation that is known to make the parameters equal to the target's: they need not be moved."""
        layouts, known = self.symmetry.layouts, set(self.keys)
        source = self.source.lazily()
        return self.cost_of(
            source.map(lambda key, value: self.target[key] if key in known else permutation.move(value, layouts[key]))
        )

    def cost_of(self, params: State) -> float:
        """The cost of hard parameters: the mean over the batches that permutations are compared on."""
        with torch.no_grad():
            if not self.compared:
                return float(self.objective.judge(params, self.target, None))
            costs = [self.objective.judge(self.fresh(params), self.target, batch) for batch in self.compared]
            return float(torch.stack(costs).mean())


def make_problem(
    model: Model, to: Model, symmetry: Symmetry, objective: Objective, data: Iterable[Any] | None, lazily: bool
) -> Problem:
    """Both states on the device of the target and in one type, and the objective bound."""
    if objective.repaired and data is not None and isinstance(model, nn.Module):
        twins = [make_twin(each, symmetry, data) for each in (model, _fill(model, to))]
        (model, symmetry), (to, _) = (twin or (each, symmetry) for twin, each in zip(twins, (model, to), strict=True))
    source, target = (read_state(m) if lazily else read_state(m).load() for m in (model, to))
    if lazily and (source.is_lazy or target.is_lazy):
        source, target = source.lazily(), target.lazily()
    keys = each_tied_once(parameter_keys(model if isinstance(model, nn.Module) else target), symmetry)
    if not keys:
        raise ValueError("the model has no floating parameters to align")
    device, dtype = target.device, torch.promote_types(source.dtype, target.dtype)
    source, target = (state.tie(symmetry.ties).to(device, dtype) for state in (source, target))
    module = None
    if isinstance(model, nn.Module):
        module = to if isinstance(to, nn.Module) else model
        if data is not None:  # it will be run
            module = copy.deepcopy(module).to(device, dtype)
    bound = objective.bind(module if module is not None else StateDict({key: target.shapes[key] for key in keys}))
    batches = None if data is None else _MovedBatches(data, device, dtype)
    compared: Sequence[Any] = ()
    if batches is not None and objective.uses_data:
        compared = [batch for batch, _ in zip(batches, range(_NUM_COMPARED), strict=False)]
    return Problem(symmetry, source, target, keys, bound, batches, compared, module)


def _fill(model: nn.Module, state: Model) -> nn.Module:
    """A module with a state, which may be one already."""
    if isinstance(state, nn.Module):
        return state
    filled = copy.deepcopy(model)
    filled.load_state_dict(state)
    return filled


@dataclass(frozen=True)
class _MovedBatches:
    """Batches on the computing device, their floating tensors in the computing type."""

    data: Iterable[Any]
    device: torch.device
    dtype: torch.dtype

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            yield tree_map(self._move, batch)

    def _move(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, self.dtype if value.is_floating_point() else None)
