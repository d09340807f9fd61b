"""The saved states of optimisers, moved along with the parameters.

PyTorch saves the state of the k-th parameter under the number k. Which parameter that is depends on how the optimiser was
made, and only recent ones that were given names save them. Otherwise it is found out by the shapes, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onebasin.checkpoints.tensor_names import find_renaming
from onebasin.relaxation.objectives import each_tied_once
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.symmetries.layout import Layout, write

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of buffers, which no optimiser has."""
UNNAMED = "the optimiser's parameters have no names, and are taken in the order of the model"
"""A remark for the user."""
_GIVE_NAMES = (
    "save the state of an optimiser that was made with model.named_parameters(), which knows their names, or give them to "
    "onebasin.checkpoints.move_optimizer"
)


def is_optimizer_state(content: Any) -> bool:
    """Whether the content of a file looks like what ``optimizer.state_dict()`` returns."""
    return isinstance(content, Mapping) and {"state", "param_groups"} <= content.keys()


def move_optimizer(
    permutation: Permutation | Transform, saved: Mapping[str, Any], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The state dict of an optimiser, as ``optimizer.state_dict()`` wrote it, for the permuted model.

    Args:
        permutation: of the model; or a transform that the state can follow, see `onebasin.Transform.apply_optimizer`.
        saved: with the entries "state" and "param_groups".
        names: of the parameters, in the order in which the optimiser got them. If None: the names in the state dict, or else
            as `find_parameter_names` finds them.

    Raises:
        ValueError: if it is no such state dict, it cannot be told which state belongs to which parameter, names and shapes
            do not fit, or the state cannot follow a transform.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> from onebasin.checkpoints import move_optimizer
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x = torch.randn(3, 4)
    >>> optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    >>> model(x).sum().backward()
    >>> optimizer.step()
    >>> permutation = ob.symmetry(model, x).random()
    >>> saved = move_optimizer(permutation, optimizer.state_dict())
    >>> index = permutation["0.weight"]
    >>> torch.equal(saved["state"][1]["momentum_buffer"], optimizer.state_dict()["state"][1]["momentum_buffer"][index])
    True
    """
    numbers = _list_numbers(saved)
    order = list(names or find_parameter_names(permutation.symmetry, saved))
    if len(order) != len(numbers):
        raise ValueError(f"the optimiser has {len(numbers)} parameters, and {len(order)} names are given")
    return permutation.move_optimizer(saved, order)


def find_parameter_names(symmetry: Symmetry, saved: Mapping[str, Any]) -> list[str]:
    """The names of an optimiser's parameters, in its order.

    They are those in the state dict, if there are any. If not, the parameters of one group are taken in the order of the
    model. In several groups, those of one shape must all be in one group, in the order of the model, or all move alike.

    Raises:
        ValueError: if that does not tell which state belongs to which parameter.
    """
    named = _read_names(saved)
    if named is not None:
        if len(set(named)) < len(named):
            raise ValueError("the optimiser's state has two parameters of one name")
        shapes = {key: torch.empty(_shape(layout), device="meta") for key, layout in symmetry.layouts.items()}
        keys = {name: key for key, name in find_renaming(named, shapes)[0].items()}
        return [keys[name] for name in named]
    model = [key for key in each_tied_once(symmetry.layouts, symmetry) if key.rpartition(".")[2] not in _STATISTICS]
    numbers = _list_numbers(saved)
    if len(model) != len(numbers):
        raise ValueError(f"the optimiser has {len(numbers)} parameters without names, the model {len(model)}: {_GIVE_NAMES}")
    return model if len(saved["param_groups"]) == 1 else _match_shapes(symmetry, saved, model)


def has_names(saved: Mapping[str, Any]) -> bool:
    """Whether the state dict of an optimiser tells the names of its parameters."""
    return _read_names(saved) is not None


def _list_numbers(saved: Mapping[str, Any]) -> list[Any]:
    """What each parameter is called, which is a number or, if the states of a sharded model were gathered, its name."""
    try:
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        unknown = set(saved["state"]) - set(numbers)
        entries_are_mappings = all(isinstance(entries, Mapping) for entries in saved["state"].values())
    except (KeyError, TypeError, AttributeError):
        raise ValueError("this is not the state dict of an optimiser: it needs 'state' and 'param_groups'") from None
    if unknown or len(set(numbers)) < len(numbers) or not entries_are_mappings:
        raise ValueError("the optimiser's state dict is damaged: its states are not those of the parameters in its groups")
    return numbers


def _read_names(saved: Mapping[str, Any]) -> list[str] | None:
    numbers = _list_numbers(saved)
    if numbers and all(isinstance(number, str) for number in numbers):
        return numbers
    named = [name for group in saved["param_groups"] for name in group.get("param_names") or ()]
    if named and len(named) != len(numbers):
        raise ValueError(f"the optimiser's state has {len(numbers)} parameters, but names of {len(named)}")
    return named or None


def _match_shapes(symmetry: Symmetry, saved: Mapping[str, Any], model: Sequence[str]) -> list[str]:
    """The names of parameters that are in several groups, by the shapes of their states."""
    found: dict[tuple[int, ...], list[Any]] = {}
    group_of = {number: place for place, group in enumerate(saved["param_groups"]) for number in group["params"]}
    for number in group_of:
        shapes = {tuple(v.shape) for v in saved["state"].get(number, {}).values() if isinstance(v, Tensor) and v.numel() > 1}
        for shape in shapes:
            found.setdefault(shape, []).append(number)
    names: dict[Any, str] = {}
    for shape, numbers in found.items():
        alike = [key for key in model if _shape(symmetry.layouts[key]) == shape]
        is_certain = len(numbers) == len(alike) and len({group_of[number] for number in numbers}) == 1
        if len(numbers) > len(alike) or names.keys() & set(numbers):
            raise ValueError(f"the optimiser has states of shape {shape} that do not fit the parameters of the model")
        if not is_certain and len({write(symmetry.layouts[key]) for key in alike}) > 1:
            raise ValueError(
                f"the optimiser has groups of parameters without names, and it cannot be told which of its states of shape "
                f"{shape} is that of {alike[0]!r}: {_GIVE_NAMES}"
            )
        names |= dict(zip(numbers, alike, strict=False))
    left = iter([key for key in model if key not in names.values()])  # for parameters without a state
    return [names[number] if number in names else next(left) for number in group_of]


def _shape(layout: Layout) -> tuple[int, ...]:
    return tuple(term.size for term in layout)
