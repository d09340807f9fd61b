"""Scales by Newton's method, against grids and planted ones."""

import torch

from onebasin.matching.closest_scales import Term, closest_logarithms, scaled_scores


def test_closest_logarithms_are_the_lowest_of_a_grid():
    torch.manual_seed(0)
    square, product = torch.rand(2, 2, 50, dtype=torch.float64)
    terms = {1.0: Term(square[0], product[0]), -1.0: Term(square[1], product[1])}
    found = closest_logarithms(terms)
    grid = torch.linspace(-3, 3, 6001, dtype=torch.float64)[:, None]
    costs = sum(t.square * (2 * p * grid).exp() - 2 * t.product * (p * grid).exp() for p, t in terms.items())
    torch.testing.assert_close(found, grid[costs.argmin(0), 0], atol=1e-3, rtol=0)


def test_units_that_point_apart_do_not_vanish():
    """The smaller the closer: there is no best scale, and none beyond the limit."""
    terms = {1.0: Term(torch.ones(1, dtype=torch.float64), -torch.ones(1, dtype=torch.float64))}
    assert closest_logarithms(terms).tolist() == [-3.0]


def test_pairs_of_one_power_count_as_much_as_the_best_scale_explains():
    generator = torch.Generator().manual_seed(0)
    target, source = torch.rand(2, 7, 5, generator=generator, dtype=torch.float64)
    product, square = target @ source.T, source.square().sum(-1)
    found = scaled_scores({1.0: Term(square.expand(7, 7), product)})
    torch.testing.assert_close(found, product.square() / square / 2)


def test_scaled_copies_count_most():
    generator = torch.Generator().manual_seed(0)
    made, read = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64)
    scale = torch.rand(7, 1, generator=generator, dtype=torch.float64) + 0.5
    order = torch.randperm(7, generator=generator)
    source_made, source_read = (scale * made)[order], (read / scale)[order]
    terms = {
        1.0: Term(source_made.square().sum(-1).expand(7, 7), made @ source_made.T),
        -1.0: Term(source_read.square().sum(-1).expand(7, 7), read @ source_read.T),
    }
    sizes = (made.square() + read.square()).sum(-1) / 2
    found = scaled_scores(terms)
    assert torch.equal(found.argmax(-1), order.argsort())
    torch.testing.assert_close(found.amax(-1), sizes)
