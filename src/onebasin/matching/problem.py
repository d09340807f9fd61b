"""An alignment problem, checked and ready: what every method works on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.relaxation.objectives import WeightDistance
from onebasin.symmetries.permutation import Permutation
from onebasin.symmetries.structure import Symmetry
from onebasin.tensors.lazy import LazyState, make_lazy
from onebasin.tensors.states import State

Objective = Callable[[Mapping[str, Any], Mapping[str, Any], Any], Tensor]


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
        model: the architecture, for methods that look at activations.
        seed: for everything random.
        report: called with every entry of the history.
        track: called within a sweep or a descent with what is being done, how much of it is done, and how much there is.
        num_judged: batches that a hard permutation is judged on.
    """

    symmetry: Symmetry
    source: State | LazyState
    target: State | LazyState
    keys: tuple[str, ...]
    objective: Objective
    batches: Iterable[Any] | None = None
    model: nn.Module | None = None
    seed: int = 0
    report: Callable[[dict[str, Any]], None] = field(default=lambda entry: None)
    track: Callable[[str, int, int], None] = field(default=lambda what, done, total: None)
    num_judged: int = 4

    @property
    def device(self) -> torch.device:
        """Where to compute."""
        return self.target.device if isinstance(self.target, LazyState) else self.target[self.keys[0]].device

    @property
    def dtype(self) -> torch.dtype:
        """What to compute in."""
        return (self.target.shapes if isinstance(self.target, LazyState) else self.target)[self.keys[0]].dtype

    @property
    def floor(self) -> float:
        """No permutation costs less, as far as the objective knows."""
        return getattr(self.objective, "floor", -math.inf)

    def fresh(self, params: Mapping[str, Any]) -> State:
        """The same parameters with buffers of their own: a batch norm in train mode writes into its statistics."""
        counted = {key for tied in self.symmetry.ties for key in tied} | set(self.keys)
        return {k: v.clone() if isinstance(v, Tensor) and k not in counted else v for k, v in params.items()}

    def stream(self) -> Iterator[Any]:
        """Batches for ever; None for ever without data."""
        if self.batches is None:
            yield from itertools.repeat(None)
            return
        while True:
            empty = True
            for batch in self.batches:
                empty = False
                yield batch
            if empty:
                raise ValueError("the data has no batches (an iterator can be read once only: give a list or a loader)")

    def permuted(self, permutation: Permutation) -> State | LazyState:
        """The source, permuted hard; only tensors that move are new."""
        if isinstance(self.source, LazyState):
            return self._permuted_lazily(self.source, permutation)
        result = dict(self.source)
        for key, layout in self.symmetry.layouts.items():
            if isinstance(self.source.get(key), Tensor):
                result[key] = permutation.move(self.source[key], layout)
        for tied in self.symmetry.ties:
            for key in tied[1:]:
                if key in result and tied[0] in result:
                    result[key] = result[tied[0]]
        return result

    def _permuted_lazily(self, source: LazyState, permutation: Permutation) -> LazyState:
        return source.map(lambda key, value: permutation.move(value, self.symmetry.layouts[key]))

    def advance(
        self, current: State | LazyState, update: Permutation, total: Permutation, keys: Iterable[str]
    ) -> State | LazyState:
        """The source permuted by `total`, given as it is `current`ly and by the `update` that moves only `keys`."""
        if isinstance(current, LazyState):  # what was moved before is nowhere kept
            return self.permuted(total)
        return {**current, **{key: update.move(current[key], self.symmetry.layouts[key]) for key in keys}}

    def cost(self, permutation: Permutation) -> float:
        """The cost of a hard permutation: on the first batches, at fixed points of the line."""
        if self.batches is None and isinstance(self.objective, WeightDistance):  # reads each tensor once: hold one at a time
            return self.cost_of(self._permuted_lazily(make_lazy(self.source), permutation))
        return self.cost_of(self.permuted(permutation))

    def cost_of(self, params: State | LazyState) -> float:
        """The cost of hard parameters."""
        points = getattr(self.objective, "points", None)
        with torch.no_grad():
            if self.batches is None:
                return float(self.objective(params, self.target, None))
            total, count = 0.0, 0
            for batch in itertools.islice(self.batches, self.num_judged):
                fresh = self.fresh(params)
                if points is None:
                    total, count = total + float(self.objective(fresh, self.target, batch)), count + 1
                    continue
                for point in points():
                    total += float(self.objective.at(fresh, self.target, batch, point))  # type: ignore[attr-defined]
                    count += 1
        return total / count if count else math.nan


@dataclass(frozen=True)
class Found:
    """What a method found.

    Attributes:
        permutation: the best one.
        cost: its cost.
        history: an entry a step or sweep.
        converged: whether the method stopped by itself, not by its limit.
        logits: where a descent on logits ended, to go on from there.
    """

    permutation: Permutation
    cost: float
    history: list[dict[str, Any]]
    converged: bool
    logits: dict[str, Tensor] | None = None
