"""Rules that readings share: the same network has the same scales and bases however its linear maps are written."""

import pytest
import torch
from torch import nn

import onebasin as ob


class Written(nn.Module):
    """A linear map, ReLU, a linear map, a linear map: each of the last two is written in one way."""

    def __init__(self, write):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(n, m)) for n, m in ((6, 3), (5, 6), (2, 5)))
        self.write = write

    def forward(self, x):
        return self.write(self.write(torch.relu(x @ self.a.T), self.b), self.c)


@pytest.mark.parametrize(
    "write",
    [
        nn.functional.linear,
        lambda x, w: x @ w.T,
        lambda x, w: torch.matmul(w, x.mT).mT,
        lambda x, w: torch.einsum("ni,oi->no", x, w),
        lambda x, w: (x[:, None, :] * w).sum(-1),
        lambda x, w: nn.functional.conv1d(x.unsqueeze(-1), w.unsqueeze(-1)).squeeze(-1),
        lambda x, w: torch.bmm(x[None], w.T[None])[0],
        lambda x, w: torch.stack([x @ w.T, x @ w.T]).mean(0),
    ],
)
def test_linear_maps_however_they_are_written(write):
    torch.manual_seed(0)
    symmetry = ob.symmetry(Written(write), torch.randn(4, 3), kinds="all")
    assert [(scale.name, scale.group) for scale in symmetry.scales.values()] == [("a", "a")]
    assert [(basis.name, basis.kind) for basis in symmetry.bases.values()] == [("b", "linear")]
