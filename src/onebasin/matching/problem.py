"""An alignment problem, checked and ready: what every method works on."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from onebasin.engines import LOCAL, Engine
from onebasin.engines.clock import spent_on
from onebasin.engines.journal import Values
from onebasin.engines.memory_limits import MemoryEstimate
from onebasin.engines.reduction_tree import FAN_IN
from onebasin.engines.work_meter import MEASURING
from onebasin.landscape.batches import copy_with_state
from onebasin.landscape.normalised_twin import make_twin
from onebasin.matching.cutting import cut_keys, cut_symmetry, find_blocks
from onebasin.relaxation.hardening import joint_groups
from onebasin.relaxation.objectives import Objective, WeightDistance, each_tied_once, parameter_keys
from onebasin.relaxation.plans import plan_shape
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.symmetries.layout import names
from onebasin.tensors.progress import Progress
from onebasin.tensors.row_blocks import cut_rows
from onebasin.tensors.states import LazyState, Model, State, StateDict, read_state
from onebasin.torch_internals import tree_map

_NUM_COMPARED = 4
"""Batches that hard permutations are compared on."""
_SPARED_FROM = 16
"""Batches of data from which on descents leave those out. Of less data they would miss too large a share."""

_MARGIN = 1.1
"""For what memory allocators do not give back at once."""


class Entry(TypedDict, total=False):
    """One entry of the history of an alignment: what a method tells about a step, a sweep or a round.

    Attributes:
        by: the method, or "polish" or "scales".
        step: the number of a step of a descent.
        sweep: the number of a sweep over all groups.
        round: the number of a round of exchanges.
        group: that the round is about.
        soft: the cost with the plans of this step.
        hard: the cost of the permutation that they harden to.
        gap: the difference of the two.
        best: the lowest cost of a permutation so far.
        cost: of scales and bases that are learned.
        polish: the cost after the polish.
        inner: the inner product of the parameters, which weight matching maximises.
        distance: of the parameters, squared, where bases are matched.
        moved: how many units a sweep moved.
        tried: exchanges that were evaluated.
        helping: those among them that lower the cost by themselves.
        exchanged: those that were made.
        gain: by how much they changed the cost.
        batches: that activations were gathered on.
        sites: places in the network where they were.
        groups_without_site: groups that were matched by their weights.
    """

    by: str
    step: int
    sweep: int
    round: int
    group: str
    soft: float
    hard: float
    gap: float
    best: float
    cost: float
    polish: float
    inner: float
    distance: float
    moved: int
    tried: int
    helping: int
    exchanged: int
    gain: float
    batches: int
    sites: int
    groups_without_site: int


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
        num_held_out: how many batches at the beginning of the data descents leave out, because they are compared on them.
        model: the architecture, for methods that look at activations.
        seed: for everything random.
        report: called with every entry of the history.
        progress: called within a sweep or a descent with what is being done, how much of it is done, and how much there is.
        is_started: whether the source was moved to where scales or bases are to start, so that none are to be found anew.
        engine: where work on tensors of lazy states is done.
    """

    symmetry: Symmetry
    source: State
    target: State
    keys: tuple[str, ...]
    objective: Objective
    batches: Iterable[Any] | None = None
    compared: Sequence[Any] = ()
    num_held_out: int = 0
    model: nn.Module | None = None
    seed: int = 0
    report: Callable[[Entry], None] = ignore
    progress: Progress = ignore
    is_started: bool = False
    engine: Engine = LOCAL

    @functools.cached_property
    def bare(self) -> Problem:
        """The tensors and the symmetry alone, as workers need them."""
        return Problem(self.symmetry, self.source, self.target, self.keys, WeightDistance(), seed=self.seed)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the tensors and the symmetry are sent to workers once."""
        with self.engine.broadcast(self.bare, self.symmetry, self.source, self.target):
            yield

    @property
    def device(self) -> torch.device:
        """Where to compute."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """What to compute in."""
        return self.target.dtype

    def reporting_as(self, name: str) -> Problem:
        """The same problem; entries of the history say that they are by this method."""

        def report(entry: Entry) -> None:
            self.report({**entry, "by": name})

        return replace(self, report=report)

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
        move = functools.partial(_move, permutation, self.symmetry)
        return self.source.rearrange(move) if isinstance(self.source, LazyState) else self.source.map(move)

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
        """Batches for the objective, without end and without those held out; None each time if it uses no data."""
        if self.batches is None or not self.objective.uses_data:
            yield from itertools.repeat(None)
        while True:
            batch = None
            for batch in itertools.islice(self.batches or (), self.num_held_out, None):
                yield batch
            if batch is None:
                raise ValueError("the data has no batches beside those that permutations are compared on")

    def fresh(self, params: Mapping[str, Any]) -> StateDict:
        """The same parameters, tied, with buffers of their own: a batch norm in train mode writes into its statistics."""
        ties = self.symmetry.ties
        counted = {key for tied in ties for key in tied} | set(self.keys)
        own = {k: v.clone() if isinstance(v, Tensor) and k not in counted else v for k, v in params.items()}
        return StateDict(own).tie(ties)

    def substitute(self, state: Mapping[str, Any], live: Mapping[str, Tensor]) -> StateDict:
        """A state with other tensors in place of some of its own, everywhere they are tied, and buffers of its own."""
        first = {key: keys[0] for keys in self.symmetry.ties for key in keys}
        return self.fresh({key: live.get(key, live.get(first.get(key, key), value)) for key, value in state.items()})

    def cost(self, permutation: Permutation) -> float:
        """The cost of a hard permutation."""
        if self.objective.uses_data:
            return self.cost_of(self.permuted(permutation))
        if self.source.is_lazy and type(self.objective) is WeightDistance:
            return self._sum_costs(self.objective, self.permuted(permutation))
        lazy = replace(self, source=self.source.lazily())  # a distance reads each tensor once: one at a time is held
        return self.cost_of(lazy.permuted(permutation))

    def _sum_costs(self, objective: WeightDistance, moved: State) -> float:
        """A distance of lazy states: sums over tensors, which the engine computes."""
        keys = objective.keys or self.keys
        function = functools.partial(_measure_part, objective, self.target, moved)

        def measure() -> Values:
            with self.held(), self.engine.broadcast(moved):
                sums = list(self.engine.map(function, split_keys(keys), MEASURING, self.count_bytes))
            return {"cost": objective.combine([each for part in sums for each in part])}

        return float(self.engine.checkpointed(measure, _check_cost)["cost"])

    def count_bytes(self, keys: Iterable[str]) -> float:
        """Of some tensors of both networks, in the type to compute in."""
        return 2.0 * sum(self.target.shapes[key].nbytes for key in keys)

    def cost_of_copy(self, permutation: Permutation) -> float:
        """The cost of a permutation that is known to make the parameters equal to the target's: they need not be moved."""
        source = self.source.lazily()
        moved = replace(self, source=source).permuted(permutation)
        read = functools.partial(_read_copy, frozenset(self.keys), self.target, moved)
        copied = LazyState(source.shapes, read, source.device)
        if self.source.is_lazy and type(self.objective) is WeightDistance:
            return self._sum_costs(self.objective, copied)
        return self.cost_of(copied)

    def cost_of(self, params: State) -> float:
        """The cost of hard parameters: the mean over the batches that permutations are compared on."""
        with torch.no_grad():
            if not self.compared:
                return float(self.objective.judge(params, self.target, None))
            costs = [self.objective.judge(self.fresh(params), self.target, batch) for batch in self.compared]
            return float(torch.stack(costs).mean())


