"""Views, cuts and concatenations, also of scalars and empty tensors."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.programs.exporting import export
from onebasin.programs.recording import record
from onebasin.tracing.conversion import to_symmetry
from onebasin.tracing.trace import Trace
from onebasin.tracing.walk import walk
from tests.cases import Fn, call_of, check_groups, two_layers


def interleave(x, step):
    """Parts of an axis, one after the other, written with steps."""
    made, begin = torch.zeros_like(x), 0
    for start in range(step):
        end = begin + len(range(start, x.shape[1], step))
        made = torch.slice_scatter(made, x[:, begin:end], 1, start, x.shape[1], step)
        begin = end
    return made


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
    (lambda self, x: self.last(interleave(self.first(x), 2)), [4]),
    (lambda self, x: self.last(interleave(self.first(x), 4)), [2]),
    (lambda self, x: self.last(interleave(self.first(x), 3)), []),  # three does not divide eight
    (lambda self, x: self.last(torch.slice_scatter(self.first(x), self.first(x)[:, 1::2], 1, 0, 8, 2)), [4]),
    (lambda self, x: self.last(torch.slice_scatter(self.first(x), self.first(x)[:, :3], 1, 0, 6, 2)), []),
    (lambda self, x: self.last(torch.select_scatter(self.first(x), x[:, 0], 1, 3)), [3, 4]),
    (lambda self, x: self.last(self.first(x).view(torch.int32).view(torch.float32)), [8]),
    (lambda self, x: self.last(self.first(x)) + self.first(x).view(torch.int16).float().mean(), []),
    (lambda self, x: self.last(torch.stack([self.first(x)]).squeeze(0)), [8]),
    (lambda self, x: self.last(self.first(x)[:, :1].expand(3, 8)), [8]),
    (lambda self, x: self.last(torch.mul(*torch.broadcast_tensors(self.first(x), self.scale))), [8]),
    (lambda self, x: self.last(self.first(x) + torch.broadcast_tensors(x[:, :1], self.scale)[0]), [8]),
    (lambda self, x: self.last(torch.tile(self.first(x)[:, :4], (2,))), [4, 2]),
    (lambda self, x: self.last(torch.hstack(self.first(x).split([3, 5], 1))), [3, 5]),
    (lambda self, x: self.last(torch.hstack([self.first(x).sum(0), self.first(x).sum()])[:8]), [8]),
    (lambda self, x: self.last(torch.vstack([self.first(x), self.scale])), [8]),
    (lambda self, x: self.last(torch.dstack([self.first(x), self.first(x)]).sum((0, 2))), [8]),
    (lambda self, x: self.last(torch.column_stack([self.scale, self.first(x).mT]).mT), [8]),
    (lambda self, x: self.last(nn.functional.channel_shuffle(self.first(x)[:, :, None, None], 2).flatten(1)), [2, 4]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)


def test_heads_across_a_concatenation():
    """Queries, keys and values side by side, cut into heads of (query, key, value) as in EfficientViT."""

    def forward(self, x):
        packed = torch.cat([self.q(x), self.k(x), self.v(x)], -1)
        q, k, v = packed.reshape(2, 5, 2, 12).transpose(1, 2).chunk(3, -1)
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 8))

    model = Fn(forward, q=nn.Linear(4, 8), k=nn.Linear(4, 8), v=nn.Linear(4, 8), out=nn.Linear(8, 2))
    symmetry = ob.symmetry(model, torch.rand(2, 5, 4), verify=False)
    assert {group.size for group in symmetry.groups.values()} == {4}
    assert symmetry.num_free == 24
    assert symmetry.verify(model, torch.rand(2, 5, 4)) < 1e-9


def test_a_relative_shift_keeps_heads_and_units():
    """Scores of relative positions are shifted by a pad and two views; these cut across positions, not across heads."""

    def forward(self, x):
        q, k = (layer(x).view(2, 5, 3, 4).transpose(1, 2) for layer in (self.q, self.k))
        shifted = nn.functional.pad(q @ k.mT, (1, 0)).view(2, 3, 6, 5)[:, :, 1:].reshape(2, 3, 5, 5)
        return self.out((shifted.softmax(-1) @ q).transpose(1, 2).reshape(2, 5, 12))

    model = Fn(forward, q=nn.Linear(4, 12), k=nn.Linear(4, 12), out=nn.Linear(12, 2))
    symmetry = ob.symmetry(model, torch.rand(2, 5, 4), verify=False)
    assert sorted((group.size, len(group.parents)) for group in symmetry.groups.values()) == [(3, 0), (4, 1)]
    assert symmetry.verify(model, torch.rand(2, 5, 4)) < 1e-9


@pytest.mark.parametrize(("read", "where"), [(record, "made for the model"), (export, "arange")])
def test_numbers_that_are_counted_are_a_constant_that_varies(read, where):
    model = two_layers(lambda self, x: self.last(self.first(x) * torch.arange(8)))
    program, trace = read(model, call_of(torch.rand(3, 4))), Trace()
    walk(program, trace)
    pin = to_symmetry(trace, model, [program]).pinned["first.weight", 0]
    assert (pin.reason, pin.operation) == ("a constant that varies", where)
