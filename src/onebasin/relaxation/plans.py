"""Plans: soft permutations, one per group, and the hard permutations among them."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.symmetries import Group, Permutation, Symmetry


def plan_shape(symmetry: Symmetry, group: Group) -> tuple[int, ...]:
    """The shape of a group's plan: a pair of axes (target, source) for each free parent, one for each fixed parent, (n, n).

    So a family of units in H heads has a plan of its own for every pair of heads: (H, H, d, d).
    """
    sizes = symmetry.sizes
    lead = [n for p in group.parents for n in [sizes[p]] * (2 if p in symmetry.groups else 1)]
    return (*lead, group.size, group.size)


def plans_of(permutation: Permutation, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A permutation as plans of zeros and ones: rows of the target, columns of the source.

    For a child, pairs of parents that do not meet have weight zero; they get the identity.
    """
    symmetry, plans = permutation.symmetry, {}
    for name, group in symmetry.groups.items():
        plan = torch.eye(group.size, dtype=dtype).expand(plan_shape(symmetry, group)).contiguous()
        plan[pair_index(permutation, group) or ...] = torch.eye(group.size, dtype=dtype)[permutation[name]]
        plans[name] = plan
    return plans


def pair_index(permutation: Permutation, group: Group) -> tuple[Tensor, ...]:
    """An index into the leading axes of a group's plan: for every combination of target parents, the pairs that meet."""
    symmetry = permutation.symmetry
    sizes = [symmetry.sizes[parent] for parent in group.parents]
    grid = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij") if sizes else ()
    index: list[Tensor] = []
    for parent, target, source in zip(group.parents, grid, permutation.parent_sources(group), strict=True):
        index += [target, source] if parent in symmetry.groups else [target]
    return tuple(index)
