"""Heads move as blocks, and units inside them; positions move unless a mask orders them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from tests.cases import Fn, check_groups, weight, written

attend = F.scaled_dot_product_attention


def heads_of(x, num_heads):
    """(batch, position, head * unit) to (batch, head, position, unit)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-2, -3)


# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: self.last(attend(self.first(x), self.first(x), self.first(x))), [8]),
    (lambda self, x: self.last(attend(self.first(x), self.first(x), self.first(x), is_causal=True)), [8]),
    (lambda self, x: self.last(attend(x, x, self.first(x))), [8]),
    (lambda self, x: self.last(attend(*[heads_of(self.first(x), 2)] * 3).transpose(0, 1).flatten(1)), [2, 4]),
    (lambda self, x: self.last(self.scale) + attend(self.first(x), self.first(x), self.last(self.first(x))), [8]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)


@pytest.mark.parametrize(("options", "groups"), [({}, ["5", "6"]), ({"is_causal": True}, ["6"])])
def test_a_causal_mask_orders_positions(options, groups):
    def forward(self, x):
        return torch.sin(attend(self.table, self.table, self.table, **options)).sum(0) @ self.out * x

    torch.manual_seed(0)
    assert written(Fn(forward, table=weight(5, 6), out=weight(6, 4))) == groups


@pytest.mark.parametrize(("options", "groups"), [({}, ["5", "5", "6"]), ({"is_causal": True}, ["6"])])
def test_equal_queries_attend_to_what_is_before_them(options, groups):
    def forward(self, x):
        query = self.table.mean(0, keepdim=True).expand(5, 6)
        return (attend(query, self.table, self.table, **options) * self.gate[:, None]).sin().sum(0) @ self.out * x

    torch.manual_seed(0)
    assert written(Fn(forward, table=weight(5, 6), gate=weight(5), out=weight(6, 4))) == groups


def test_queries_in_groups_share_keys_and_values():
    """Two key-value heads with two query heads each: both levels move, and so do the units that are summed over."""

    def forward(self, x):
        q, k, v = heads_of(self.q(x), 4), heads_of(self.k(x), 2), heads_of(self.v(x), 2)
        return self.out(attend(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    members = {"q": nn.Linear(4, 12), "k": nn.Linear(4, 6), "v": nn.Linear(4, 10), "out": nn.Linear(20, 2)}
    assert written(Fn(forward, **members), torch.randn(2, 3, 4)) == ["2", "2[2]", "3[2]", "5[2]"]


def test_dropout_in_eval_mode_is_not_covered():
    model = Fn(
        lambda self, x: self.last(attend(*[self.first(x)] * 3, dropout_p=0.5)), first=nn.Linear(4, 8), last=nn.Linear(8, 2)
    )
    symmetry = ob.symmetry(model, torch.rand(3, 4), verify=False)
    assert not symmetry.groups
    assert "dropout is on in eval mode" in str(symmetry.pinned["first.weight", 0])
