"""Matrices that are learned stay of their kind."""

import pytest
import torch

from onebasin.relaxation.learned_bases import LearnedBasis, exponential, exponentials
from onebasin.symmetries import Basis
from onebasin.symmetries.basis_matrices import check_matrices, random_matrices


def matrices(learned, dtype=torch.float64):
    return learned.matrices(exponentials(learned.exponents(dtype)), dtype)


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
