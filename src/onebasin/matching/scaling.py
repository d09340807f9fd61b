"""Positive scales and bases of the units of an aligned network, learned on the objective.

They do not change what the permuted network computes, but they do change the line to the target: half way, a unit whose
filter was multiplied by s takes the share s / (1 + s) of that network. So a unit without a good partner can lean towards the
network where it matters more, which no permutation can do. And units that are mixed in one network are mixed alike in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebasin.descent.cuda_graphs import CapturedStep
from onebasin.matching.methods.base import check_count, check_number
from onebasin.matching.problem import Problem
from onebasin.relaxation.learned_bases import LearnedBasis
from onebasin.symmetries.multiplication import matrix_shape, mixed_tensors, scale_shape, scaled_tensors
from onebasin.tensors.states import StateDict

_REPORT_EVERY = 10


@dataclass(frozen=True)
class Scaling:
    """How positive scales and bases are learned: by Adam, the step falling linearly to zero.

    The logarithms of each scale sum to zero, so that no layer as a whole leans towards one network: else the middle of the
    line would move to the better end, and the barrier with it. They are bounded, so that nothing hides close to an end.
    A basis is the exponential of a matrix, times its start: a skew-symmetric one for a rotation.

    Attributes:
        steps: of Adam; none leaves all scales at one, and all bases where they start.
        lr: the first step, of logarithms of scales.
        limit: the bound of a logarithm.
        basis_lr: the first step, of the matrices whose exponentials are the bases.
    """

    steps: int = 500
    lr: float = 0.05
    limit: float = 2.0
    basis_lr: float = 0.01

    def __post_init__(self) -> None:
        check_count("steps", self.steps, at_least=0)
        check_number("lr", self.lr, above=0)
        check_number("limit", self.limit, above=0)
        check_number("basis_lr", self.basis_lr, above=0)


class Learned(NamedTuple):
    """The logarithms of scales, the matrices of bases, and what they cost."""

    logarithms: dict[str, Tensor]
    matrices: dict[str, Tensor]
    cost: float


def learn_transform(problem: Problem, options: Scaling, start: Mapping[str, Tensor]) -> Learned:
    """Learn the scales of a problem's symmetry, from one, and its bases, from matrices or from the identity.

    Returns:
        What costs least on the batches that permutations are compared on: what was learned, the start, or nothing at all.
    """
    symmetry = problem.symmetry
    source = problem.source.load()
    scaled, mixed, learned = scaled_tensors(symmetry), mixed_tensors(symmetry), set(problem.keys)
    shapes = {name: scale_shape(symmetry, scale) for name, scale in symmetry.scales.items()}
    raw = {n: torch.zeros(shape, device=problem.device, requires_grad=True) for n, shape in shapes.items()}
    bases = {
        name: LearnedBasis(basis, matrix_shape(symmetry, basis), start.get(name), problem.device)
        for name, basis in symmetry.bases.items()
        if basis.kind != "signed"
    }
    signs = {name: value.to(problem.device) for name, value in start.items() if symmetry.bases[name].kind == "signed"}

    tied = {key for keys in symmetry.ties for key in keys[1:]}  # `substitute` puts the first of them in their place

    def bound() -> dict[str, Tensor]:
        bounded = {name: options.limit * torch.tanh(value / options.limit) for name, value in raw.items()}
        return {name: value - value.mean(-1, keepdim=True) for name, value in bounded.items()}

    def transform(logarithms: Mapping[str, Tensor], plans: Mapping[str, Tensor]) -> StateDict:
        live: dict[str, Tensor] = {key: scaled.scale(key, source[key], logarithms) for key in scaled.keys if key not in tied}
        if plans:
            live |= mixed.mix_with({key: value for key, value in {**source, **live}.items() if key not in tied}, plans)
        # Statistics of batch norms follow, but nothing is differentiated in them: a norm in train mode writes into them.
        return problem.substitute(source, {key: v if key in learned else v.detach() for key, v in live.items()})

    def plans() -> dict[str, Tensor]:
        return signs | {key: value for basis in bases.values() for key, value in basis.plans().items()}

    def capture() -> Learned:
        with torch.no_grad():
            found = bound()
            # In float64 a rotation is one to rounding, so that the function is the same to rounding.
            matrices = signs | {name: basis.matrices(torch.float64)[0] for name, basis in bases.items()}
            return Learned(found, matrices, problem.cost_of(transform(found, plans())))

    best = Learned({name: value.detach().clone() for name, value in raw.items()}, {}, problem.cost_of(source))
    if start:
        best = min(best, capture(), key=lambda each: each.cost)
    if not options.steps or not (raw or bases):
        return best
    on_cuda = problem.device.type == "cuda"
    parts = [(options.lr, list(raw.values())), (options.basis_lr, [basis.generator for basis in bases.values()])]
    rates = [rate for rate, params in parts if params]
    optimizer = torch.optim.Adam(
        [{"params": params, "lr": torch.tensor(rate, device=problem.device)} for rate, params in parts if params],
        capturable=on_cuda,
        foreach=on_cuda,
    )

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        cost = problem.objective(transform(bound(), plans()), problem.target, batch)
        cost.backward()
        optimizer.step()
        return cost.detach()

    take_step = CapturedStep(step, on_cuda and problem.objective.can_be_captured, problem.device)
    stream = problem.stream()
    for number in range(options.steps):
        problem.progress("scales" if raw else "bases", number, options.steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"].fill_(rate * (1 - number / options.steps))
        cost = take_step(next(stream))
        if (number + 1) % _REPORT_EVERY == 0 or number == options.steps - 1:
            problem.report({"step": number, "cost": float(cost)})
    return min(best, capture(), key=lambda each: each.cost)
