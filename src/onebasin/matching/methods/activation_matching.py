"""Activation matching (Li et al. 2016; Git Re-Basin, sec. 3.1): pair units that respond alike to the same data.

Statistics are gathered in one pass over the data, by hooks at `Symmetry.sites`: for every group the correlations between the
units of the two networks, summed over batches, positions and sites. Units that no module returns as they are (the heads
inside an attention) are then matched by their weights.
"""

from __future__ import annotations

import copy
import itertools
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import run_batches
from onebasin.matching.methods.base import Match, Method, check_count
from onebasin.matching.methods.basis_matching import sweep_transforms, with_pairs, without_pairs
from onebasin.matching.methods.weight_matching import sweep
from onebasin.matching.problem import Problem
from onebasin.matching.scores import innermost_axes, member_blocks, products, reduce_to
from onebasin.matching.unit_pairs import CrossProducts, sole_bases
from onebasin.programs.isolation import evaluation_mode
from onebasin.relaxation.hardening import harden
from onebasin.relaxation.plans import plan_shape
from onebasin.symmetries import Site, Symmetry, Transform
from onebasin.symmetries.unrolling import Block

_MAX_SWEEPS = 100


@dataclass(frozen=True)
class ActivationMatching(Method):
    """Pair the units whose activations correlate most.

    Attributes:
        num_batches: read so many batches; all of them if None.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> data = [torch.randn(32, 4) for _ in range(4)]
    >>> ob.align(b, to=a, data=data, method=ob.ActivationMatching(num_batches=2)).method
    'activation-matching'
    """

    num_batches: int | None = None

    name: ClassVar[str] = "activation-matching"
    looks_at_activations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("num_batches", self.num_batches, at_least=1, optional=True)

    def match(self, problem: Problem) -> Match:
        """One pass over the data, then an assignment per group."""
        assert problem.model is not None
        assert problem.batches is not None
        symmetry = with_pairs(problem.symmetry)
        missing = [name for name in symmetry.groups if not symmetry.sites.get(name)]
        sites = {site for found in symmetry.sites.values() for site in found}
        statistics = {site: _Correlations(symmetry, site) for site in sites}
        networks = [copy.deepcopy(problem.model).to(problem.device, problem.dtype) for _ in range(2)]
        for network, state in zip(networks, (problem.target, problem.source), strict=True):
            network.load_state_dict(state.load())
        count = 0
        for batch in itertools.islice(problem.batches, self.num_batches):
            seen = [_collect(network, sites, batch) for network in networks]
            for site in sites:
                statistics[site].add(*(activations[site] for activations in seen))
            count += 1
        scores = {name: torch.zeros(plan_shape(symmetry, g), dtype=torch.float64) for name, g in symmetry.groups.items()}
        signed = {basis.group for basis in sole_bases(symmetry).values() if basis.kind == "signed"}
        for each in statistics.values():
            for name, correlation in each.correlations():
                scores[name] += correlation.abs() if name in signed else correlation
        for name in missing:  # no module returns these units as they are: they are matched by their weights instead
            scores[name] = torch.eye(symmetry.groups[name].size, dtype=torch.float64).expand(scores[name].shape)
        mixed = _cross_products(symmetry, statistics.values())
        for each in mixed.values():
            if each.basis.group not in signed:
                scores[each.basis.group] = each.scores()
        permutation = harden(symmetry, scores)
        problem.report({"batches": count, "sites": len(sites), "groups_without_site": len(missing)})
        rotated = {name: each.rotations(permutation) for name, each in mixed.items()}
        found = without_pairs(problem.symmetry, Transform(permutation, {}, rotated))
        if missing and symmetry.bases:
            found = sweep_transforms(problem, _MAX_SWEEPS, found, only=missing).transform
        elif missing:
            found = Transform(sweep(problem, found.permutation, only=missing)[0], {})
        cost = problem.cost(found.permutation)
        return Match(found.permutation, cost, converged=True, logarithms=found.logarithms, matrices=found.matrices)


def _cross_products(symmetry: Symmetry, found: Iterable[_Correlations]) -> dict[str, CrossProducts]:
    """How units that may be rotated, or change their signs, vary together, by the names of their bases.

    A sign is seen where a module makes the units with a parameter that changes with it.
    """
    result = {}
    moments = [(site.site.module, each) for site in found for each in site.moments.values()]
    for name, basis in sole_bases(symmetry).items():
        if basis.kind == "signed":
            makers = {key.rpartition(".")[0] for key in basis.places}
            mine = [each.correlation() for module, each in moments if each.group == basis.group and module in makers]
        else:
            mine = [each.covariance() for _, each in moments if each.group == basis.group]
        if mine:
            result[name] = CrossProducts(symmetry, basis, torch.stack(mine).sum(0))
    return result


