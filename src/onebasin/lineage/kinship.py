"""Are units of two networks related? Two tests on one group of units.

Both compare rows: all weights of a unit, each tensor scaled to the same size per entry. A test counts the units that a
matching pairs as another one does, and `chance` gives the p-value of the count.

*Order.* The best matching of the rows is compared with the identity. If B was trained from a random start of its own, in a
way that treats units alike, then B with its units in another order is as probable as B: the matching is a uniformly random
permutation, whatever A is, and whatever both have learned from the same data. Exact. It sees nothing if B was reordered.

*Residual.* Rows are divided in two: their parts along the upper half of the singular directions of A's rows, where what was
learned is large, and their parts along the lower half, where mostly the random start of A is left. Units are paired by the
upper parts; then the lower parts are matched, and compared with these pairs. If B has a random start of its own, the lower
parts know nothing of the pairs, unless features that both have learned reach into them. What they may reach is a tolerance:
the share of units that agree beyond chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.lineage.chance import count_by_chance, tail
from onebasin.matching.scores import innermost_axes, member_blocks
from onebasin.relaxation.assignment import assign
from onebasin.symmetries import Group, Symmetry
from onebasin.tensors.states import State

MAX_UNITS = 512
"""Of A that are compared, chosen at random where there are more: their p-values reach 1e-300."""
_FEWEST_DIRECTIONS = 8
"""Directions that are left for residuals: fewer tell units apart by nothing but features."""
_RANK = 1e-7
"""Directions with less of the largest eigenvalue are rounding."""


@dataclass(frozen=True)
class Evidence:
    """What a test on one group of units found.

    Attributes:
        test: "order" or "residual".
        group: of units.
        num_units: that were compared.
        num_agreeing: of them.
        p_value: of so many, or more, under the null hypothesis of the test.
        best: the p-value if all units had agreed.
        keys: the tensors that were compared.
        other: the tensors of the network with more blocks, if they have other names.
    """

    test: str
    group: str
    num_units: int
    num_agreeing: int
    p_value: float
    best: float
    keys: tuple[str, ...]
    other: tuple[str, ...] = ()


def compare_order(
    symmetry: Symmetry, groups: Sequence[Group], keys: Sequence[str], a: State, b: State, generator: torch.Generator
) -> list[Evidence]:
    """Test groups that are nested in each other, each on tensors of its own. Ancestors are taken as they stand."""
    chosen = {group.name: torch.randperm(group.size, generator=generator)[:MAX_UNITS] for group in groups}
    scores: dict[str, Tensor] = {}
    used: dict[str, list[str]] = {}
    for name, key, rows in _share_out(symmetry, groups, keys, a, b):
        ours, theirs = (_scale(each[:, chosen[name]]) for each in rows)
        products = (ours @ theirs.mT).double()
        scores[name] = scores[name] + products if name in scores else products
        used.setdefault(name, []).append(key)
    found = []
    for name, total in scores.items():
        num_members, size, _ = total.shape
        matched = _match(total, generator)
        num_agreeing = int((matched == torch.arange(size)).sum())
        chances, num_units = count_by_chance(size, num_members), size * num_members
        p_value, best = tail(num_agreeing, chances, _draw(generator)), tail(num_units, chances, 1)
        found.append(Evidence("order", name, num_units, num_agreeing, p_value, best, tuple(dict.fromkeys(used[name]))))
    return found


def compare_residuals(
    symmetry: Symmetry,
    group: Group,
    keys: Sequence[str],
    a: State,
    b: State,
    generator: torch.Generator,
    tolerance: float,
    flipped: Sequence[str] = (),
) -> Evidence | None:
    """Test a group without ancestors, whose neighbours in B have been aligned to those in A.

    Args:
        symmetry: of both.
        group: whose units to compare.
        keys: of the tensors.
        a: the tensors of A.
        b: those of B.
        generator: of random numbers.
        tolerance: the share of units that may agree because of what both have learned.
        flipped: the tensors in which the units of B may have changed their signs.

    Returns:
        None if the rows are too short.
    """
    chosen = torch.randperm(group.size, generator=generator)[:MAX_UNITS]
    inner = torch.zeros(len(chosen), len(chosen), dtype=torch.float64)
    fixed, turned = (torch.zeros(len(chosen), group.size, dtype=torch.float64) for _ in range(2))
    used = []
    for _, key, rows in _share_out(symmetry, [group], keys, a, b):
        ours, theirs = _scale(rows[0][0, chosen]), _scale(rows[1][0])
        inner += (ours @ ours.mT).double()
        cross = turned if key in flipped else fixed
        cross += (ours @ theirs.mT).double()
        used.append(key)
    values, vectors = torch.linalg.eigh(inner)
    is_there = values > _RANK * values[-1]
    values, vectors = values[is_there], vectors[:, is_there]  # from the smallest up
    half = len(values) // 2
    if half < _FEWEST_DIRECTIONS:
        return None
    lower, upper = vectors[:, :half], vectors[:, half:]
    # The rows of B along the upper directions, beside those of A: each pair of units counts with its better sign.
    sides = [upper @ (upper.mT @ cross) for cross in (fixed, turned)]
    pairs = _match(sides[0] + sides[1].abs(), generator)
    signs = torch.where(sides[1].gather(1, pairs[:, None])[:, 0] < 0, -1.0, 1.0).double()
    along = lower.mT @ (fixed[:, pairs] + signs * turned[:, pairs])  # (directions, pairs)
    sizes = torch.linalg.vector_norm(along / values[:half, None].sqrt(), dim=0)
    matched = _match((lower @ along) / sizes.clamp_min(1e-30), generator)
    num_agreeing = int((matched == torch.arange(len(chosen))).sum())
    chances = count_by_chance(len(chosen), 1, tolerance)
    p_value, best = tail(num_agreeing, chances, _draw(generator)), tail(len(chosen), chances, 1)
    return Evidence("residual", group.name, len(chosen), num_agreeing, p_value, best, tuple(dict.fromkeys(used)))


def _draw(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def _match(scores: Tensor, generator: torch.Generator) -> Tensor:
    """The best column for each row, (*batch, rows). Columns are shuffled first, so that ties are broken at random."""
    order = torch.randperm(scores.shape[-1], generator=generator)
    return order[assign(scores[..., order])]


def _share_out(
    symmetry: Symmetry, groups: Sequence[Group], keys: Sequence[str], a: State, b: State
) -> Iterator[tuple[str, str, list[Tensor]]]:
    """Each part of a tensor is given to one of the groups on it, the last: so what tests of groups look at is disjoint.

    Parts with the group on two of their axes, and parts with one number per unit, are left out.

    Yields:
        The name of the group, that of the tensor, and the rows in both networks, (members, n, weights).
    """
    members = {group.name: group for group in groups}
    order = {name: number for number, name in enumerate(members)}
    for key in keys:
        for block in member_blocks(symmetry.layouts[key], members, a[key], b[key]):
            innermost = innermost_axes(members, block)
            axis = max(innermost, key=lambda each: order[block.labels[each] or ""])
            name, axes = block.labels[axis] or "", innermost[axis]
            if block.labels.count(name) == 1 and math.prod(block.sizes) > math.prod(block.sizes[each] for each in axes):
                size = block.sizes[axis]
                front = tuple(range(len(axes)))
                rows = [tensor.movedim(tuple(axes), front).flatten(len(axes)) for tensor in block.tensors]
                yield name, key, [each.reshape(-1, size, each.shape[-1]).float().cpu() for each in rows]


def _scale(rows: Tensor) -> Tensor:
    """Rows whose mean square is one."""
    sizes = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / sizes.clamp_min(1e-30) * rows.shape[-1] ** 0.5
