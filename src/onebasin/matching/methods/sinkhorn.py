"""Re-basin by the Sinkhorn operator (the paper, sec. 3): gradient descent on the logits of all groups at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from onebasin.descent.adam import Optimizer, RowAdam, make_adam
from onebasin.descent.cuda_graphs import CapturedStep
from onebasin.engines.memory_limits import available_memory
from onebasin.matching.methods.base import Match, Method, check_choice, check_count, check_flag, check_number
from onebasin.matching.problem import Problem
from onebasin.operator.implicit import choose_backend
from onebasin.relaxation.assignment import Start
from onebasin.relaxation.distance import SoftDistance
from onebasin.relaxation.plans import plan_shape
from onebasin.relaxation.rebasin_net import SOLVER_STEPS, RebasinNet
from onebasin.symmetries import Permutation, Symmetry

OptimizerName = Literal["adam", "row-adam"]
_LOGITS, _ADAM = "logits.", "adam."  # before the names of logits, and of Adam's moments, where both are saved


@dataclass(frozen=True)
class Sinkhorn(Method):
    """Minimise the objective over soft permutations by Adam, keep the best hard one seen on the way.

    Adam makes the step independent of the scale of the cost. What it must reach grows with the width: a logit of log(n) is
    needed for a plan of size n to hold half of its mass in one place. So the step of each group is lr log(n) / log(10).

    Attributes:
        steps: the most steps to take.
        lr: step of the optimiser for a group of ten units; if None, 0.2 for "adam" and 0.5 for "row-adam".
        optimizer: "adam", or "row-adam", in which entries with small gradients move less than the others of their row of
            logits (see `onebasin.descent.adam.RowAdam`), so that copies are found in a few steps. If None, "adam" with data
            and "row-adam" without it.
        tau: temperature; with `final_tau` it falls geometrically to that.
        final_tau: see `tau`.
        num_iters: rounds of the Sinkhorn operator.
        gradient: through the operator, "implicit" or "unrolled".
        patience: stop after so many steps without a better hard permutation.
        check_every: steps between two looks at the hard permutation. If None, for groups of up to 128 units 5 with data, and
            1 without it, or up to 4 while looks find nothing better. For larger groups 5, or up to 20 while looks find
            nothing better; while many rows of the plans share their best column, which makes assignments slow, 25.
        start: logits at the "identity" as in the paper, "scaled" so that every plan holds `mass` on it, or "random".
        mass: see `start`.
        noise: standard deviation of the noise added to the start.
        logits: go on from here: the `logits` of an `Alignment` of the same problem, which hold the moments of Adam too, or
            the ``state_dict()`` of a `RebasinNet`, with which Adam starts anew.
        solver_steps: the most steps of the implicit gradient's solver; see `RebasinNet`.
        capture: on CUDA, capture a step in a graph and replay it. By default done with the objectives of this package at a
            fixed tau in float32; an objective of your own must do the same at every call and never wait for the device.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> ob.align(b, to=a, example_inputs=torch.zeros(1, 4), method=ob.Sinkhorn(steps=10)).method
    'sinkhorn'
    """

    steps: int = 100
    lr: float | None = None
    optimizer: OptimizerName | None = None
    tau: float = 1.0
    final_tau: float | None = None
    num_iters: int = 20
    gradient: Literal["implicit", "unrolled"] = "implicit"
    patience: int = 50
    check_every: int | None = None
    start: Literal["identity", "scaled", "random"] = "identity"
    mass: float = 0.5
    noise: float = 0.0
    logits: dict[str, Tensor] | None = None
    solver_steps: int = SOLVER_STEPS
    capture: bool | None = None

    name: ClassVar[str] = "sinkhorn"
    is_polished: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("steps", self.steps, at_least=0)
        check_count("patience", self.patience, at_least=0)
        check_count("num_iters", self.num_iters, at_least=1)
        check_count("solver_steps", self.solver_steps, at_least=1)
        check_count("check_every", self.check_every, at_least=1, optional=True)
        check_number("lr", self.lr, above=0, optional=True)
        check_number("tau", self.tau, above=0)
        check_number("final_tau", self.final_tau, above=0, optional=True)
        check_number("mass", self.mass, above=0, below=1)
        check_number("noise", self.noise, at_least=0)
        check_flag("capture", self.capture, optional=True)
        self._check_logits()
        check_choice("start", self.start, "identity", "scaled", "random")
        check_choice("gradient", self.gradient, "implicit", "unrolled")
        if self.optimizer is not None:
            check_choice("optimizer", self.optimizer, "adam", "row-adam")
        if self.capture and self.final_tau is not None:
            raise ValueError("capture=True needs a tau that stays as it is: final_tau must be None")

    def _check_logits(self) -> None:
        given = self.logits
        if given is None:
            return
        if not isinstance(given, Mapping) or not all(isinstance(value, Tensor) for value in given.values()):
            raise TypeError(
                f"logits must be a dict of tensors, such as the logits of an Alignment; got a {type(given).__name__}"
            )
        if wrong := [key for key in given if not str(key).startswith((_LOGITS, _ADAM))]:
            raise ValueError(f"logits must come from an Alignment or a RebasinNet, which have no key {wrong[0]!r}")

    @property
    def title(self) -> str:
        """The name, with the start of the plans if it is not that of the paper."""
        starts = {"identity": "", "scaled": f" from plans of mass {self.mass:g}", "random": " from random plans"}
        return self.name + starts[self.start]

    @property
    def resumes(self) -> bool:
        """Whether it goes on from given logits."""
        return self.logits is not None

    def check(self, problem: Problem) -> None:
        """Refuse logits of another problem, and plans that cannot fit into memory."""
        self._check_shapes(problem.symmetry)
        if self.capture and problem.device.type != "cuda":
            raise ValueError(f"capture=True needs models on CUDA, these are on {problem.device}")
        needed, available = plan_memory(problem.symmetry, problem.dtype), available_memory(problem.device)
        if available is not None and needed > available:
            raise ValueError(
                f"the plans need about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free: "
                "use method='weight-matching', or choose fewer groups="
            )

    def _check_shapes(self, symmetry: Symmetry) -> None:
        """Refuse logits that are not stacked as `RebasinNet` stacks those of this symmetry."""
        if self.logits is None:
            return
        counts: Counter[int] = Counter()
        for group in symmetry.groups.values():
            counts[group.size] += math.prod(plan_shape(symmetry, group)[:-2])
        expected = {f"{_LOGITS}{size}": (count, size, size) for size, count in counts.items()}
        given = {key: tuple(value.shape) for key, value in self.logits.items() if key.startswith(_LOGITS)}
        if given != expected:
            raise ValueError(f"logits belong to another problem: this one has the shapes {expected}, got {given}")

    def match(self, problem: Problem) -> Match:
        """Descend from the start that the options name."""
        net, saved = self._make_net(problem), self.logits or {}
        optimizer = make_optimizer(net, self._choose_optimizer(problem), self.lr)
        if moments := {key.removeprefix(_ADAM): value for key, value in saved.items() if key.startswith(_ADAM)}:
            optimizer.load_moments(moments)
        capture = self._can_be_captured(problem, net) if self.capture is None else self.capture
        take_step = CapturedStep(make_step(problem, net, optimizer), capture, problem.device)
        search = _Descent(problem, self._choose_looks(problem, net))
        stream = problem.stream()
        step = -1
        for step in range(self.steps if problem.symmetry.groups else 0):
            if self.final_tau is not None:
                net.tau = self.tau * (self.final_tau / self.tau) ** (step / max(self.steps - 1, 1))
            problem.progress("descent", step, self.steps)
            cost = take_step(next(stream))
            is_last = step == self.steps - 1 or search.is_finished(step, self.patience)
            if is_last or search.is_due(step):
                search.look(net, step, cost, is_last)
            if search.is_finished(step, self.patience):
                break
        converged = self.steps == 0 or step < self.steps - 1
        logits = net.state_dict() | {f"{_ADAM}{key}": value for key, value in optimizer.moments().items()}
        return Match(search.best, search.cost, converged, search.alternatives(), logits)

    def _choose_optimizer(self, problem: Problem) -> OptimizerName:
        return self.optimizer or ("adam" if problem.objective.uses_data else "row-adam")

    def _choose_looks(self, problem: Problem, net: RebasinNet) -> _Looks:
        if self.check_every is not None:
            return _Looks(self.check_every)
        if max(map(int, net.logits), default=0) > 128:
            return _Looks(5, 20, early=() if problem.objective.uses_data else (2, 3), latest=25)
        return _Looks(5) if problem.objective.uses_data else _Looks(1, 4)

    def _make_net(self, problem: Problem) -> RebasinNet:
        identity = problem.symmetry.identity()
        starts: dict[str, Any] = {"identity": None, "scaled": identity, "random": "random"}
        net = RebasinNet(
            problem.source if problem.model is None else problem.model,
            problem.symmetry,
            self.tau,
            self.num_iters,
            init=starts[self.start],
            noise=self.noise,
            mass=self.mass,
            gradient=self.gradient,
            generator=torch.Generator().manual_seed(problem.seed),
            solver_steps=self.solver_steps,
        ).to(problem.device, problem.dtype)
        if self.logits is not None:
            net.load_state_dict({key: value for key, value in self.logits.items() if not key.startswith(_ADAM)})
        return net

    def _can_be_captured(self, problem: Problem, net: RebasinNet) -> bool:
        """Whether a step is known to run without the host: in plain PyTorch the operator reads values back as it goes."""
        on_triton = all(choose_backend(logits) == "triton" for logits in net.parameters())
        return self.final_tau is None and problem.objective.can_be_captured and on_triton


def make_optimizer(net: RebasinNet, name: OptimizerName, lr: float | None = None) -> Optimizer:
    """An optimiser of the logits; the step of each group grows with the logarithm of its size."""
    make, default = {"adam": (make_adam, 0.2), "row-adam": (RowAdam, 0.5)}[name]
    rates = [(lr or default) * max(math.log10(int(n)), 1.0) for n in net.logits]
    return make(list(net.logits.values()), rates)


def make_step(problem: Problem, net: RebasinNet, optimizer: Optimizer) -> Callable[[Any], Tensor]:
    """A step on the logits for a batch; it returns the cost before it."""
    on_cuda = problem.device.type == "cuda"
    distance = find_distance(problem, net)
    check = not on_cuda  # a check of the plans waits for the device; there the next look finds what is wrong

    def differentiate(batch: Any) -> Tensor:
        if distance is None:
            cost = problem.objective(net(problem.source, net.plans(check)), problem.target, batch)
            cost.backward()
            return cost.detach()
        plans = net.stacked_plans(check)
        gradients = {size: torch.zeros_like(stack) for size, stack in plans.items()}
        cost = distance(net.unstack(plans), net.unstack(gradients))
        torch.autograd.backward(list(plans.values()), list(gradients.values()))
        return cost

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        cost = differentiate(batch)  # a function of its own: the plans are gone when Adam makes its moments
        optimizer.step()
        return cost

    return step


def find_distance(problem: Problem, net: RebasinNet) -> SoftDistance | None:
    """The objective as a function of the plans, if it is a distance of parameters alone and that is worth it."""
    distance = problem.objective.of_plans(problem.source, problem.target, net.symmetry)
    if distance is None or not distance.takes_any_alone or not distance.keys <= set(problem.keys):
        return None
    return distance


def plan_memory(symmetry: Symmetry, dtype: torch.dtype) -> int:
    """Bytes of a descent: logits, gradient and two moments of Adam, and four matrices of work for the operator."""
    return 8 * dtype.itemsize * sum(math.prod(plan_shape(symmetry, group)) for group in symmetry.groups.values())


@dataclass(frozen=True)
class _Looks:
    """When to look at the hard permutation, which costs as much as a step or more.

    A look is cheap where nearly all rows of the plans have a best column of their own: then little is left to assign. So it
    is for a copy that has been found, and hardly ever for networks that were trained apart.

    Attributes:
        gap: steps between two looks, after one that found a better permutation.
        longest: the gap doubles up to this while looks find nothing better; None if it stays as it is.
        early: looks in the first gap, numbers of steps: most copies are found there.
        latest: a look is put off while many rows share their best column, up to so many steps after the last one; None if
            no look is put off.
    """

    gap: int
    longest: int | None = None
    early: tuple[int, ...] = ()
    latest: int | None = None

    def lengthen(self, gap: int) -> int:
        """The gap after a look that found nothing better."""
        return gap if self.longest is None else min(2 * gap, self.longest)


_MOST_DIFFER = 0.9
"""Different best columns, as a share of all rows, from which on no look is put off. When the permutation of a copy is found
they are more than 0.97; between networks of 512 units that were trained apart 0.7 is the most on L2, and on the loss 0.9 is
passed after a third of the descent."""


class _Descent:
    """The best hard permutation so far, the identity to begin with: no result costs more than the start."""

    def __init__(self, problem: Problem, looks: _Looks):
        self.problem, self.looks = problem, looks
        self.best = problem.symmetry.identity()
        self.cost = problem.cost(self.best)
        self.seen: tuple[list[Permutation], list[float]] = ([], [])
        self.columns: list[Tensor] = []  # the best of each row when the candidates were assigned
        self.starts: tuple[dict[str, Start], dict[str, Start]] = ({}, {})  # of the assignments of the next look
        self.last_gain = self.last_look = self.last_check = -1  # a check is a look, or finds that it is put off
        self.gap = looks.gap

    def is_due(self, step: int) -> bool:
        """Whether to look after this step, or to see whether the look is put off."""
        is_late = self.looks.latest is not None and step - self.last_look >= self.looks.latest
        return is_late or step - self.last_check >= self.gap or step + 1 in self.looks.early

    def look(self, net: RebasinNet, step: int, soft: Tensor, is_last: bool) -> None:
        """Judge the hard permutations of this step, unless the look is put off; the last one is not."""
        with torch.no_grad():
            plans = net.stacked_plans()
            columns = [stack.argmax(-1) for stack in (*plans.values(), *net.logits.values())]
        self.last_check = -1 if step + 1 in self.looks.early else step
        if not is_last and self._is_put_off(step, columns[: len(plans)]):
            return
        self.last_look = self.last_check
        candidates = self._find_candidates(net, plans, columns)
        if candidates != self.seen[0]:  # judging costs as much as a step or more, and late in the descent nothing changes
            self.seen = candidates, [self.problem.cost(c) for c in candidates]
        cost = min(self.seen[1])
        value = float(soft)
        self.problem.report({"step": step, "soft": value, "hard": cost, "gap": cost - value, "best": min(cost, self.cost)})
        is_better = cost < self.cost
        self.gap = self.looks.gap if is_better or step < self.looks.gap else self.looks.lengthen(self.gap)
        if is_better:
            self.best, self.cost, self.last_gain = candidates[self.seen[1].index(cost)], cost, step

    def _is_put_off(self, step: int, columns: list[Tensor]) -> bool:
        """Whether a look can wait and many rows share their best column with others; read from the device at once."""
        if self.looks.latest is None or step - self.last_look >= self.looks.latest:
            return False
        is_taken = [torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best, True) for best in columns]
        count = int(torch.stack([each.sum() for each in is_taken]).sum())
        return count < _MOST_DIFFER * sum(best.numel() for best in columns)

    def _find_candidates(self, net: RebasinNet, plans: dict[str, Tensor], columns: list[Tensor]) -> list[Permutation]:
        """Those of the last look if the best column of every row is the same: nothing is assigned then."""
        if self.columns and all(map(torch.equal, columns, self.columns)):
            return self.seen[0]
        self.columns = columns
        return net.candidates(net.unstack(plans), self.starts)

    def alternatives(self) -> tuple[Permutation, ...]:
        """Where the descent ended, by the plans and by the logits: this may lie in a better basin than the best one."""
        return tuple(candidate for candidate in self.seen[0] if candidate != self.best)

    def is_finished(self, step: int, patience: int) -> bool:
        return self.cost <= self.problem.objective.floor or step - self.last_gain > patience
