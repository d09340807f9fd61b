"""Units are paired by the best element of their kind: scales, signs, matrices of heads."""

from dataclasses import replace

import pytest
import torch

import onebasin as ob
from onebasin.matching.closest_transforms import ClosestTransforms
from onebasin.matching.unit_pairs import CrossProducts, UnitPairs, sole_bases
from onebasin.symmetries import Basis
from tests.basis_networks import RMSNorm
from tests.matching.transform_networks import CASES, make_problem, plant, stream

STREAM = plant(lambda: stream(RMSNorm))


def test_members_of_a_family_are_paired_by_what_rotations_reach():
    symmetry = STREAM.symmetry
    basis = next(b for b in sole_bases(symmetry).values() if symmetry.groups[b.group].parents)
    generator = torch.Generator().manual_seed(0)
    turns = torch.linalg.qr(torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)).Q
    total = torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    total[0, 1], total[1, 0] = turns  # each is the other's turned copy
    found = CrossProducts(symmetry, basis, total)
    assert found.scores()[0, 1].trace() == pytest.approx(4)
    assert found.scores()[0, 0].trace() == pytest.approx(0)
    (parent,) = symmetry.groups[basis.group].parents
    permutation = symmetry.identity()
    permutation.indices[parent] = torch.tensor([1, 0])
    torch.testing.assert_close(found.rotations(permutation), turns)


def test_groups_with_several_bases_are_left_out():
    stream_basis = next(b for b in STREAM.symmetry.bases.values() if b.kind == "orthogonal")
    both = {**STREAM.symmetry.bases, "more": Basis("more", stream_basis.group, "linear", {})}
    assert stream_basis.name not in sole_bases(replace(STREAM.symmetry, bases=both))


def find(name: str, group: str, fitted: bool) -> tuple[ob.Transform, ob.Transform]:
    """What is found for the first layer of a network whose first layer alone was transformed, and what undoes that."""
    planted = plant(CASES[name])
    symmetry, drawn = planted.symmetry, planted.transform
    indices = {
        each: value if each == group else symmetry.identity()[each] for each, value in drawn.permutation.indices.items()
    }
    logarithms = {each: 3 * v for each, v in drawn.logarithms.items() if symmetry.scales[each].group == group}
    matrices = {each: value for each, value in drawn.matrices.items() if symmetry.bases[each].group == group}
    transform = ob.Transform(ob.Permutation(symmetry, indices), logarithms, matrices)
    problem = make_problem(symmetry, type(planted.target)(transform.apply(planted.target)), planted.target)
    keys = [key for key in problem.keys if key.startswith(("0.", "2."))]
    pairs = UnitPairs(ClosestTransforms(symmetry))
    return pairs.find(problem, problem.source, [symmetry.groups[group]], keys, fitted), transform.inverse()


def test_units_are_paired_at_their_best_scales():
    found, wanted = find("ReLU", "0.weight", fitted=True)
    assert found.permutation == wanted.permutation
    assert not found.logarithms


@pytest.mark.parametrize("fitted", [True, False])
def test_units_are_paired_with_their_better_signs(fitted):
    found, wanted = find("tanh", "0.weight", fitted)
    assert found.permutation == wanted.permutation
    assert any(bool((value < 0).any()) for value in found.matrices.values())
    for name, value in found.matrices.items():
        assert torch.equal(value, wanted.matrices[name])


def test_what_can_be_fitted():
    heads = [group for group in STREAM.symmetry.groups.values() if group.parents]
    pairs = UnitPairs(ClosestTransforms(STREAM.symmetry))
    assert pairs.can_fit(heads)
    assert not pairs.have_scales(heads)
    assert not pairs.can_fit([STREAM.symmetry.groups["embed"]])
    assert pairs.bases_of([STREAM.symmetry.groups["embed"]])
