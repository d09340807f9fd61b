"""Experts and codes that are found by comparing them, and looked up, move as wholes; whatever else is read pins them."""

import pytest
import torch
from torch import nn

from tests.cases import Fn, weight, written

# ----------------------------------------------------------------------------------------------------------- codebooks


def quantise(choose, look_up):
    """The nearest of seven codes stands for the six features."""

    def forward(self, x):
        return self.last(look_up(self, choose(torch.cdist(self.first(x), self.codes))))

    torch.manual_seed(0)
    return Fn(forward, first=nn.Linear(4, 6), codes=weight(7, 6), last=nn.Linear(6, 2))


@pytest.mark.parametrize(
    "choose",
    [lambda d: d.argmin(1), lambda d: d.min(-1).indices, lambda d: d.topk(1, largest=False).indices[:, 0]],
)
@pytest.mark.parametrize(
    "look_up",
    [
        lambda self, i: self.codes[i],
        lambda self, i: nn.functional.embedding(i, self.codes),
        lambda self, i: self.codes.index_select(0, i),
        lambda self, i: self.codes.gather(0, i[:, None].expand(3, 6)),
        lambda self, i: nn.functional.one_hot(i, 7).float() @ self.codes,
        lambda self, i: torch.zeros(3, 7).scatter(1, i[:, None], 1.0) @ self.codes,
        lambda self, i: self.codes[i.view(3, 1).to(torch.int32).squeeze(1).long()],
    ],
)
def test_codes_move(choose, look_up):
    assert written(quantise(choose, look_up)) == ["6", "7"]


@pytest.mark.parametrize(
    "look_up",
    [
        lambda self, i: self.codes[(i + 1) % 7],
        lambda self, i: self.codes[6 - i],
        lambda self, i: self.codes[i] * i[:, None],
        lambda self, i: self.codes[i] * (i == 3)[:, None],
        lambda self, i: self.codes[i] * i.bool()[:, None],
        lambda self, i: self.codes[i] * nn.functional.one_hot(i, 9).float()[:, :1],
        lambda self, i: self.codes[torch.maximum(i, i.flip(0))],
        lambda self, i: self.codes[i.sort().values],
        lambda self, i: self.codes[i] + torch.histc(i.float(), 7, 0, 7)[:6],
        lambda self, i: self.codes[i] + torch.histc(i.float(), 7, 0, 6).cumsum(0)[:6],
    ],
)
def test_codes_whose_positions_are_read_stay(look_up):
    assert "7" not in written(quantise(lambda d: d.argmin(1), look_up))


def test_positions_that_are_returned_are_pinned():
    model = Fn(lambda self, x: (x @ self.scores).argmax(1), scores=weight(4, 7))
    assert written(model) == []


@pytest.mark.parametrize(
    "blur",
    [torch.relu, torch.round, lambda d: d.clamp(max=1), lambda d: d.masked_fill(d > 1, 0.0), lambda d: d * (d > 0)],
)
def test_entries_that_may_be_equal_have_an_order(blur):
    """Of equal entries the first is found."""
    assert written(quantise(lambda d: blur(d).argmin(1), lambda self, i: self.codes[i])) == ["6"]


def test_scores_of_features_that_may_vanish_have_an_order():
    """Where all features are rectified to zero, all scores are equal, unless they have biases."""

    def make(bias: bool) -> Fn:
        scores = nn.Linear(6, 7, bias)
        return Fn(
            lambda self, x: self.codes[self.scores(torch.relu(self.first(x))).argmax(1)] @ self.last,
            **{"first": nn.Linear(4, 6), "scores": scores, "codes": weight(7, 5), "last": weight(5, 2)},
        )

    assert written(make(bias=True)) == ["5", "6", "7"]
    assert written(make(bias=False)) == ["5", "6"]


def test_numbers_of_features_have_an_order():
    model = quantise(lambda d: (d > 1).float().mean(0, keepdim=True).argmin(1), lambda self, i: self.codes[i].expand(3, 6))
    assert "7" not in written(model)


def test_a_table_with_another_number_of_rows_is_not_the_axis():
    model = quantise(lambda d: d.argmin(1), lambda self, i: torch.cat([self.codes, self.codes[:1]])[i])
    assert written(model) == ["6"]


# ------------------------------------------------------------------------------------------------------------- experts


def experts(forward) -> Fn:
    """A router, and five experts of six hidden units each."""
    torch.manual_seed(0)
    members = {"router": nn.Linear(4, 5), "up": weight(5, 4, 6), "bias": weight(5, 6), "down": weight(5, 6, 2)}
    return Fn(forward, **members)


def by_lookup(self, x):
    """The matrices of the two best experts of each token are looked up."""
    shares, chosen = self.router(x).softmax(1).topk(2)
    hidden = torch.relu(torch.einsum("nd,nkdh->nkh", x, self.up[chosen]) + self.bias[chosen])
    return torch.einsum("nkh,nkho,nk->no", hidden, self.down[chosen], shares)


