"""Is one network a permuted copy of the other?

The sum of a unit's weights and their norm stay the same when the units before and after it are reordered. So in a copy every
unit has the same few numbers, its fingerprint, as in the original, and comparing them finds the permutation: all groups at
once, with one pass over the tensors. Networks that are no copies differ in the norm of the first tensor already.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from onebasin.engines.clock import spent_on
from onebasin.engines.work_meter import COPIES
from onebasin.matching.problem import Problem
from onebasin.matching.scores import innermost_axes, member_blocks, products, reduce_to
from onebasin.relaxation.hardening import harden, joint_groups
from onebasin.relaxation.plans import plan_shape
from onebasin.symmetries import Group, Permutation
from onebasin.symmetries.layout import names

_LEAST_SPREAD = 1e-5
"""Numbers that differ less between units, beside the largest of them, differ by rounding: they tell nothing."""
_SAME_NORM = 1e-4
"""The same numbers in another order have norms that differ less than this, relatively."""
_NUM_PRINTS = 3
"""Numbers that tell any two units apart: with one, of thousands of units some agree to as many digits as there are."""


def find_copy(problem: Problem) -> Permutation | None:
    """The permutation that makes the parameters of both networks equal; None if they are no copies.

    Where units cannot be told apart by their fingerprints a copy may be missed.
    """
    with problem.held():
        return _find_copy(problem)


def _find_copy(problem: Problem) -> Permutation | None:
    symmetry, engine = problem.symmetry, problem.engine

    def count(key: str) -> float:
        return problem.count_bytes([key])

    prints = _take_fingerprints(problem)
    if prints is None:
        return None
    indices = dict(symmetry.identity_indices)
    sets = [(groups, [prints[group.name] for group in groups]) for groups in joint_groups(symmetry)]
    for found in engine.map(functools.partial(_match_prints, problem.bare), sets):
        indices.update(found)
    guess = Permutation(symmetry, indices, check=False)
    with engine.broadcast(guess):
        equal = engine.map(functools.partial(_is_equal, problem.bare, guess), problem.keys, COPIES, count)
        return guess if all(equal) else None


def _match_prints(problem: Problem, joint: tuple[list[Group], list[list[tuple[Tensor, Tensor]]]]) -> dict[str, Tensor]:
    """The best permutation of joint groups by their fingerprints."""
    groups, prints = joint
    with spent_on("assign"):
        scores = {group.name: _compare(problem, group, own) for group, own in zip(groups, prints, strict=True)}
        found = harden(problem.symmetry, scores, groups)
    return {group.name: found[group.name] for group in groups}


def _is_equal(problem: Problem, guess: Permutation, key: str) -> bool:
    with spent_on("score"):
        return torch.equal(guess.move_tensor(key, problem.source[key]), problem.target[key])


Fingerprints = dict[str, list[tuple[Tensor, Tensor]]]
"""For each group pairs of numbers, of target and source units, (*parents, n), in float64, with a deviation of one."""


def _take_fingerprints(problem: Problem) -> Fingerprints | None:
    """None if a number shows that these are no copies."""
    symmetry = problem.symmetry
    prints: Fingerprints = {name: [] for name in symmetry.groups}

    def list_wanted() -> Iterator[tuple[str, frozenset[str]]]:
        for key in problem.keys:
            wanting = frozenset(name for name, some in prints.items() if len(some) < _NUM_PRINTS)
            if names(symmetry.layouts[key]) & wanting:
                yield key, wanting

    def count(wanted: tuple[str, frozenset[str]]) -> float:
        return problem.count_bytes([wanted[0]])

    for found in problem.engine.map(functools.partial(_print_tensor, problem.bare), list_wanted(), COPIES, count):
        # Workers may have looked for more than is still wanting.
        full = {name for name, some in prints.items() if len(some) >= _NUM_PRINTS}
        for name, (norm, other, spread, largest), numbers in found:
            if name in full:
                continue
            if abs(norm - other) > _SAME_NORM * norm:
                return None
            if spread > _LEAST_SPREAD * largest:
                prints[name].append((numbers[0] / spread, numbers[1] / spread))
    return prints


def _print_tensor(
    problem: Problem, wanted: tuple[str, frozenset[str]]
) -> list[tuple[str, list[float], tuple[Tensor, Tensor]]]:
    """For groups on a tensor: norms of the numbers of target and source, their spread and size, and the numbers."""
    key, wanting = wanted
    symmetry, found = problem.symmetry, []
    with spent_on("score"):
        for block in member_blocks(symmetry.layouts[key], symmetry.groups, problem.target[key], problem.source[key]):
            for axis, chain in innermost_axes(symmetry.groups, block).items():
                name = block.labels[axis] or ""
                if name not in wanting:
                    continue
                alone = len(chain) == len(block.labels)  # nothing to reduce: a bias
                for reduction in (torch.sum,) if alone else (torch.sum, _take_norms):
                    ours, theirs = (reduce_to(tensor, chain, reduction).double() for tensor in block.tensors)
                    norms = [torch.linalg.vector_norm(each) for each in (ours, theirs)]
                    largest = torch.linalg.vector_norm(ours, float("inf"))
                    measured = torch.stack([*norms, ours.std(), largest]).tolist()
                    found.append((name, measured, (ours, theirs)))
    return found


def _take_norms(tensor: Tensor, dim: list[int]) -> Tensor:
    """Norms over some axes. PyTorch's own takes six times as long where the first axis is one of them.

    Squares of numbers beyond 1e19 are infinite in float32, as they are in PyTorch's own; such norms tell nothing.
    """
    return tensor.square().sum(dim).sqrt()


def _compare(problem: Problem, group: Group, prints: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Minus half the squared distances of all pairs of fingerprints, up to a constant per row, in the shape of a plan.

    A row that has its twin among the columns then has its largest score there, and the assignment need not be solved.
    """
    symmetry = problem.symmetry
    if not prints:  # a parent group: its score comes from its children, added when the plans are hardened
        return torch.zeros(plan_shape(symmetry, group), device=problem.device)
    target, source = (torch.stack(numbers, -1) for numbers in zip(*prints, strict=True))
    units = list(range(target.dim() - 1))
    center = target.mean(units)
    target, source = target - center, source - center
    norms = source.square().sum(-1, keepdim=True)
    target = torch.cat([target, torch.ones_like(norms)], -1)
    source = torch.cat([source, -norms / 2], -1)
    return products(symmetry, target, source, units, [*group.parents, group.name, None])
