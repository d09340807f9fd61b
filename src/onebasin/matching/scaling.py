"""Positive scales and bases of the units of an aligned network, learned on the objective.

They do not change what the permuted network computes, but they change the line to the target: at the midpoint, a unit whose
filter was multiplied by s takes the share s / (1 + s) of that network. So a unit without a good partner can lean towards the
network where it matters more, which no permutation can do. And units that are mixed in one network are mixed alike in both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebasin.descent.cuda_graphs import CapturedStep
from onebasin.matching.closest_transforms import EQUAL
from onebasin.matching.methods.base import check_count, check_flag, check_number
from onebasin.matching.problem import Problem
from onebasin.relaxation.learned_bases import LearnedBases
from onebasin.symmetries import Transform
from onebasin.symmetries.multiplication import mixed_tensors, scale_shape, scaled_tensors
from onebasin.tensors.states import State, StateDict

_REPORT_EVERY = 10
_SPREAD = 2.0
"""How much the shares of networks in a random mixture differ: their logarithms have this deviation."""


@dataclass(frozen=True)
class Scaling:
    """How positive scales and bases are learned: by Adam, the step falling linearly to zero.

    The logarithms of each scale sum to zero, so that no layer as a whole leans towards one network: else the middle of the
    line would move to the better end, and the barrier with it. They are bounded, so that nothing hides close to an end.
    A basis is the exponential of a matrix, times its start: a skew-symmetric one for a rotation. Any other has bounded
    singular values, so that the function of the end is kept in float32 as well.

    Attributes:
        steps: of Adam; none leaves all scales at one, and all bases where they start.
        lr: the first step, of logarithms of scales.
        limit: the bound of what is learned of a logarithm, beside what it starts from: of a scale, and of a singular value
            of a basis. So the condition number of a basis is at most exp(2 limit) times that of its start; by default 55.
        basis_lr: the first step, of the matrices whose exponentials are the bases.
        both: learn scales and bases of the target as well, so that both ends of the line move towards each other. The
            objective must look at a loss between them.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> data = [(torch.randn(32, 4), torch.randint(2, (32,))) for _ in range(4)]
    >>> loss = nn.functional.cross_entropy
    >>> objective = ob.RandomPoint(loss, low=0.3, high=0.7)
    >>> result = ob.align(b, to=a, data=data, objective=objective, kinds="positive", scaling=ob.Scaling(steps=5))
    >>> list(result.scales)
    ['0.weight']
    """

    steps: int = 500
    lr: float = 0.05
    limit: float = 2.0
    basis_lr: float = 0.01
    both: bool = False

    def __post_init__(self) -> None:
        check_count("steps", self.steps, at_least=0)
        check_number("lr", self.lr, above=0)
        check_number("limit", self.limit, above=0)
        check_number("basis_lr", self.basis_lr, above=0)
        check_flag("both", self.both)


class Learned(NamedTuple):
    """The logarithms of scales, the matrices of bases, what they cost, and those of the target, if that moves too."""

    logarithms: dict[str, Tensor]
    matrices: dict[str, Tensor]
    cost: float
    of_target: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None


def learn_transform(problem: Problem, options: Scaling, start: Transform, costs: tuple[float, float]) -> Learned:
    """Learn the scales and bases of a problem's symmetry.

    Args:
        problem: with the permuted source.
        options: how to learn.
        start: scales and bases to begin with.
        costs: of the permuted source, and of the same with the start.

    Returns:
        What costs least on the batches that permutations are compared on: what was learned, the start, or nothing at all.
    """
    symmetry = problem.symmetry
    nothing = {name: torch.zeros(scale_shape(symmetry, scale)) for name, scale in symmetry.scales.items()}
    as_it_is = Learned(nothing, {}, costs[0])
    whole, floor = Learned(nothing | start.logarithms, start.matrices, costs[1]), problem.objective.floor
    if math.isfinite(floor) and whole.cost - floor <= EQUAL * (as_it_is.cost - floor):
        return whole
    unscaled = whole
    if start.logarithms:
        only_mixed = Transform(start.permutation, {}, start.matrices)
        unscaled = Learned(nothing, start.matrices, problem.cost_of(only_mixed.apply(problem.source)))
    # Learning begins with the matrices in any case, and with the scales if they lower the objective.
    begin = min(unscaled, whole, key=lambda each: each.cost)
    best = min(as_it_is, begin, key=lambda each: each.cost)
    if not options.steps or best.cost <= floor:
        return best
    network = _Network(problem, options, Transform(start.permutation, begin.logarithms, begin.matrices))
    if not network.is_learned:
        return best
    ends = [network]
    if options.both:
        ends += [_Network(replace(problem, source=problem.target), options, Transform(symmetry.identity(), {}))]

    def target() -> State:
        return ends[1].state() if options.both else problem.target

    _descend(ends, options, lambda batch: problem.objective(network.state(), target(), batch))
    with torch.no_grad():
        cost = replace(problem, target=target()).cost_of(network.state())
    learned = Learned(*network.elements(), cost, ends[1].elements() if options.both else None)
    return min(best, learned, key=lambda each: each.cost)


def learn_together(problems: Sequence[Problem], options: Scaling) -> list[Learned]:
    """Learn the scales and bases of networks with a common target at once, so that all points between them cost little.

    A step looks at the line from one of them, or the target, to a random mixture of all others.

    Returns:
        For each problem what was learned, with the mean cost of all lines between two of them; nothing at all for each if
        that is not lower than at the start.
    """
    first, *_ = problems
    networks = [_Network(each, options, Transform(each.symmetry.identity(), {})) for each in problems]
    count = len(networks) + 1

    def states() -> list[Mapping[str, Any]]:
        return [first.target.load(), *(network.state() for network in networks)]

    def cost_of_pairs() -> float:
        with torch.no_grad():
            found = states()
            pairs = itertools.combinations(range(count), 2)
            costs = [replace(first, target=StateDict(found[i])).cost_of(StateDict(found[j])) for i, j in pairs]
        return sum(costs) / len(costs)

    def cost(batch: Any) -> Tensor:
        found = states()
        drawn = torch.rand(count, device=first.device)
        chosen = (drawn == drawn.max()).to(torch.float32)
        others = torch.softmax(_SPREAD * torch.randn(count, device=first.device) - 1e9 * chosen, 0)
        one, rest = (first.fresh(_mix(found, shares)) for shares in (chosen, others))
        return first.objective(one, rest, batch)

    before = cost_of_pairs()
    nothing = [Learned({}, {}, before) for _ in networks]
    if not options.steps or not any(network.is_learned for network in networks):
        return nothing
    _descend(networks, options, cost)
    after = cost_of_pairs()
    return [Learned(*network.elements(), after) for network in networks] if after < before else nothing


def _mix(states: Sequence[Mapping[str, Any]], shares: Tensor) -> dict[str, Any]:
    """The weighted mean of states, entry by entry; what is no floating-point tensor is the first one's."""
    result = dict(states[0])
    for key, value in states[0].items():
        if isinstance(value, Tensor) and value.is_floating_point():
            result[key] = sum(share.to(value.dtype) * state[key] for share, state in zip(shares, states, strict=True))
    return result