def _check_cost(values: Values) -> None:
    if not isinstance(values["cost"], float):
        raise ValueError("it has no cost")


def _move(permutation: Permutation, symmetry: Symmetry, key: str, value: Tensor) -> Tensor:
    return permutation.move(value, symmetry.layouts[key])


def _read_copy(keys: frozenset[str], target: State, moved: State, key: str) -> Tensor:
    return target[key] if key in keys else moved[key]


def estimate_need(problem: Problem) -> MemoryEstimate:
    """What weight matching of lazy states holds at a time: a pair of tensors, and the scores of joint groups."""
    symmetry, engine, item = problem.symmetry, problem.engine, problem.dtype.itemsize
    tensor = item * max(problem.target.shapes[key].numel() for key in problem.keys)
    plans: dict[bool, int] = {False: 0, True: 0}  # the largest, by whether its scores are a sum over tasks
    for groups in joint_groups(symmetry):
        members = {group.name for group in groups}
        count = sum(1 for key in problem.keys if names(symmetry.layouts[key]) & members)
        size = item * sum(math.prod(plan_shape(symmetry, group)) for group in groups)
        plans[count > FAN_IN] = max(plans[count > FAN_IN], size)
    summed, largest = plans[True], max(plans.values())
    levels = 1 + math.ceil(math.log(max(len(problem.keys), 2), FAN_IN))
    # Weighing a step: a pair of tensors, the next pair, and one that is moved. Scores: their sum, and a product to add.
    scoring = max(5 * tensor, 4 * tensor + 2 * largest)
    worker = max(scoring, tensor + _count_assigning(largest, item), 6 * summed if engine.is_remote else 0)
    on_device = problem.device.type != "cpu"
    return MemoryEstimate(
        driver=_count_assigning(summed, item) if engine.is_remote else 0,
        worker=int(_MARGIN * (2 * tensor + 3 * summed if on_device else worker)),
        results=summed * (levels + (engine.most_under_way if engine.is_remote else 0)),
        device=int(_MARGIN * (5 * tensor + 6 * largest)) if on_device else 0,
    )


