"""Seeded within, untouched outside."""

import pytest
import torch

from onebasin.tensors.seeding import seeded


def test_numbers_are_those_of_the_seed_and_the_generator_goes_on():
    torch.manual_seed(5)
    expected = torch.rand(2), torch.rand(2)
    torch.manual_seed(5)
    found = [torch.rand(2)]
    with seeded(3):
        inside = torch.rand(2)
    found.append(torch.rand(2))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(inside, torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_an_error_leaves_the_generator_alone_too():
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match="unsupported"), seeded(3):
        torch.rand(2) + "2"
    assert torch.equal(torch.get_rng_state(), before)
