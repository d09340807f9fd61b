"""Rows and columns of a matrix with a diagonal are one axis."""

import pytest
import torch
from torch.nn import functional as F

from onebasin.programs.exporting import export
from onebasin.tracing.conversion import to_symmetry
from onebasin.tracing.trace import Trace
from onebasin.tracing.walk import walk
from tests.cases import call_of, check_groups, two_layers


def every() -> torch.Tensor:
    """All positions of an axis of 8."""
    return torch.arange(8)


def write(matrix, rows, columns, values):
    """The matrix with values at these rows and columns."""
    matrix[rows, columns] = values
    return matrix


def filtered(make_rows, make_columns, num_columns=8):
    """Units times a matrix of zeros with scales at these rows and columns."""

    def forward(self, x):
        rows, columns = make_rows(), make_columns()
        matrix = write(torch.zeros(8, num_columns), rows, columns, self.scale[: len(rows)])
        return self.last(self.first(x) @ matrix[:, -8:])

    return forward


# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: self.last(torch.diag_embed(self.first(x)) @ self.scale), [8]),
    (lambda self, x: self.last(torch.diag_embed(self.first(x), dim1=0, dim2=1).sum(0).mT), [8]),
    (lambda self, x: self.last(torch.diag_embed(self.first(x)[:, 1:], offset=1).sum(1)), []),
    (lambda self, x: self.last((self.first(x)[:, None] * self.first(x)[:, :, None]).diagonal(dim1=1, dim2=2)), [8]),
    (lambda self, x: self.last((self.first(x)[:, None] * self.scale[:, None]).diagonal(dim1=1, dim2=2)), [8]),
    (lambda self, x: self.last((self.scale[:, None, None] * self.first(x)).diagonal(dim1=0, dim2=2)), [8]),
    (lambda self, x: self.last(self.first(x)) * (self.scale.outer(self.first(x)[0])).diagonal(1).sum(), []),
    # Diagonals that an index writes: into zeros, into a matrix that moves already, added to one.
    (filtered(every, every), [8]),
    (lambda self, x: self.last(self.first(x) @ write(torch.zeros(8, 8), every(), every(), x[0, 0])), [8]),
    (lambda self, x: self.last(self.first(x) @ write(self.scale.outer(self.scale), every(), every(), x.new_ones(8))), [8]),
    (lambda self, x: self.last(self.scale.outer(self.scale).index_put((every(), every()), x[0, 0], True).sum(0)), [8]),
    (lambda self, x: self.last(write(torch.zeros(8, 8, 3), every(), every(), self.first(x).mT).sum(1).mT), [8]),
    # Other places than the diagonal, or not all of it.
    (filtered(every, lambda: every().flip(0)), []),
    (filtered(every, lambda: every() - 1), []),
    (filtered(every, lambda: every() + 1, 9), []),
    (filtered(*[lambda: torch.arange(-8, 0)] * 2), []),
    (filtered(*[lambda: torch.arange(7)] * 2), []),
    # Equal numbers on a diagonal are not the same along a row.
    (lambda self, x: self.last((torch.diag_embed(x.mean(1, keepdim=True).expand(3, 8)) * self.scale).sin().sum(1)), []),
    (lambda self, x: self.last((torch.diag_embed(F.pad(self.first(x)[:, :5], (3, 0))) * self.scale).sin().sum(1)), []),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)


@pytest.mark.parametrize(("columns", "sizes"), [(8, [8]), (9, [])])
def test_the_identity_has_one_axis(columns, sizes):
    """An adapter's matrix as its layers applied to the identity."""
    model = two_layers(lambda self, x: self.last(self.first(x)) + self.last(torch.eye(8, columns)[:, :8]).norm(dim=0))
    inputs = torch.rand(3, 4)
    program, trace = export(model, call_of(inputs)), Trace()
    walk(program, trace)
    symmetry = to_symmetry(trace, model, [program])
    assert [group.size for group in symmetry.groups.values()] == sizes
    assert symmetry.verify(model, inputs) < 1e-9