def by_mask(self, x):
    """All experts are computed, and those that are not chosen multiplied by zero."""
    scores = self.router(x).softmax(1)
    mask = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
    hidden = torch.relu(torch.einsum("nd,edh->neh", x, self.up) + self.bias)
    return torch.einsum("neh,eho,ne->no", hidden, self.down, scores * mask)


def by_sorting(self, x):
    """Rows are sorted by expert, and brought back into their order afterwards."""
    shares, chosen = self.router(x).softmax(1).topk(2)
    expert, before = chosen.flatten().sort()
    hidden = torch.relu(torch.einsum("rd,rdh->rh", x[before // 2], self.up[expert]) + self.bias[expert])
    results = torch.einsum("rh,rho->ro", hidden, self.down[expert]) * shares.flatten()[before][:, None]
    return results[before.argsort()].view(-1, 2, 2).sum(1)


def by_groups(self, x):
    """Rows are sorted by expert, and the order is inverted by writing numbers."""
    shares, chosen = self.router(x).softmax(1).topk(2)
    expert, before = chosen.flatten().sort()
    offsets = torch.histc(expert.float(), 5, 0, 4).cumsum(0, dtype=torch.int32)
    hidden = nn.functional.grouped_mm(x[before // 2], self.up.mT.contiguous().mT, offs=offsets)
    hidden = torch.relu(hidden + self.bias[expert])
    results = torch.einsum("rh,rho->ro", hidden, self.down[expert]) * shares.flatten()[before][:, None]
    inverse = torch.empty_like(before)
    inverse[before] = torch.arange(before.size(0))
    return results[inverse].view(-1, 2, 2).sum(1)


def by_adding(self, x):
    """Rows are sorted by expert, and added to the tokens they come from."""
    shares, chosen = self.router(x).softmax(1).topk(2)
    flat = chosen.flatten()
    before = flat.argsort()
    hidden = torch.relu(torch.einsum("rd,rdh->rh", x[before // 2], self.up[flat[before]]) + self.bias[flat[before]])
    results = torch.einsum("rh,rho->ro", hidden, self.down[flat[before]]) * shares.flatten()[before][:, None]
    return torch.zeros(3, 2).to(x).index_add(0, before // 2, results)


@pytest.mark.parametrize(
    ("forward", "groups"),
    [
        (by_lookup, ["5", "6"]),
        (by_mask, ["5", "6[5]"]),
        (by_sorting, ["5", "6[5]"]),
        (by_groups, ["5", "6[5]"]),
        (by_adding, ["5", "6[5]"]),
    ],
)
def test_experts_move(forward, groups):
    assert written(experts(forward)) == groups


def sorted_rows(finish):
    """As above, with something else at the end of the sorted rows."""

    def forward(self, x):
        chosen = self.router(x).argmax(1)
        expert, before = chosen.sort()
        rows = torch.einsum("rd,rdh->rh", x[before], self.up[expert])
        return finish(self, torch.einsum("rh,rho->ro", rows, self.down[expert]), before, x)

    return experts(forward)


@pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")
@pytest.mark.parametrize(
    "finish",
    [
        lambda self, rows, before, x: rows,
        lambda self, rows, before, x: rows.cumsum(0).sum(0),
        lambda self, rows, before, x: rows[before],
        lambda self, rows, before, x: (rows * x[:, :1]).sum(0),
        lambda self, rows, before, x: (rows * self.bias[:3].sum(1, keepdim=True)).sum(0),
        lambda self, rows, before, x: (rows * before[:, None]).sum(0) + (rows * self.router(x).argmax(1).sort()[1][:, None]),
    ],
)
def test_experts_stay_where_the_order_of_sorted_rows_is_read(finish):
    """Their units are a family of five fixed experts."""
    assert "5" not in written(sorted_rows(finish))


def test_experts_whose_rows_are_sorted_backwards_stay():
    def forward(self, x):
        expert, before = self.router(x).argmax(1).sort(descending=True)
        rows = torch.einsum("rd,rdh->rh", x[before], self.up[expert]) + self.bias[expert]
        return torch.einsum("rh,rho->ro", rows, self.down[expert]).sum(0)

    assert written(experts(forward)) == ["6"]


@pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")
def test_units_of_experts_are_alike_where_rows_of_two_experts_meet():
    """Each row is multiplied with the units of another expert than its own."""

    def forward(self, x):
        scores = self.router(x)
        (first, before), (second, other) = scores.argmax(1).sort(), scores.argmin(1).sort()
        rows = torch.einsum("rd,rdh->rh", x[before], self.up[first])
        others = torch.einsum("rd,rdh->rh", x[other], self.up[second])
        return (rows * others).sum(1)

    assert "6[5]" not in written(experts(forward))
    assert "6[5*]" not in written(experts(forward))
