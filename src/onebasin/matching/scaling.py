"""Positive scales of the units of an aligned network, learned on the objective.

Scales do not change what the permuted network computes, but they do change the line to the target: half way, a unit whose
filter was multiplied by s takes the share s / (1 + s) of that network. So a unit without a good partner can lean towards the
network where it matters more, which no permutation can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebasin.descent.cuda_graphs import CapturedStep
from onebasin.matching.methods.base import check_count, check_number
from onebasin.matching.problem import Problem
from onebasin.symmetries.transform import scale_shape, scaled_tensors
from onebasin.tensors.states import StateDict

_REPORT_EVERY = 10


@dataclass(frozen=True)
class Scaling:
    """How positive scales are learned: by Adam on their logarithms, the step falling linearly to zero.

    The logarithms of each scale sum to zero, so that no layer as a whole leans towards one network: else the middle of the
    line would move to the better end, and the barrier with it. They are bounded, so that nothing hides close to an end.

    Attributes:
        steps: of Adam; none leaves all scales at one.
        lr: the first step.
        limit: the bound of a logarithm.
    """

    steps: int = 500
    lr: float = 0.05
    limit: float = 2.0

    def __post_init__(self) -> None:
        check_count("steps", self.steps, at_least=0)
        check_number("lr", self.lr, above=0)
        check_number("limit", self.limit, above=0)


def learn_scales(problem: Problem, options: Scaling) -> tuple[dict[str, Tensor], float]:
    """Learn the scales of a problem's symmetry, from one.

    Returns:
        Their logarithms, all zero if the objective did not fall on the batches that permutations are compared on; and the
        cost.
    """
    symmetry = problem.symmetry
    source = problem.source.load()
    scaled, learned = scaled_tensors(symmetry), set(problem.keys)
    shapes = {name: scale_shape(symmetry, scale) for name, scale in symmetry.scales.items()}
    raw = {n: torch.zeros(shape, device=problem.device, requires_grad=True) for n, shape in shapes.items()}
    start = problem.cost_of(source)
    if not raw or not options.steps:
        return {name: value.detach() for name, value in raw.items()}, start

    def bound() -> dict[str, Tensor]:
        bounded = {name: options.limit * torch.tanh(value / options.limit) for name, value in raw.items()}
        return {name: value - value.mean(-1, keepdim=True) for name, value in bounded.items()}

    def transform(logarithms: dict[str, Tensor]) -> StateDict:
        live = {key: scaled.scale(key, source[key], logarithms) for key in scaled.keys}
        # Statistics of batch norms follow, but nothing is differentiated in them: a norm in train mode writes into them.
        return problem.substitute(source, {key: v if key in learned else v.detach() for key, v in live.items()})

    on_cuda = problem.device.type == "cuda"
    rate = torch.tensor(options.lr, device=problem.device)
    optimizer = torch.optim.Adam(list(raw.values()), lr=rate, capturable=on_cuda, foreach=on_cuda)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        cost = problem.objective(transform(bound()), problem.target, batch)
        cost.backward()
        optimizer.step()
        return cost.detach()

    take_step = CapturedStep(step, on_cuda and problem.objective.can_be_captured, problem.device)
    stream = problem.stream()
    for number in range(options.steps):
        problem.progress("scales", number, options.steps)
        rate.fill_(options.lr * (1 - number / options.steps))
        cost = take_step(next(stream))
        if (number + 1) % _REPORT_EVERY == 0 or number == options.steps - 1:
            problem.report({"step": number, "cost": float(cost)})
    with torch.no_grad():
        found = bound()
        end = problem.cost_of(transform(found))
    if not end < start:
        return {name: torch.zeros_like(value) for name, value in found.items()}, start
    return found, end
