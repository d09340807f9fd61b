"""Re-basin by the Sinkhorn operator (the paper, sec. 3): gradient descent on the logits of all groups at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from onebasin.descent.adam import make_adam
from onebasin.descent.cuda_graphs import CapturedStep
from onebasin.matching.copies import find_copy
from onebasin.matching.methods.weight_matching import polish as polish_permutation
from onebasin.matching.problem import Found, Problem
from onebasin.operator.implicit import choose_backend
from onebasin.relaxation.distance import SoftDistance
from onebasin.relaxation.network import RebasinNet
from onebasin.relaxation.objectives import WeightDistance
from onebasin.symmetries.permutation import Permutation


def match_by_sinkhorn(
    problem: Problem,
    steps: int = 100,
    lr: float = 0.2,
    tau: float = 1.0,
    final_tau: float | None = None,
    num_iters: int = 20,
    gradient: Literal["implicit", "unrolled"] = "implicit",
    patience: int = 50,
    check_every: int | None = None,
    start: Literal["identity", "scaled", "random"] = "identity",
    mass: float = 0.5,
    noise: float = 0.0,
    polish: bool | None = None,
    first_look: bool = True,
    logits: dict[str, torch.Tensor] | None = None,
    solver_steps: int = 10,
    capture: bool | None = None,
) -> Found:
    """Minimise the objective over soft permutations by Adam, keep the best hard one seen on the way.

    Adam makes the step independent of the scale of the cost. What it must reach grows with the width: a logit of log(n) is
    needed for a plan of size n to hold half of its mass in one place. So the step of each group is lr log(n) / log(10).

    Args:
        problem: what to match.
        steps: the most steps to take.
        lr: step of Adam for a group of ten units.
        tau: temperature; with `final_tau` it falls geometrically to that.
        final_tau: see `tau`.
        num_iters: rounds of the Sinkhorn operator.
        gradient: through the operator, "implicit" or "unrolled".
        patience: stop after so many steps without a better hard permutation.
        check_every: steps between two looks at the hard permutation; if None, 1 for groups of up to 128 units without data,
            else 5: assigning large groups, or running data through the network, costs more than a step.
        start: logits at the "identity" as in the paper, "scaled" so that every plan holds `mass` on it, or "random".
        mass: see `start`.
        noise: standard deviation of the noise added to the start.
        polish: finish with weight-matching sweeps if they lower the cost; by default without data only.
        first_look: without data, first pair units by what no permutation of their neighbours changes, and end there if that
            costs nothing, as it does for a copy. There is no descent then, and no logits.
        logits: go on from these (the ``state_dict()`` of a `RebasinNet` of the same problem).
        solver_steps: the most steps of the implicit gradient's solver. With ten, 17 of 18 pairs ended at the very
            permutation that a full solution finds (`benchmarks.accuracy`).
        capture: on CUDA, record a step as a graph and replay it. By default done with the objectives of this package at a
            fixed tau in float32; an objective of your own must do the same at every call and never wait for the device.
    """
    if capture and (problem.device.type != "cuda" or final_tau is not None):
        raise ValueError("capture=True needs models on CUDA and a tau that stays as it is: final_tau must be None")
    measures_distance = isinstance(problem.objective, WeightDistance) and problem.floor == 0 and problem.batches is None
    copied = find_copy(problem) if first_look and logits is None and measures_distance else None
    if copied is not None:  # equal parameters have no distance
        entry = {"step": 0, "hard": 0.0, "best": 0.0}
        problem.report(entry)
        return Found(copied, 0.0, [entry], converged=True)
    net = RebasinNet(
        problem.source if problem.model is None else problem.model,
        problem.symmetry,
        tau,
        num_iters,
        init={"identity": None, "scaled": problem.symmetry.identity(), "random": "random"}[start],
        noise=noise,
        mass=mass,
        gradient=gradient,
        generator=torch.Generator().manual_seed(problem.seed),
        solver_steps=solver_steps,
    ).to(problem.device, problem.dtype)
    if logits is not None:
        net.load_state_dict(logits)
    if capture is None:
        capture = final_tau is None and _can_be_captured(problem, net)
    take_step = CapturedStep(make_step(problem, net, lr), capture, problem.device)
    search = _Search(problem)
    stream = problem.stream()
    every = check_every or (1 if problem.batches is None and max(map(int, net.logits), default=0) <= 128 else 5)
    for step in range(steps if problem.symmetry.groups else 0):
        if final_tau is not None:
            net.tau = tau * (final_tau / tau) ** (step / max(steps - 1, 1))
        problem.track("descent", step, steps)
        cost = take_step(next(stream))
        if (step + 1) % every == 0 or step == steps - 1:
            search.look(net, step, float(cost))
        if search.finished(step, patience):
            break
    if polish or (polish is None and problem.batches is None):
        for candidate in search.candidates():
            search.offer(polish_permutation(problem, candidate), what="polish")
    converged = len(search.history) == 0 or search.history[-1]["step"] < steps - 1
    return Found(search.best, search.cost, search.history, converged, net.state_dict())


def _can_be_captured(problem: Problem, net: RebasinNet) -> bool:
    """Whether a step is known to run without the host: in plain PyTorch the operator reads values back as it goes."""
    return getattr(problem.objective, "can_be_captured", False) and all(
        choose_backend(logits) == "triton" for logits in net.parameters()
    )


def make_step(problem: Problem, net: RebasinNet, lr: float) -> Callable[[Any], torch.Tensor]:
    """A step of Adam on the logits for a batch; it returns the cost before it."""
    on_cuda = problem.device.type == "cuda"
    optimizer = make_adam(list(net.logits.values()), [lr * max(math.log10(int(n)), 1.0) for n in net.logits])
    distance = find_distance(problem, net)
    check = not on_cuda  # a check of the plans waits for the device; there the next look finds what is wrong

    def differentiate(batch: Any) -> torch.Tensor:
        if distance is None:
            cost = problem.objective(net(problem.source, net.plans(check)), problem.target, batch)
            cost.backward()
            return cost.detach()
        plans = net.stacked_plans(check)
        gradients = {size: torch.zeros_like(stack) for size, stack in plans.items()}
        cost = distance(net.unstack(plans), net.unstack(gradients))
        torch.autograd.backward(list(plans.values()), list(gradients.values()))
        return cost

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        cost = differentiate(batch)  # a function of its own: the plans are gone when Adam makes its moments
        optimizer.step()
        return cost

    return step


def find_distance(problem: Problem, net: RebasinNet) -> SoftDistance | None:
    """The objective as a function of the plans, if it is a distance of parameters alone and that is worth it."""
    objective = problem.objective
    if not isinstance(objective, WeightDistance) or objective.keys is None or not {*objective.keys} <= {*problem.keys}:
        return None
    distance = objective.of_plans(problem.source, problem.target, net.symmetry)
    return distance if distance is not None and distance.takes_any_alone else None


class _Search:
    """The best hard permutation so far, the identity to begin with: no result costs more than the start."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.best = problem.symmetry.identity()
        self.cost = problem.cost(self.best)
        self.last = self.best
        self.seen: tuple[list[Permutation], list[float]] = ([], [])
        self.last_gain = -1
        self.history: list[dict[str, Any]] = []

    def look(self, net: RebasinNet, step: int, soft: float) -> None:
        candidates = net.candidates()
        if candidates != self.seen[0]:  # judging costs as much as several steps, and late in the descent nothing changes
            self.seen = candidates, [self.problem.cost(c) for c in candidates]
        cost = min(self.seen[1])
        self.last = candidates[self.seen[1].index(cost)]
        entry = {"step": step, "soft": soft, "hard": cost, "gap": cost - soft, "best": min(cost, self.cost)}
        self.history.append(entry)
        self.problem.report(entry)
        if cost < self.cost:
            self.best, self.cost, self.last_gain = self.last, cost, step

    def candidates(self) -> list[Permutation]:
        """What is worth polishing: the best, and where the descent ended, which may lie in a better basin."""
        if self.cost <= self.problem.floor:
            return []
        return [self.best] if self.last == self.best else [self.best, self.last]

    def offer(self, permutation: Permutation, what: str) -> None:
        cost = self.problem.cost(permutation)
        if cost < self.cost:
            self.best, self.cost = permutation, cost
        self.history.append({"step": self.history[-1]["step"] if self.history else 0, what: cost, "best": self.cost})

    def finished(self, step: int, patience: int) -> bool:
        return self.cost <= self.problem.floor or step - self.last_gain > patience
