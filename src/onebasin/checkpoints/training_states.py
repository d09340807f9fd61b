"""Training checkpoints: what lies beside the model in a PyTorch file, moved along with it.

States of optimisers and copies of the model (moving averages) are moved, wherever they are; all else stays as it is: epochs,
schedules, states of random generators.
"""

from __future__ import annotations

import fnmatch
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onebasin.checkpoints.checkpoint import Checkpoint
from onebasin.checkpoints.optimizer_states import UNNAMED, has_names, is_optimizer_state, move_optimizer
from onebasin.checkpoints.tensor_names import find_renaming
from onebasin.symmetries import Permutation, Transform
from onebasin.symmetries.layout import names


@dataclass(frozen=True)
class TrainingEntries:
    """The entries beside the model, moved.

    Attributes:
        content: the entries.
        places: of what was moved, such as "optimizer" or "averages.0".
        notes: remarks for the user.
    """

    content: Mapping[Any, Any] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def move_training_entries(
    permutation: Permutation | Transform, model: Checkpoint, ignore: Collection[str] = ()
) -> TrainingEntries:
    """The entries beside a model in its file, for the moved model.

    Args:
        permutation: of the model.
        model: the checkpoint under the names of the model.
        ignore: shell patterns for places of entries that stay as they are.

    Raises:
        ValueError: if a state of an optimiser cannot be moved; if a tensor has the shape of one that moves, and nothing
            tells which one it belongs to.
    """
    mover = _Mover(permutation, model, ignore)
    content = {key: mover.move(str(key), value) for key, value in model.layout.read_others().items()}
    places = tuple(mover.places)
    notes = [f"moved with the model: {', '.join(places)}"] if places else []
    return TrainingEntries(content, places, (*notes, *dict.fromkeys(mover.notes)))


def note_left_entries(checkpoint: Checkpoint) -> tuple[str, ...]:
    """One remark for the user that names the entries beside the model, if they are not written; or none."""
    others = [str(key) for key in checkpoint.layout.read_others()]
    return (f"left out, as only the model is written: {', '.join(others)}",) if others else ()


def copy_tensors(value: Any) -> Any:
    """The same with tensors that own their memory: PyTorch saves a view of a mapped file with the whole file."""
    return _rebuild(value, lambda name, entry: copy_tensors(entry)) if not isinstance(value, Tensor) else value.clone()


def _rebuild(value: Any, change: Callable[[str, Any], Any]) -> Any:
    """A container with other entries, of the same type if that is ordinary; every other value as it is."""
    match value:
        case Mapping():
            changed = {key: change(str(key), entry) for key, entry in value.items()}
            return OrderedDict(changed) if isinstance(value, OrderedDict) else changed
        case list():
            return [change(str(number), entry) for number, entry in enumerate(value)]
        case tuple() if any(isinstance(entry, Tensor | Mapping | list | tuple) for entry in value):
            return tuple(change(str(number), entry) for number, entry in enumerate(value))
    return value


class _Mover:
    """Moves entries, and keeps the places of those that moved."""

    def __init__(self, permutation: Permutation | Transform, model: Checkpoint, ignore: Collection[str]):
        self.permutation, self.model, self.ignore = permutation, model, ignore
        layouts = permutation.symmetry.layouts
        self.shapes = {key: torch.empty([term.size for term in layout], device="meta") for key, layout in layouts.items()}
        self.places: list[str] = []
        self.notes: list[str] = []

    def move(self, place: str, value: Any) -> Any:
        if any(fnmatch.fnmatchcase(place, pattern) for pattern in self.ignore):
            return value
        if is_optimizer_state(value):
            self.places.append(place)
            moved = self._explain(place, lambda: move_optimizer(self.permutation, value))
            self.notes += [] if has_names(value) else [UNNAMED]
            return moved
        keys = self._find_copy(value)
        if keys:
            self.places.append(place)
            state = {key: value[name] for name, key in keys.items()}
            moved = self._explain(place, lambda: self._move_copy(state))
            return _rebuild(
                value, lambda name, entry: moved[keys[name]] if name in keys else self.move(f"{place}.{name}", entry)
            )
        if isinstance(value, Tensor):
            self._check_foreign(place, value)
        return _rebuild(value, lambda name, entry: self.move(f"{place}.{name}", entry))

    def _explain(self, place: str, move: Callable[[], Any]) -> Any:
        try:
            return move()
        except ValueError as error:
            raise ValueError(
                f"the entry {place!r} of {self.model.path} cannot follow the model (--model-only leaves it out): {error}"
            ) from error

    def _find_copy(self, value: Any) -> dict[str, str]:
        """For each tensor of a copy of the model its key in the model; nothing if it is no copy."""
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            return {}
        tensors = {name: entry for name, entry in value.items() if isinstance(entry, Tensor) and entry.numel() > 1}
        found = find_renaming(list(tensors), self.shapes)[0]
        fitting = {name: key for key, name in found.items() if key in self.shapes}
        return {name: key for name, key in fitting.items() if tensors[name].shape == self.shapes[key].shape}

    def _move_copy(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if isinstance(self.permutation, Transform):
            return self.permutation.apply(state)
        layouts, move = self.permutation.symmetry.layouts, self.permutation.move
        return {key: move(value, layouts[key]) for key, value in state.items()}

    def _check_foreign(self, place: str, value: Tensor) -> None:
        """Refuse a tensor that may belong to the model. Vectors are often something else, and weights never come alone."""
        symmetry = self.permutation.symmetry
        for key, shape in self.shapes.items():
            if value.dim() > 1 and value.shape == shape.shape and names(symmetry.layouts[key]) & symmetry.groups.keys():
                raise ValueError(
                    f"the entry {place!r} of {self.model.path} has the shape of {key!r}, which moves, and nothing tells "
                    f"whether it must move too: --ignore '{place}' leaves it as it is, and --model-only leaves it out"
                )
