"""Workers on a Ray cluster, which may have many machines that share a file system."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from onebasin.engines.clock import Seconds, spent_on
from onebasin.engines.engine import FAN_IN, Engine, Item, Result
from onebasin.engines.held_values import HeldValues
from onebasin.engines.memory_limits import Need
from onebasin.engines.packing import check_portable, pack, unpack
from onebasin.engines.worker import prepare, run_task
from onebasin.tensors.states import State

_MAX_REPEATS = 16
_MOST_HELD = 32
"""Values that a worker keeps for further tasks."""


class RayEngine(Engine):
    """Tasks of Ray: it repeats those whose worker dies, and starts them where cores and memory are free.

    Args:
        workers: tasks at a time; as many as the cluster has room for if None.
        memory: bytes that each task may hold; if None, what it needs is asked of Ray.
        address: of the cluster; if None, one is found by RAY_ADDRESS, or started on this machine.
        threads: of PyTorch in each task, which takes as many cores.
        device: where tasks compute: with "cuda" each takes a GPU.

    Raises:
        ImportError: if Ray is not installed.
    """

    name = "ray"

    def __init__(
        self,
        workers: int | None = None,
        memory: int | None = None,
        address: str | None = None,
        threads: int = 1,
        device: str = "cpu",
    ):
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("the engine 'ray' needs Ray: pip install 'onebasin[ray]', or take 'processes'") from error
        self._ray = ray
        self._started = not ray.is_initialized()
        if self._started:
            place = [path for path in sys.path if path and not path.endswith((".zip", "lib-dynload"))]
            variables = {"PYTHONPATH": os.pathsep.join(place), "OMP_NUM_THREADS": str(threads)}
            # A cluster that is already there has the library installed.
            local = {} if address or os.environ.get("RAY_ADDRESS") else {"runtime_env": {"env_vars": variables}}
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
        gpus = 1 if device.startswith("cuda") else 0
        self._options: dict[str, Any] = {"num_cpus": threads, "num_gpus": gpus, "max_retries": _MAX_REPEATS}
        found = ray.cluster_resources()
        room = found.get("GPU", 0) if gpus else found.get("CPU", 1) // threads
        super().__init__(max(1, int(room)) if workers is None else workers, memory)
        self.threads = threads
        self._held, self._references = HeldValues(), {}

    def check_states(self, states: Mapping[str, State]) -> None:
        """See `Engine.check_states`."""
        for what, state in states.items():
            check_portable(state, what)

    def check_memory(self, need: Need) -> None:
        """Ask Ray to start a task only where there is as much memory as it needs."""
        if self.memory is not None and need.worker > self.memory:
            super().check_memory(need)
        self._options["memory"] = need.worker
        said = need.describe(self.workers, self.is_apart)
        largest = max((node["Resources"].get("memory", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
        if need.worker > largest:
            raise ValueError(f"{said}, and no machine of the cluster has more than {largest / 1e9:.2f} GB")
        if said not in self.notes:
            self.notes.append(said)

    @contextlib.contextmanager
    def hold(self, *values: Any) -> Iterator[None]:
        """See `Engine.hold`."""
        with self._held.hold(values) as tokens:
            yield
        for token in tokens:
            self._references.pop(token, None)

    def _submit(self, function: Callable[[Any], Any], item: Any) -> Any:
        task, needed = self._held.pack((function, item))
        for token, content in needed.items():
            if token not in self._references:
                self._references[token] = self._ray.put(content)
        references = {token: self._references[token] for token in needed}
        remote = self._ray.remote(**self._options)(_run_remotely)
        return remote.remote(task, references, self.threads)

    def _run(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[tuple[Any, Seconds]]:
        pending: collections.deque[Any] = collections.deque()
        left = iter(items)
        try:
            while True:
                while len(pending) < 2 * self.workers and (item := next(left, pending)) is not pending:
                    pending.append(self._submit(function, item))
                if not pending:
                    return
                with spent_on("wait"):
                    answer = self._read(pending.popleft())
                yield answer
        finally:
            for reference in pending:
                self._ray.cancel(reference, force=True)

    def _read(self, reference: Any) -> tuple[Any, Seconds]:
        is_done, result, seconds = unpack(self._ray.get(reference))
        if not is_done:
            raise result
        return result, seconds

    def reduce(
        self, function: Callable[[Item], Result], items: Sequence[Item], combine: Callable[[Result, Result], Result]
    ) -> Result:
        """See `Engine.reduce`: here workers combine, and the results of all but the last level never leave them."""
        if len(items) <= FAN_IN:
            return super().reduce(function, items, combine)
        remote = self._ray.remote(**{**self._options, "num_gpus": 0})(_combine_remotely)
        packed, _ = pack(combine)
        level: list[Any] = []
        nodes: list[Any] = []
        for item in items:
            level.append(self._submit(function, item))
            if len(level) == FAN_IN:
                nodes.append(remote.remote(packed, *level))
                level = []
            if len(nodes) * FAN_IN > 2 * self.workers:  # no more are begun than are soon done
                self._ray.wait(nodes, num_returns=len(nodes) - 2 * self.workers // FAN_IN, fetch_local=False)
        nodes += [remote.remote(packed, *level)] if level else []
        while len(nodes) > 1:
            groups = [nodes[start : start + FAN_IN] for start in range(0, len(nodes), FAN_IN)]
            nodes = [remote.remote(packed, *group) for group in groups]
        with spent_on("wait"):
            result, seconds = self._read(nodes[0])
        self.add_seconds(seconds)
        return result

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        if self._started:
            self._ray.shutdown()


_kept: collections.OrderedDict[str, Any] = collections.OrderedDict()
"""Values that several tasks of this worker need, by their tokens, in the order in which they were used."""


def _run_remotely(task: bytes, references: dict[str, Any], threads: int) -> bytes:
    import ray  # pyright: ignore[reportMissingImports]

    def fetch(token: str) -> Any:
        if token not in _kept:
            _kept[token] = unpack(ray.get(references[token]), fetch)
            while len(_kept) > _MOST_HELD:
                _kept.popitem(last=False)
        _kept.move_to_end(token)
        return _kept[token]

    if torch.get_num_threads() != threads:
        prepare(threads)
    return run_task(task, fetch)


def _combine_remotely(combine: bytes, *answers: bytes) -> bytes:
    function, total, spent = unpack(combine), None, {}
    for number, answer in enumerate(answers):
        is_done, result, seconds = unpack(answer)
        if not is_done:
            return answer
        total = function(total, result) if number else result
        spent = {what: spent.get(what, 0.0) + seconds.get(what, 0.0) for what in {**spent, **seconds}}
    return pack((True, total, spent))[0]
