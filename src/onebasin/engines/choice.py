"""An engine by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, get_args

from onebasin.engines.engine import Engine, LocalEngine
from onebasin.engines.processes import ProcessEngine
from onebasin.engines.ray_cluster import RayEngine

EngineName = Literal["local", "processes", "ray"]


def make_engine(
    name: EngineName = "local",
    workers: int | None = None,
    memory: int | None = None,
    address: str | None = None,
    device: str = "cpu",
) -> Engine:
    """An engine for `onebasin.align`, `merge` and `provenance` on checkpoints; use it in a ``with`` statement, or close it.

    Args:
        name: "local": in this process. "processes": in worker processes on this machine. "ray": on a Ray cluster.
        workers: how many work at a time; one for each core if None.
        memory: bytes that all processes on this machine may hold; what is free if None. Work that needs more is refused.
        address: of the Ray cluster; if None, one is found by RAY_ADDRESS, or started on this machine.
        device: where workers compute; on a cluster each then takes a GPU.

    Raises:
        ValueError: for another name, or for an argument that the engine does not have.
        ImportError: if Ray is asked for and not installed.

    >>> from onebasin.engines import make_engine
    >>> with make_engine("local") as engine:
    ...     list(engine.map(abs, [-1, 2]))
    [1, 2]
    """
    if name not in get_args(EngineName):
        raise ValueError(f"engine must be 'local', 'processes' or 'ray', got {name!r}")
    if address is not None and name != "ray":
        raise ValueError(f"the engine {name!r} has no address: take engine 'ray'")
    if name == "local" and workers not in (None, 1):
        raise ValueError("the engine 'local' works in one process: take 'processes' or 'ray' for several workers")
    if name == "local":
        return LocalEngine(memory)
    if name == "processes":
        return ProcessEngine(workers, memory)
    return RayEngine(workers, memory, address, device=device)


@contextlib.contextmanager
def opened(engine: Engine | EngineName | None) -> Iterator[Engine]:
    """An engine that was given, or one of this name, which is closed at the end; the local one if None.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(engine, Engine):
        yield engine
    elif engine is None:
        yield LocalEngine(is_checked=False)
    elif isinstance(engine, str):
        with make_engine(engine) as made:
            yield made
    else:
        raise TypeError(f"engine must be a name or come from onebasin.engines.make_engine, got {engine!r}")
