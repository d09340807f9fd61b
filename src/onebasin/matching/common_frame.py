"""Many models in one frame of reference: permutations of all of them at once, by Frank-Wolfe (C2M3, arXiv 2405.17897).

With S_m the softly permuted tensors of model m, and w_m its weight in the average,

    F(P_1, ..., P_M) = sum_{p < q} w_p w_q <S_p, S_q>

is what the squared norm of the average gains by the alignment. Its gradient in every plan gives scores, an assignment turns
them into the best vertex, and all plans move towards their vertices by one step, which maximises F on the segment. Each
model is moved to the common frame, so that the maps between models are consistent on every cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from onebasin.relaxation.hardening import harden, joint_weights
from onebasin.relaxation.plans import plans_of
from onebasin.symmetries import Permutation, Symmetry
from onebasin.symmetries.layout import names
from onebasin.symmetries.mixing import mix_all
from onebasin.tensors.progress import Progress

Plans = dict[str, Tensor]


def find_common_frame(
    states: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry,
    starts: Sequence[Permutation],
    shares: Sequence[float],
    progress: Progress,
    max_iters: int = 200,
    patience: int = 5,
    tolerance: float = 1e-6,
) -> list[Permutation]:
    """A permutation for each model, the first one's taken out of all, so that it stays as it is.

    Args:
        states: the parameters of each model, each tied tensor once, in the computing type.
        symmetry: of all models.
        starts: where the search begins.
        shares: of the models in the average.
        progress: called with each step.
        max_iters: the most steps.
        patience: end after so many steps in a row that gain little.
        tolerance: what is little, relative to F.

    Returns:
        The rounded plans or, if F is lower there, the starts.
    """
    search = _FrankWolfe(states, symmetry, shares)
    plans = [search.plans_of(start) for start in starts]
    value, idle = search.value(plans), 0
    for step in range(max_iters):
        progress("common frame", step, max_iters)
        vertices = search.find_vertices(plans)
        plans, better = search.move_towards(plans, vertices)
        idle = idle + 1 if better - value <= tolerance * abs(value) else 0
        value = better
        if idle == patience:
            break
    progress("common frame", max_iters, max_iters)
    rounded = [harden(symmetry, joint_weights(symmetry, each)) for each in plans]
    hard = [search.value([search.plans_of(p) for p in candidates]) for candidates in (rounded, starts)]
    best = rounded if hard[0] > hard[1] else starts
    back = best[0].inverse()
    return [back @ permutation for permutation in best]


class _FrankWolfe:
    def __init__(self, states: Sequence[Mapping[str, Tensor]], symmetry: Symmetry, shares: Sequence[float]):
        self.states, self.symmetry, self.shares = states, symmetry, shares
        some = next(iter(states[0].values()))
        self.device, self.dtype = some.device, some.dtype
        # Along a segment every tensor is a polynomial of the number of its moved axes, and F of twice that.
        layouts = (symmetry.layouts[key] for key in states[0])
        moved = max(sum(bool(names((term,)) & symmetry.groups.keys()) for term in layout) for layout in layouts)
        self.times = np.linspace(0, 1, 2 * max(moved, 1) + 1)

    def plans_of(self, permutation: Permutation) -> Plans:
        return {name: plan.to(self.device) for name, plan in plans_of(permutation, self.dtype).items()}

    def _evaluate(self, plans: Sequence[Plans]) -> Tensor:
        """The objective F, summed tensor by tensor over all models."""
        layouts, parents = self.symmetry.layouts, self.symmetry.parents
        soft = [mix_all(state, layouts, each, parents) for state, each in zip(self.states, plans, strict=True)]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for key in self.states[0]:
            weighted = [share * each[key] for share, each in zip(self.shares, soft, strict=True)]
            mean = torch.stack(weighted).sum(0)
            total = total + (mean.square().sum() - sum(each.square().sum() for each in weighted)).double() / 2
        return total

    @torch.no_grad()
    def value(self, plans: Sequence[Plans]) -> float:
        return float(self._evaluate(plans))

    def find_vertices(self, plans: Sequence[Plans]) -> list[Plans]:
        """For each model the permutation with the highest inner product with F's gradient."""
        live = [{name: plan.detach().requires_grad_() for name, plan in each.items()} for each in plans]
        flat = [plan for each in live for plan in each.values()]
        gradients = iter(torch.autograd.grad(self._evaluate(live), flat, allow_unused=True, materialize_grads=True))
        scores = [{name: next(gradients) for name in each} for each in live]
        return [self.plans_of(harden(self.symmetry, each, carry=False)) for each in scores]

    def move_towards(self, plans: Sequence[Plans], vertices: Sequence[Plans]) -> tuple[list[Plans], float]:
        """The best point of the segment from the plans to the vertices, and its value."""

        def at(time: float) -> list[Plans]:
            pairs = zip(plans, vertices, strict=True)
            return [{name: torch.lerp(one[name], other[name], time) for name in one} for one, other in pairs]

        values = [self.value(at(time)) for time in self.times]
        polynomial = np.polynomial.Polynomial.fit(self.times, values, len(self.times) - 1)
        roots = polynomial.deriv().roots()
        candidates = [0.0, 1.0, *(float(r.real) for r in roots if abs(r.imag) < 1e-9 and 0 < r.real < 1)]
        best = max(candidates, key=polynomial)
        found = at(best)
        value = self.value(found)
        return (found, value) if value > values[0] else (list(plans), values[0])
