"""Tiny networks whose changes of basis can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D = 8


class Attention(nn.Module):
    """Heads of four; `kv_heads` of them for keys and values."""

    def __init__(
        self,
        heads: int = 2,
        kv_heads: int = 2,
        norm: nn.Module | None = None,
        rotate: str = "",
        bias: bool = True,
        interleaves: bool = False,
    ):
        super().__init__()
        self.interleaves = interleaves
        self.heads, self.kv_heads, self.rotate = heads, kv_heads, rotate
        self.q = nn.Linear(D, heads * 4, bias=bias)
        self.k, self.v = (nn.Linear(D, kv_heads * 4, bias=bias) for _ in range(2))
        self.o = nn.Linear(heads * 4, D, bias=bias)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, 4).transpose(1, 2)
        k, v = (f(x).view(batch, length, self.kv_heads, 4).transpose(1, 2) for f in (self.k, self.v))
        if self.norm is not None:
            q, k = self.norm(q), self.norm(k)
        if self.rotate:
            q, k = rotary(q, self.rotate), rotary(k, self.rotate)
        repeats = self.heads // self.kv_heads
        if self.interleaves:
            k, v = (value.repeat_interleave(repeats, 1) for value in (k, v))
        elif repeats > 1:
            shape = (batch, self.kv_heads, repeats, length, 4)
            k, v = (value.unsqueeze(2).expand(shape).reshape(batch, self.heads, length, 4) for value in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class PackedAttention(nn.Module):
    """Two heads of four, queries, keys and values from one layer, and rotary positions."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 24), nn.Linear(8, D)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = rotary(q, "halves") @ rotary(k, "halves").mT
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


class ViewedAttention(nn.Module):
    """Two heads of four; queries, keys and values from one layer, whose outputs are viewed as three by heads by units."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 24), nn.Linear(8, D)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


def rotary(x: Tensor, style: str) -> Tensor:
    """Pairs turned by an angle that grows with the position."""
    angles = torch.arange(x.shape[2])[:, None] * torch.tensor([1.0, 0.1])
    if style == "part":
        first, second, rest = x.split([1, 1, 2], -1)
        cos, sin = angles[:, :1].cos(), angles[:, :1].sin()
        return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)
    if style == "complex":
        pairs = torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles).to(x), angles.to(x))).flatten(-2)
    if style == "not in pairs":
        angles = torch.arange(x.shape[2])[:, None] * torch.tensor([1.0, 0.1, 0.7, 0.3])
        return x * angles.cos() + torch.cat([-x[..., 2:], x[..., :2]], -1) * angles.sin()
    if style == "halves":
        cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, -1).flatten(-2)


class RMSNorm(nn.Module):
    """Written by hand, as language models have it."""

    def __init__(self, size: int = D):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class SwiGLU(nn.Module):
    """A gate and a branch that is multiplied by it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 12), nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MLP(nn.Module):
    """One hidden layer."""

    def __init__(self, function: Callable[[Tensor], Tensor] = F.gelu, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(D, 12, bias=bias), nn.Linear(12, D, bias=bias), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


class Model(nn.Module):
    """Embeds, adds what branches say about the stream, normalised before or after, and reads the stream."""

    def __init__(self, branches: list[nn.Module], norms: list[nn.Module], style: str = "pre", head: bool = True):
        super().__init__()
        self.embed = nn.Linear(3, D)
        self.branches, self.norms, self.style = nn.ModuleList(branches), nn.ModuleList(norms), style
        self.last = norms[-1] if len(norms) > len(branches) else nn.Identity()
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.style == "parallel":
            normed = self.norms[0](x)
            x = x + sum(branch(normed) for branch in self.branches)
        else:
            for branch, norm in zip(self.branches, self.norms, strict=False):
                x = x + branch(norm(x)) if self.style == "pre" else norm(x + branch(x))
        return self.head(self.last(x))


class Tied(nn.Module):
    """Tokens whose embedding is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, D)
        self.branch = MLP()
        self.norm = RMSNorm()
        self.head = nn.Linear(D, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.norm(x + self.branch(self.norm(x))))


class Function(nn.Module):
    """Two linear maps with something between them."""

    def __init__(self, between: Any, bias: bool = True):
        super().__init__()
        self.first, self.second = nn.Linear(3, D, bias=bias), nn.Linear(D, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Shifted(nn.Module):
    """A learned bias is added to a stream behind its norm, and a reader stands behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.bias = nn.Linear(3, D), nn.Linear(D, 2), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.rms_norm(self.embed(x), (D,)) + self.bias)


