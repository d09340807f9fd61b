"""Weight matching as Algorithm 1 of Git Re-Basin (Ainsworth et al., 2022) has it: a reference to measure against.

A loop in Python over the layers in random order, one assignment by SciPy each, until nothing changes. Every tensor is
permuted anew whenever it is looked at. Groups within groups (heads and their units) are beyond it.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import onebasin as ob
from onebasin.symmetries.layout import Factor, Product

Axes = dict[str, list[tuple[str, int]]]
"""For each permutation the tensors, and the axis of each, that it permutes."""


def match_plainly(
    target: dict[str, Tensor], source: dict[str, Tensor], symmetry: ob.Symmetry, seed: int = 0
) -> ob.Permutation:
    """The permutation of the source at which the sweeps come to rest."""
    if any(group.parents for group in symmetry.groups.values()):
        raise ValueError("plain weight matching knows no groups within groups")
    a, axes = _take_apart(target, symmetry)
    b, _ = _take_apart(source, symmetry)
    found = {name: torch.arange(group.size) for name, group in symmetry.groups.items()}
    names = list(found)
    generator = np.random.default_rng(seed)
    progress = True
    while progress:
        progress = False
        for number in generator.permutation(len(names)):
            name = names[number]
            size = symmetry.groups[name].size
            products = torch.zeros(size, size, device=next(iter(a.values())).device)
            for key, axis in axes[name]:
                moved = _permute(b[key], key, axis, axes, found)
                ours, theirs = (tensor.movedim(axis, 0).reshape(size, -1) for tensor in (a[key], moved))
                products += ours @ theirs.T
            scores = products.double().cpu().numpy()
            columns = linear_sum_assignment(scores, maximize=True)[1]
            old, new = (scores[np.arange(size), index].sum() for index in (found[name].numpy(), columns))
            progress = progress or bool(new > old + 1e-12)
            found[name] = torch.from_numpy(columns)
    return ob.Permutation(symmetry, found)


def _take_apart(state: dict[str, Tensor], symmetry: ob.Symmetry) -> tuple[dict[str, Tensor], Axes]:
    """Tensors with an axis for every group, of parameters alone."""
    tensors: dict[str, Tensor] = {}
    axes: Axes = {name: [] for name in symmetry.groups}
    for key, layout in symmetry.layouts.items():
        tensor = state[key]
        if not tensor.is_floating_point() or key.endswith(("running_mean", "running_var")):
            continue
        axis = 0
        for term in layout:
            factors = term.factors if isinstance(term, Product) else (term,)
            if not all(isinstance(factor, Factor) for factor in factors):
                raise ValueError(f"plain weight matching does not know the layout of {key!r}")
            tensor = tensor.unflatten(axis, [factor.size for factor in factors])
            for factor in factors:
                if factor.name in axes:
                    axes[factor.name].append((key, axis))
                axis += 1
        tensors[key] = tensor
    return tensors, axes


def _permute(tensor: Tensor, key: str, but: int, axes: Axes, found: dict[str, Tensor]) -> Tensor:
    for name, places in axes.items():
        for where, axis in places:
            if where == key and axis != but:
                tensor = tensor.index_select(axis, found[name].to(tensor.device))
    return tensor
