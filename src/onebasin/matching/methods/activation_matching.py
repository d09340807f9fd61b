"""Activation matching (Li et al. 2016; Git Re-Basin, sec. 3.1): pair units that respond alike to the same data.

Statistics are gathered in one pass over the data, by hooks at `Symmetry.sites`: for every group the correlations between the
units of the two networks, summed over batches, positions and sites. Units that no module returns as they are (the heads
inside an attention) are then matched by their weights.
"""

from __future__ import annotations

import copy
import itertools
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import run_batches
from onebasin.matching.methods.base import Match, Method, check_option
from onebasin.matching.methods.weight_matching import sweep
from onebasin.matching.problem import Problem
from onebasin.matching.scores import innermost_axes, member_blocks, products, reduce_to
from onebasin.programs.graph import evaluation_mode
from onebasin.relaxation.hardening import harden
from onebasin.relaxation.plans import plan_shape
from onebasin.symmetries import Site, Symmetry


@dataclass(frozen=True)
class ActivationMatching(Method):
    """Pair the units whose activations correlate most.

    Attributes:
        num_batches: read so many batches; all of them if None.
    """

    num_batches: int | None = None

    name: ClassVar[str] = "activation-matching"
    looks_at_activations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_option("num_batches", self.num_batches, at_least=1)

    def match(self, problem: Problem) -> Match:
        """One pass over the data, then an assignment per group."""
        assert problem.model is not None
        assert problem.batches is not None
        symmetry = problem.symmetry
        missing = [name for name in symmetry.groups if not symmetry.sites.get(name)]
        sites = {site for found in symmetry.sites.values() for site in found}
        sums = {site: _CorrelationSums(symmetry, site) for site in sites}
        networks = [copy.deepcopy(problem.model).to(problem.device, problem.dtype) for _ in range(2)]
        for network, state in zip(networks, (problem.target, problem.source), strict=True):
            network.load_state_dict(state.load())
        count = 0
        for batch in itertools.islice(problem.batches, self.num_batches):
            seen = [_collect(network, sites, batch) for network in networks]
            for site in sites:
                sums[site].add(*(found[site] for found in seen))
            count += 1
        scores = {name: torch.zeros(plan_shape(symmetry, g), dtype=torch.float64) for name, g in symmetry.groups.items()}
        for each in sums.values():
            for name, correlation in each.correlations():
                scores[name] += correlation
        for name in missing:  # no module returns these units as they are: they are matched by their weights instead
            scores[name] = torch.eye(symmetry.groups[name].size, dtype=torch.float64).expand(scores[name].shape)
        permutation = harden(symmetry, scores)
        problem.report({"batches": count, "sites": len(sites), "groups without a site": len(missing)})
        if missing:
            permutation, _ = sweep(problem, permutation, only=missing)
        return Match(permutation, problem.cost(permutation), converged=True)


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


class _CorrelationSums:
    """Streaming sums at one site, in float64: for every group there, of x, y, their squares, and x y for all pairs."""

    def __init__(self, symmetry: Symmetry, site: Site):
        self.symmetry, self.site = symmetry, site
        self.sums: dict[tuple[int, int], tuple[str, float, list[Tensor]]] = {}  # by block and axis: group, count, sums

    def add(self, target: Tensor, source: Tensor) -> None:
        """Take in one batch of activations of both networks."""
        groups = self.symmetry.groups
        for number, block in enumerate(member_blocks(self.site.layout, groups, target.double(), source.double())):
            x, y = block.tensors
            for axis, chain in innermost_axes(groups, block).items():
                terms = [reduce_to(t, chain).cpu() for t in (x, y, x * x, y * y)]
                terms.append(products(self.symmetry, x, y, chain, block.labels).cpu())
                count = x.numel() / terms[0].numel()
                if (number, axis) in self.sums:
                    _, total, sums = self.sums[number, axis]
                    count, terms = count + total, [a + b for a, b in zip(sums, terms, strict=True)]
                self.sums[number, axis] = (block.labels[axis] or "", count, terms)

    def correlations(self) -> Iterator[tuple[str, Tensor]]:
        """For each group at the site, the correlation of every target unit with every source unit, shaped like a plan."""
        for name, count, (x, y, xx, yy, xy) in self.sums.values():
            means = x / count, y / count
            spreads = [(s / count - m * m).clamp_min(0).sqrt() for s, m in zip((xx, yy), means, strict=True)]
            free = [p in self.symmetry.groups for p in self.symmetry.groups[name].parents]
            covariance = xy / count - _outer(means[0], means[1], free)
            scale = _outer(spreads[0], spreads[1], free)
            yield name, torch.where(scale > 0, covariance / scale, torch.zeros_like(scale))


def _outer(x: Tensor, y: Tensor, free: list[bool]) -> Tensor:
    """Target units times source units: axes of free parents and of the units in pairs, those of fixed parents once."""
    letters = string.ascii_lowercase[: x.dim()]
    theirs = "".join(c.upper() if pair else c for c, pair in zip(letters, [*free, True], strict=True))
    result = "".join(a if a == b else a + b for a, b in zip(letters, theirs, strict=True))
    return torch.einsum(f"{letters},{theirs}->{result}", x, y)
