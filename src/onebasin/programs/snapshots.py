"""What the modules of a model hold, so that a run of the model can be undone."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.programs.stores import CONTAINERS, find_stores


class ModuleSnapshot:
    """The attributes of all modules, and whatever else their code may keep tensors in: see `find_stores`.

    Args:
        model: the module.
        inputs: what it is called with. The snapshot includes whether the tensors among them require a gradient.

    Attributes:
        tensors: every tensor that the modules hold.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Any] = ()):
        self.tensors: list[Tensor] = []
        self._model = model
        self._contents: dict[int, tuple[Any, Any]] = {}  # by identity of a container: itself, and a copy of what it holds
        self._add([vars(module) for module in model.modules()])
        self._stores = find_stores(model)
        for store in self._stores.containers:
            self._contents.setdefault(id(store), (store, _copy(store)))
        leaves = [*model.parameters(), *(t for t in inputs if isinstance(t, Tensor) and t.is_leaf)]
        self._gradients = [(leaf, leaf.requires_grad, leaf.grad) for leaf in leaves]

    def _add(self, entries: Iterable[Any]) -> None:
        for entry in entries:
            kind = type(entry)
            if kind in CONTAINERS:
                if id(entry) not in self._contents:
                    self._contents[id(entry)] = (entry, _copy(entry))
                    if entry:
                        self._add(entry.values() if isinstance(entry, dict) else entry)
            elif kind is tuple:
                self._add(entry)
            elif isinstance(entry, Tensor):
                self.tensors.append(entry)

    def restore(self) -> None:
        """Undo whatever the modules set or stored since (modes, caches, activations). Values of tensors are not undone."""
        for container, content in self._contents.values():
            if (container or content) and not _is_same(container, content):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        self._stores.restore()
        for leaf, requires_grad, gradient in self._gradients:
            if leaf.requires_grad != requires_grad:
                leaf.requires_grad_(requires_grad)
            if leaf.grad is not gradient:
                leaf.grad = gradient

    @contextlib.contextmanager
    def restoring_values(self) -> Iterator[None]:
        """Afterwards, undo what was written into tensors that are not in the state dict."""
        state = {id(value) for value in self._model.state_dict(keep_vars=True).values()}
        before = [(tensor, tensor.detach().clone()) for tensor in self.tensors if id(tensor) not in state]
        try:
            yield
        finally:
            for tensor, value in before:
                if not tensor.is_meta and not torch.equal(tensor, value):
                    with torch.inference_mode():
                        tensor.detach().copy_(value)


def _copy(container: Any) -> Any:
    """A module has a dozen containers, most of them empty: these are not copied."""
    return container.copy() if container else ()


def _is_same(container: Any, content: Any) -> bool:
    """Whether a container holds the same objects in the same order. Equality is not enough, nor a bool for tensors."""
    if len(container) != len(content) or not all(map(operator.is_, container, content)):
        return False
    return not isinstance(container, dict) or all(map(operator.is_, container.values(), content.values()))
