"""What a tiny network of the tables is made of: how to make it, what to feed it, which groups a person counted in it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.programs.calls import Call, read_calls


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    groups: list[str]


class Fn(nn.Module):
    """Modules by name, and a forward that uses them."""

    def __init__(self, forward: Callable[..., Any], **members: Any):
        super().__init__()
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def flat(width: int = 4) -> Callable[[], Tensor]:
    return lambda: torch.randn(3, width)


def image(channels: int = 3, size: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, channels, size, size)


def tokens(vocabulary: int = 10) -> Callable[[], Tensor]:
    return lambda: torch.arange(6).view(2, 3) % vocabulary


def sequence(width: int = 4, length: int = 5) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, length, width)


def call_of(inputs: Any) -> Call:
    """The only call that example inputs describe."""
    (call,) = read_calls(inputs)
    return call


def two_layers(forward: Callable[..., Any], **members: Any) -> Fn:
    """`first` from 4 to 8 units and `last` from 8 to 2, in a forward that uses them."""
    torch.manual_seed(0)
    return Fn(forward, first=nn.Linear(4, 8), last=nn.Linear(8, 2), **members)


def check_groups(forward: Callable[..., Any], sizes: list[int]) -> None:
    """Trace `two_layers` without verification, compare the sizes of its groups, and verify them.

    There is a parameter `scale` for the 8 units between the layers. Few forwards use all parameters.
    """
    model, inputs = two_layers(forward, scale=weight(8)), torch.rand(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ob.UnreachedWarning)
        symmetry = ob.symmetry(model, inputs, verify=False)
        assert sorted(group.size for group in symmetry.groups.values()) == sorted(sizes), f"\n{symmetry}"
        assert symmetry.verify(model, inputs) < 1e-9


def written(model: nn.Module, inputs=None) -> list[str]:
    """Trace without verification, verify on own and on random weights, and return sizes of groups and of their parents."""
    inputs = flat()() if inputs is None else inputs
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert symmetry.verify(model, inputs) < 1e-9
    ob.symmetry(model, inputs)
    sizes = symmetry.sizes
    return sorted(
        str(group.size) + "".join(f"[{sizes[p]}{'' if p in symmetry.groups else '*'}]" for p in group.parents)
        for group in symmetry.groups.values()
    )
