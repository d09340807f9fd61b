"""One table of tiny networks, each with the groups that a person counted.

A group is written as its size, a family as "size[sizes of its parents]"; an asterisk marks a parent that is fixed.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.attention_networks import ATTENTION
from tests.cases import Case, Fn, flat, image, tokens, weight
from tests.convolution_networks import CONVOLUTION
from tests.structured_networks import GROUPING, RECURRENCE


def mlp(activation: type[nn.Module] = nn.Tanh, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias), activation(), nn.Linear(8, 6, bias), activation(), nn.Linear(6, 2, bias))


def experts(m, x):
    x = x.expand(3, *x.shape)
    return torch.bmm(torch.relu(torch.bmm(x, m.w1)), m.w2).sum(0)


def unet(m, x):
    a = torch.relu(m.down1(x))
    b = torch.relu(m.down2(F.max_pool2d(a, 2)))
    c = F.interpolate(b, scale_factor=2, mode="bilinear")
    return m.up(F.pad(torch.cat([a, c], 1), (1, 1, 1, 1), mode="reflect"))


def densenet(m, x):
    x = m.stem(x)
    for norm, conv in zip(m.norms, m.convs, strict=True):
        x = torch.cat([x, conv(torch.relu(norm(x)))], 1)
    return m.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def mixer(m, x):
    x = m.patches(x).flatten(2).transpose(1, 2)
    x = x + m.token2(F.gelu(m.token1(m.norm1(x).transpose(1, 2)))).transpose(1, 2)
    x = x + m.channel2(F.gelu(m.channel1(m.norm2(x))))
    return m.head(x.mean(1))


def traps(m, x):
    a = torch.cumsum(m.a(x), 1)
    b = torch.sort(m.b(x), dim=1).values
    c = torch.roll(m.c(x), 1, dims=1)
    d = m.d(x) + torch.arange(5, dtype=x.dtype)
    e = m.e(x)[:, torch.tensor([0, 2, 1, 4, 3])]
    f = m.f(x) * m.ramp
    g = m.g(x).flip(1)
    return m.out(torch.relu(m.free(a + b + c + d + e + f + g)))


def writes(m, x):
    h = torch.relu(m.a(x)).clone()
    h[:, 0] = 0
    h[:, 1:3] += 1
    z = torch.zeros(h.shape[0], 8, dtype=h.dtype)
    z[:, :4] = m.b(x)
    return m.out(h + z)


def attention(m, x):
    x = m.embed(x)
    batch, length, width = x.shape
    q, k, v = m.qkv(x).view(batch, length, 3, 3, width // 3).permute(2, 0, 3, 1, 4).unbind(0)
    y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
    return m.head(m.out(y.transpose(1, 2).reshape(batch, length, width)))


def rearranged(m, x):
    h = m.a(x).unsqueeze(0).permute(1, 2, 0).squeeze()
    first, second = torch.split(torch.relu(h), [3, 5], dim=1)
    both = torch.stack([first, second[:, :3]], dim=-1).flatten(1)  # interleaved, so the two are permuted alike
    return m.b(both), m.c(second)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.down(F.silu(self.up(x))))


def recursive(m, x):
    x = m.embed(x)
    for _ in range(3):
        x = x + m.block(x)
    return m.head(x)


def masked(m, x):
    h = m.a(x)
    h = torch.where(h > 0, h, m.slope * h).masked_fill(h > 3, 0.5)
    h = torch.maximum(h, m.floor)
    gate = (m.gate(x) * h).sum(-1, keepdim=True)
    return m.b(h * torch.softmax(gate, 1) / (1 + h.norm(dim=-1, keepdim=True)))


def option_a(m, x):
    x = torch.relu(m.stem(x))
    y = m.wide(x)
    y = y + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
    return m.head(y.mean((2, 3)))


CASES: dict[str, Case] = {
    # linear, matmul, bmm, einsum, addmm, embedding
    "mlp tanh": Case(mlp, flat(), ["6", "8"]),
    "mlp relu": Case(lambda: mlp(nn.ReLU), flat(), ["6", "8"]),
    "mlp without bias": Case(lambda: mlp(nn.ReLU, bias=False), flat(), ["6", "8"]),
    "raw parameters": Case(
        lambda: Fn(lambda m, x: torch.tanh(x @ m.w + m.b) @ m.v, w=weight(4, 8), b=weight(8), v=weight(8, 2)), flat(), ["8"]
    ),
    "addmm": Case(
        lambda: Fn(
            lambda m, x: torch.mm(torch.relu(torch.addmm(m.b, x, m.w)), m.v), w=weight(4, 8), b=weight(8), v=weight(8, 2)
        ),
        flat(),
        ["8"],
    ),
    "experts by bmm": Case(lambda: Fn(experts, w1=weight(3, 4, 8), w2=weight(3, 8, 2)), flat(), ["3", "8[3]"]),
    "einsum": Case(
        lambda: Fn(
            lambda m, x: torch.einsum("...h,ho->...o", torch.einsum("bi,hi->bh", x, m.w).relu(), m.v),
            w=weight(8, 4),
            v=weight(8, 2),
        ),
        flat(),
        ["8"],
    ),
    "gram matrix": Case(
        lambda: Fn(lambda m, x: m.b((h := m.a(x).view(3, 4, 2)) @ h.transpose(1, 2)), a=nn.Linear(4, 8), b=nn.Linear(4, 2)),
        flat(),
        ["2"],
    ),
    "embedding and mlp": Case(
        lambda: Fn(lambda m, i: m.mlp(m.embed(i).mean(1)), embed=nn.Embedding(10, 4), mlp=mlp()), tokens(), ["4", "6", "8"]
    ),
    # elementwise
    "swiglu": Case(
        lambda: Fn(
            lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)), a=nn.Linear(4, 8), b=nn.Linear(4, 8, bias=False), c=nn.Linear(8, 2)
        ),
        flat(),
        ["8"],
    ),
    "residual mlp": Case(
        lambda: Fn(
            lambda m, x: m.head((h := m.embed(x)) + m.down(F.gelu(m.up(m.norm(h))))),
            embed=nn.Linear(4, 8),
            norm=nn.LayerNorm(8),
            up=nn.Linear(8, 12),
            down=nn.Linear(12, 8),
            head=nn.Linear(8, 2),
        ),
        flat(),
        ["12", "8"],
    ),
    "prelu": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 6, 3), nn.PReLU(), nn.Conv2d(6, 2, 1)),
        image(),
        ["6", "8"],
    ),
    "masks and gates": Case(
        lambda: Fn(masked, a=nn.Linear(4, 8), slope=weight(8), floor=weight(8), gate=nn.Linear(4, 8), b=nn.Linear(8, 2)),
        flat(),
        ["8"],
    ),
    "dropout in train mode": Case(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).train(), flat(), ["8"]
    ),
    # pooling, reductions, interpolation, padding
    "global pooling": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 8, 3),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 2),
        ),
        image(),
        ["6", "8"],
    ),
    "u-net": Case(
        lambda: Fn(unet, down1=nn.Conv2d(3, 6, 3, padding=1), down2=nn.Conv2d(6, 8, 3, padding=1), up=nn.Conv2d(14, 2, 3)),
        image(),
        ["6", "8"],
    ),
    "maximum and its place": Case(
        lambda: Fn(
            lambda m, x: (m.c(m.a(x).max(1, keepdim=True).values), m.b(x).argmax(1)),
            a=nn.Linear(4, 8),
            b=nn.Linear(4, 8),
            c=nn.Linear(1, 2),
        ),
        flat(),
        ["8"],
    ),
    # rearrangement
    "densenet": Case(
        lambda: Fn(
            densenet,
            stem=nn.Conv2d(3, 6, 3),
            head=nn.Linear(14, 2),
            norms=nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(10)]),
            convs=nn.ModuleList([nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(10, 4, 3, padding=1)]),
        ),
        image(),
        ["4", "4", "6"],
    ),
    "chunked glu": Case(
        lambda: Fn(
            lambda m, x: m.c(F.glu(m.b((h := m.a(x).chunk(2, -1))[0] * torch.sigmoid(h[1])))),
            a=nn.Linear(4, 12),
            b=nn.Linear(6, 10),
            c=nn.Linear(5, 2),
        ),
        flat(),
        ["5", "6"],
    ),
    "mlp-mixer": Case(
        lambda: Fn(
            mixer,
            patches=nn.Conv2d(3, 8, 4, 4),
            norm1=nn.LayerNorm(8),
            norm2=nn.LayerNorm(8),
            token1=nn.Linear(4, 6),
            token2=nn.Linear(6, 4),
            channel1=nn.Linear(8, 12),
            channel2=nn.Linear(12, 8),
            head=nn.Linear(8, 2),
        ),
        image(),
        ["12", "6", "8"],
    ),
    "split, stack and slice": Case(
        lambda: Fn(rearranged, a=nn.Linear(4, 8), b=nn.Linear(6, 2), c=nn.Linear(5, 3)), flat(), ["2", "3"]
    ),
    "padded shortcut": Case(
        lambda: Fn(option_a, stem=nn.Conv2d(3, 4, 3, padding=1), wide=nn.Conv2d(4, 8, 3, 2, 1), head=nn.Linear(8, 2)),
        image(),
        ["2", "2", "4"],
    ),
    "one unit read apart": Case(
        lambda: Fn(lambda m, x: m.b(h := m.a(x).relu()) + h[:, :1] - h[:, 3:4], a=nn.Linear(4, 8), b=nn.Linear(8, 2)),
        flat(),
        ["2", "4"],
    ),
    "reshape across the structure": Case(
        lambda: Fn(lambda m, x: m.b(m.a(x).view(2, 12)), a=nn.Linear(4, 8), b=nn.Linear(12, 2)), flat(), []
    ),
    "repeat and expand": Case(
        lambda: Fn(
            lambda m, x: m.c(m.b(m.a(x).repeat(1, 2).relu() * m.s.expand(3, 16)).repeat_interleave(3, 1)),
            a=nn.Linear(4, 8),
            s=weight(1),
            b=nn.Linear(16, 5),
            c=nn.Linear(15, 2),
        ),
        flat(),
        ["2[8]", "3[5]", "5", "8"],  # the copies of a unit can be exchanged too
    ),
    # traps
    "traps": Case(
        lambda: Fn(
            traps,
            **{n: nn.Linear(4, 5) for n in "abcdefg"},
            ramp=torch.linspace(0, 1, 5),
            free=nn.Linear(5, 8),
            out=nn.Linear(8, 2),
        ),
        flat(),
        ["8"],
    ),
    "writes into views": Case(
        lambda: Fn(writes, a=nn.Linear(4, 8), b=nn.Linear(4, 4), out=nn.Linear(8, 2)), flat(), ["2", "4"]
    ),
    "gather and scatter": Case(
        lambda: Fn(
            lambda m, x: (
                m.b(m.a(x).gather(1, torch.arange(8).expand(3, 8)))
                + m.d(torch.zeros(3, 6, dtype=x.dtype).scatter_add(1, torch.arange(6).expand(3, 6), m.c(x)))
            ),
            a=nn.Linear(4, 8),
            b=nn.Linear(8, 2),
            c=nn.Linear(4, 6),
            d=nn.Linear(6, 2),
        ),
        flat(),
        [],
    ),
    # whole-module matters
    "tied auto-encoder": Case(
        lambda: Fn(lambda m, x: F.linear(torch.relu(F.linear(x, m.w, m.b)), m.w.t()), w=weight(8, 4), b=weight(8)),
        flat(),
        ["8"],
    ),
    "tied embedding": Case(Tied, tokens(), ["12", "8"]),
    "block used three times": Case(
        lambda: Fn(
            recursive,
            embed=nn.Linear(4, 8),
            block=nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)),
            head=nn.Linear(8, 2),
        ),
        flat(),
        ["6", "8"],
    ),
    "two heads": Case(
        lambda: Fn(
            lambda m, x: {"a": m.a(h := m.trunk(x).relu()), "b": [m.b(h)]},
            trunk=nn.Linear(4, 8),
            a=nn.Linear(8, 2),
            b=nn.Linear(8, 3),
        ),
        flat(),
        ["8"],
    ),
    "two inputs": Case(
        lambda: Fn(
            lambda m, x, scale: m.c((m.a(x) + m.b(scale)).relu()),
            a=nn.Linear(4, 8),
            b=nn.Linear(3, 8, bias=False),
            c=nn.Linear(8, 2),
        ),
        lambda: {"x": torch.randn(3, 4), "scale": torch.randn(3, 3)},
        ["8"],
    ),
    "unused parameters": Case(
        lambda: Fn(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(4, 8), b=nn.Linear(8, 2), spare=nn.Linear(8, 8)),
        flat(),
        ["8"],
    ),
    "buffer as a mask": Case(
        lambda: Fn(
            lambda m, x: m.c(m.b(m.a(x) * m.mask).relu()),
            a=nn.Linear(4, 8),
            b=nn.Linear(8, 6),
            c=nn.Linear(6, 2),
            mask=torch.rand(8),
        ),
        flat(),
        ["6", "8"],
    ),
    "output in the middle": Case(
        lambda: Fn(
            lambda m, x: (h := m.a(x).relu(), m.c(m.b(h).relu())), a=nn.Linear(4, 8), b=nn.Linear(8, 6), c=nn.Linear(6, 2)
        ),
        flat(),
        ["6"],
    ),
    # nested structure that falls out of the plain rules
    "attention by hand": Case(
        lambda: Fn(attention, embed=nn.Linear(4, 12), qkv=nn.Linear(12, 36), out=nn.Linear(12, 12), head=nn.Linear(12, 2)),
        lambda: torch.randn(2, 5, 4),
        ["12", "12", "3", "4[3]", "4[3]"],
    ),
    # files of their own
    **CONVOLUTION,
    **ATTENTION,
    **RECURRENCE,
    **GROUPING,
}
