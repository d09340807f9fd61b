"""What the command line's --model, --data and --loss name in the tests."""

from typing import Any

import torch
from torch import Tensor, nn


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 10))


def make_wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 10))


def make_with_inputs() -> tuple[nn.Module, Tensor]:
    return make_mlp(), torch.zeros(1, 1, 8, 8)


def make_conv() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 10)]
    return nn.Sequential(*layers), torch.zeros(1, 1, 8, 8)


class PartlyUsed(nn.Linear):
    """A layer with a parameter that no call uses."""

    def __init__(self):
        super().__init__(3, 2)
        self.spare = nn.Parameter(torch.zeros(2))


def make_partly_used() -> tuple[nn.Module, Tensor]:
    return PartlyUsed(), torch.zeros(1, 3)


def make_normed() -> tuple[nn.Module, Tensor]:
    weight_norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2)), torch.zeros(1, 4)


def broken() -> nn.Module:
    raise RuntimeError("this factory is broken")


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 1, 8, 8, generator=generator), torch.randint(10, (64,), generator=generator)
    return [(x[:32], y[:32]), (x[32:], y[32:])]


def odd_batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))]


def generator():
    yield from batches()


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output.gather(1, target[:, None]) - 1).square().mean()


def tokens() -> list[tuple[dict[str, Tensor], Tensor]]:
    ids = torch.randint(48, (6, 8), generator=torch.Generator().manual_seed(0))
    return [({"input_ids": part}, part) for part in ids.split(3)]


def next_token(output: Any, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_of_an_object(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits, target)


not_callable = 3


def make_transformer():
    """A block of attention and ReLU behind layer norms, and inputs."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(3, 8), layer, nn.LayerNorm(8), nn.Linear(8, 2)).eval(), torch.randn(2, 4, 3)


def sequences() -> list[tuple[Tensor, Tensor]]:
    """Inputs of `make_transformer`, with a class for each position."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, 3, generator=generator), torch.randint(2, (8, 4), generator=generator))]


def at_every_position(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
