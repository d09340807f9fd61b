"""Inner products between the units of two tensors, for a group at any place of a layout."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from onebasin.symmetries.layout import Factor, Product, Term, factors
from onebasin.symmetries.structure import Group, Symmetry


def blocks(
    terms: list[Term], target: Tensor, source: Tensor, members: Mapping[str, Group], homes: list[int] | None = None
) -> Iterator[tuple[list[str | None], list[int], Tensor, Tensor]]:
    """Both tensors with every axis that holds a member taken apart into its factors, one block for each segment."""
    homes = list(range(len(terms))) if homes is None else homes
    needed = set(members) | {p for g in members.values() for p in g.parents}
    for axis, term in enumerate(terms):
        if isinstance(term, Factor) or not any(f.name in needed for f in factors(term)):
            continue
        before, after = terms[:axis], terms[axis + 1 :]
        if isinstance(term, Product):
            sizes = [f.size for f in term.factors]
            wide = [*homes[:axis], *[homes[axis]] * len(sizes), *homes[axis + 1 :]]
            inside = [*before, *term.factors, *after]
            yield from blocks(inside, target.unflatten(axis, sizes), source.unflatten(axis, sizes), members, wide)
        else:
            pieces = (x.split([p.size for p in term.parts], dim=axis) for x in (target, source))
            for part, t, s in zip(term.parts, *pieces, strict=True):
                yield from blocks([*before, part, *after], t, s, members, homes)
        return
    labels = [t.name if isinstance(t, Factor) else None for t in terms]
    if any(name in members for name in labels):
        yield labels, homes, target, source


def chain_of(members: Mapping[str, Group], labels: list[str | None], homes: list[int], axis: int) -> list[int]:
    """The axes of a group's parents, fixed ones included, and its own."""
    chain = []
    for parent in members[labels[axis] or ""].parents:
        candidates = [a for a, name in enumerate(labels) if name == parent]
        own = [a for a in candidates if homes[a] == homes[axis]]
        chain.append((own or candidates)[0])
    return [*chain, axis]


def find_tips(members: Mapping[str, Group], labels: list[str | None], homes: list[int]) -> dict[int, list[int]]:
    """The axes of members that are nobody's parent here, each with its chain: a parent counts through its children."""
    chains = {axis: chain_of(members, labels, homes, axis) for axis, name in enumerate(labels) if name in members}
    return {a: chain for a, chain in chains.items() if not any(a in other[:-1] for other in chains.values())}


def reduce_to(tensor: Tensor, chain: list[int], reduction: Callable[..., Tensor] = torch.sum) -> Tensor:
    """Sum, or reduce otherwise, over all axes but those of a chain, which come in its order."""
    others = [axis for axis in range(tensor.dim()) if axis not in chain]
    kept = reduction(tensor, dim=others) if others else tensor
    order = sorted(chain)
    return kept.permute([order.index(axis) for axis in chain])


def products(symmetry: Symmetry, target: Tensor, source: Tensor, chain: list[int], labels: list[str | None]) -> Tensor:
    """Sum over all other axes: S[h, j, d, e] = sum_r target[h, d, r] source[j, e, r]."""
    letters = list(string.ascii_lowercase[: target.dim()])
    theirs, result = list(letters), ""
    for axis in chain:
        result += letters[axis]
        if labels[axis] in symmetry.groups:
            theirs[axis] = letters[axis].upper()
            result += theirs[axis]
    return torch.einsum(f"{''.join(letters)},{''.join(theirs)}->{result}", target, source)
