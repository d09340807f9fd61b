"""Entries that get other positions: which matrices and which scales they let through."""

import pytest
import torch
from torch import nn

import onebasin as ob
from tests.basis_networks import D, Function

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def write(x, change):
    """A copy of a tensor that is written to."""
    result = x.clone()
    change(result)
    return result


def find(between):
    """The kinds of bases, and how many scales there are if scales are all that is looked for."""
    torch.manual_seed(0)
    model = Function(between).eval()
    bases = ob.symmetry(model, X, kinds="all").bases
    return [basis.kind for basis in bases.values()], len(ob.symmetry(model, X, kinds="positive").scales)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.roll(1, 0),
        lambda x: x.flip(0),
        lambda x: x.roll((1, 2), (0, 1)) if x.dim() == 3 else x[None].roll((1, 1), (0, 1))[0],
        lambda x: x.tile(2, 1),
        lambda x: x.tile(2, 3, 1),
        lambda x: x.repeat(3, 1),
        lambda x: x.repeat_interleave(2, 0),
        lambda x: x[:1].broadcast_to(4, D),
        lambda x: torch.hstack([x[None], 2 * x[None]])[0],
        lambda x: torch.vstack([x, x[0]]),
        lambda x: torch.dstack([x.mT, x.flip(0).mT]).sum(-1).mT,
        lambda x: torch.column_stack([x.mT, x.mT]).mT,
        lambda x: torch.cat([torch.zeros(1, D).to(x), x]),
        lambda x: torch.stack([torch.zeros_like(x), x], 1),
        lambda x: x.tensor_split(2, 0)[0],
        lambda x: write(x, lambda y: y[0].zero_()),
        lambda x: write(x, lambda y: y[1:3].fill_(0.0)),
        lambda x: write(x, lambda y: y[1:3].copy_(x[:2].flip(0))),
        lambda x: write(x, lambda y: y[-1].copy_(x[0])),
        lambda x: write(torch.zeros(5, D).to(x), lambda y: y[:2].copy_(x[:2])),
        lambda x: torch.cat(x.tensor_split(2, 1)[::-1], 1),
    ],
)
def test_what_moves_whole_rows_commutes_with_any_matrix(between):
    kinds, num_scales = find(between)
    assert (kinds, num_scales) == (["linear"] * len(kinds), len(kinds))
    assert len(kinds) in (1, 2)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda x: x.roll(1, 1), []),
        (lambda x: x.flip(1), []),
        (lambda x: x.roll(1), []),
        (lambda x: torch.hstack([x[None], torch.tanh(x)[None]])[0], ["signed"]),
        (lambda x: torch.vstack([x, torch.tanh(x)]), ["signed"]),
        (lambda x: write(x, lambda y: y[0].fill_(1.0)), ["centred"]),
        (lambda x: write(x, lambda y: y[0].copy_(torch.arange(D))), []),
        (lambda x: write(x, lambda y: y[0].copy_(torch.tanh(x[1]))), ["signed"]),
        (lambda x: write(x, lambda y: y[:, : D // 2].zero_()), []),
        (lambda x: torch.cat([torch.ones(1, D).to(x), x]), ["centred"]),
        (lambda x: torch.cat([torch.arange(D)[None].to(x), x]), []),
    ],
)
def test_what_allows_less(between, expected):
    assert find(between)[0] == expected


class Grown(nn.Module):
    """One learned row for all tokens, as a query or a class token is."""

    def __init__(self, grow):
        super().__init__()
        self.row, self.first, self.second = nn.Parameter(torch.randn(1, D)), nn.Linear(3, D), nn.Linear(D, 2)
        self.grow = grow

    def forward(self, x):
        return self.second(self.first(x) + self.grow(self.row, len(x)))


@pytest.mark.parametrize(
    "grow", [lambda row, n: row.tile(n, 1), lambda row, n: row.repeat(n, 1), lambda row, n: row.expand(n, D)]
)
def test_a_row_that_is_repeated(grow):
    torch.manual_seed(0)
    symmetry = ob.symmetry(Grown(grow).eval(), X, kinds="all")
    assert [basis.kind for basis in symmetry.bases.values()] == ["linear"]
    (basis,) = symmetry.bases.values()
    assert set(basis.places) == {"row", "first.weight", "first.bias", "second.weight"}
