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
from onebasin.symmetries.basis_matrices import complement_of_ones, pair, turn
from onebasin.symmetries.structure import Basis
from onebasin.symmetries.transform import matrix_shape, mixed_tensors, scale_shape, scaled_tensors
from onebasin.tensors.states import StateDict

_REPORT_EVERY = 10
_NUM_TERMS, _NUM_SQUARINGS = 8, 4


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
        name: _LearnedBasis(basis, matrix_shape(symmetry, basis), start.get(name), problem.device)
        for name, basis in symmetry.bases.items()
    }

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
        return {key: value for basis in bases.values() for key, value in basis.plans().items()}

    def capture() -> Learned:
        with torch.no_grad():
            found = bound()
            # In float64 a rotation is one to rounding, so that the function is the same to rounding.
            matrices = {name: basis.matrices(torch.float64)[0] for name, basis in bases.items()}
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


class _LearnedBasis:
    """Matrices exp(G) S with a start S, and their duals exp(-G^T) S^-T, differentiable in what G is made of."""

    def __init__(self, basis: Basis, shape: tuple[int, ...], start: Tensor | None, device: torch.device):
        self.basis = basis
        size = shape[-1] - 1 if basis.kind == "centred" else shape[-1]
        self.generator = torch.zeros((*shape[:-2], size, size), device=device, requires_grad=True)
        first = torch.eye(shape[-1], dtype=torch.float64).expand(shape) if start is None else start.double().cpu()
        self._first = {}
        for dtype in (torch.float32, torch.float64):
            self._first[dtype] = [m.to(device, dtype) for m in (first, torch.linalg.inv(first).mT)]
        self._inside = complement_of_ones(shape[-1]).to(device)

    def matrices(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        made = self.generator.to(dtype)
        if self.basis.is_rotary:
            growth, angle = made[..., 0, 0], made[..., 1, 0]
            grown, opposite = turn(angle, growth.exp()), turn(angle, (-growth).exp())
            return grown @ self._first[dtype][0], opposite @ self._first[dtype][1]
        if self.basis.kind != "linear":
            made = made - made.mT
        if self.basis.kind == "centred":
            inside = self._inside.to(dtype)
            made = inside @ made @ inside.mT
        grown = exponential(made)
        opposite = grown if self.basis.kind != "linear" else exponential(-made.mT)
        return grown @ self._first[dtype][0], opposite @ self._first[dtype][1]

    def plans(self) -> dict[str, Tensor]:
        return pair(self.basis.name, *self.matrices())


def exponential(matrix: Tensor) -> Tensor:
    """The exponential of matrices: in float64 by PyTorch, else by a fixed number of products, which a CUDA graph can hold.

    A Taylor polynomial of a sixteenth of the matrix, squared four times, is exact to float32 up to a norm of eight.
    """
    if matrix.dtype == torch.float64:
        return torch.linalg.matrix_exp(matrix)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    small, result = matrix / 2**_NUM_SQUARINGS, identity
    for number in range(_NUM_TERMS, 0, -1):
        result = identity + small @ result / number
    for _ in range(_NUM_SQUARINGS):
        result = result @ result
    return result
