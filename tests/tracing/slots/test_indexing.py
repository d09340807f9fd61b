"""Reads and writes at positions between two linear maps: which matrices and which scales they let through."""

import pytest
import torch
from torch import nn

import onebasin as ob
from tests.basis_networks import D, Function

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
ROWS = torch.tensor([0, 3])
MASK = torch.tensor([True, False, True, True, False])
EACH = torch.randint(0, 5, (2, D), generator=torch.Generator().manual_seed(0))
"""A row for each unit."""
FLAGS = torch.rand(5, D, generator=torch.Generator().manual_seed(0)) > 0.5
"""A truth value for each unit of each row."""
UNITS = torch.randperm(D, generator=torch.Generator().manual_seed(0))


def zeros(x):
    return torch.zeros(5, D).to(x)


FREE = {
    "index": lambda x: x[ROWS],
    "index of several axes": lambda x: x.view(1, 5, D)[torch.zeros(2, dtype=torch.int64), ROWS],
    "indices that are not adjacent": lambda x: x.view(1, 5, D, 1)[0, ROWS, :, torch.zeros(2, dtype=torch.int64)],
    "one entry": lambda x: x[[3]],
    "index_select": lambda x: x.index_select(0, ROWS),
    "gather": lambda x: x.gather(0, ROWS[:, None].expand(2, D)),
    "gather by what is repeated": lambda x: x.gather(0, ROWS[:, None].repeat(1, D)),
    "take_along_dim": lambda x: x.take_along_dim(ROWS[:, None], 0),
    "index_add": lambda x: x.index_add(0, ROWS, 2 * x[:2]),
    "index_add to zeros": lambda x: zeros(x).index_add(0, ROWS, x[:2], alpha=3),
    "index_copy": lambda x: x.index_copy(0, ROWS, x[:2].flip(0)),
    "index_put": lambda x: x.index_put((ROWS,), x[:2].flip(0)),
    "index_put of one row": lambda x: x.index_put((ROWS,), x[4]),
    "index_put, summed": lambda x: x.index_put((ROWS,), x[:2].flip(0), accumulate=True),
    "index_put of zeros": lambda x: x.index_put((ROWS,), torch.zeros(D).to(x)),
    "index_put into zeros": lambda x: zeros(x).index_put((ROWS,), x[:2].flip(0)),
    "rows that are set to zero": lambda x: x.clone().masked_fill_(MASK[:, None], 0),
    "mask that is written to": lambda x: x.index_put((torch.arange(len(x)) > 2,), torch.tensor(0.0).to(x)),
    "scatter_add": lambda x: x.scatter_add(0, ROWS[:, None].expand(2, D), x[:2].flip(0)),
    "scatter into zeros": lambda x: zeros(x).scatter(0, ROWS[:, None].expand(2, D), x[:2].flip(0)),
    "scatter of zero": lambda x: x.scatter(0, ROWS[:, None].expand(2, D), 0.0),
    "scatter, averaged": lambda x: x.scatter_reduce(0, ROWS[:, None].expand(2, D), x[:2].flip(0), "mean"),
    "masked_fill": lambda x: x.masked_fill(MASK[:, None], 0.0),
    "masked_fill by what is repeated": lambda x: x.masked_fill(MASK[:, None].expand(5, D), 0.0),
    "where zero": lambda x: torch.where(MASK[:, None], x, 0.0),
    "zero where": lambda x: torch.where(MASK[:, None], torch.zeros_like(x), x),
    "where one or the other": lambda x: torch.where(MASK[:, None], x, 2 * x.flip(0)),
}


def find(between):
    """The kinds of bases, and how many scales there are if scales are all that is looked for."""
    torch.manual_seed(0)
    model = Function(between).eval()
    bases = ob.symmetry(model, X, kinds="all").bases
    return [basis.kind for basis in bases.values()], len(ob.symmetry(model, X, kinds="positive").scales)


@pytest.mark.parametrize("name", FREE)
def test_what_is_the_same_for_all_units_commutes_with_any_matrix(name):
    assert find(FREE[name]) == (["linear"], 1)


UNIT_BY_UNIT = {
    "gather": lambda x: x.gather(0, EACH),
    "scatter_add": lambda x: x.scatter_add(0, EACH, x[:2]),
    "masked_fill": lambda x: x.masked_fill(FLAGS[0], 0.0),
    "where zero": lambda x: torch.where(FLAGS, x, 0.0),
    "where one or the other": lambda x: torch.where(FLAGS, x, x.flip(0)),
}