class LoRA(nn.Module):
    """A linear layer and a product of two thin ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(5, 6), nn.Linear(5, 4, bias=False), nn.Linear(4, 6, bias=False)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.base(x) + 2 * self.b(self.a(x))))


class BiasedAttention(nn.Module):
    """Two heads of four, whose scores get a learned number for each distance: of T5 without factors, of Swin with them."""

    def __init__(self, factor: float = 1.0, bias: bool = False):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=bias) for _ in range(4))
        self.distances, self.factor = nn.Embedding(9, 2), factor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        positions = torch.arange(x.shape[1])
        near = (positions - positions[:, None]).clamp(-4, 4) + 4
        scores = self.factor * q @ k.mT + self.distances(near).permute(2, 0, 1)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Windows(nn.Module):
    """Layer norm, tokens shifted and cut into windows, attention, four tokens merged into one: as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.norm = nn.Linear(3, D), BiasedAttention(0.5, bias=True), nn.LayerNorm(D)
        self.merge, self.reduce = nn.LayerNorm(4 * D), nn.Linear(4 * D, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        batch, height, width, _ = x.shape
        moved = torch.roll(self.norm(x), (1, 1), (1, 2))
        windows = moved.view(batch, height // 2, 2, width // 2, 2, D).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, D)
        back = self.attention(windows).view(batch, height // 2, width // 2, 2, 2, D).permute(0, 1, 3, 2, 4, 5)
        x = x + torch.roll(back.reshape(batch, height, width, D), (-1, -1), (1, 2))
        parts = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return self.reduce(self.merge(torch.cat(parts, -1)))


class LayerScale(nn.Module):
    """What a branch adds to the stream is multiplied by a gain."""

    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.norm, self.branch, self.gain = nn.Linear(3, D), nn.LayerNorm(D), MLP(), nn.Parameter(torch.ones(D))
        self.last, self.head = nn.LayerNorm(D) if last is None else last, nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.last(x + self.gain * self.branch(self.norm(x))))


class ConvNeXt(nn.Module):
    """A depthwise convolution reads the stream channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise, self.branch = nn.Conv2d(3, D, 1), nn.Conv2d(D, D, 3, padding=1, groups=D), MLP()
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.branch(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return self.head(self.norm((x.permute(0, 2, 3, 1) + y).mean((1, 2))))


class ConvNet(nn.Module):
    """Convolutions with batch norms, and two without anything between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 3)
        self.third, self.head = nn.Conv2d(5, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.third(self.second(torch.relu(self.norm(self.first(x)))))).mean((2, 3)))


class Recurrent(nn.Module):
    """A recurrent layer between linear ones, of which all outputs are read, or the last state, or the last cell."""

    def __init__(
        self, kind: type[nn.RNNBase] = nn.LSTM, reads: str = "outputs", start: float | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 5), kind(5, 6, batch_first=True, **options)
        self.last = nn.Linear(12 if options.get("bidirectional") else options.get("proj_size", 6), 2)
        self.reads, self.start = reads, start

    def forward(self, x: Tensor) -> Tensor:
        start = None if self.start is None else torch.full((1, len(x), 6), self.start)
        outputs, states = self.inner(self.first(x), start)
        if self.reads == "outputs":
            return self.last(outputs)
        if isinstance(states, tuple):
            states = states[1 if self.reads == "cell" else 0]
        return self.last(states[-1])


class Stacked(nn.Module):
    """Two layers beside each other, with units of their own, in one tensor each."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.bias = nn.Parameter(torch.randn(2, 6, 3)), nn.Parameter(torch.randn(2, 6))
        self.second, self.functions = nn.Parameter(torch.randn(2, 4, 6)), functions

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.functions, self.first, self.bias, self.second, strict=True)
        return sum((f(F.linear(x, a, b)) @ c.mT for f, a, b, c in parts), torch.zeros(()))


class WithBuffer(nn.Module):
    """A fixed table is added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(3, D), nn.LayerNorm(D), nn.Linear(D, 2)
        self.register_buffer("table", torch.randn(4, D), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x) + self.table))


def with_gains(model: nn.Module) -> nn.Module:
    """The same model, its gains drawn at random."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | RMSNorm):
                module.weight.copy_(torch.rand(module.weight.shape, generator=generator) + 0.5)
    return model


def randomise_norms(model: nn.Module, gains: Mapping[str, float | None]) -> None:
    """Draw gains, some of which are negative, and all offsets of norms, as training leaves them.

    Args:
        model: is changed.
        gains: the keys of the gains, each with the number at which it multiplies by one; None leaves it.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for key, neutral in gains.items():
            if neutral is not None:
                drawn = torch.rand(parameters[key].shape, generator=generator) + 0.5
                drawn[1] *= -1
                parameters[key].copy_(drawn + neutral - 1)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm) and module.bias is not None:
                module.bias.copy_(torch.randn(module.bias.shape, generator=generator))


class Gated(nn.Module):
    """A stream that can be rotated, and gated units that can be scaled and change their signs."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norms = nn.ModuleList(nn.RMSNorm(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        inside = self.norms[0](x)
        x = x + self.down(F.silu(self.gate(inside)) * self.up(inside))
        return self.head(self.norms[1](x))
