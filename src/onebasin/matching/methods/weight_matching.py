"""Weight matching (Ainsworth et al., "Git Re-Basin", 2022): coordinate descent on the inner product of the weights.

For one group with its neighbours held fixed, the permutation with the largest inner product is a linear assignment. Sweeps
over the groups in random order go on until nothing changes. Nested groups are decided together (see `hardening`). Where a
group is on both axes of one tensor the problem is quadratic: such a step is taken only if the true inner product grows.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from onebasin.engines.clock import spent_on
from onebasin.engines.journal import Values
from onebasin.engines.reduction_tree import FAN_IN
from onebasin.engines.work_meter import MATCHING
from onebasin.matching.methods.base import Match, Method, check_choice, check_count
from onebasin.matching.methods.basis_matching import sweep_transforms
from onebasin.matching.problem import Entry, Problem, ignore
from onebasin.matching.scores import count_scoring, inner_products, order_from_anchors, score, touched_keys
from onebasin.relaxation.assignment import DEVICE_FROM, THREADS_FROM
from onebasin.relaxation.hardening import harden, joint_groups
from onebasin.relaxation.objectives import WeightDistance
from onebasin.symmetries import Group, Permutation, Symmetry
from onebasin.tensors.states import State

_INDEX = "index of "
_MOST_TOGETHER = 2**28  # bytes of parameters; of larger networks several permuted sources might not fit into memory


@dataclass(frozen=True)
class WeightMatching(Method):
    """Sweep over the groups until the inner product of the weights grows no more.

    It reads tensors one at a time, so that lazy states are matched without being loaded.

    Attributes:
        max_sweeps: the most sweeps to make.
        order: of the groups in the first sweep. "anchored": first those beside inputs and outputs, whose order is known,
            then those beside groups that have been decided; scores mean something from the first group on, and sweeps are
            few. "random": as in the paper. The later sweeps go in random order.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> result = ob.align(b, to=a, example_inputs=torch.zeros(1, 4), method=ob.WeightMatching(max_sweeps=20))
    >>> result.converged
    True
    """

    max_sweeps: int = 100
    order: Literal["anchored", "random"] = "anchored"

    name: ClassVar[str] = "weight-matching"
    reads_lazily: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("max_sweeps", self.max_sweeps, at_least=1)
        check_choice("order", self.order, "anchored", "random")

    def match(self, problem: Problem) -> Match:
        """Sweep from the identity."""
        if problem.symmetry.bases or problem.symmetry.scales:
            found, converged, distance = sweep_transforms(problem, self.max_sweeps)
            cost = problem.cost(found.permutation)
            # What is read from disk is transformed once: in memory, a transform that was built up has rounded more often.
            is_known = problem.source.is_lazy and problem.objective == WeightDistance("l2", problem.keys)
            return Match(
                found.permutation,
                cost,
                converged,
                logarithms=found.logarithms,
                matrices=found.matrices,
                whole_cost=distance if is_known else None,
            )
        start = problem.symmetry.identity()
        permutation, converged = sweep(problem, start, self.max_sweeps, anchored=self.order == "anchored")
        return Match(permutation, problem.cost(permutation), converged)


def sweep(
    problem: Problem,
    start: Permutation,
    max_sweeps: int = 100,
    only: Collection[str] | None = None,
    anchored: bool = False,
) -> tuple[Permutation, bool]:
    """Raise the inner product of the weights from a given permutation.

    Args:
        problem: what to match.
        start: the permutation to begin with.
        max_sweeps: the most sweeps to make.
        only: decide these groups, and those nested with them; all if None.
        anchored: see `WeightMatching.order`.

    Returns:
        A permutation whose inner product is not smaller, and whether the last sweep changed nothing.
    """
    generator = torch.Generator().manual_seed(problem.seed)
    symmetry = problem.symmetry
    total, current = start, problem.permuted(start)
    sets = [groups for groups in joint_groups(symmetry) if only is None or any(g.name in only for g in groups)]
    touched = [touched_keys(symmetry, problem.keys, groups) for groups in sets]
    stale = set(range(len(sets)))  # decided again only if a tensor they score has changed: the answer would be the same
    with problem.held():
        for number_of_sweep in range(max_sweeps):
            if current.is_lazy:  # the engine reports; after the first sweep mostly comes one in which nothing moves
                left = sum(_count_work(problem, (sets[number], touched[number])) for number in stale)
                problem.engine.meter.expect_left(MATCHING, left * (2 if number_of_sweep == 0 and max_sweeps > 1 else 1))
            num_moved = done = 0
            order = torch.randperm(len(sets), generator=generator).tolist()
            if anchored and number_of_sweep == 0:
                order = order_from_anchors(symmetry, sets, touched)
            while done < len(order):
                batch, done = _take_independent(order, done, touched, stale, many=current.is_lazy)
                stale.difference_update(batch)
                found = _decide_all(problem, current, [(sets[number], touched[number]) for number in batch])
                for place, (number, decision) in enumerate(zip(batch, found, strict=True)):
                    if not current.is_lazy:
                        problem.progress(f"sweep {number_of_sweep + 1}", done - len(batch) + place, len(sets))
                    if not decision["is_better"]:
                        continue
                    keys, update = touched[number], _read_update(symmetry, sets[number], decision)
                    following = update @ total
                    if not current.is_lazy:
                        current = problem.advance(current, update, following, keys)
                    num_moved, total = num_moved + 1, following
                    others = (n for n, theirs in enumerate(touched) if not set(theirs).isdisjoint(keys))
                    stale |= {n for n in others if n != number or not decision["is_exact"]}
                if current.is_lazy:  # it keeps no tensors: each reading permutes the source again
                    current = problem.permuted(total)
            (inner,) = inner_products(problem, current, (), problem.keys) if problem.keys else (0.0,)
            problem.report({"sweep": number_of_sweep, "moved": num_moved, "inner": inner})
            if not num_moved:
                return total, True
    return total, False


def sweep_all(problem: Problem, starts: Sequence[Permutation]) -> Iterator[Permutation]:
    """What `sweep` finds from each start, in their order; the starts are worked on at the same time where that is faster.

    Each sweep is a sequence of assignments, and each assignment runs on one core. Sweeps from the identity are anchored:
    they are weight matching as it is by default.
    """
    if not _can_sweep_together(problem):
        yield from (sweep(problem, start, anchored=start.is_identity)[0] for start in starts)
        return
    stream = torch.cuda.current_stream(problem.device) if problem.device.type == "cuda" else None

    def run(start: Permutation) -> tuple[Permutation, list[Entry]]:
        entries: list[Entry] = []
        with torch.cuda.stream(stream):  # a new thread has the default stream of the first device
            moved = replace(problem, report=entries.append, progress=ignore)
            return sweep(moved, start, anchored=start.is_identity)[0], entries

    with ThreadPoolExecutor(min(len(starts), torch.get_num_threads())) as pool:
        for found, entries in pool.map(run, starts):
            for entry in entries:
                problem.report(entry)
            yield found


def _can_sweep_together(problem: Problem) -> bool:
    """Whether threads gain something, each has memory for a permuted source, and the engine keeps no order of results."""
    if problem.source.is_lazy or problem.engine.is_remote or problem.engine.journal is not None:
        return False
    largest = max((group.size for group in problem.symmetry.groups.values()), default=0)
    num_bytes = sum(problem.source.shapes[key].nbytes for key in problem.keys)
    is_on_host = problem.device.type != "cuda" or largest**2 < DEVICE_FROM
    return torch.get_num_threads() > 1 and largest >= THREADS_FROM and is_on_host and num_bytes <= _MOST_TOGETHER


def _take_independent(
    order: list[int], start: int, touched: list[list[str]], stale: set[int], many: bool
) -> tuple[list[int], int]:
    """The next sets to decide, none of which moves a tensor of another: so all of them can be decided at once.

    Args:
        order: of all sets.
        start: the place of the first.
        touched: the tensors of each set.
        stale: the sets that need to be decided.
        many: take as many as there are, not one.

    Returns:
        The sets, and the place of the one after them.
    """
    batch: list[int] = []
    taken: set[str] = set()
    for place in range(start, len(order)):
        number = order[place]
        if not taken.isdisjoint(touched[number]) or (batch and not many):
            return batch, place
        if number in stale:
            batch.append(number)
            taken.update(touched[number])
    return batch, len(order)


_Set = tuple[list[Group], list[str]]
"""Groups that are decided together, and the tensors that they move."""


def _decide_all(problem: Problem, current: State, members: list[_Set]) -> Iterator[Values]:
    """Decide sets of groups that are independent of each other.

    A set that moves few tensors is one task. The scores of one that moves many are a sum over tasks.
    """
    engine, check = problem.engine, functools.partial(_check_decision, problem.symmetry)
    with engine.broadcast(current):
        if len(members) == 1 and len(members[0][1]) > FAN_IN:
            compute = functools.partial(decide, problem, current, members[0])
            with engine.counting():
                decision = engine.checkpointed(compute, functools.partial(check, members[0]))
            yield decision
        else:
            function, size = functools.partial(decide, problem.bare, current), functools.partial(_count_work, problem)
            yield from engine.map_checkpointed(function, members, check, MATCHING if current.is_lazy else "", size)


def _count_work(problem: Problem, member: _Set) -> float:
    """How much work it is to decide some groups: their scores, and what they gain."""
    groups, keys = member
    return count_scoring(problem, groups, keys) + problem.count_bytes(keys)


def decide(problem: Problem, current: State, member: _Set) -> Values:
    """The best permutation of some groups while all others stay.

    Args:
        problem: what to match.
        current: the source as it has been moved.
        member: the groups, and the tensors that they move.

    Returns:
        Whether the inner product grows ("is_better"), whether the scores are those of it ("is_exact"), and the indices.
    """
    groups, keys = member
    scores, exact = score(problem, current, groups, keys)
    with spent_on("assign"):
        update = harden(problem.symmetry, scores, groups)
    if update.is_identity:
        return {"is_better": False, "is_exact": exact}
    before, after = inner_products(problem, current, [update], keys)
    # Ties are broken in some way or other by the assignment: a step that gains nothing would go round in circles.
    is_better = after - before > 1e-12 * abs(before) + (0.0 if exact else 1e-12)
    found = {f"{_INDEX}{group.name}": update[group.name] for group in groups} if is_better else {}
    return {"is_better": is_better, "is_exact": exact, **found}


def _read_update(symmetry: Symmetry, groups: list[Group], decision: Values, check: bool = False) -> Permutation:
    found = {group.name: decision[f"{_INDEX}{group.name}"] for group in groups}
    return Permutation(symmetry, {**symmetry.identity_indices, **found}, check=check)


def _check_decision(symmetry: Symmetry, member: _Set, decision: Values) -> None:
    """Refuse values that `decide` cannot have returned."""
    groups, _ = member
    if not all(isinstance(decision[name], bool) for name in ("is_better", "is_exact")):
        raise ValueError("it does not say what was decided")
    if not decision["is_better"]:
        return
    for group in groups:
        index = decision[f"{_INDEX}{group.name}"]
        if not isinstance(index, Tensor) or index.dtype != torch.int64:
            raise ValueError(f"the index of {group.name!r} does not consist of whole numbers")
    _read_update(symmetry, groups, decision, check=True)
