"""Which entries of a model's tensors a run reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onebasin.torch_internals import TorchDispatchMode, find_schema, memory_id, tree_leaves

_ATEN = torch.ops.aten
_LOOKUPS = {_ATEN.embedding.default, _ATEN._embedding_bag.default, _ATEN._embedding_bag_forward_only.default}
"""Operations that read the rows of a table, the first argument, at indices, the second."""


class ReachRecorder(TorchDispatchMode):
    """Records which entries of tensors are read by the operations that run under it.

    An operation reads all entries of its operands, except that lookups read the rows they look up, and operations without
    entries read none. Views read nothing, they are followed.

    Attributes:
        num_rows: for each table, by its key, that rows were looked up in: how many it has.
        ranges: for each tensor of indices, by its memory, the least number of rows of the tables it was looked up in.
        others: the tables of indices that were computed: pairs of the number of indices and the number of rows.
    """

    def __init__(self, state: Mapping[str, Tensor], indices: tuple[Tensor, ...] = ()):
        """Watch tensors.

        Args:
            state: the tensors to watch; operations must get them, or views of them, and no copies.
            indices: tensors of integers whose `ranges` are asked for.
        """
        super().__init__()
        self._state = dict(state)
        self._masks: dict[int, Tensor] = {}
        self._rows: dict[str, Tensor] = {}
        for value in self._state.values():
            size = value.untyped_storage().nbytes() // max(1, value.itemsize)
            self._masks.setdefault(memory_id(value), torch.zeros(size, dtype=torch.bool, device=value.device))
        self._keys = {memory_id(value): key for key, value in reversed(self._state.items())}
        self._indices = {memory_id(value) for value in indices}
        self.num_rows: dict[str, int] = {}
        self.ranges: dict[int, int] = {}
        self.others: set[tuple[int, int]] = set()

    def reached(self, key: str) -> Tensor:
        """The entries that were read, as a mask of the shape of the tensor."""
        return self._view(self._state[key])

    def num_looked_up(self, key: str) -> int:
        """How many rows of a table were looked up."""
        return int(self._rows[key].sum())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operands = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        watched = [operand for operand in operands if memory_id(operand) in self._masks]
        if not watched or _is_view(func) or not all(operand.numel() for operand in operands):
            return result
        for operand in watched:
            self._read(func, args, operand)
        return result

    def _read(self, func: Any, args: tuple[Any, ...], operand: Tensor) -> None:
        mask = self._view(operand)
        if func in _LOOKUPS and operand is args[0]:
            self._look_up(operand, args[1])
            mask[args[1]] = True
        elif func is _ATEN.index_select.default and operand is args[0]:
            if args[1] == 0:
                self._look_up(operand, args[2])
            mask.index_fill_(args[1], args[2], True)
        elif func is _ATEN.index.Tensor and operand is args[0]:
            if len(args[1]) == 1 and args[1][0] is not None and args[1][0].dtype != torch.bool:
                self._look_up(operand, args[1][0])
            mask[tuple(slice(None) if index is None else index for index in args[1])] = True
        else:
            mask.fill_(True)

    def _look_up(self, table: Tensor, indices: Tensor) -> None:
        if memory_id(indices) in self._indices:
            known = self.ranges.get(memory_id(indices), len(table))
            self.ranges[memory_id(indices)] = min(known, len(table))
        else:
            self.others.add((indices.numel(), len(table)))
        key = self._keys[memory_id(table)]
        if self._state[key].shape[:1] == table.shape[:1]:
            self.num_rows[key] = len(table)
            self._rows.setdefault(key, torch.zeros(len(table), dtype=torch.bool, device=table.device))[indices] = True

    def _view(self, value: Tensor) -> Tensor:
        """The mask of a tensor or a view. Of entries that are repeated, one is enough."""
        sizes = [1 if stride == 0 else size for size, stride in zip(value.shape, value.stride(), strict=True)]
        return self._masks[memory_id(value)].as_strided(sizes, value.stride(), value.storage_offset())


def _is_view(operation: Any) -> bool:
    """Whether an operation returns another look at its operand and writes nothing."""
    schema = find_schema(operation)
    aliases = [result.alias_info for result in schema.returns] if schema is not None else []
    return any(alias is not None and not alias.is_write for alias in aliases)
