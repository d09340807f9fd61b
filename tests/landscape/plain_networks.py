"""Small networks with and without batch norm, their data, and what is compared of them."""

import copy

import torch
from torch import Tensor, nn

from onebasin.tensors.interpolation import interpolate


def mlp(seed: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 8, bias), nn.Tanh(), nn.Linear(8, 7, bias), nn.ReLU(), nn.Linear(7, 6, bias), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(6, 2, bias)).to(dtype)


def cnn(seed: int, norm: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    norms = [nn.BatchNorm2d(6)] if norm else []
    layers = [nn.Conv2d(1, 6, 3), *norms, nn.ReLU(inplace=True), nn.Conv2d(6, 5, 3), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 3))
    return model.double()


def batches(*shape: int, num: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(20 + 7 * i, *shape, generator=generator, dtype=dtype) + 0.5 * i for i in range(num)]


def load(model: nn.Module, state) -> nn.Module:
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model.eval()


def snapshot(model: nn.Module):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    norms = [m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    return state, [m.training for m in model.modules()], norms


def unchanged(model: nn.Module, before) -> bool:
    state, modes, norms = snapshot(model)
    return all(torch.equal(state[key], value) for key, value in before[0].items()) and (modes, norms) == before[1:]


def mix(a: nn.Module, b: nn.Module, weights=(0.5, 0.5)) -> nn.Module:
    return load(a, interpolate([a, b], weights))
