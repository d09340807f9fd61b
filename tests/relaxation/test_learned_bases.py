"""Matrices that are learned stay of their kind, and within their bound."""

import math

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.relaxation.learned_bases import LearnedBases, LearnedBasis, bound_stretch, exponential, exponentials
from onebasin.symmetries import Basis
from onebasin.symmetries.basis_matrices import check_matrices, complement_of_ones, random_matrices


def matrices(learned, dtype=torch.float64):
    made = learned.generator.to(dtype)
    return learned.matrices(exponentials(learned.exponents(bound_stretch(made, 2.0) if learned.is_free else made)), dtype)


@pytest.mark.parametrize(
    ("kind", "shape"), [("linear", (2, 4, 4)), ("orthogonal", (5, 5)), ("centred", (5, 5)), ("rotary", (3, 2, 2))]
)
@pytest.mark.parametrize("starts", [False, True])
def test_learned_matrices_are_of_their_kind(kind, shape, starts):
    generator = torch.Generator().manual_seed(0)
    start = random_matrices(shape, kind, generator) if starts else None
    basis = Basis("w", "h", kind, {})
    learned = LearnedBasis(basis, shape, start, torch.device("cpu"))
    matrix, _ = matrices(learned)
    torch.testing.assert_close(matrix, torch.eye(shape[-1]).double().expand(shape) if start is None else start)
    with torch.no_grad():
        learned.generator.normal_(0, 0.3, generator=generator)
    matrix, dual = matrices(learned)
    check_matrices(basis, matrix.detach())
    torch.testing.assert_close(dual.mT @ matrix, torch.eye(shape[-1]).double().expand(shape))
    torch.testing.assert_close(matrices(learned, torch.float32)[0].double(), matrix, rtol=1e-4, atol=1e-5)
    dual.square().sum().backward()
    assert learned.generator.grad is not None


@pytest.mark.parametrize("norm", [0.0, 0.1, 2.0, 8.0])
def test_the_exponential_in_float32_is_that_of_float64(norm):
    matrix = torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    skew = matrix - matrix.mT
    skew = norm * skew / torch.linalg.matrix_norm(skew, 2)[:, None, None]
    found = exponential(skew.float()).double()
    torch.testing.assert_close(found, torch.linalg.matrix_exp(skew), rtol=0, atol=2e-5)
    torch.testing.assert_close(exponential(skew), torch.linalg.matrix_exp(skew))


def test_exponentials_of_several_sizes_are_those_of_each():
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 4), (3, 2, 4, 4), (5, 5), (2, 5, 5), (0, 4, 4)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    for found, matrix in zip(exponentials(drawn), drawn, strict=True):
        torch.testing.assert_close(found, exponential(matrix))
    assert exponentials([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [0.1, 2.0])
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0, 1e4])
def test_exponentials_of_bounded_matrices_stretch_by_a_bound(dtype, limit, size):
    drawn = size * torch.randn(20, 6, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = bound_stretch(drawn, limit)
    assert found.dtype == dtype
    symmetric, before = (found + found.mT) / 2, (drawn + drawn.mT) / 2
    rounding = 10 * size * torch.finfo(dtype).eps  # of the rotation, which may be much larger
    assert float(torch.linalg.matrix_norm(symmetric, 2).max()) <= limit * (1 + 1e-5) + rounding
    torch.testing.assert_close(found - symmetric, drawn - before, rtol=1e-5, atol=1e-6 * size)  # the rotation stays
    spread = torch.linalg.matrix_norm(before, 2)
    ratio = (symmetric * before).sum((-2, -1)) / before.square().sum((-2, -1))
    torch.testing.assert_close(symmetric, ratio[:, None, None] * before, rtol=1e-5, atol=1e-6 * size)
    assert bool((ratio[spread < limit / 2] > 1 - 1e-5).all())  # as they are, unless they come close to the limit
    grown = torch.linalg.matrix_exp(found.double())
    if size < 10:
        assert float(torch.linalg.cond(grown).max()) <= math.exp(2 * limit) * (1 + 1e-4)


def test_skew_matrices_are_not_bounded():
    drawn = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0))
    for size in (0.0, 1.0, 1e3):
        skew = size * (drawn - drawn.mT)
        assert bool((bound_stretch(skew, 0.5) == skew).all())


