"""Fourier transforms pin the axis along which they mix, complex numbers the axis of their parts."""

import pytest
import torch
from torch import nn

import onebasin as ob
from tests.cases import Fn, check_groups, weight

# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: self.last(torch.fft.fft(self.first(x), dim=0).real), [8]),
    (lambda self, x: self.last(torch.fft.fft(self.first(x)).imag), []),
    (lambda self, x: self.last(torch.fft.irfft(torch.fft.rfft(self.first(x), dim=0), n=3, dim=0)), [8]),
    (lambda self, x: self.last(torch.fft.fft2(self.first(x)).abs()), []),
    (lambda self, x: self.last(torch.fft.fftn(self.first(x), dim=(0,)).angle()), [8]),
    (lambda self, x: self.last(torch.polar(self.first(x), self.scale.expand(3, 8)).real), [8]),
    (
        lambda self, x: self.last(
            torch.view_as_real(torch.complex(self.first(x), self.first(x)).conj().resolve_conj())[..., 1]
        ),
        [8],
    ),
    (lambda self, x: self.last(torch.view_as_complex(self.first(x).view(3, 4, 2)).real.repeat(1, 2)), [4, 2]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)


def test_a_spectral_convolution_is_free():
    """A layer of a Fourier operator: frequencies stay, channels are mixed at each of them by a complex matrix."""

    def forward(self, x):
        h = self.up(x)
        spectrum = torch.fft.rfft(h, dim=1)
        mixed = torch.einsum("bfi,fio->bfo", spectrum, torch.view_as_complex(self.weights))
        return self.down(torch.relu(h + torch.fft.irfft(mixed, n=h.shape[1], dim=1)))

    model = Fn(forward, up=nn.Linear(3, 6), weights=weight(3, 6, 6, 2), down=nn.Linear(6, 2))
    symmetry = ob.symmetry(model, torch.rand(2, 4, 3), verify=False)
    assert [group.size for group in symmetry.groups.values()] == [6]
    assert symmetry.verify(model, torch.rand(2, 4, 3)) < 1e-9
