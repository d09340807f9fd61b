"""Tiny networks with recurrence and grouping inside. Part of the table in `networks`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import Case, Fn, flat, image, sequence, weight

# --------------------------------------------------------------------------------------------------------- recurrence


def unrolled(m, x):
    state = None
    for step in x.unbind(1):
        state = m.cell(step, state)
    return m.head(state[0])


def recurrent_net(layer: nn.Module, width: int, read=lambda out: out[0], **members: Any) -> nn.Module:
    return Fn(lambda m, x: m.head(read(m.layer(x))), layer=layer, head=nn.Linear(width, 2), **members)


RECURRENCE: dict[str, Case] = {
    "lstm": Case(lambda: recurrent_net(nn.LSTM(4, 6, batch_first=True), 6), sequence(), ["6"]),
    "two-layer bidirectional lstm": Case(
        lambda: recurrent_net(nn.LSTM(4, 6, 2, dropout=0.5, bidirectional=True), 12), sequence(), ["6", "6", "6", "6"]
    ),
    "lstm read at its last state": Case(
        lambda: recurrent_net(nn.LSTM(4, 6, 2), 6, lambda out: out[1][0][-1] + out[1][1][0]),
        sequence(),
        ["6"],  # the last hidden state of one layer is added to the cell state of the other
    ),
    "lstm with a projection": Case(
        lambda: recurrent_net(nn.LSTM(4, 6, 2, proj_size=3), 3), sequence(), ["3", "3", "6", "6"]
    ),
    "lstm and its final states": Case(
        lambda: Fn(lambda m, x: m.b(m.a(x)[0]), a=nn.LSTM(4, 6), b=nn.LSTM(6, 5)), sequence(), ["6"]
    ),
    "gru": Case(lambda: recurrent_net(nn.GRU(4, 6, 2), 6), sequence(), ["6", "6"]),
    "gru without bias": Case(lambda: recurrent_net(nn.GRU(4, 6, bias=False), 6), sequence(), ["6"]),
    "rnn with a learned state": Case(
        lambda: Fn(
            lambda m, x: m.head(m.layer(x, m.state.expand(2, 5, 6))[0]),
            layer=nn.RNN(4, 6, 2, nonlinearity="relu"),
            state=weight(6),
            head=nn.Linear(6, 2),
        ),
        sequence(),
        ["6"],  # one state for both layers
    ),
    "rnn with a given state": Case(
        lambda: Fn(lambda m, x, h: m.head(m.layer(x, h)[0]), layer=nn.RNN(4, 6), head=nn.Linear(6, 2)),
        lambda: (torch.randn(2, 5, 4), torch.randn(1, 5, 6)),
        [],
    ),
    "lstm cell": Case(lambda: Fn(unrolled, cell=nn.LSTMCell(4, 6), head=nn.Linear(6, 2)), sequence(), ["6"]),
}


# ----------------------------------------------------------------------------------------------------------- grouping


def group_norm_residual(m, x):
    x = m.norm1(m.stem(x))
    x = x + m.conv2(torch.relu(m.norm2(m.conv1(x))))
    return m.head(x.mean((2, 3)))


def channel_shuffle(m, x):
    batch, _, height, width = x.shape
    x = torch.relu(m.a(x)).view(batch, 2, 4, height, width).transpose(1, 2).reshape(batch, 8, height, width)
    return m.c(torch.relu(m.b(x)))


def shuffle_unit(m, x):
    """ShuffleNet v2: half of the channels go through, then the halves are interleaved."""
    x = torch.relu(m.stem(x))
    batch, channels, height, width = x.shape
    kept, changed = x.chunk(2, 1)
    x = torch.cat([kept, torch.relu(m.branch(changed))], 1)
    x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
    return m.head(x)


def shuffle_units(m, x):
    """Two such units: what the first interleaved, the second cuts."""
    x = torch.relu(m.stem(x))
    batch, channels, height, width = x.shape
    for branch in m.branches:
        kept, changed = x.chunk(2, 1)
        x = torch.cat([kept, torch.relu(branch(changed))], 1)
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
    return m.head(x)


def windows(m, x):
    """Columns of windows, changed and put back; windows along one axis."""
    columns = F.unfold(m.a(x), 2, stride=2) * 2
    x = F.fold(m.b(columns.mT).mT, (8, 8), 2, stride=2)
    return m.c(x.unfold(2, 4, 2).sum(-1))


def experts(m, x):
    x = m.embed(x)
    gate = torch.softmax(m.gate(x), -1)
    h = torch.relu(torch.einsum("bi,ehi->beh", x, m.up) + m.bias)
    return m.head(torch.einsum("beh,eoh,be->bo", h, m.down, gate))


def mixing(operation):
    """An operation along the outer factor of 4 x 2 units: the inner ones must then be ordered alike in all 4."""
    return lambda: Fn(
        lambda m, x: m.b(operation(m.a(x).view(3, 4, 2)).reshape(3, 8).relu()), a=nn.Linear(4, 8), b=nn.Linear(8, 2)
    )


def partly_frozen(m, x):
    with torch.no_grad():
        h = m.norm(m.trunk(x)).relu()
    return m.head(h)


GROUPING: dict[str, Case] = {
    "chain of grouped convs": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=2), nn.ReLU(), nn.Conv2d(12, 10, 3, groups=2), nn.Conv2d(10, 2, 1)
        ),
        image(),
        ["2", "4[2]", "5[2]", "6[2]"],
    ),
    # 12 channels are 2 groups of 6 for one, 4 groups of 3 for the other: 2 x 2 x 3
    "grouped convs that disagree": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=2), nn.ReLU(), nn.Conv2d(12, 20, 3, groups=4), nn.Conv2d(20, 2, 1)
        ),
        image(),
        ["2", "2[2]", "3[2,2]", "4[2]", "5[2,2]"],
    ),
    "group norm in a residual net": Case(
        lambda: Fn(
            group_norm_residual,
            stem=nn.Conv2d(3, 8, 3),
            norm1=nn.GroupNorm(4, 8),
            conv1=nn.Conv2d(8, 15, 1),
            norm2=nn.GroupNorm(5, 15),
            conv2=nn.Conv2d(15, 8, 1),
            head=nn.Linear(8, 2),
        ),
        image(),
        ["2[4]", "3[5]", "4", "5"],
    ),
    # (2, 4) channels become (4, 2), read by 4 groups: whole groups move. Each could order its 2 channels by itself, but the
    # view made the 2 the outer factor, and an outer factor is not taken for a child of an inner one
    "channel shuffle": Case(
        lambda: Fn(channel_shuffle, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 12, 3, groups=4), c=nn.Conv2d(12, 2, 1)),
        image(),
        ["2", "3[4]", "4"],
    ),
    "shuffle unit": Case(
        lambda: Fn(shuffle_unit, stem=nn.Conv2d(3, 8, 1), branch=nn.Conv2d(4, 4, 1), head=nn.Conv2d(8, 2, 1)),
        image(),
        ["4", "4"],  # what passed by and the branch's result are interleaved, and so permuted alike
    ),
    # Of 8 channels the first unit keeps 4 and makes 4 (a, b). Interleaved, their halves go different ways, a1 with b1 and
    # a2 with b2: two pairs that are ordered alike. The second unit interleaves a1, b1 with what it makes of a2, b2.
    "shuffle units": Case(
        lambda: Fn(
            shuffle_units,
            stem=nn.Conv2d(3, 8, 1),
            branches=nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)]),
            head=nn.Conv2d(8, 2, 1),
        ),
        image(),
        ["2", "2", "4"],
    ),
    "windows of an image": Case(
        lambda: Fn(windows, a=nn.Conv2d(3, 5, 1), b=nn.Linear(20, 24), c=nn.Conv2d(6, 2, 1)), image(), ["5", "6"]
    ),
    "a slice with an odd step": Case(
        lambda: Fn(lambda m, x: m.b(m.a(x)[:, :, ::3, ::3]), a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 2, 1)), image(), ["6"]
    ),
    "pixel shuffle after a conv": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 20, 3), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(5, 2, 1)
        ),
        image(),
        ["5", "6"],
    ),
    "pixel unshuffle": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.PixelUnshuffle(2), nn.Conv2d(16, 5, 1), nn.ReLU(), nn.Conv2d(5, 2, 1)),
        image(),
        ["4", "5"],
    ),
    "experts by einsum": Case(
        lambda: Fn(
            experts,
            embed=nn.Linear(4, 8),
            gate=nn.Linear(8, 3),
            up=weight(3, 5, 8),
            bias=weight(3, 5),
            down=weight(3, 7, 5),
            head=nn.Linear(7, 2),
        ),
        lambda: torch.randn(3, 4),
        ["3", "5[3]", "7", "8"],
    ),
    "softmax along a parent": Case(mixing(lambda h: h.softmax(1)), flat(), ["2", "4"]),
    "softmax along a child": Case(mixing(lambda h: h.softmax(2)), flat(), ["2[4]", "4"]),
    "layer norm along a parent": Case(mixing(lambda h: F.layer_norm(h.mT, (4,)).mT), flat(), ["2", "4"]),
    "group norm along a parent": Case(mixing(lambda h: F.group_norm(h.mT, 2).mT), flat(), ["2", "4"]),
    "instance norm along a parent": Case(mixing(lambda h: F.instance_norm(h.mT).mT), flat(), ["2", "4"]),
    "cumulative sum along a parent": Case(mixing(lambda h: h.cumsum(1)), flat(), ["2"]),
    "roll along a parent": Case(mixing(lambda h: h.roll(1, 1) + h), flat(), ["2"]),
    "sort along a parent": Case(mixing(lambda h: h.sort(1).values), flat(), ["2"]),
    # constants whose order matters vary, whatever they were made of
    "cumulative sum of ones": Case(mixing(lambda h: h * torch.ones(4, 2, dtype=h.dtype).cumsum(0)), flat(), ["2[4*]"]),
    "triangle of ones": Case(mixing(lambda h: torch.ones(4, 4, dtype=h.dtype).tril() @ h), flat(), ["2"]),
    "roll of a padded axis": Case(
        mixing(lambda h: F.pad(h[:, :3], (0, 0, 1, 0)).roll(1, 1) + F.pad(h[:, :3], (0, 0, 0, 1))),
        flat(),
        ["2"],
    ),
    "a region without gradients": Case(
        lambda: Fn(partly_frozen, trunk=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), head=nn.Conv2d(8, 2, 1)), image(), ["8"]
    ),
}
