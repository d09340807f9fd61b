"""Invertible matrices of bases beside each other are found together."""

import torch

from onebasin.matching.joint_matrices import solve_together
from onebasin.symmetries import Transform
from onebasin.symmetries.multiplication import mixed_tensors
from tests.matching.transform_networks import CASES, plant


def test_planted_matrices_of_bases_in_a_row_are_undone():
    planted = plant(CASES["wide linear layers in a row"])
    symmetry, target = planted.symmetry, planted.target
    only_matrices = Transform(symmetry.identity(), {}, planted.transform.matrices)
    source = only_matrices.apply(target)
    keys = [key for key in target if any(key in basis.places for basis in symmetry.bases.values())]
    assert any(not torch.allclose(source[key], target[key], atol=0.1) for key in keys)
    with torch.no_grad():
        found = solve_together(
            symmetry,
            mixed_tensors(symmetry),
            {key: source[key] for key in keys},
            {key: target[key] for key in keys},
            symmetry.bases,
        )
    after = Transform(symmetry.identity(), {}, found).apply(source)
    for key in keys:
        torch.testing.assert_close(after[key], target[key], rtol=1e-8, atol=1e-8)