def _count_assigning(scores: int, item: int) -> int:
    """What an assignment holds: the scores, and twice the same in float64."""
    return scores + 2 * scores * 8 // item


def split_keys(keys: Sequence[str]) -> list[list[str]]:
    """Tensors in portions that one task works on. How they are split fixes the order of sums."""
    return [list(keys[start : start + FAN_IN]) for start in range(0, len(keys), FAN_IN)]


def _measure_part(objective: WeightDistance, target: State, source: State, keys: Sequence[str]) -> list[tuple[float, ...]]:
    with spent_on("score"):
        return [objective.sums(source[key], target[key]) for key in keys]


def make_problem(
    model: Model,
    to: Model,
    symmetry: Symmetry,
    objective: Objective,
    data: Iterable[Any] | None,
    lazily: bool,
    in_blocks: bool = False,
) -> Problem:
    """Both states on the device of the target and in one type, and the objective bound.

    Args:
        model: to be permuted.
        to: what it is to match.
        symmetry: with the groups to decide.
        objective: not yet bound.
        data: batches, if any.
        lazily: leave lazy states as they are.
        in_blocks: cut large tensors of lazy states, see `cutting`.
    """
    if objective.repaired and data is not None and isinstance(model, nn.Module):
        other = to if isinstance(to, nn.Module) else copy_with_state(model, to)
        twins = [make_twin(each, symmetry, data) for each in (model, other)]
        (model, symmetry), (to, _) = (twin or (each, symmetry) for twin, each in zip(twins, (model, to), strict=True))
    source, target = (read_state(m) if lazily else read_state(m).load() for m in (model, to))
    if lazily and (source.is_lazy or target.is_lazy):
        source, target = source.lazily(), target.lazily()
    keys = each_tied_once(parameter_keys(model if isinstance(model, nn.Module) else target), symmetry)
    if not keys:
        raise ValueError("the model has no floating parameters to align")
    device, dtype = target.device, torch.promote_types(source.dtype, target.dtype)
    source, target = (state.tie(symmetry.ties).to(device) for state in (source, target))
    module = None
    if isinstance(model, nn.Module):
        module = to if isinstance(to, nn.Module) else model
        if data is not None:  # it will be run
            module = copy.deepcopy(module).to(device, dtype)
    bound = objective.bind(module if module is not None else StateDict({key: target.shapes[key] for key in keys}))
    if in_blocks and type(bound) is WeightDistance and isinstance(source, LazyState) and isinstance(target, LazyState):
        blocks = find_blocks(symmetry, keys, source, target)
        source, target = cut_rows(source, blocks), cut_rows(target, blocks)
        symmetry, keys = cut_symmetry(symmetry, blocks), cut_keys(keys, blocks)
        bound = replace(bound, keys=cut_keys(bound.keys or keys, blocks))
    source, target = (state.to(device, dtype) for state in (source, target))
    batches = None if data is None else MovedBatches(data, device, dtype)
    kept, num_held_out = ([], 0) if data is None or not objective.uses_data else _hold_out(data)
    compared = list(MovedBatches(kept, device, dtype))
    return Problem(symmetry, source, target, keys, bound, batches, compared, num_held_out, module)


def _hold_out(data: Iterable[Any]) -> tuple[list[Any], int]:
    """The batches to compare permutations on, and how many of them descents leave out: all, or none of little data."""
    if (length := _find_length(data)) is not None:
        kept = list(itertools.islice(data, _NUM_COMPARED))
        return kept, len(kept) if length >= _SPARED_FROM else 0
    kept, count = [], 0
    for batch in itertools.islice(data, _SPARED_FROM):
        kept += [batch] if count < _NUM_COMPARED else []
        count += 1
    return kept, len(kept) if count == _SPARED_FROM else 0


def _find_length(data: Any) -> int | None:
    """How many batches there are, where that is known; a loader of a stream has a length in name alone."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True)
class MovedBatches:
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
