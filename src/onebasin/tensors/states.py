"""The state of a model: every key of its ``state_dict()``, held in memory or read when asked for.

Tied keys hold the same tensor object. A state may have entries that are no tensors, a module's extra state; they pass
through untouched.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from onebasin.torch_internals import memory_id

Model = nn.Module | Mapping[str, Any]
"""What a state can be read from: a module, a state dict, or a state."""
M = TypeVar("M", bound=Model)
"""The type of the models that a function is given, and of those it returns."""
Ties = tuple[tuple[str, ...], ...]
"""Sets of keys that are one tensor."""


class State(Mapping[str, Any]):
    """What every state offers, whether its tensors are in memory or not."""

    is_lazy: ClassVar[bool]

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, Tensor]:
        """For each key of a tensor, a tensor of the same shape and type: no values are read."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are, once they are read."""
        return next((value.device for value in self.shapes.values()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """What to compute in: float64 if some tensor has that type, else float32."""
        return torch.float64 if any(v.dtype == torch.float64 for v in self.shapes.values()) else torch.float32

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in self.shapes.values())

    @property
    def num_entries(self) -> int:
        """Entries of all tensors."""
        return sum(value.numel() for value in self.shapes.values())

    @abstractmethod
    def map(self, function: Callable[[str, Tensor], Tensor], by_rows: Collection[str] = ()) -> Self:
        """The same keys, with `function` of key and tensor in place of each tensor; tied keys stay tied.

        For the keys in `by_rows` the function treats rows of a tensor each by itself, and can be given some of them.
        """

    @abstractmethod
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Tensors on another device and, those of floating type, in another type."""

    @abstractmethod
    def tie(self, ties: Ties) -> Self:
        """The same, with one tensor object for each set of tied keys that are present."""

    @abstractmethod
    def load(self) -> StateDict:
        """All tensors in memory."""

    def find_origin(self, key: str) -> str:
        """The same for keys that are known to be read from one place."""
        return key

    def lazily(self) -> LazyState:
        """The tensors of this state as a lazy one."""
        return LazyState({k: v.to("meta") for k, v in self.shapes.items()}, self.__getitem__, self.device)


class StateDict(dict[str, Any], State):
    """A state in memory: an ordinary ``dict``, as ``torch.func.functional_call`` and ``load_state_dict`` take it."""

    is_lazy = False

    @property
    def shapes(self) -> Mapping[str, Tensor]:
        """The tensors themselves."""
        return {key: value for key, value in self.items() if isinstance(value, Tensor)}

    @property
    def ties(self) -> Ties:
        """Sets of keys that hold one tensor object, in the order of the state."""
        keys: dict[int, list[str]] = {}
        for key, value in self.shapes.items():
            keys.setdefault(id(value), []).append(key)
        return tuple(tuple(alike) for alike in keys.values() if len(alike) > 1)

    def map(self, function: Callable[[str, Tensor], Tensor], by_rows: Collection[str] = ()) -> StateDict:
        """A new state dict; `function` is called once per tensor, with the first of its keys."""
        done: dict[int, Any] = {}
        for key, value in self.items():
            if id(value) not in done:
                done[id(value)] = function(key, value) if isinstance(value, Tensor) else value
        return StateDict({key: done[id(value)] for key, value in self.items()})

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> StateDict:
        """A new state dict; tensors that are there already are not copied."""
        return self.map(lambda key, value: value.to(device, dtype if value.is_floating_point() else None))

    def tie(self, ties: Ties) -> StateDict:
        """A new state dict, or this one if there is nothing to tie."""
        firsts = {key: next(k for k in keys if k in self) for keys in ties for key in keys if key in self}
        return StateDict({key: self[firsts.get(key, key)] for key in self}) if firsts else self

    def load(self) -> StateDict:
        """Itself."""
        return self

    def __reduce__(self) -> Any:
        # Saved as what `state_dict()` returns: readers need no onebasin, and `torch.load(weights_only=True)` takes it.
        return OrderedDict, (), None, None, iter(self.items())


class RowReader(ABC):
    """Reads the tensors of a lazy state, and of some of them rows alone: slices along the first axis."""

    @abstractmethod
    def __call__(self, key: str) -> Tensor:
        """A tensor."""

    @abstractmethod
    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        """Some rows of a tensor."""

    def has_rows(self, key: str) -> bool:
        """Whether rows of a tensor are read without the rest of it."""
        return True

    def find_origin(self, key: str) -> str:
        """The same for keys that are known to be read from one place: so tied keys need not be compared."""
        return key


class LazyState(State):
    """A read-only state: its keys and shapes are known at once; a tensor is read, or computed, at each access.

    Give one to `Permutation.apply`, `align`, `interpolate` or `merge` in place of a state dict: what comes back is lazy too.
    If `read` can be pickled, as those of checkpoints can, it can be read in other processes (see `onebasin.engines`).

    Args:
        shapes: for each key a tensor on the meta device, which tells its shape and type.
        read: from a key to its tensor; a `RowReader` reads rows of large tensors as well.
        device: where the tensors are when they have been read.

    >>> import torch
    >>> from onebasin.tensors import LazyState
    >>> ones = LazyState({"w": torch.empty(2, device="meta")}, lambda key: torch.ones(2))
    >>> ones.map(lambda key, value: 2 * value)["w"]
    tensor([2., 2.])
    """

    is_lazy = True

    def __init__(self, shapes: Mapping[str, Tensor], read: Callable[[str], Tensor], device: torch.device | str = "cpu"):
        self._shapes = dict(shapes)
        self._device = torch.device(device)
        self._read = read

    @property
    def read(self) -> Callable[[str], Tensor]:
        """From a key to its tensor."""
        return self._read

    @property
    def shapes(self) -> Mapping[str, Tensor]:
        """Tensors on the meta device."""
        return self._shapes

    @property
    def device(self) -> torch.device:
        """Where the tensors are when they have been read."""
        return self._device

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._shapes:
            raise KeyError(key)
        return self._read(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, key: object) -> bool:  # Mapping's own would read the tensor
        return key in self._shapes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tensors, {self.num_bytes / 1e6:.1f} MB)"

    def has_rows(self, key: str) -> bool:
        """Whether rows of a tensor are read without the rest of it; one without axes has none."""
        return isinstance(self._read, RowReader) and self._shapes[key].dim() > 0 and self._read.has_rows(key)

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        """Some rows of a tensor: a slice along its first axis."""
        if isinstance(self._read, RowReader) and self.has_rows(key):
            return self._read.read_rows(key, start, stop)
        return self[key][start:stop]

    def find_origin(self, key: str) -> str:
        """The same for keys that are known to be read from one place."""
        return self._read.find_origin(key) if isinstance(self._read, RowReader) else key

    def map(self, function: Callable[[str, Tensor], Tensor], by_rows: Collection[str] = ()) -> LazyState:
        """The same keys and shapes; `function` is applied to each tensor when it is read."""
        return LazyState(self._shapes, _Mapped(self, function, frozenset(by_rows)), self.device)

    def rearrange(self, function: Callable[[str, Tensor], Tensor]) -> LazyState:
        """`map` for a function that moves entries and computes nothing: it comes before a conversion to a wider type."""
        if isinstance(self._read, _Converted) and self._read.state.device == self.device:
            moved = _Converted(self._read.state.map(function), self._read.device, self._read.shapes)
            return LazyState(self._shapes, moved, self.device)
        return self.map(function)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> LazyState:
        """Tensors are moved and converted when they are read."""
        shapes = {key: v.to(dtype) if dtype and v.is_floating_point() else v for key, v in self._shapes.items()}
        return LazyState(shapes, _Converted(self, device, shapes), device)

    def tie(self, ties: Ties) -> LazyState:
        """Itself: tensors that are read anew at each access have no identity."""
        return self

    def load(self) -> StateDict:
        """All tensors at once."""
        return StateDict(self.items())

    def lazily(self) -> LazyState:
        """Itself."""
        return self


@dataclass(frozen=True)
class _Mapped(RowReader):
    state: LazyState
    function: Callable[[str, Tensor], Tensor]
    by_rows: frozenset[str]

    def __call__(self, key: str) -> Tensor:
        return self.function(key, self.state[key])

    def has_rows(self, key: str) -> bool:
        return key in self.by_rows and self.state.has_rows(key)

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        return self.function(key, self.state.read_rows(key, start, stop))


@dataclass(frozen=True)
class _Converted(RowReader):
    state: LazyState
    device: torch.device | str
    shapes: Mapping[str, Tensor]

    def __call__(self, key: str) -> Tensor:
        return self.state[key].to(self.device, self.shapes[key].dtype)

    def has_rows(self, key: str) -> bool:
        return self.state.has_rows(key)

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        return self.state.read_rows(key, start, stop).to(self.device, self.shapes[key].dtype)

    def find_origin(self, key: str) -> str:
        return self.state.find_origin(key)


def read_state(model: Model) -> State:
    """The state of a module or of a mapping: detached, never copied. A lazy state is returned as it is.

    Keys that view the same memory hold one tensor object, though ``state_dict()`` makes a view for each of them.

    Raises:
        TypeError: if it is neither.
    """
    if isinstance(model, LazyState):
        return model
    return read_state_dict(model)


def read_state_dict(model: Model) -> StateDict:
    """`read_state` in memory: a lazy state is loaded."""
    if isinstance(model, nn.Module):
        entries = model.state_dict(keep_vars=True)
    elif isinstance(model, Mapping):
        entries = model
    else:
        raise TypeError(f"expected a torch.nn.Module or a state dict, got {type(model).__name__}")
    seen: dict[int, Any] = {}
    by_memory: dict[Any, Any] = {}
    for value in entries.values():
        if id(value) not in seen:
            seen[id(value)] = by_memory.setdefault(_identify(value), value.detach() if isinstance(value, Tensor) else value)
    return StateDict({key: seen[id(value)] for key, value in entries.items()})


def _identify(value: Any) -> Any:
    """Equal for tensors that are the same view of the same memory."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.numel() == 0:
        return id(value)
    return memory_id(value), value.storage_offset(), value.shape, value.stride(), value.dtype


def find_ties(model: nn.Module) -> Ties:
    """The state keys of a module that are one tensor, in the order of its state dict.

    Raises:
        ValueError: if two parameters share part of their memory without being the same: a permutation of one would
            have to move the other, and no layout says how.
    """
    state = read_state_dict(model)
    spans: dict[int, list[tuple[int, int, str]]] = {}
    distinct = {id(value): (key, value) for key, value in reversed(list(state.shapes.items()))}
    for key, value in distinct.values():
        if value.layout == torch.strided and value.numel() and not value.is_meta:
            start = int(value.storage_offset()) * value.element_size()
            extent = int(sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))) + 1
            spans.setdefault(memory_id(value), []).append((start, start + extent * value.element_size(), key))
    for intervals in spans.values():
        for (_, end, first), (start, _, second) in itertools.pairwise(sorted(intervals)):
            if start < end:
                raise ValueError(
                    f"{first!r} and {second!r} share part of their memory; give each its own tensor "
                    "(a view of another parameter should be taken in forward, not stored)"
                )
    return state.ties


def check_ties(state: Mapping[str, Any], ties: Iterable[tuple[str, ...]]) -> None:
    """Refuse a state whose tied keys hold different values."""
    for keys in ties:
        present = [k for k in keys if k in state]
        if isinstance(state, LazyState):
            present = list({state.find_origin(key): key for key in reversed(present)}.values())[::-1]
        for key in present[1:]:
            first, other = state[present[0]], state[key]
            if first is not other and not torch.equal(first, other):
                raise ValueError(f"{present[0]!r} and {key!r} are one tied tensor in the model, but their values differ")
