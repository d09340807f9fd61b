"""Small networks of every kind of transform, and copies of them that are transformed at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.matching.problem import Problem
from onebasin.relaxation.objectives import WeightDistance
from onebasin.tensors.states import State, StateDict
from tests.basis_networks import MLP, Attention, D, Model, Recurrent, RMSNorm, SwiGLU

Made = tuple[nn.Module, Tensor]
"""A network, and inputs for it."""


def stream(norm: type[nn.Module], style: str = "pre", inputs: int = 3) -> Made:
    """A transformer whose inputs are narrower than its stream."""
    model = Model([Attention(), MLP(), MLP()], [norm(D) for _ in range(4 if style == "pre" else 3)], style)
    model.embed = nn.Linear(inputs, D)
    return model, torch.randn(2, 5, inputs)


def deep_stream() -> Made:
    """Many branches with scales, no gains, biases of zero: inputs and outputs are a small part of what the stream enters."""
    branches = [Attention(), MLP(nn.functional.relu), MLP(nn.functional.relu), MLP(nn.functional.relu)]
    model = Model(branches, [nn.LayerNorm(D, elementwise_affine=False) for _ in range(5)])
    model.embed = nn.Linear(1, D)
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(value)
    return model, torch.randn(2, 5, 1)


def llama() -> Made:
    """Gates, rotary positions, and four query heads for two key-value heads."""
    attention = [Attention(4, 2, rotate="halves", bias=False) for _ in range(2)]
    branches = [attention[0], SwiGLU(), attention[1], SwiGLU()]
    model = Model(branches, [RMSNorm(D) for _ in range(5)])
    model.embed, model.head = nn.Embedding(40, D), nn.Linear(D, 40, bias=False)
    return model, torch.randint(0, 40, (2, 5))


def batch_norms() -> Made:
    """Convolutions, with statistics as if they had been trained."""
    layers = (nn.Conv2d(2, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    for norm in (layers[1], layers[4]):
        assert isinstance(norm, nn.BatchNorm2d)
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return model, torch.randn(2, 2, 8, 8)


def low_rank() -> Made:
    """Two linear layers with nothing between them, wider than their neighbours: no tensor spans the basis alone."""
    return nn.Sequential(nn.Linear(5, 12), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(2, 5)


def low_ranks() -> Made:
    """Wide linear layers beside each other: neither of their bases is known before the other is."""
    layers = (nn.Linear(5, 9), nn.Linear(9, 10), nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 3))
    return nn.Sequential(*layers), torch.randn(2, 5)


def recurrent(kind: type[nn.RNNBase]) -> Made:
    """Candidates may change their signs; the units before them are mixed."""
    return Recurrent(kind), torch.randn(2, 4, 3)


def odd() -> Made:
    """Units may change their signs."""
    layers = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return nn.Sequential(*layers), torch.randn(2, 6)


def relu() -> Made:
    """Units may be scaled."""
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)), torch.randn(2, 6)


CASES: dict[str, Callable[[], Made]] = {
    "layer norm, 3 inputs": lambda: stream(nn.LayerNorm),
    "layer norm, 1 input": lambda: stream(nn.LayerNorm, inputs=1),
    "RMS norm, 3 inputs": lambda: stream(RMSNorm),
    "RMS norm, 1 input": lambda: stream(RMSNorm, inputs=1),
    "layer norm after branches": lambda: stream(nn.LayerNorm, "post"),
    "RMS norm after branches": lambda: stream(RMSNorm, "post"),
    "many branches, biases of zero": deep_stream,
    "grouped queries, rotary, gates": llama,
    "batch norm": batch_norms,
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "wide linear layers": low_rank,
    "wide linear layers in a row": low_ranks,
    "tanh": odd,
    "ReLU": relu,
}


def train(model: nn.Module, x: Tensor) -> None:
    """A few large steps, so that nothing is as it was drawn; gains of norms stay one, and a change of basis needs that."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.dim() > 1], lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


class Planted(NamedTuple):
    """A network in float64, its inputs, and a copy that is transformed at random."""

    model: nn.Module
    inputs: Tensor
    symmetry: ob.Symmetry
    transform: ob.Transform

    @property
    def target(self) -> StateDict:
        """The state of the network."""
        return StateDict(self.model.state_dict())

    @property
    def source(self) -> StateDict:
        """The state of the copy."""
        return StateDict(self.transform.apply(self.model.state_dict()))


def plant(make: Callable[[], Made], seed: int = 0, trained: bool = False, symmetry: ob.Symmetry | None = None) -> Planted:
    """Draw a network and a transform of it; the symmetry of one of the same architecture may be given."""
    torch.manual_seed(seed)
    model, x = make()
    if trained:
        train(model.train(), x)
    model, x = model.double().eval(), x.double() if x.is_floating_point() else x
    symmetry = symmetry or ob.symmetry(model, x, kinds="all")
    return Planted(model, x, symmetry, ob.Transform.random(symmetry, torch.Generator().manual_seed(seed + 1)))


def make_problem(symmetry: ob.Symmetry, source: State, target: State) -> Problem:
    """Bring the source to the target."""
    keys = tuple(key for key in source if key not in symmetry.fixed)
    return Problem(symmetry, source, target, keys, WeightDistance())
