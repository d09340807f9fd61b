"""Moving the state of an optimiser along with the parameters that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.symmetries.layout import Layout


def name_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The names of the parameters of an optimiser, in its order.

    Raises:
        ValueError: if one is not the model's.
    """
    keys = {id(parameter): key for key, parameter in model.named_parameters()}
    names = [keys.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
    known = [name for name in names if name is not None]
    if len(known) < len(names):
        raise ValueError("the optimiser holds a parameter that is not one of the model's")
    return known


def move_optimizer_state(
    saved: Mapping[str, Any],
    names: Sequence[str],
    layouts: Mapping[str, Layout],
    move: Callable[[str, str, Tensor], Tensor],
) -> dict[str, Any]:
    """The state dict of an optimiser with every moment moved as its parameter is; nothing is shared with `saved`.

    Args:
        saved: as ``optimizer.state_dict()`` gives it.
        names: of the parameters, in the order in which the optimiser has them.
        layouts: of the model's tensors, by name.
        move: moves a tensor, by the name of its entry and the name of its parameter.

    Raises:
        ValueError: if a name is not known, or a state has another shape than its parameter or is a container of tensors:
            factored states cannot be permuted.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    moved: dict[Any, dict[str, Any]] = {}
    for number, name in zip(numbers, names, strict=True):
        if name not in layouts:
            raise ValueError(f"the permutation does not know the optimiser's parameter {name!r}")
        entries = saved["state"].get(number, {})
        if entries:
            moved[number] = {entry: _move(entry, name, value, layouts[name], move) for entry, value in entries.items()}
    return {**saved, "state": moved}


def _move(entry: str, name: str, value: Any, layout: Layout, move: Callable[[str, str, Tensor], Tensor]) -> Any:
    what = f"{entry!r} of {name!r}"
    if not isinstance(value, Tensor):
        _check_without_tensors(what, value)
        return value
    if value.numel() == 1:
        return value.clone()  # load_state_dict would share it, and both optimisers would count its steps
    expected = tuple(term.size for term in layout)
    if tuple(value.shape) != expected:
        raise ValueError(
            f"the optimiser's {what} has shape {tuple(value.shape)}, the parameter has {expected}: its parameters are in "
            "another order, or their states are factored and cannot be permuted"
        )
    moved = move(entry, name, value)
    return value.clone() if moved is value else moved


def _check_without_tensors(what: str, value: Any) -> None:
    """Refuse containers of tensors, such as the preconditioners of each axis: they do not move as the parameter does."""
    inside = [*value.values()] if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else []
    for entry in inside:
        if isinstance(entry, Tensor) and entry.numel() > 1:
            raise ValueError(f"the optimiser's {what} is a container of tensors, and it cannot be told how they move")
        _check_without_tensors(what, entry)