@pytest.mark.parametrize("kind", ["orthogonal", "centred"])
def test_rotations_know_no_bound(kind):
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.RMSNorm(6) if kind == "orthogonal" else nn.LayerNorm(6), nn.Linear(6, 2))
    symmetry = ob.symmetry(ob.canonical(net, torch.zeros(1, 3)).model, torch.zeros(1, 3), kinds="all")
    ((name, basis),) = symmetry.bases.items()
    assert basis.kind == kind
    start = random_matrices((6, 6), kind, generator)
    learned = LearnedBases(symmetry, {name: start}, torch.device("cpu"), limit=1e-3)
    with torch.no_grad():
        made = learned.generators[0].normal_(0, 0.5, generator=generator)
        skew = made - made.mT
        if kind == "centred":
            inside = complement_of_ones(6).float()
            skew = inside @ skew @ inside.mT
        # The bases of one size are made in a batch, whose products need not be rounded as those of one matrix.
        torch.testing.assert_close(learned.plans()[f"basis:{name}"], exponential(skew) @ start.float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [1, 5])
def test_the_gradient_of_the_bound(size):
    at_zero = torch.zeros(2, size, size, requires_grad=True)
    weights = torch.randn(2, size, size, generator=torch.Generator().manual_seed(1))
    (bound_stretch(at_zero, 2.0) * weights).sum().backward()
    torch.testing.assert_close(at_zero.grad, weights)
    for scale in (1e-3, 0.5, 2.0, 20.0):
        drawn = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda g: bound_stretch(g, 2.0), (scale * drawn).requires_grad_())
    far = torch.full((2, size, size), 1e6, requires_grad=True)
    bound_stretch(far, 2.0).sum().backward()
    assert bool(far.grad.isfinite().all())


@pytest.mark.parametrize(("kind", "shape"), [("linear", (2, 4, 4)), ("rotary", (3, 2, 2))])
def test_the_condition_is_bounded_by_that_of_the_start(kind, shape):
    generator = torch.Generator().manual_seed(0)
    start = random_matrices(shape, kind, generator)
    learned = LearnedBasis(Basis("w", "h", kind, {}), shape, start, torch.device("cpu"))
    with torch.no_grad():
        learned.generator.normal_(0, 5.0, generator=generator)
    matrix, dual = (each.detach() for each in matrices(learned))
    torch.testing.assert_close(dual.mT @ matrix, torch.eye(shape[-1]).double().expand(shape), rtol=0, atol=1e-8)
    change = matrix @ torch.linalg.inv(start)
    stretches = torch.linalg.svdvals(change).log()
    assert float(stretches.abs().max()) <= 2.0 + 1e-9
    assert float(stretches.abs().max()) > 1.0
    assert bool((torch.linalg.cond(matrix) <= math.exp(4) * torch.linalg.cond(start) * (1 + 1e-9)).all())


def test_all_bases_of_a_network_have_the_bound_that_is_asked_for():
    net = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 2))
    symmetry = ob.symmetry(net, torch.zeros(1, 3), kinds="all")
    for limit in (0.5, 2.0):
        learned = LearnedBases(symmetry, {}, torch.device("cpu"), limit)
        assert len(learned.generators) == 3
        with torch.no_grad():
            for number, generator in enumerate(learned.generators):
                generator.normal_(0, 3.0, generator=torch.Generator().manual_seed(number))
        for matrix in learned.matrices().values():
            assert float(torch.linalg.svdvals(matrix).log().abs().max()) <= limit + 1e-9
        plans = learned.plans()
        for name, matrix in learned.matrices().items():
            torch.testing.assert_close(plans[f"basis:{name}"].double(), matrix, rtol=1e-3, atol=1e-4)
