"""How far a transform goes beyond a permutation, in numbers: each change of basis, and each positive scale."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.symmetries.structure import BasisKind
from onebasin.symmetries.transform import Transform

_RIGID = ("orthogonal", "centred", "signed")
"""Kinds of bases whose matrices change no lengths."""


@dataclass(frozen=True)
class BasisSize:
    """A change of basis.

    Attributes:
        name: of the basis.
        group: of its units.
        kind: of its matrices.
        size: units that one matrix mixes.
        num_members: how many matrices there are, such as one for each head.
        distance: the norm of M - 1 over that of 1, over all matrices M: zero if units are only permuted, and at most two for
            rotations and signs.
        condition: the largest ratio of the largest stretch of a matrix to its smallest.
    """

    name: str
    group: str
    kind: BasisKind
    size: int
    num_members: int
    distance: float
    condition: float


@dataclass(frozen=True)
class ScaleSize:
    """A positive scale.

    Attributes:
        name: of the scale.
        group: of its units.
        size: units of one member of the group.
        num_members: how many members there are.
        lowest: the smallest factor.
        highest: the largest factor.
    """

    name: str
    group: str
    size: int
    num_members: int
    lowest: float
    highest: float


def measure_bases(transform: Transform) -> list[BasisSize]:
    """The changes of basis of a transform in the order of its symmetry, those that change nothing included.

    >>> import onebasin as ob
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> symmetry = ob.symmetry(model, torch.zeros(1, 4), kinds="all")
    >>> twice = ob.Transform(symmetry.identity(), {}, {name: 2 * torch.eye(8) for name in symmetry.bases})
    >>> [(each.kind, each.size, each.num_members, each.distance, each.condition) for each in measure_bases(twice)]
    [('linear', 8, 1, 1.0, 1.0)]
    """
    found = []
    for name, basis in transform.symmetry.bases.items():
        matrices = transform.matrices.get(name)
        if matrices is None:
            continue
        size = matrices.shape[-1]
        flat = matrices.reshape(-1, size) if basis.kind == "signed" else matrices.reshape(-1, size, size)
        distance = _distance(flat, is_diagonal=basis.kind == "signed")
        condition = 1.0 if basis.kind in _RIGID else float(torch.linalg.cond(flat).max())
        found.append(BasisSize(name, basis.group, basis.kind, size, len(flat), distance, condition))
    return found


def measure_scales(transform: Transform) -> list[ScaleSize]:
    """The positive scales of a transform, likewise."""
    found = []
    for name, scale in transform.symmetry.scales.items():
        logarithms = transform.logarithms.get(name)
        if logarithms is None:
            continue
        size = logarithms.shape[-1]
        ends = (math.exp(float(end)) for end in (logarithms.min(), logarithms.max()))
        found.append(ScaleSize(name, scale.group, size, logarithms.numel() // size, *ends))
    return found


def count_kinds(transform: Transform) -> dict[str, int]:
    """How many changes of basis of each kind there are."""
    return dict(Counter(basis.kind for name, basis in transform.symmetry.bases.items() if name in transform.matrices))


def _distance(matrices: Tensor, is_diagonal: bool) -> float:
    unit = torch.ones(()) if is_diagonal else torch.eye(matrices.shape[-1])
    return float((matrices - unit.to(matrices)).norm()) / math.sqrt(matrices.shape[0] * matrices.shape[-1])
