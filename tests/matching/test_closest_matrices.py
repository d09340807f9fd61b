"""The closest matrices, against planted ones and dense least squares."""

import pytest
import torch

from onebasin.matching.closest_matrices import (
    Known,
    closest_map,
    closest_rotation,
    closest_turn,
    complex_sum,
    explained_by_maps,
)

N = 6


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_rotation(size: int = N) -> torch.Tensor:
    return torch.linalg.qr(draw(size, size, seed=7)).Q


def test_a_planted_rotation_is_found():
    units, rotation = draw(N, 9), draw_rotation()
    found, known = closest_rotation(rotation @ units @ units.T, float(units.square().sum()), 1e-12)
    assert known is None
    torch.testing.assert_close(found, rotation)


def test_what_units_do_not_span_is_not_known():
    units, rotation = draw(N, 2), draw_rotation()
    theirs = rotation @ units
    found, known = closest_rotation(theirs @ units.T, float(units.square().sum()), 1e-9)
    assert known is not None
    assert float(known.trace()) == pytest.approx(2)
    torch.testing.assert_close(known @ theirs, theirs)
    torch.testing.assert_close(found @ units, theirs)
    torch.testing.assert_close(found @ found.T, torch.eye(N, dtype=torch.float64))


def test_directions_that_are_known_stay():
    known = torch.diag(torch.tensor([1.0, 1.0, 0, 0, 0, 0])).double()
    found, left = closest_rotation(draw(N, N), 1.0, 1e-9, known=known)
    assert left is None
    torch.testing.assert_close(known @ found, known)


def test_centred_rotations_keep_the_ones():
    found, _ = closest_rotation(draw(N, N), 1.0, 0.0, "centred")
    torch.testing.assert_close(found.sum(-1), torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(found @ found.T, torch.eye(N, dtype=torch.float64))


def test_pairs_are_turned_by_the_angle_between_them():
    source = draw(2, 5)
    pair, angle = torch.complex(*source), torch.tensor(0.3, dtype=torch.float64)
    turned = pair * torch.exp(1j * angle)
    target = torch.stack([turned.real, turned.imag])
    torch.testing.assert_close(torch.complex(*complex_sum(target @ source.T)), (turned * pair.conj()).sum())
    torch.testing.assert_close(closest_turn(target @ source.T) @ source, target)


@pytest.mark.parametrize(("made", "read"), [(3, 2), (9, 0), (0, 9), (9, 9), (2, 3)])
def test_maps_are_the_least_squares(made, read):
    a, a_target, b, b_target = draw(N, made), draw(N, made, seed=1), draw(N, read, seed=2), draw(N, read, seed=3)
    products = a_target @ a.T + b_target @ b.T
    found, known = closest_map(products, a @ a.T, b_target @ b_target.T, 1e-9)
    one = torch.eye(N, dtype=torch.float64)
    rows = torch.cat([torch.kron(one, a.T.contiguous()), torch.kron(b_target.T.contiguous(), one)])  # of M, row after row
    wanted = torch.cat([a_target.flatten(), b.T.flatten()])
    best = torch.linalg.lstsq(rows, wanted[:, None], driver="gelsd").solution
    distance = (found @ a - a_target).square().sum() + (found.T @ b_target - b).square().sum()
    torch.testing.assert_close(distance, (rows @ best - wanted[:, None]).square().sum())
    assert (known is None) == (max(made, read) >= N)
    explained = explained_by_maps(products, a @ a.T, b_target @ b_target.T)
    torch.testing.assert_close(2 * explained, wanted.square().sum() - distance)


def test_a_map_of_which_a_part_is_known_undoes_that_part_and_is_well_conditioned():
    planted = draw(N, N)
    a, b = draw(N, 3), draw(N, 2, seed=1)
    a_target, b_target = planted @ a, torch.linalg.inv(planted).T @ b
    found, known = closest_map(a_target @ a.T + b_target @ b.T, a @ a.T, b_target @ b_target.T, 1e-9)
    assert isinstance(known, Known)
    assert known.rank == pytest.approx(5)
    torch.testing.assert_close(found @ a, a_target)
    torch.testing.assert_close(found.T @ b_target, b)
    torch.testing.assert_close(known.made @ b_target, b_target)  # what reads the units tells of all that makes them
    torch.testing.assert_close(known.read @ a_target, a_target)
    other = draw(N, 4, seed=2)
    torch.testing.assert_close(known.made @ found @ other, known.made @ planted @ other)
    dual, planted_dual = torch.linalg.inv(found).T, torch.linalg.inv(planted).T
    torch.testing.assert_close(known.read @ dual @ other, known.read @ planted_dual @ other)
    assert float(torch.linalg.cond(found)) < 100
