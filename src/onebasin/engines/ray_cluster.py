"""Workers on a Ray cluster, which may have many machines that share a file system."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from onebasin.engines.broadcasting import Broadcasts
from onebasin.engines.clock import recording, spent_on
from onebasin.engines.engine import Answer, Engine
from onebasin.engines.memory_limits import MemoryEstimate, in_gb
from onebasin.engines.packing import check_portable, pack, unpack
from onebasin.engines.worker import prepare, read_answer, run_task
from onebasin.tensors.states import State

_MAX_REPEATS = 16
_MOST_KEPT = 32
"""Values that a worker keeps for further tasks."""
_SECONDS_TO_ANSWER = 5.0
"""In which a cluster must answer: Ray itself tries for minutes."""


class RayEngine(Engine):
    """Tasks of Ray: it repeats those whose worker dies, and starts them where cores and memory are free.

    Args:
        workers: tasks at a time; as many as the cluster has room for if None.
        memory: bytes that all processes on this machine may hold together; what is free if None.
        address: of the cluster; if None, one is found by RAY_ADDRESS, or started on this machine.
        threads: of PyTorch in each task, which takes as many cores.
        device: where tasks compute: with "cuda" each takes a GPU.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if there is no cluster at the address.
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
            _join_cluster(ray, address or os.environ.get("RAY_ADDRESS"), threads)
        gpus = 1 if device.startswith("cuda") else 0
        self._options: dict[str, Any] = {"num_cpus": threads, "num_gpus": gpus, "max_retries": _MAX_REPEATS}
        room = self._count_room(ray.cluster_resources(), threads, gpus)
        super().__init__(max(1, room) if workers is None else workers, memory)
        self.threads = threads
        self._run_remotely, self._combine_remotely = ray.remote(_run_remotely), ray.remote(_combine_remotely)
        self._broadcasts, self._references = Broadcasts(), {}

    @staticmethod
    def _count_room(resources: Mapping[str, float], threads: int, gpus: int) -> int:
        return int(resources.get("GPU", 0) if gpus else resources.get("CPU", 1) // threads)

    def check_states(self, states: Mapping[str, State]) -> None:
        """See `Engine.check_states`."""
        for what, state in states.items():
            check_portable(state, what)

    @property
    def workers_here(self) -> int:
        """See `Engine.workers_here`."""
        own = self._ray.get_runtime_context().get_node_id()
        resources = next(node["Resources"] for node in self._ray.nodes() if node["NodeID"] == own)
        return min(self.workers, self._count_room(resources, self.threads, self._options["num_gpus"]))

    @property
    def workers_on_gpu(self) -> int:
        """See `Engine.workers_on_gpu`: Ray gives each task one."""
        return 1

    def check_memory(self, need: MemoryEstimate) -> None:
        """See `Engine.check_memory`. Ray then starts a task only where there is as much memory as it needs."""
        super().check_memory(need)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        for what, name, wanted in (
            ("memory for a worker", "memory", need.in_worker),
            ("room in its object store for results", "object_store_memory", need.results),
        ):
            largest = int(max((node.get(name, 0) for node in nodes), default=0))
            if wanted > largest:
                raise ValueError(
                    f"{in_gb(wanted)} of {what} are needed, and no machine of the cluster has more than {in_gb(largest)}"
                )
        self._options["memory"] = need.in_worker

    @contextlib.contextmanager
    def broadcast(self, *values: Any) -> Iterator[None]:
        """See `Engine.broadcast`."""
        with self._broadcasts.hold(values) as tokens:
            yield
        for token in tokens:
            self._references.pop(token, None)

    def _submit(self, function: Callable[[Any], Any], item: Any) -> Any:
        task, needed = self._broadcasts.pack((function, item))
        for token, content in needed.items():
            if token not in self._references:
                self._references[token] = self._ray.put(content)
        references = {token: self._references[token] for token in needed}
        return self._run_remotely.options(**self._options).remote(task, references, self.threads)

    def _wait(self, handle: Any) -> None:
        self._ray.wait([handle], fetch_local=False)

    def _fetch(self, handle: Any) -> Answer:
        try:
            content = self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise RuntimeError(
                f"a task failed on the cluster, again and again ({said}): if workers were killed for their memory, take "
                "fewer of them"
            ) from error
        return read_answer(content)

    def _combine(self, combine: Callable[[Any, Any], Any], first: Any, other: Any) -> Any:
        """See `Engine._combine`: here a worker combines, and results of all but the last level never leave the workers."""
        options = {**self._options, "num_gpus": 0}
        return self._combine_remotely.options(**options).remote(pack(combine)[0], first, other)

    def _cancel(self, handle: Any) -> None:
        self._ray.cancel(handle, force=True)

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        if self._started:
            self._ray.shutdown()


def _join_cluster(ray: Any, address: str | None, threads: int) -> None:
    """Join a cluster, or start one on this machine."""
    if address is not None:
        _check_answer(address)
    place = [path for path in sys.path if path and not path.endswith((".zip", "lib-dynload"))]
    variables = {"PYTHONPATH": os.pathsep.join(place), "OMP_NUM_THREADS": str(threads)}
    # A cluster that is already there has the library installed.
    local = {} if address else {"runtime_env": {"env_vars": variables}}
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
    except ConnectionError as error:
        said = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise ValueError(
            f"cannot join a Ray cluster at {address or 'this machine'} ({said}): if it was started with a token, give the "
            "same one in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from error
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray's own would end the process by an exit that hides why


def _check_answer(address: str) -> None:
    """Refuse an address at which nothing answers.

    Raises:
        ValueError: saying what an address looks like.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:  # "auto" or "local"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_ANSWER).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"no Ray cluster answers at {address} ({error}): give HOST:PORT as `ray start --head` printed it, or auto"
        ) from None


_kept: collections.OrderedDict[str, Any] = collections.OrderedDict()
"""Values that several tasks of this worker need, by their tokens, in the order in which they were used."""


def _run_remotely(task: bytes, references: dict[str, Any], threads: int) -> bytes:
    import ray  # pyright: ignore[reportMissingImports]

    def fetch(token: str) -> Any:
        if token not in _kept:
            _kept[token] = unpack(ray.get(references[token]), fetch)
            while len(_kept) > _MOST_KEPT:
                _kept.popitem(last=False)
        _kept.move_to_end(token)
        return _kept[token]

    if torch.get_num_threads() != threads:
        prepare(threads)
    return run_task(task, fetch, _name_worker())


def _combine_remotely(combine: bytes, first: bytes, other: bytes) -> bytes:
    answers = [unpack(first), unpack(other)]
    for content, (is_done, *_) in zip((first, other), answers, strict=True):
        if not is_done:
            return content
    (_, one, spent), (_, another, further) = answers
    with recording() as spans, spent_on("reduce"):
        total = unpack(combine)(one, another)
    return pack((True, total, [*spent, *further, (_name_worker(), spans)]))[0]


def _name_worker() -> str:
    return f"{socket.gethostname()} {os.getpid()}"
