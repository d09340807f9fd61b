"""Where the code of a model may keep tensors beside its modules: objects, closures, global variables and caches."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
_MAX_DEPTH = 3
"""Of objects that hold objects. A module may hold whatever a program consists of, such as the trainer that runs it."""
_Cache = type(functools.lru_cache(lambda: None))


@dataclass
class Stores:
    """What may be written to.

    Attributes:
        containers: lists, dicts and sets, those that hold the attributes of objects among them.
        cells: variables of enclosing functions, with their values.
        variables: global variables: the dict that holds them, the name, the value.
        caches: of `functools.lru_cache`, with the number of their misses.
    """

    containers: list[Any] = field(default_factory=list)
    cells: list[tuple[CellType, Any]] = field(default_factory=list)
    variables: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    caches: list[tuple[Any, int]] = field(default_factory=list)

    def restore(self) -> None:
        """Undo what was assigned to variables since, and empty the caches that were filled."""
        for cell, value in self.cells:
            if cell.cell_contents is not value:
                cell.cell_contents = value
        for namespace, name, value in self.variables:
            if namespace.get(name) is not value:
                namespace[name] = value
        for cache, misses in self.caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def find_stores(model: nn.Module) -> Stores:
    """Find what the forward functions and hooks of all modules can reach, but for the modules' own attributes.

    Global variables are followed from function to function within one package, and code of PyTorch is not followed.
    """
    found, seen = Stores(), set()
    pending: list[tuple[Any, int]] = [(value, 0) for value in _list_values(model)]
    while pending:
        value, depth = pending.pop()
        if id(value) in seen or isinstance(value, (Tensor, nn.Module, type, ModuleType, str, int, float, type(None))):
            continue
        seen.add(id(value))
        pending += [
            (entry, depth + is_object) for entry, is_object in _open(value, found) if depth + is_object <= _MAX_DEPTH
        ]
    return found


def _list_values(model: nn.Module) -> Iterator[Any]:
    """The attributes of modules and, of classes that are not PyTorch's, what is defined in them."""
    classes: dict[type, None] = {}
    for module in model.modules():
        classes |= dict.fromkeys(type(module).__mro__)
        yield from vars(module).values()
    for cls in classes:
        if not _is_of_torch(cls.__module__) and cls is not object:
            yield from vars(cls).values()


def _open(value: Any, found: Stores) -> Iterable[tuple[Any, bool]]:
    """Add a value to what was found, and return what it holds, each with whether an object holds it as an attribute."""
    kind = type(value)
    if kind in CONTAINERS:
        found.containers.append(value)
        return [(entry, False) for entry in (value.values() if isinstance(value, dict) else value)]
    if kind is tuple:
        return [(entry, False) for entry in value]
    if kind is FunctionType:
        return [] if _is_of_torch(value.__module__) else [(entry, False) for entry in _open_function(value, found)]
    if kind is MethodType:
        return [(value.__func__, False), (value.__self__, False)]
    if kind in (staticmethod, classmethod):
        return [(value.__func__, False)]
    if kind is property:
        return [(value.fget, False)]
    if kind is functools.partial:
        return [(value.func, False), (value.args, False), (value.keywords, False)]
    if kind is _Cache:
        found.caches.append((value, value.cache_info().misses))
        return [(value.__wrapped__, False)]
    if not hasattr(value, "__dict__") or _is_of_torch(kind.__module__):
        return []
    found.containers.append(vars(value))
    return [(entry, True) for entry in vars(value).values()]


def _open_function(function: FunctionType, found: Stores) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        found.cells.append((cell, value))
        yield value
    package = function.__module__.partition(".")[0]
    for name in _list_names(function.__code__):
        value = function.__globals__.get(name, found)
        if value is found or isinstance(value, (type, ModuleType)):
            continue
        if type(value) in (FunctionType, _Cache):
            if value.__module__.partition(".")[0] == package:
                yield value
        else:
            found.variables.append((function.__globals__, name, value))
            if type(value) in CONTAINERS or type(value).__module__.partition(".")[0] == package:
                yield value


@functools.cache
def _list_names(code: CodeType) -> tuple[str, ...]:
    """The names of global variables and attributes that code uses, functions defined in it included."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _list_names(constant)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _is_of_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("torch", "builtins")
