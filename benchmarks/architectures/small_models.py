"""Small networks that need PyTorch alone: the layers of `torch.nn` put together in the usual ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.architectures.architecture import Architecture, Example, Inputs, images


class Residual(nn.Module):
    """A module beside a shortcut."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Their sum."""
        return x + self.inner(x)


class Last(nn.Module):
    """A recurrent layer, read at its last step."""

    def __init__(self, layer: nn.Module, width: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.head(self.layer(x)[0][:, -1])


class CellLoop(nn.Module):
    """A cell run step by step over a sequence of any length."""

    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Scores after the last step."""
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Classifier(nn.Module):
    """Tokens with learned positions, a transformer, their mean."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.embed, self.positions = nn.Embedding(40, 16), nn.Parameter(torch.randn(32, 16))
        self.block, self.head = block, nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores."""
        return self.head(self.block(self.embed(ids) + self.positions[: ids.shape[1]]).mean(1))


class Siamese(nn.Module):
    """Two inputs through one network, compared by their cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The cosine."""
        return F.cosine_similarity(self.tower(a), self.tower(b), dim=-1)


class MixtureOfExperts(nn.Module):
    """All experts, weighted by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.inner, self.outer = nn.Parameter(torch.randn(4, 6, 12)), nn.Parameter(torch.randn(4, 12, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Their weighted mean."""
        hidden = torch.einsum("bi,eih->beh", x, self.inner).relu()
        return torch.einsum("be,beh,eho->bo", self.gate(x).softmax(-1), hidden, self.outer)


class UNet(nn.Module):
    """Two levels with a concatenation across."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, 2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(12, 8, 2, 2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """An image of the same size."""
        outer = self.down(x).relu()
        return self.out(torch.cat([self.up(self.bottom(outer).relu()), outer], 1))


def _rows(width: int) -> Inputs:
    return lambda batch, length: torch.randn(batch, width)


def _sequences(width: int) -> Inputs:
    return lambda batch, length: torch.randn(batch, length, width)


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 40, (batch, length))


def _convolutional(norm: Callable[[int], nn.Module]) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU())
    block = Residual(nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), norm(12), nn.ReLU(), nn.Conv2d(12, 8, 1)))
    return nn.Sequential(stem, block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2, enable_nested_tensor=False)


_EXAMPLES: dict[str, tuple[Callable[[], nn.Module], Inputs, int, tuple[int, ...]]] = {
    "MLP": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)),
        _rows(6),
        1,
        (),
    ),
    "residual MLP": (
        lambda: nn.Sequential(
            nn.Linear(6, 16), Residual(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))), nn.Linear(16, 3)
        ),
        _rows(6),
        1,
        (),
    ),
    "ResNet, batch norm": (lambda: _convolutional(nn.BatchNorm2d), images(), 8, (9, 12)),
    "ResNet, group norm": (lambda: _convolutional(lambda width: nn.GroupNorm(4, width)), images(), 8, (9, 12)),
    "ResNet, instance norm": (
        lambda: _convolutional(lambda width: nn.InstanceNorm2d(width, affine=True)),
        images(),
        8,
        (9,),
    ),
    "U-Net": (UNet, images(), 8, (12,)),
    "LSTM": (lambda: Last(nn.LSTM(6, 16, 2, batch_first=True), 16), _sequences(6), 5, (9, 1)),
    "GRU": (lambda: Last(nn.GRU(6, 16, batch_first=True), 16), _sequences(6), 5, (9, 1)),
    "bidirectional LSTM": (lambda: Last(nn.LSTM(6, 8, bidirectional=True, batch_first=True), 16), _sequences(6), 5, (9,)),
    "LSTM cell": (lambda: CellLoop(nn.LSTMCell(6, 16)), _sequences(6), 1, (9,)),
    "GRU cell": (lambda: CellLoop(nn.GRUCell(6, 16)), _sequences(6), 1, (9,)),
    "transformer": (lambda: Classifier(_encoder()), _ids, 5, (9, 1)),
    "Siamese": (Siamese, lambda batch, length: tuple(torch.randn(2, batch, 6)), 1, ()),
    "soft mixture of experts": (MixtureOfExperts, _rows(6), 1, ()),
}


def small_architectures() -> Iterator[Architecture]:
    """Every one of them."""
    for name, (make, inputs, length, others) in _EXAMPLES.items():
        yield Architecture("torch", name, lambda a=(make, inputs, length, others): Example(a[0](), *a[1:]))
