"""Inner products between the units of two tensors, for a group at any place of a layout."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from onebasin.symmetries import Group, Symmetry
from onebasin.symmetries.layout import Term
from onebasin.symmetries.unrolling import Block, names_to_unroll, unroll


def member_blocks(layout: Sequence[Term], members: Mapping[str, Group], *tensors: Tensor) -> Iterator[Block]:
    """The blocks of tensors of one layout that have a member on them, with every axis of a member a single factor."""
    names = names_to_unroll(members.keys(), {name: group.parents for name, group in members.items()})
    for block in unroll(layout, names, *tensors):
        if any(name in members for name in block.labels):
            yield block


def innermost_axes(members: Mapping[str, Group], block: Block) -> dict[int, list[int]]:
    """The axes of members that are nobody's parent in a block, each with the axes of its parents before it.

    A parent counts through its children.
    """
    own = {axis: name for axis, name in enumerate(block.labels) if name is not None and name in members}
    chains = {axis: [*block.parent_axes(axis, members[name].parents), axis] for axis, name in own.items()}
    return {a: chain for a, chain in chains.items() if not any(a in other[:-1] for other in chains.values())}


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
