"""Inner products between the units of two tensors, for a group at any place of a layout."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from onebasin.engines import LOCAL
from onebasin.engines.clock import spent_on
from onebasin.engines.work_meter import FLOPS_PER_BYTE, MATCHING
from onebasin.matching.problem import Problem, split_keys
from onebasin.relaxation.plans import plan_shape
from onebasin.symmetries import Group, Permutation, Symmetry
from onebasin.symmetries.layout import Term, names
from onebasin.symmetries.unrolling import Block, names_to_unroll, unroll
from onebasin.tensors.states import State
from onebasin.tensors.sums import add_up, inner, sum_pieces


def member_blocks(layout: Sequence[Term], members: Mapping[str, Group], *tensors: Tensor) -> Iterator[Block]:
    """The blocks of tensors of one layout that have a member on them, with every axis of a member a single factor."""
    unrolled = names_to_unroll(members.keys(), {name: group.parents for name, group in members.items()})
    for block in unroll(layout, unrolled, *tensors):
        if any(name in members for name in block.labels):
            yield block


def innermost_axes(members: Mapping[str, Group], block: Block) -> dict[int, list[int]]:
    """The axes of members that are nobody's parent in a block, each with the axes of its parents before it.

    A parent counts through its children.
    """
    own = {axis: name for axis, name in enumerate(block.labels) if name is not None and name in members}
    chains = {axis: [*block.parent_axes(axis, members[name].parents), axis] for axis, name in own.items()}
    return {a: chain for a, chain in chains.items() if not any(a in other[:-1] for other in chains.values())}


def has_siblings(symmetry: Symmetry, key: str, members: Mapping[str, Group]) -> bool:
    """Whether several members meet on a block of a tensor of which none is a parent of the others."""
    return any(len(set(labels)) > 1 for labels in _innermost_labels(symmetry, key, members))


def has_twins(symmetry: Symmetry, key: str, members: Mapping[str, Group]) -> bool:
    """Whether one member is on several axes of a block of a tensor, so that the tensor is quadratic in what is decided."""
    return any(len(set(labels)) < len(labels) for labels in _innermost_labels(symmetry, key, members))


def _innermost_labels(symmetry: Symmetry, key: str, members: Mapping[str, Group]) -> Iterator[list[str | None]]:
    layout = symmetry.layouts[key]
    shape_only = torch.empty([term.size for term in layout], device="meta")
    for block in member_blocks(layout, members, shape_only):
        yield [block.labels[axis] for axis in innermost_axes(members, block)]


def reduce_to(tensor: Tensor, axes: list[int], reduction: Callable[..., Tensor] = torch.sum) -> Tensor:
    """Sum, or reduce otherwise, over all axes but these, which come in the order given."""
    others = [axis for axis in range(tensor.dim()) if axis not in axes]
    kept = reduction(tensor, dim=others) if others else tensor
    order = sorted(axes)
    return kept.permute([order.index(axis) for axis in axes])


def products(symmetry: Symmetry, target: Tensor, source: Tensor, axes: list[int], labels: Sequence[str | None]) -> Tensor:
    """Inner products over all axes but these: S[h, j, d, e] = sum_r target[h, d, r] source[j, e, r]."""
    letters = list(string.ascii_lowercase[: target.dim()])
    theirs, result = list(letters), ""
    for axis in axes:
        result += letters[axis]
        if labels[axis] in symmetry.groups:
            theirs[axis] = letters[axis].upper()
            result += theirs[axis]
    return torch.einsum(f"{''.join(letters)},{''.join(theirs)}->{result}", target, source)


def touched_keys(symmetry: Symmetry, keys: tuple[str, ...], groups: list[Group]) -> list[str]:
    """The parameters that some groups move."""
    members = {g.name for g in groups}
    return [key for key in keys if names(symmetry.layouts[key]) & members]


def order_from_anchors(symmetry: Symmetry, sets: list[list[Group]], touched: list[list[str]]) -> list[int]:
    """Sets of groups in the order in which their scores can be trusted.

    Next comes the set with the largest share of entries in tensors whose other groups are all decided, or that has none.
    """
    owners = {group.name: number for number, groups in enumerate(sets) for group in groups}
    beside = {
        key: {owners[name] for name in names(symmetry.layouts[key]) if name in owners} for keys in touched for key in keys
    }
    sizes = {key: math.prod(term.size for term in symmetry.layouts[key]) for key in beside}
    order: list[int] = []
    left = set(range(len(sets)))

    def share(number: int) -> float:
        decided = sum(sizes[key] for key in touched[number] if not beside[key] & left - {number})
        return decided / max(sum(sizes[key] for key in touched[number]), 1)

    while left:
        best = max(sorted(left), key=share)
        order.append(best)
        left.remove(best)
    return order


def inner_products(problem: Problem, current: State, updates: Sequence[Permutation], keys: Sequence[str]) -> list[float]:
    """Of the target and the source as it has been moved, and as it is moved by each of some updates, over some tensors."""
    function = functools.partial(_multiply_part, problem.bare, current, updates)
    sums = list(problem.engine.map(function, split_keys(keys), MATCHING if current.is_lazy else "", problem.count_bytes))
    return [math.fsum(each) for each in zip(*sums, strict=True)]


def _multiply_part(problem: Problem, current: State, updates: Sequence[Permutation], keys: Sequence[str]) -> list[float]:
    pieces: list[list[float]] = [[] for _ in range(1 + len(updates))]
    with spent_on("score"):
        for key in keys:
            target, own = problem.target[key], current[key]
            pieces[0] += sum_pieces(inner, own, target)
            for number, update in enumerate(updates, start=1):
                pieces[number] += sum_pieces(inner, update.move_tensor(key, own), target)
        return [add_up(each) for each in pieces]


def score(
    problem: Problem, source: State, groups: list[Group], keys: list[str], dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], bool]:
    """For each of some joint groups, the inner products of target and source units, in the shape of its plan.

    Args:
        problem: with the target.
        source: the source as it has been moved.
        groups: decided together.
        keys: of the tensors to compare.
        dtype: what to compute in; that of the problem if None.

    Returns:
        The scores, and whether they are exact: not where a tensor has the groups on it more than once.
    """
    function = functools.partial(_score_part, problem.bare, source, groups, dtype or problem.dtype)
    size = functools.partial(count_scoring, problem, groups)
    if not source.is_lazy:  # what is in memory is scored where it is
        scores, exact = LOCAL.reduce(function, split_keys(keys) or [[]], _add_scores)
        return scores, exact
    with problem.held(), problem.engine.broadcast(source):
        scores, exact = problem.engine.reduce(function, split_keys(keys) or [[]], _add_scores, MATCHING, size)
    return {name: value.to(problem.device) for name, value in scores.items()}, exact


def count_scoring(problem: Problem, groups: Sequence[Group], keys: Iterable[str]) -> float:
    """How much work the scores of joint groups on some tensors are, see `work_meter`: each entry meets many units."""
    sizes = problem.symmetry.sizes
    met = max(
        math.prod(plan_shape(problem.symmetry, group)) / math.prod(sizes[name] for name in (*group.parents, group.name))
        for group in groups
    )
    entries = sum(problem.target.shapes[key].numel() for key in keys)
    return problem.count_bytes(keys) + 2.0 * met * entries / FLOPS_PER_BYTE


_Scores = tuple[dict[str, Tensor], bool]


def _add_scores(first: _Scores, other: _Scores) -> _Scores:
    return {name: value + other[0][name] for name, value in first[0].items()}, first[1] and other[1]


def _score_part(problem: Problem, source: State, groups: list[Group], dtype: torch.dtype, keys: list[str]) -> _Scores:
    """The share of some tensors in scores; one of them is held at a time."""
    with spent_on("score"):
        return _score_tensors(problem, source, groups, dtype, keys)


def _score_tensors(problem: Problem, source: State, groups: list[Group], dtype: torch.dtype, keys: list[str]) -> _Scores:
    symmetry = problem.symmetry
    members = {g.name: g for g in groups}
    scores = {g.name: torch.zeros(plan_shape(symmetry, g), dtype=dtype, device=problem.device) for g in groups}
    exact = True
    for key in keys:
        tensors = (state[key].to(dtype) for state in (problem.target, source))
        for block in member_blocks(symmetry.layouts[key], members, *tensors):
            innermost = innermost_axes(members, block)
            exact = exact and len(innermost) == 1
            for axis, chain in innermost.items():
                target, own = block.tensors
                scores[block.labels[axis] or ""] += products(symmetry, target, own, chain, block.labels)
    return scores, exact
