"""Writes at positions that an index names pin the axis they write along; sums forget the order of sources, writes do not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from tests.cases import Fn, check_groups, two_layers, weight

ROWS = torch.tensor([1, 0, 1])
UNITS = torch.tensor([1, 0, 1, 3, 2, 2, 7, 7])


def over_rows(operation):
    """Rows of the hidden layer written into five others."""
    return lambda self, x: self.last(operation(torch.zeros(5, 8), self.first(x)))


def over_units(operation):
    """Hidden units written into eight others."""
    return lambda self, x: self.last(operation(torch.zeros(3, 8), self.first(x)))


# A forward, and the sizes of the groups that a person counts.
CASES = [
    (over_rows(lambda z, h: z.scatter(0, ROWS[:, None].expand(3, 8), h)), [8]),
    (over_rows(lambda z, h: z.scatter_add(0, ROWS[:, None].expand(3, 8), h)), [8]),
    (over_rows(lambda z, h: z.scatter_reduce(0, ROWS[:, None].expand(3, 8), h, "amax", include_self=False)), [8]),
    (over_rows(lambda z, h: z.index_add(0, ROWS, h)), [8]),
    (over_rows(lambda z, h: z.index_reduce(0, ROWS, h, "mean")), [8]),
    (over_rows(lambda z, h: z.index_copy(0, torch.arange(3), h)), [8]),
    (over_rows(lambda z, h: z.index_put((ROWS,), h, accumulate=True)), [8]),
    (over_rows(lambda z, h: z.index_put((torch.arange(3),), h)), [8]),
    (over_units(lambda z, h: z.index_put((h > 0,), torch.tensor(1.0)) + h), [8]),
    (over_units(lambda z, h: h.scatter(0, (h[:2] > 0).long(), 1.0)), [8]),
    # A part of the axis: the other entries keep what they had.
    (over_units(lambda z, h: h.scatter_add(0, torch.zeros(3, 4).long(), h)), []),
    (over_units(lambda z, h: h.scatter_add(0, torch.zeros(2, 8).long(), h)), [8]),
    # Along the units. A sum of sources is the same for any order of them, a write is not.
    (over_units(lambda z, h: z.scatter_add(1, UNITS.expand(3, 8), h)), []),
    (over_units(lambda z, h: z.scatter_add(1, torch.zeros(3, 8).long(), h)), [8]),
    (over_units(lambda z, h: h.scatter_add(1, (h > 0).long(), h)), []),
    (over_units(lambda z, h: z.scatter_add(1, (h > 0).long(), h)), [8]),
    (over_units(lambda z, h: z.scatter(1, (h > 0).long(), h)), []),
    (over_units(lambda z, h: z.index_add(1, UNITS, h)), []),
    (over_units(lambda z, h: h.index_add(1, UNITS, torch.ones_like(h))), []),
    (over_units(lambda z, h: z.scatter_reduce(1, (h > 0).long(), h, "prod")), [8]),
    # Histograms count all entries alike.
    (lambda self, x: self.last(self.first(x)) * torch.histc(self.first(x), 2, -1, 1), [8]),
    (lambda self, x: self.last(F.one_hot((self.first(x) > 0).sum(1) % 8, 8).float()), [8]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)


def test_units_of_a_source_do_not_depend_on_what_is_written():
    """Each row of the table orders its units like all others, because any may be added to any."""
    model = Fn(
        lambda self, x: self.last(self.table.index_add(0, (x[:, 0] > 0).long(), self.table[:3])).sum(0),
        table=weight(4, 8),
        last=nn.Linear(8, 2),
    )
    symmetry = ob.symmetry(model, torch.randn(3, 4), verify=False)
    assert [(group.size, group.parents) for group in symmetry.groups.values()] == [(8, ())]
    assert symmetry.verify(model, torch.randn(3, 4)) < 1e-9


def test_a_graph_convolution_is_free():
    """Messages along edges, weighted by attention over the edges of each node."""

    def convolve(self, x, edges):
        h = self.first(x)
        scores = torch.exp((h[edges[0]] + h[edges[1]]).tanh() @ self.attention)
        total = torch.zeros(len(x)).to(x).scatter_add(0, edges[1], scores)[edges[1]]
        messages = h[edges[0]] * (scores / total)[:, None]
        return self.last(torch.zeros_like(h).index_add(0, edges[1], messages))

    model, inputs = two_layers(convolve, attention=weight(8)), (torch.randn(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]]))
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert [group.size for group in symmetry.groups.values()] == [8]
    assert symmetry.verify(model, inputs) < 1e-9
