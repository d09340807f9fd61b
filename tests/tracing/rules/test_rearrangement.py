"""Views, cuts and concatenations, also of scalars and empty tensors."""

import pytest
import torch
from cases import check_groups

# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: self.last(self.first(x).squeeze(()).squeeze()), [8]),
    (lambda self, x: self.last(self.first(x)).sum().squeeze().transpose(0, -1).t(), [2, 8]),
    (lambda self, x: self.last(self.first(x).T.mT.movedim(0, 1).swapaxes(0, 1)), [8]),
    (lambda self, x: self.last(self.first(x).view(3, 2, 4).movedim((1, 2), (2, 1)).reshape(3, 8)), [4, 2]),
    (lambda self, x: self.last(torch.cat(self.first(x).split([0, 3, 5], 1), 1)), [3, 5]),
    (lambda self, x: self.last(torch.cat([self.first(x).narrow(1, -3, 3), self.first(x).narrow(1, 0, 5)], 1)), [3, 5]),
    (lambda self, x: self.last(self.first(x)[:, ::2].repeat(1, 2)), [4, 2]),
    (lambda self, x: self.last(torch.constant_pad_nd(self.first(x)[:, ::3], (0, 5))), []),  # what meets zeros only
    (lambda self, x: self.last(torch.cat([self.first(x), torch.ones(0)], 1)), [8]),
    (lambda self, x: self.last(self.first(x)) + torch.cat([x[:, :0], x[:, :0]], 1).sum(), [8]),
    (
        lambda self, x: self.last(torch.slice_scatter(self.first(x), x[:, :2], 1, 0, 2)),
        [6],
    ),  # and two units that nothing reads
    (lambda self, x: self.last(torch.slice_scatter(self.first(x), x[:, :0], 1, 2, 2)), [8]),
    (lambda self, x: self.last(torch.slice_scatter(self.first(x), x, 1, 0, 8, 2)), []),
    (lambda self, x: self.last(torch.select_scatter(self.first(x), x[:, 0], 1, 3)), [3, 4]),
    (lambda self, x: self.last(self.first(x).view(torch.int32).view(torch.float32)), [8]),
    (lambda self, x: self.last(self.first(x)) + self.first(x).view(torch.int16).float().mean(), []),
    (lambda self, x: self.last(torch.stack([self.first(x)]).squeeze(0)), [8]),
    (lambda self, x: self.last(self.first(x)[:, :1].expand(3, 8)), [8]),
    (lambda self, x: self.last(torch.tile(self.first(x)[:, :4], (2,))), [4, 2]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)
