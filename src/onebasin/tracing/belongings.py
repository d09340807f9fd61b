"""What the modules of a model hold, so that a run of it can be undone."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


class Belongings:
    """The attributes of all modules, with the lists, dicts and sets among them and within them."""

    def __init__(self, model: nn.Module):
        self.tensors: list[Tensor] = []
        self._contents: dict[int, tuple[Any, Any]] = {}  # by identity of a container: itself, and a copy
        for module in model.modules():
            self._note(vars(module))
        self._flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif type(value) is tuple:
            for entry in value:
                self._note(entry)
        elif type(value) in _CONTAINERS and id(value) not in self._contents:
            self._contents[id(value)] = (value, value.copy())
            for entry in value.values() if isinstance(value, dict) else value:
                self._note(entry)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Whatever the modules set, or put somewhere, while they run (caches, activations) is as before afterwards."""
        try:
            yield
        finally:
            for container, content in self._contents.values():
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)
            for parameter, requires_grad, gradient in self._flags:
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)
                if parameter.grad is not gradient:
                    parameter.grad = gradient
