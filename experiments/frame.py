"""Running trials: which are still to do, where they run, and what is kept of them."""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

Config = dict[str, Any]
Record = dict[str, Any]


def run_experiment(
    name: str,
    configs: Sequence[Config],
    path: Path,
    device: str = "cpu",
    engine: str = "processes",
    num_processes: int = 1,
) -> list[Record]:
    """Run the trials that `path` has no record of, append each as it is done, and return all records asked for.

    An interrupted run goes on where it stopped: a trial is known by its whole configuration.
    """
    done = {identify(record["config"]): record for record in read_records(path)}
    pending = [config for config in configs if identify(config) not in done]
    begin = time.perf_counter()
    if len(pending) < len(configs):
        print(f"{len(configs) - len(pending)} of {len(configs)} trials have a record already", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, record in enumerate(_map(name, pending, device, engine, num_processes), 1):
        done[identify(record["config"])] = record
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        _report(number, len(pending), time.perf_counter() - begin, record)
    return [done[identify(config)] for config in configs if identify(config) in done]


def identify(config: Mapping[str, Any]) -> str:
    """The same text for the same configuration, whatever the order of its keys."""
    return json.dumps(config, sort_keys=True)


def read_records(path: Path) -> list[Record]:
    """The records of a file; a last line that was cut off by a crash is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path} has a line that is no record; its trial is run again", file=sys.stderr)
    if not path.read_text().endswith("\n") and path.stat().st_size:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def run_trial(name: str, config: Config, device: str) -> Record:
    """One trial, with what is needed to make it again."""
    begin = time.perf_counter()
    result = importlib.import_module(f"experiments.{name}").run(config, device)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return {
        "config": config,
        "result": _round(result),
        "seconds": round(time.perf_counter() - begin, 3),
        "commit": _commit(),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine(),
    }


def _map(name: str, configs: Sequence[Config], device: str, engine: str, num_processes: int) -> Iterator[Record]:
    if engine == "ray":
        yield from _map_with_ray(name, configs, device)
    elif num_processes <= 1:
        for config in configs:
            yield run_trial(name, config, device)
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_processes, mp_context=context, initializer=_one_thread) as pool:
            futures = [pool.submit(run_trial, name, config, device) for config in configs]
            failures: dict[str, BaseException] = {}
            for future in as_completed(futures):
                error = future.exception()
                if error is None:
                    yield future.result()
                elif str(error) not in failures:  # what fails all of them, such as data that is not there, is said once
                    failures[str(error)] = error
                    print(f"a trial failed, the others go on: {error}", file=sys.stderr, flush=True)
            if failures:
                raise next(iter(failures.values()))


def _map_with_ray(name: str, configs: Sequence[Config], device: str) -> Iterator[Record]:
    try:
        import ray
    except ImportError as error:
        raise ImportError("--engine ray needs ray: pip install 'onebasin[ray]'") from error
    if not ray.is_initialized():
        root = Path(__file__).parent.parent
        environment = {"PYTHONPATH": f"{root}:{root / 'src'}", "ONEBASIN_COMMIT": _commit()}
        if "ONEBASIN_DATA" in os.environ:
            environment["ONEBASIN_DATA"] = os.environ["ONEBASIN_DATA"]
        ray.init(runtime_env={"env_vars": environment}, log_to_driver=False)
    remote = ray.remote(num_gpus=1 if device.startswith("cuda") else 0)(run_trial)
    pending = [remote.remote(name, config, device) for config in configs]
    while pending:
        ready, pending = ray.wait(pending)
        yield from ray.get(ready)


def _round(value: Any) -> Any:
    """Seven digits are what float32 holds; more would only make the files long."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _round(entry) for key, entry in value.items()}
    return [_round(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _one_thread() -> None:
    torch.set_num_threads(1)


@functools.cache  # the code that runs is what was there when it was imported
def _commit() -> str:
    """The commit of this checkout; a copy without its history is told by ONEBASIN_COMMIT."""
    if "ONEBASIN_COMMIT" in os.environ:
        return os.environ["ONEBASIN_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _report(number: int, total: int, elapsed: float, record: Record) -> None:
    left = elapsed / number * (total - number)
    what = ", ".join(f"{k}={v}" for k, v in record["config"].items() if isinstance(v, (str, int, float)))
    print(f"[{number}/{total}] {record['seconds']:7.1f} s, {left:5.0f} s left: {what}", file=sys.stderr, flush=True)


def select(configs: Iterable[Config], conditions: Sequence[str]) -> list[Config]:
    """The configurations that meet every condition, each written ``key=value`` or ``key=value,value``."""
    chosen = list(configs)
    for condition in conditions:
        key, _, values = condition.partition("=")
        if not values or not any(key in config for config in chosen):
            keys = sorted({k for config in chosen for k in config})
            raise ValueError(f"--only takes key=value with a key of {', '.join(keys)}; got {condition!r}")
        whole = any(str(config.get(key)) == values for config in chosen)  # names of rows have commas
        chosen = [config for config in chosen if str(config.get(key)) in ([values] if whole else values.split(","))]
        if not chosen:
            raise ValueError(f"no trial has {condition} (after the conditions before it)")
    return chosen