class _Network:
    """The source of a problem under scales and bases that are learned.

    Attributes:
        source: its tensors, after the scales to begin with.
        raw: what the logarithms of the scales are made of.
    """

    def __init__(self, problem: Problem, options: Scaling, start: Transform):
        symmetry = problem.symmetry
        self._start = {name: value - value.mean(-1, keepdim=True) for name, value in start.logarithms.items()}
        self.problem, self._limit = problem, options.limit
        self.source = Transform(start.permutation, self._start).apply(problem.source).load()
        self._scaled, self._mixed = scaled_tensors(symmetry), mixed_tensors(symmetry)
        shapes = {name: scale_shape(symmetry, scale) for name, scale in symmetry.scales.items()}
        self.raw = {n: torch.zeros(shape, device=problem.device, requires_grad=True) for n, shape in shapes.items()}
        self._bases = LearnedBases(symmetry, start.matrices, problem.device, options.limit)
        self._learned = set(problem.keys)
        # `substitute` puts the first of tied tensors in the place of the others.
        self._tied = {key for keys in symmetry.ties for key in keys[1:]}

    @property
    def generators(self) -> list[Tensor]:
        """What the bases are made of."""
        return self._bases.generators

    @property
    def is_learned(self) -> bool:
        """Whether there is anything to learn."""
        return bool(self.raw or self.generators)

    def logarithms(self) -> dict[str, Tensor]:
        """Bounded, and of mean zero."""
        bounded = {name: self._limit * torch.tanh(value / self._limit) for name, value in self.raw.items()}
        return {name: value - value.mean(-1, keepdim=True) for name, value in bounded.items()}

    def state(self) -> StateDict:
        """The tensors, multiplied; parameters are differentiable in what is learned."""
        source, tied, logarithms = self.source, self._tied, self.logarithms()
        live = {key: self._scaled.scale(key, source[key], logarithms) for key in self._scaled.keys if key not in tied}
        if plans := self._bases.plans():
            together: dict[str, Tensor] = {**source, **live}
            live |= self._mixed.mix_with({key: value for key, value in together.items() if key not in tied}, plans)
        # Statistics of batch norms follow, but nothing is differentiated in them: a norm in train mode writes into them.
        return self.problem.substitute(source, {k: v if k in self._learned else v.detach() for k, v in live.items()})

    def elements(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The logarithms with those of the start, and the matrices in float64."""
        with torch.no_grad():
            found = {name: value.cpu().double() for name, value in self.logarithms().items()}
            return {n: v + self._start.get(n, 0.0) for n, v in found.items()}, self._bases.matrices()


def _descend(networks: Sequence[_Network], options: Scaling, cost_of: Callable[[Any], Tensor]) -> None:
    """Minimise a cost by Adam, with captured steps on a GPU."""
    problem = networks[0].problem
    on_cuda = problem.device.type == "cuda"
    scales = [value for network in networks for value in network.raw.values()]
    bases = [generator for network in networks for generator in network.generators]
    parts = [(rate, params) for rate, params in ((options.lr, scales), (options.basis_lr, bases)) if params]
    optimizer = torch.optim.Adam(
        [{"params": params, "lr": torch.tensor(rate, device=problem.device)} for rate, params in parts],
        capturable=on_cuda,
        foreach=on_cuda,
    )

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        cost = cost_of(batch)
        cost.backward()
        optimizer.step()
        return cost.detach()

    take_step = CapturedStep(step, on_cuda and problem.objective.can_be_captured, problem.device)
    stream = problem.stream()
    for number in range(options.steps):
        problem.progress("scales" if scales else "bases", number, options.steps)
        for group, (rate, _) in zip(optimizer.param_groups, parts, strict=True):
            group["lr"].fill_(rate * (1 - number / options.steps))
        cost = take_step(next(stream))
        if (number + 1) % _REPORT_EVERY == 0 or number == options.steps - 1:
            problem.report({"step": number, "cost": float(cost)})
