"""Scales and matrices in closed form, of one set of groups while all others stay."""

import pytest
import torch

from onebasin.matching.closest_transforms import ClosestTransforms, can_stretch, distance, tolerance_of
from onebasin.matching.problem import Problem
from onebasin.symmetries import Transform
from onebasin.tensors.states import StateDict
from tests.matching.transform_networks import CASES, make_problem, plant


def make(name: str, kind: str) -> tuple[Problem, Transform]:
    """A problem in which the bases of one kind, or the scales ("positive"), are transformed, and nothing else."""
    planted = plant(CASES[name])
    symmetry, drawn = planted.symmetry, planted.transform
    matrices = {each: value for each, value in drawn.matrices.items() if symmetry.bases[each].kind == kind}
    transform = Transform(symmetry.identity(), drawn.logarithms if kind == "positive" else {}, matrices)
    assert not transform.is_identity
    return make_problem(symmetry, StateDict(transform.apply(planted.target)), planted.target), transform


def differ(problem: Problem, update: Transform) -> float:
    return distance(update.apply(problem.source), problem.target, problem.keys)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("RMS norm, 3 inputs", "orthogonal"),
        ("layer norm, 3 inputs", "centred"),
        ("grouped queries, rotary, gates", "orthogonal"),
    ],
)
def test_planted_rotations_are_undone(name, kind):
    problem, _ = make(name, kind)
    symmetry = problem.symmetry
    bases = [basis for basis in symmetry.bases.values() if basis.kind == kind]
    update, left = ClosestTransforms(symmetry).rotate(problem, problem.source, bases, problem.keys)
    assert not left
    assert differ(problem, update) < 1e-20


def test_a_rotation_is_known_where_the_tensors_span_the_units():
    problem, _ = make("RMS norm, 3 inputs", "orthogonal")
    bases = [basis for basis in problem.symmetry.bases.values() if basis.kind == "orthogonal"]
    keys = ["embed.weight"]  # three inputs
    update, left = ClosestTransforms(problem.symmetry).rotate(problem, problem.source, bases, keys)
    assert [known.rank for known in left.values()] == pytest.approx([6])
    assert distance(update.apply(problem.source), problem.target, keys) < 1e-20
    assert differ(problem, update) > 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ReLU", "positive"),
        ("batch norm", "positive"),
        ("grouped queries, rotary, gates", "positive"),
        ("grouped queries, rotary, gates", "linear"),
        ("wide linear layers", "linear"),
    ],
)
def test_planted_scales_and_matrices_of_one_group_after_the_other_are_undone(name, kind):
    problem, transform = make(name, kind)
    symmetry, closest = problem.symmetry, ClosestTransforms(problem.symmetry)
    bases = {symmetry.bases[each].group for each in transform.matrices}
    groups = bases or {scale.group for scale in symmetry.scales.values()}
    assert can_stretch(symmetry, groups)
    total = Transform(symmetry.identity(), {})
    for _ in range(60):  # scales beside each other depend on each other
        for group in sorted(groups):
            update, _ = closest.stretch(problem, StateDict(total.apply(problem.source)), {group}, problem.keys)
            total = update @ total
    assert differ(problem, total) < 1e-10 * differ(problem, Transform(symmetry.identity(), {}))


def test_what_leaves_too_much_is_not_taken():
    problem, _ = make("ReLU", "positive")
    other = StateDict({key: torch.randn_like(value) for key, value in problem.source.items()})
    closest, groups = ClosestTransforms(problem.symmetry), problem.symmetry.groups
    assert closest.stretch(problem, other, groups, problem.keys)[0].logarithms
    assert not closest.stretch(problem, other, groups, problem.keys, share=0.5)[0].logarithms


def test_permutations_alone_cannot_stretch():
    symmetry = plant(CASES["tanh"]).symmetry
    assert not can_stretch(symmetry, symmetry.groups)


def test_inner_products_of_units_are_those_of_their_rows():
    problem, _ = make("wide linear layers", "linear")
    (basis,) = problem.symmetry.bases.values()
    closest = ClosestTransforms(problem.symmetry)
    first, bias, second = (problem.source[key] for key in ("0.weight", "0.bias", "1.weight"))
    made = closest.grams(problem.source, basis, problem.keys, is_dual=False)
    torch.testing.assert_close(made, first @ first.T + torch.outer(bias, bias))
    torch.testing.assert_close(closest.grams(problem.source, basis, problem.keys, is_dual=True), second.T @ second)


def test_rounding_counts_by_the_type():
    problem, _ = make("ReLU", "positive")
    assert tolerance_of(problem) == pytest.approx(torch.finfo(torch.float64).eps ** 0.75)
