"""The re-basin network: logits, through the Sinkhorn operator, to plans, to softly permuted tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onebasin.operator import sinkhorn
from onebasin.relaxation.assignment import Start
from onebasin.relaxation.hardening import Hardening, harden_all, joint_weights
from onebasin.relaxation.learned_bases import LearnedBases
from onebasin.relaxation.plans import plan_shape, plans_of
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.symmetries.mixing import mix_all
from onebasin.symmetries.multiplication import check_fixed, mixed_tensors, scale_shape, scaled_tensors
from onebasin.tensors.states import Model, StateDict, read_state_dict

SOLVER_STEPS = 10


class RebasinNet(nn.Module):
    """A network whose only parameters are the logits of the plans (eq. 6 of the paper).

    Beside them it has, if the symmetry has scales or changes of basis, the logarithms of the scales and the generators of
    the matrices: units that were permuted are multiplied by the scales and mixed by the matrices. Signs stay as they start.
    A matrix that is learned is well conditioned: its condition number is at most 55 (exp(4)) times that of its start.

    A symmetry with changes of basis needs a model in canonical form, see `onebasin.canonical`.

    Calling it returns the softly permuted tensors of a model, differentiable in the logits, for
    ``torch.func.functional_call``: so any cost of a network's parameters can be minimised over permutations, all layers at
    once, in an ordinary training loop.

    Args:
        model: whose tensors to permute. They are not parameters of this network and not in its ``state_dict``.
        symmetry: from `onebasin.symmetry`.
        tau: temperature of the Sinkhorn operator; may be changed between calls.
        num_iters: its rounds.
        init: where to start. None: logits = identity, as in the paper. A `Permutation`: its matrices, scaled so that each
            plan holds `mass` on it, and at least twice what any other place has; a `Transform` starts its scales and
            matrices as well. "random": noise alone.
        noise: standard deviation of the normal noise added to the start.
        mass: see `init`.
        gradient: "implicit" or "unrolled", see `onebasin.sinkhorn`.
        solver_steps: the most steps of the implicit gradient's solver. Ten are the default here and in `align`: with them 17
            of 18 descents ended at the very permutation that a full solution finds (`benchmarks.accuracy`). For a gradient
            that is exact to rounding take the 200 that `onebasin.sinkhorn` has.
        generator: for the noise.

    Raises:
        ValueError: if the tensors do not fit, or if a gain of a norm has to be folded for changes of basis.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> net = ob.RebasinNet(b, ob.symmetry(b, torch.zeros(1, 4)))
    >>> optimizer = torch.optim.Adam(net.parameters(), lr=0.2)
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     soft = net()
    ...     sum((soft[key] - value).square().sum() for key, value in a.named_parameters()).backward()
    ...     optimizer.step()
    >>> len(net.permutation()["0.weight"])
    8
    """

    def __init__(
        self,
        model: Model,
        symmetry: Symmetry,
        tau: float = 1.0,
        num_iters: int = 20,
        init: Permutation | Transform | Literal["random"] | None = None,
        noise: float = 0.0,
        mass: float = 0.5,
        gradient: Literal["implicit", "unrolled"] = "implicit",
        generator: torch.Generator | None = None,
        solver_steps: int = SOLVER_STEPS,
    ):
        super().__init__()
        state = read_state_dict(model)
        self.symmetry = symmetry.bind(model)
        if symmetry.bases:
            check_fixed(self.symmetry, state)
        self.tau, self.num_iters, self.gradient, self.solver_steps = tau, num_iters, gradient, solver_steps
        buffers = {key for key, _ in model.named_buffers()} if isinstance(model, nn.Module) else set()
        # A plain tuple, so that these are neither parameters nor buffers of ours.
        self._tensors = (state, buffers)
        self._dtype = state.dtype
        if init == "random" and not noise:
            noise = 1.0
        self._add_other_kinds(init if isinstance(init, Transform) else None, state.device)
        start = self._start(init.permutation if isinstance(init, Transform) else init, mass)
        self.logits = nn.ParameterDict()
        self._members: dict[str, dict[str, tuple[int, ...]]] = {}  # by size: its groups, and the shapes of their plans
        batches: dict[str, list[Tensor]] = {}
        for name, group in self.symmetry.groups.items():
            size = str(group.size)
            self._members.setdefault(size, {})[name] = plan_shape(self.symmetry, group)
            batches.setdefault(size, []).append(start[name].reshape(-1, group.size, group.size))
        for size, batch in batches.items():
            logits = torch.cat(batch).to(self._dtype)
            logits = logits + noise * torch.randn(logits.shape, generator=generator, dtype=logits.dtype) if noise else logits
            self.logits[size] = nn.Parameter(logits.to(state.device))

    def _add_other_kinds(self, start: Transform | None, device: torch.device) -> None:
        """The parameters of scales and bases, and the signs."""
        symmetry = self.symmetry
        logarithms, matrices = (start.logarithms, start.matrices) if start is not None else ({}, {})
        self._scaled, self._mixed = scaled_tensors(symmetry), mixed_tensors(symmetry)
        self._scales, self.logarithms = list(symmetry.scales), nn.ParameterList()
        for name, scale in symmetry.scales.items():
            first = logarithms.get(name, torch.zeros(scale_shape(symmetry, scale)))
            self.logarithms.append(nn.Parameter(first.to(device, self._dtype)))
        self._bases = LearnedBases(symmetry, matrices, device)
        self.generators = nn.ParameterList(self._bases.generators)
        self._bases.replace_generators(self.generators)

    def multiply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of permuted units, by their keys, times scales and matrices; differentiable in what these are made of."""
        if not (self._scales or self.symmetry.bases):
            return dict(tensors)
        logarithms = dict(zip(self._scales, self.logarithms, strict=True))
        scaled = {key: self._scaled.scale(key, value, logarithms) for key, value in tensors.items()}
        dtype = torch.float64 if self._dtype == torch.float64 else torch.float32
        return scaled | self._mixed.mix_with(scaled, self._bases.plans(dtype))

    def _start(self, init: Permutation | str | None, mass: float) -> dict[str, Tensor]:
        if not (init is None or init == "random" or isinstance(init, Permutation)):
            raise ValueError(f"init must be a Permutation, a Transform, 'random' or None, got {init!r}")
        plans = plans_of(init if isinstance(init, Permutation) else self.symmetry.identity(), self._dtype)
        if init == "random":
            return {name: torch.zeros_like(plan) for name, plan in plans.items()}
        if init is None:
            return plans
        return {name: plan * _scale(plan.shape[-1], mass, self.tau) for name, plan in plans.items()}

    def unstack(self, batches: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The matrices of every group, as views into those stacked by size, as `stacked_plans` returns them."""
        result = {}
        for size, shapes in self._members.items():
            # One split: the gradient of a slice would be a batch of zeros with the slice in it.
            parts = batches[size].split([math.prod(shape[:-2]) for shape in shapes.values()])
            result |= {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return result

    def stacked_plans(self, check: bool = True) -> dict[str, Tensor]:
        """The plans of all groups of one size as one tensor, by one call of the operator, for each size."""
        options = {"gradient": self.gradient, "check": check, "solver_steps": self.solver_steps}
        return {size: sinkhorn(logits, self.tau, self.num_iters, **options) for size, logits in self.logits.items()}

    def plans(self, check: bool = True) -> dict[str, Tensor]:
        """The plan of every group."""
        return self.unstack(self.stacked_plans(check))

    def forward(self, params: Mapping[str, Any] | None = None, plans: Mapping[str, Tensor] | None = None) -> StateDict:
        """Softly permuted tensors: parameters differentiable in the logits (and in `params`), buffers detached and fresh.

        Args:
            params: live tensors to permute in place of the model's.
            plans: plans to use in place of this network's own.
        """
        state, buffers = self._tensors
        state = state if params is None else {**state, **params}
        plans = self.plans() if plans is None else plans
        device = next(iter(plans.values())).device if plans else None
        layouts, parents = self.symmetry.layouts, self.symmetry.parents
        first = {id(value): key for key, value in reversed(state.items()) if key in layouts and isinstance(value, Tensor)}
        here = {key: state[key] if device is None else state[key].to(device) for key in first.values()}
        live = mix_all({key: value for key, value in here.items() if key not in buffers}, layouts, plans, parents)
        fixed = {key: value.detach() for key, value in here.items() if key in buffers and value.is_floating_point()}
        moved = mix_all(fixed, layouts, {name: plan.detach() for name, plan in plans.items()}, parents)
        live = self.multiply(live) if live else live
        with torch.no_grad():
            moved = self.multiply(moved) if moved else moved
        done = live | {key: (moved if key in moved else here)[key].clone() for key in here if key in buffers}
        return StateDict({key: done[first[id(value)]] if id(value) in first else value for key, value in state.items()})

    def permutation(self, cost: Callable[[Permutation], float] | None = None) -> Permutation:
        """The hard permutation closest to the plans; with `cost`, the better of that and the assignment on the logits."""
        candidates = self.candidates()
        return candidates[0] if cost is None or len(candidates) == 1 else min(candidates, key=cost)

    def transform(self, cost: Callable[[Permutation], float] | None = None) -> Transform:
        """The hard permutation as in `permutation`, with the scales and matrices as they are."""
        logarithms = dict(zip(self._scales, self.logarithms, strict=True))
        return Transform(self.permutation(cost), logarithms, self._bases.matrices())

    def candidates(
        self, plans: Mapping[str, Tensor] | None = None, starts: tuple[dict[str, Start], dict[str, Start]] | None = None
    ) -> list[Permutation]:
        """The permutation closest to the plans and, if it differs, the one assigned on the logits, as the authors do.

        Args:
            plans: of these logits, if they have been computed.
            starts: see `harden`, for plans and for logits.
        """
        of_plans, of_logits = starts or (None, None)
        with torch.no_grad():
            weights = joint_weights(self.symmetry, self.plans() if plans is None else plans)
            logits = self.unstack(dict(self.logits.items()))
            both = Hardening(weights, starts=of_plans), Hardening(logits, carry=False, starts=of_logits)
            from_plans, from_logits = harden_all(self.symmetry, both)
        return [from_plans] if from_plans == from_logits else [from_plans, from_logits]


def _scale(size: int, mass: float, tau: float) -> float:
    """The logit c for which the plan of c times a permutation matrix holds a given mass on it: e^c / (e^c + n - 1).

    It is at least log(2), so that the permutation has twice the mass of any other place and can be read from the plan.
    """
    if not 0 < mass < 1:
        raise ValueError(f"mass must lie between 0 and 1, got {mass}")
    return tau * max(math.log(mass / (1 - mass) * (size - 1)), math.log(2)) if size > 1 else 0.0