def _collect(network: nn.Module, sites: set[Site], batch: Any) -> dict[Site, Tensor]:
    """Run one batch and return the activations at the sites."""
    wanted: dict[str, dict[int, Site]] = {}
    for site in sites:
        wanted.setdefault(site.module, {})[site.call] = site
    found: dict[Site, Tensor] = {}
    handles = []
    for path, calls in wanted.items():
        counter: list[None] = []

        def hook(
            module: nn.Module, args: Any, output: Any, calls: Mapping[int, Site] = calls, counter: list = counter
        ) -> None:
            if len(counter) in calls:
                # A recurrent layer returns its states too; the site is its first tensor.
                found[calls[len(counter)]] = (output[0] if isinstance(output, tuple) else output).detach()
            counter.append(None)

        handles.append(network.get_submodule(path).register_forward_hook(hook))
    try:
        with evaluation_mode(network):
            run_batches(network, [batch])
    finally:
        for handle in handles:
            handle.remove()
    return found


@dataclass
class _JointMoments:
    """Running means, squares and cross products of one group's activations at one site.

    They stay on the device of the activations; squares and products are about the means. Batches are centred by their own
    means and merged as Chan, Golub and LeVeque (1979) do.
    """

    group: str
    free: list[bool]
    count: float
    means: list[Tensor]
    squares: list[Tensor]
    products: Tensor

    def add(self, other: _JointMoments) -> None:
        """Take in what another batch gave."""
        total = self.count + other.count
        share, weight = other.count / total, self.count * other.count / total
        steps = [theirs - ours for ours, theirs in zip(self.means, other.means, strict=True)]
        self.squares = [s + o + weight * d * d for s, o, d in zip(self.squares, other.squares, steps, strict=True)]
        self.products = self.products + other.products + weight * _outer(steps[0], steps[1], self.free)
        self.means = [mean + share * step for mean, step in zip(self.means, steps, strict=True)]
        self.count = total

    def correlation(self) -> Tensor:
        """Of every target unit with every source unit, shaped like a plan; zero where a unit is constant."""
        scale = _outer(self.squares[0].sqrt(), self.squares[1].sqrt(), self.free)
        return torch.where(scale > 0, self.products / scale, torch.zeros_like(scale)).cpu()

    def covariance(self) -> Tensor:
        """Cross products over the lengths of both members."""
        lengths = [squares.sum(-1, keepdim=True).expand_as(squares).sqrt() for squares in self.squares]
        scale = _outer(lengths[0], lengths[1], self.free)
        return torch.where(scale > 0, self.products / scale, torch.zeros_like(scale)).cpu()


class _Correlations:
    """Correlations between the units of two networks at one site, over batches."""

    def __init__(self, symmetry: Symmetry, site: Site):
        self.symmetry, self.site = symmetry, site
        self.moments: dict[tuple[int, int], _JointMoments] = {}  # by block and axis

    def add(self, target: Tensor, source: Tensor) -> None:
        """Take in one batch of activations of both networks."""
        groups = self.symmetry.groups
        wide = torch.promote_types(target.dtype, torch.float32)
        for number, block in enumerate(member_blocks(self.site.layout, groups, target.to(wide), source.to(wide))):
            for axis, chain in innermost_axes(groups, block).items():
                found = self._measure(block, axis, chain)
                if (number, axis) in self.moments:
                    self.moments[number, axis].add(found)
                else:
                    self.moments[number, axis] = found

    def _measure(self, block: Block, axis: int, chain: list[int]) -> _JointMoments:
        groups, name = self.symmetry.groups, block.labels[axis] or ""
        means, squares, centred = [], [], []
        for values in block.tensors:
            mean = reduce_to(values, chain, torch.mean)
            centred.append(values - _stretch(mean, chain, values.dim()))
            means.append(mean.double())
            squares.append(reduce_to(centred[-1].square(), chain).double())
        found = products(self.symmetry, centred[0], centred[1], chain, block.labels).double()
        count = block.tensors[0].numel() / means[0].numel()
        return _JointMoments(name, [p in groups for p in groups[name].parents], count, means, squares, found)

    def correlations(self) -> Iterator[tuple[str, Tensor]]:
        """For each group at the site its correlations."""
        for moments in self.moments.values():
            yield moments.group, moments.correlation()


def _stretch(values: Tensor, axes: list[int], num_axes: int) -> Tensor:
    """Values over some axes of a tensor, in the order given, laid out to broadcast against it."""
    shape = [1] * num_axes
    for axis in axes:
        shape[axis] = values.shape[axes.index(axis)]
    return values.permute([axes.index(axis) for axis in sorted(axes)]).reshape(shape)


def _outer(x: Tensor, y: Tensor, free: list[bool]) -> Tensor:
    """Target units times source units: axes of free parents and of the units in pairs, those of fixed parents once."""
    letters = string.ascii_lowercase[: x.dim()]
    theirs = "".join(c.upper() if pair else c for c, pair in zip(letters, [*free, True], strict=True))
    result = "".join(a if a == b else a + b for a, b in zip(letters, theirs, strict=True))
    return torch.einsum(f"{letters},{theirs}->{result}", x, y)
