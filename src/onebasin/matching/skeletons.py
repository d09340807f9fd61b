"""What the canonical form of a network is found from beside its vectors: the module, whose matrices are never read.

Which gains have scales is the same for all weights; what can be centred, and which changes of basis there are, depends on
which gains are one. So networks of one architecture share a skeleton, and their states can stay on disk.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from onebasin.matching.centring import Offsets, find_offsets
from onebasin.programs.calls import read_calls
from onebasin.programs.frontends import read_program
from onebasin.programs.graph import Program
from onebasin.symmetries import Symmetry
from onebasin.symmetries.verification import Function, redrawn_functions
from onebasin.tensors.comparison import check_alike
from onebasin.tensors.states import State, read_state
from onebasin.tracing import symmetry as trace

Network = TypeVar("Network", bound=nn.Module)
Constants = Mapping[str, float]
"""The vectors of a state that are filled with one number, and that number."""


class Skeleton(Generic[Network]):
    """A module, and what was found out about it.

    Args:
        module: left untouched.
        example_inputs: as for `onebasin.symmetry`.

    Attributes:
        splits: skeletons of copies in which some tied keys are parameters of their own, by these keys.
    """

    def __init__(self, module: Network, example_inputs: Any):
        self.module, self.example_inputs = module, example_inputs
        self.splits: dict[tuple[str, ...], Skeleton[Network]] = {}
        self._found: dict[tuple[Any, bool], Symmetry] = {}
        self._offsets: dict[Any, Offsets] = {}

    @cached_property
    def programs(self) -> Sequence[Program]:
        """The calls."""
        return [read_program(self.module, call) for call in read_calls(self.example_inputs)]

    @cached_property
    def functions(self) -> Sequence[Function]:
        """The calls as functions of a state in float64, at several values of their floating inputs."""
        return redrawn_functions(self.programs)

    def find_offsets(self, held: Constants) -> Offsets:
        """Where a constant can be added to all units if these vectors are constant, whatever the other weights are."""
        place = frozenset(held.items())
        if place not in self._offsets:
            self._offsets[place] = find_offsets(self.programs, self.trace({}), read_state(self.module), held)
        return self._offsets[place]

    @property
    def _vectors(self) -> dict[str, nn.Parameter]:
        parameters = self.module.named_parameters(remove_duplicate=False)
        return {key: value for key, value in parameters if value.dim() == 1 and value.numel()}

    def find_constants(self, state: Mapping[str, Tensor]) -> Constants:
        """The vectors that are filled with one number in a state of the module."""
        vectors = {key: state[key] for key in self._vectors if key in state}
        return {key: float(value[0]) for key, value in vectors.items() if bool((value == value[0]).all())}

    def trace(self, constants: Constants, verify: bool = False) -> Symmetry:
        """The symmetry of all kinds where these vectors are constant, and no others.

        Args:
            constants: see `find_constants`.
            verify: check it on random parameters.
        """
        place = frozenset(constants.items()), verify
        if place not in self._found:
            self._found[place] = trace(self._fill(constants), self.example_inputs, verify=verify, kinds="all")
        return self._found[place]

    def _fill(self, constants: Constants) -> nn.Module:
        """The module with such vectors."""
        replaced: dict[int, Tensor] = {}
        own = self.find_constants(read_state(self.module))
        for key, vector in self._vectors.items():
            if key in constants and own.get(key) != constants[key]:
                replaced[id(vector)] = torch.full_like(vector, constants[key])
            elif key in own and key not in constants:
                replaced[id(vector)] = torch.linspace(1, 2, len(vector)).to(vector)
        return copy_structure(self.module, replaced) if replaced else self.module


def copy_structure(module: Network, replaced: Mapping[int, Tensor] | None = None) -> Network:
    """A copy of a module that shares its tensors, but for some parameters.

    Args:
        module: left untouched.
        replaced: values in place of those of parameters, by the identities of these.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for parameter in module.parameters():
        if replaced and id(parameter) in replaced:
            memo[id(parameter)] = nn.Parameter(replaced[id(parameter)], parameter.requires_grad)
    return copy.deepcopy(module, memo)


def check_fits(state: State, module: nn.Module) -> None:
    """Refuse a state whose tensors are not those of a module.

    Raises:
        ValueError: naming the first difference.
    """
    check_alike(state, read_state(module), "the state", "module=")
