"""Operations that change the order of entries, and are joined again: what stands beside is no longer aligned."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from tests.cases import Fn, weight

# A function of a table (sample, row, unit). Units must not move in each row by themselves.
MIXING = {
    "roll": lambda h: h + h.roll(1, 1),
    "flip": lambda h: h + h.flip(1),
    "cumulative sum": lambda h: h + h.cumsum(1),
    "sort": lambda h: h + h.sort(1).values,
    "index": lambda h: h + h[:, torch.tensor([1, 2, 0, 3])],
    "index select": lambda h: h + h.index_select(1, torch.tensor([1, 2, 0, 3])),
    "gather": lambda h: h + h.gather(1, (h > 0).long()),
    "gather by what its children make": lambda h: (
        h + h.gather(1, (h > 0).sum(2, keepdim=True).clamp(max=3).expand(-1, -1, 6))
    ),
    "negative padding": lambda h: h + F.pad(h, (0, 0, -1, 1)),
    "pooling": lambda h: h + F.avg_pool1d(h.mT, 3, 1, 1).mT,
    "k-th value": lambda h: h + h.kthvalue(2, 1, keepdim=True).values,
    "convolution": lambda h: h + F.conv1d(h.mT, torch.ones(6, 1, 3).to(h), padding=1, groups=6).mT,
    "repeats": lambda h: h.repeat_interleave(4, 1) * h.tile(1, 4, 1),
    "repeats that do not fit": lambda h: h.repeat_interleave(3, 1) * h.tile(1, 3, 1),
}


def measure(model, symmetry, inputs):
    """The largest change of the outputs, at random weights and inputs, in float64."""
    model, worst = model.double(), 0.0
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        state = {k: torch.randn(v.shape, generator=generator).double() for k, v in model.state_dict().items()}
        x = torch.randn(inputs.shape, generator=generator).double()
        outputs = []
        for found in (state, symmetry.random(generator).apply(state)):
            model.load_state_dict(found)
            with torch.no_grad():
                outputs.append(model(x))
        worst = max(worst, float((outputs[0] - outputs[1]).abs().max()))
    return worst


@pytest.mark.parametrize("name", MIXING)
def test_units_move_in_all_rows_alike(name):
    def forward(self, x):
        h = torch.sin(x.sum(1).view(-1, 1, 1) * self.table)
        return torch.sin(MIXING[name](h)).sum((1, 2))

    model, inputs = Fn(forward, table=weight(4, 6)), torch.randn(2, 3)
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert (6, ()) in {(group.size, group.parents) for group in symmetry.groups.values()}
    assert measure(model, symmetry, inputs) < 1e-9


def test_positions_beside_a_convolution_with_a_shortcut():
    def forward(self, x):
        h = torch.sin(x.sum(1).view(-1, 1, 1) * self.positions)
        return torch.sin(h + self.mix(h)).sum((1, 2))

    model, inputs = Fn(forward, positions=weight(4, 6), mix=nn.Conv1d(4, 4, 1)), torch.randn(2, 3)
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert {(group.size, group.parents) for group in symmetry.groups.values()} == {(4, ()), (6, ())}
    assert measure(model, symmetry, inputs) < 1e-9


def test_a_gram_matrix_that_is_cut_and_unflattened():
    def forward(self, x):
        h = torch.sin(x.sum(1).view(-1, 1, 1) * self.table)
        first, second = h.chunk(2, 1)
        blocks = torch.sin((h @ h.mT).unflatten(2, (2, 2)))
        return torch.sin(2 * first).sum() + torch.sin(3 * second).sum() + torch.sin(blocks.sum((1, 2))).sum()

    model, inputs = Fn(forward, table=weight(4, 6)), torch.randn(2, 3)
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert 6 in {group.size for group in symmetry.groups.values()}
    assert measure(model, symmetry, inputs) < 1e-9
