"""States whose tensors are read when they are asked for, and are never held all at once: checkpoints on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.tensors.states import State, read_state


class LazyState(Mapping[str, Tensor]):
    """A read-only state: what is in it is known at once, its tensors are read, or computed, at every access.

    Give one to `Permutation.apply`, `align`, `interpolate` or `merge` in place of a state dict: what comes back is lazy too.

    Attributes:
        shapes: for each key a tensor on the meta device, which tells its shape and type.
        device: where the tensors are when they have been read.

    >>> ones = LazyState({"w": torch.empty(2, device="meta")}, lambda key: torch.ones(2))
    >>> ones.map(lambda key, value: 2 * value)["w"]
    tensor([2., 2.])
    """

    def __init__(self, shapes: Mapping[str, Tensor], read: Callable[[str], Tensor], device: torch.device | str = "cpu"):
        self.shapes = dict(shapes)
        self.device = torch.device(device)
        self._read = read

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.shapes:
            raise KeyError(key)
        return self._read(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, key: object) -> bool:  # Mapping's own would read the tensor
        return key in self.shapes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tensors, {self.num_bytes / 1e6:.1f} MB)"

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in self.shapes.values())

    @property
    def num_entries(self) -> int:
        """Entries of all tensors."""
        return sum(value.numel() for value in self.shapes.values())

    def map(self, function: Callable[[str, Tensor], Tensor]) -> LazyState:
        """The same keys and shapes, with `function` of key and tensor done to each tensor that is read."""
        return LazyState(self.shapes, lambda key: function(key, self[key]), self.device)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> LazyState:
        """Tensors on another device and, those of floating type, in another type."""

        def chosen(value: Tensor) -> torch.dtype:
            return dtype if dtype is not None and value.is_floating_point() else value.dtype

        shapes = {key: value.to(chosen(value)) for key, value in self.shapes.items()}
        return LazyState(shapes, lambda key: self[key].to(device, shapes[key].dtype), device)

    def load(self) -> State:
        """All tensors at once, as a plain state dict."""
        return dict(self.items())


def open_state(model: nn.Module | Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a model for reading: a lazy one as it is, of any other its state dict."""
    return model if isinstance(model, LazyState) else read_state(model)


def make_lazy(model: nn.Module | Mapping[str, Any]) -> LazyState:
    """The tensors of any state as a lazy one."""
    if isinstance(model, LazyState):
        return model
    tensors = {key: value for key, value in read_state(model).items() if isinstance(value, Tensor)}
    device = next((value.device for value in tensors.values()), torch.device("cpu"))
    return LazyState({key: value.to("meta") for key, value in tensors.items()}, tensors.__getitem__, device)
