"""The saved states of optimisers, moved along with the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onebasin.relaxation.objectives import each_tied_once
from onebasin.symmetries import Permutation, Transform
from onebasin.symmetries.optimizers import move_optimizer_state

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of buffers, which no optimiser has."""


def is_optimizer_state(content: Any) -> bool:
    """Whether the content of a file looks like what ``optimizer.state_dict()`` returns."""
    return isinstance(content, Mapping) and {"state", "param_groups"} <= content.keys()


def move_optimizer(
    permutation: Permutation | Transform, saved: Mapping[str, Any], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The state dict of an optimiser, as ``optimizer.state_dict()`` wrote it, for the permuted model.

    Args:
        permutation: of the model; a transform that does nothing else will do.
        saved: with the entries "state" and "param_groups".
        names: of the parameters, in the order in which the optimiser got them. If None: the names that recent optimisers
            save, or else all parameters in the order of the model.

    Raises:
        ValueError: if it is no such state dict, names and shapes do not fit, or a transform does more than permute.
    """
    if isinstance(permutation, Transform):
        permutation = permutation.optimizer_permutation()
    try:
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        saved_names = [name for group in saved["param_groups"] for name in group.get("param_names", ())]
        state = {number: dict(saved["state"].get(number, {})) for number in numbers}
    except (KeyError, TypeError, AttributeError):
        raise ValueError("this is not the state dict of an optimiser: it needs 'state' and 'param_groups'") from None
    order = list(names or saved_names or _list_parameters(permutation))
    if len(order) != len(numbers):
        raise ValueError(f"the optimiser has {len(numbers)} parameters, the model {len(order)}: their names are needed")
    return move_optimizer_state({**saved, "state": state}, order, permutation.symmetry.layouts, permutation.move)


def _list_parameters(permutation: Permutation) -> list[str]:
    symmetry = permutation.symmetry
    return [key for key in each_tied_once(symmetry.layouts, symmetry) if key.rpartition(".")[2] not in _STATISTICS]