@pytest.mark.parametrize("name", UNIT_BY_UNIT)
def test_what_differs_from_unit_to_unit_commutes_with_no_rotation(name):
    """Constants that differ along units pin them, and so they have nothing at all."""
    assert find(UNIT_BY_UNIT[name]) == ([], 0)


def chosen_by_units(x, scores):
    """For each unit the row where its score is largest."""
    return x.gather(0, scores.argmax(0, keepdim=True)).expand(5, D)


class Chosen(nn.Module):
    """A row is chosen for each unit, by scores of another layer; or entries are left out so."""

    def __init__(self, choose):
        super().__init__()
        self.first, self.scores, self.second, self.choose = nn.Linear(3, D), nn.Linear(3, D), nn.Linear(D, 2), choose

    def forward(self, x):
        return self.second(self.choose(self.first(x), self.scores(x)))


@pytest.mark.parametrize(
    "choose",
    [
        chosen_by_units,
        lambda x, scores: x.masked_fill(scores > 0.1, 0.0),
        lambda x, scores: torch.where(scores > 0.1, x, 0.0),
        lambda x, scores: torch.where(scores > 0.1, x, -x.flip(0)),
        lambda x, scores: x.scatter_add(0, scores.argmax(0, keepdim=True), x),
    ],
)
def test_where_each_unit_is_chosen_by_itself_signs_and_scales_remain(choose):
    torch.manual_seed(0)
    symmetry = ob.symmetry(Chosen(choose).eval(), X, kinds="all")
    assert [basis.kind for basis in symmetry.bases.values()] == ["signed"]
    assert [scale.name for scale in symmetry.scales.values()] == ["first.weight"]


NARROWED = {
    "trap: index along units": (lambda x: x[:, UNITS], []),
    "trap: index_select along units": (lambda x: x.index_select(1, UNITS), []),
    "trap: gather along units": (lambda x: x.gather(1, UNITS.expand(5, D)), []),
    "trap: one unit": (lambda x: x[:, [3]] * x, []),
    "trap: index_add along units": (lambda x: x.index_add(1, UNITS, x), []),
    "trap: index_put along units": (lambda x: x.index_put((ROWS[:, None], UNITS), x[:2].flip(0)), []),
    "trap: scatter along units": (lambda x: x.scatter_add(1, UNITS.expand(5, D), x), []),
    "trap: filled with a number": (lambda x: x.masked_fill(MASK[:, None], 0.5), []),
    "trap: filled with infinity": (lambda x: x.masked_fill(MASK[:, None], -torch.inf).amax(0, keepdim=True), []),
    "trap: another number elsewhere": (lambda x: torch.where(MASK[:, None], x, 1.0), []),
    "trap: infinity elsewhere": (
        lambda x: torch.where(MASK[:, None], x, torch.tensor(-torch.inf)).amax(0, keepdim=True),
        [],
    ),
    "trap: a number is written": (lambda x: x.scatter(0, ROWS[:, None].expand(2, D), 1.0), []),
    "trap: a number is written where a mask says": (
        lambda x: x.index_put((torch.arange(len(x)) > 2,), torch.tensor(1.0).to(x)),
        [],
    ),
    "trap: a table is written": (lambda x: x.index_put((ROWS,), EACH.to(x)), []),
    "trap: its own signs decide": (lambda x: torch.where(x > 0, x, 0.0), []),
    "trap: the largest": (lambda x: x.scatter_reduce(0, ROWS[:, None].expand(2, D), x[:2].flip(0), "amax"), []),
    "ones are written, as a mean is kept": (lambda x: x.index_put((ROWS,), torch.ones(()).to(x)), ["centred"]),
    "ones elsewhere": (lambda x: torch.where(MASK[:, None], x, torch.ones_like(x)), ["centred"]),
    "ones that are added": (lambda x: torch.full_like(x, 2.0).index_add(0, ROWS, x[:2]), ["centred"]),
    "an odd function elsewhere": (lambda x: torch.where(MASK[:, None], x, torch.tanh(x)), ["signed"]),
    "an odd function is written": (lambda x: x.index_put((ROWS,), torch.tanh(x[:2].flip(0))), ["signed"]),
    "an odd function is added": (lambda x: x.index_add(0, ROWS, torch.tanh(x[:2].flip(0))), ["signed"]),
}


@pytest.mark.parametrize("name", NARROWED)
def test_what_allows_less(name):
    between, expected = NARROWED[name]
    assert find(between)[0] == expected
