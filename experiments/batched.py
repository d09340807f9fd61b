"""Many pairs of networks at once: aligned by Sinkhorn, and measured on the line between them, under `torch.func.vmap`.

What `onebasin.align` and `onebasin.linear_path` do for one pair, with the same defaults but Adam by entries;
tests/experiments compare the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import onebasin as ob
from experiments.tasks import Data, Stack
from onebasin.relaxation.rebasin_net import SOLVER_STEPS

Plans = dict[str, Tensor]


@dataclass
class Found:
    """What was found for a batch of pairs.

    Attributes:
        indices: for each group the permutation of every pair, (pairs, n).
        costs: of the hard permutations, (pairs,).
        steps: how many each pair took before it stopped, (pairs,).
        history: of the soft and the hard cost, an entry for every look, lists over pairs.
    """

    indices: dict[str, Tensor]
    costs: Tensor
    steps: Tensor
    history: list[dict[str, Any]] = field(default_factory=list)


def align_pairs(
    model: nn.Module,
    symmetry: ob.Symmetry,
    sources: Stack,
    targets: Stack,
    objective: ob.Objective,
    batches: Sequence[Any] | None = None,
    steps: int = 100,
    lr: float = 0.2,
    tau: float = 1.0,
    num_iters: int = 20,
    gradient: str = "implicit",
    solver_steps: int = SOLVER_STEPS,
    patience: int = 50,
    check_every: int | None = None,
    noise: float = 0.0,
    scale: float = 1.0,
    seed: int = 0,
    num_judged: int = 4,
) -> Found:
    """Sinkhorn on all pairs at once, as ``align`` takes each pair with the same seed.

    With the options ``optimizer="adam", polish=False``, and `check_every` as here.

    Args:
        model: of the architecture; its groups must have no parents.
        symmetry: of the model.
        sources: the networks to permute.
        targets: the networks to align them to.
        objective: as in `onebasin.align`.
        batches: the data, the same for every pair.
        steps: this and the following are as in `onebasin.Sinkhorn`.
        lr: step of Adam for a group of ten units.
        tau: temperature.
        num_iters: rounds of the operator.
        gradient: "implicit" or "unrolled".
        solver_steps: the most steps of the implicit gradient's solver.
        patience: a pair stops after so many steps without a better hard permutation.
        check_every: steps between two looks at the hard permutations.
        noise: added to the start.
        scale: of the identity that the logits start from.
        seed: for the noise and the random points.
        num_judged: batches that hard permutations are judged on.
    """
    assert not any(group.parents for group in symmetry.groups.values())
    sizes = {name: group.size for name, group in symmetry.groups.items()}
    first = next(iter(sources.values()))
    num, device = len(first), first.device
    generator = torch.Generator().manual_seed(seed)
    logits = {}
    for name, n in sizes.items():
        start = scale * torch.eye(n) + noise * torch.randn(n, n, generator=generator)
        logits[name] = start.expand(num, n, n).contiguous().to(device).requires_grad_()
    optimizer = torch.optim.Adam(
        [{"params": [p], "lr": lr * max(math.log10(sizes[name]), 1.0)} for name, p in logits.items()]
    )
    net = ob.RebasinNet({key: value[0] for key, value in sources.items()}, symmetry)
    bound = objective.bind(model)
    cost = vmap(
        lambda source, target, plans, batch: bound(net(source, plans), target, batch),
        in_dims=(0, 0, 0, None),
        randomness="same",  # a random point is drawn once a step
    )
    judge = _Judge(net, bound, sources, targets, batches, num_judged)
    every = check_every or (1 if batches is None and max(sizes.values()) <= 128 else 5)
    stream = itertools.repeat(None) if batches is None else itertools.cycle(batches)
    torch.manual_seed(seed)
    for step in range(steps):
        plans = {
            name: ob.sinkhorn(p, tau, num_iters, gradient=gradient, solver_steps=solver_steps, check=False)
            for name, p in logits.items()
        }
        soft = cost(sources, targets, plans, next(stream))
        optimizer.zero_grad()
        soft.sum().backward()
        optimizer.step()
        if (step + 1) % every == 0 or step == steps - 1:
            with torch.no_grad():
                current = {n: ob.sinkhorn(p, tau, num_iters, check=False) for n, p in logits.items()}
                judge.look(step, soft, [current, logits])
        if judge.finished(step, patience):
            break
    return judge.found


class _Judge:
    """The best hard permutation of every pair so far, the identity to begin with."""

    def __init__(
        self, net: ob.RebasinNet, objective: ob.Objective, sources: Stack, targets: Stack, batches: Any, num_judged: int
    ):
        self.sources, self.targets = sources, targets
        self.batches = [None] if batches is None else list(itertools.islice(batches, num_judged))
        self.floor = objective.floor

        def evaluate(source: Stack, target: Stack, plans: Plans, batch: Any) -> Tensor:
            return objective.judge(net(source, plans), target, batch)

        self.evaluate = vmap(evaluate, in_dims=(0, 0, 0, None))
        first = next(iter(sources.values()))
        identity = {
            name: torch.arange(g.size, device=first.device).expand(len(first), -1).clone()
            for name, g in net.symmetry.groups.items()
        }
        self.last_gain = torch.full((len(first),), -1, device=first.device)
        self.active = torch.ones(len(first), dtype=torch.bool, device=first.device)
        self.seen: list[tuple[dict[str, Tensor], Tensor]] = []
        self.found = Found(identity, self.cost(identity), torch.zeros(len(first), dtype=torch.long, device=first.device))

    @torch.no_grad()
    def cost(self, indices: Mapping[str, Tensor]) -> Tensor:
        plans = {name: nn.functional.one_hot(index, index.shape[-1]).float() for name, index in indices.items()}
        return torch.stack([self.evaluate(self.sources, self.targets, plans, b) for b in self.batches]).mean(0)

    def look(self, step: int, soft: Tensor, scores: Iterable[Plans]) -> None:
        best = torch.full_like(self.found.costs, math.inf)
        for number, candidate in enumerate(scores):
            indices = {name: ob.assign(score) for name, score in candidate.items()}
            costs = self._cost_if_new(number, indices)
            best = torch.minimum(best, costs)
            better = self.active & (costs < self.found.costs)
            for name, index in indices.items():
                self.found.indices[name][better] = index[better]
            self.found.costs = torch.where(better, costs, self.found.costs)
            self.last_gain[better] = step
        self.found.history.append({"step": step, "soft": soft.detach().tolist(), "hard": best.tolist()})

    def _cost_if_new(self, number: int, indices: dict[str, Tensor]) -> Tensor:
        """Judging costs as much as several steps, and late in the descent nothing changes."""
        if number >= len(self.seen) or any(not torch.equal(self.seen[number][0][n], i) for n, i in indices.items()):
            self.seen[number : number + 1] = [(indices, self.cost(indices))]
        return self.seen[number][1]

    def finished(self, step: int, patience: int) -> bool:
        done = (self.found.costs <= self.floor) | (step - self.last_gain > patience)
        self.found.steps[self.active] = step + 1
        self.active &= ~done
        return not bool(self.active.any())


def permute(symmetry: ob.Symmetry, stack: Stack, indices: Mapping[str, Tensor]) -> Stack:
    """Every network of a stack by its own permutation."""
    moved = []
    for number in range(len(next(iter(stack.values())))):
        permutation = ob.Permutation(symmetry, {name: index[number].cpu() for name, index in indices.items()})
        moved.append(permutation.apply({key: value[number] for key, value in stack.items()}))
    return {key: torch.stack([state[key] for state in moved]) for key in stack}


@torch.no_grad()
def measure_paths(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    starts: Stack,
    ends: Stack,
    data: Data,
    num_points: int = 25,
    chunk: int = 5000,
) -> tuple[np.ndarray, np.ndarray]:
    """Loss and accuracy of every pair at points on the line, each (pairs, points); accuracy is NaN for a regression."""

    def at(start: Stack, end: Stack, weight: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = functional_call(model, {key: torch.lerp(start[key], end[key], weight) for key in start}, (x,))
        right = (
            (output.argmax(-1) == y).float().sum()
            if not y.is_floating_point()
            else torch.full((), math.nan, device=x.device)
        )
        return loss(output, y) * len(x), right

    evaluate = vmap(at, in_dims=(0, 0, None, None, None))
    losses, accuracies = [], []
    for weight in torch.linspace(0, 1, num_points, device=data.x.device):
        sums = [evaluate(starts, ends, weight, x, y) for x, y in data.batches(chunk)]
        losses.append(sum(s[0] for s in sums) / len(data.x))
        accuracies.append(sum(s[1] for s in sums) / len(data.x))
    return torch.stack(losses, 1).double().cpu().numpy(), torch.stack(accuracies, 1).double().cpu().numpy()
