"""Workers and drivers killed at random, and nothing lost: ``python -m benchmarks.faults --engines processes ray``.

``onebasin align`` and ``onebasin merge`` match networks in shards and write the result, by two workers. At random moments a
worker or the command itself is killed, without a warning. A command that was killed is given again, with --resume if it left
a journal. Each run must end with the same bits as one that nobody disturbed, with the inputs untouched, no worker left
behind and no other file. For Ray there is a cluster that outlives the command.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import onebasin as ob
from benchmarks.measuring import find_commit
from benchmarks.process_usage import list_descendants, read_usage
from onebasin.engines import Engine

DEPTH, WIDTH, INNER, SHARDS, NOISE = 12, 192, 384, 6, 0.3
PAUSE = 0.1
"""Seconds between two results, to be killed in: the networks are small."""
MOST_DRIVERS, MOST_WORKERS = 3, 5
"""Killed in one run: so it ends."""
EARLY = 0.003
"""How often something is killed before there is a journal, at each look."""
OUTPUTS = ("out", "out.permutations")
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), os.getcwd()]),
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
COMMANDS = (("align", "a", "b"), ("merge", "a", "b"))


class Residual(nn.Module):
    """A residual stream with more tensors than are summed at a time."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 8)
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER) for _ in range(DEPTH))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        """Blocks of two layers each."""
        x = self.embed(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.head(x)


def make_network() -> tuple[nn.Module, Tensor]:
    """What --model names."""
    return Residual(), torch.zeros(1, 16)


def write_shards(folder: Path, state: dict[str, Tensor]) -> None:
    """As large networks are stored."""
    folder.mkdir()
    names = {key: f"model-{number % SHARDS + 1}.safetensors" for number, key in enumerate(state)}
    for name in set(names.values()):
        save_file({key: value for key, value in state.items() if names[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def write_pair(folder: Path) -> None:
    """A network, and a permuted copy with noise."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, inputs = make_network()
    moved = ob.symmetry(model, inputs).random(generator).apply(dict(model.state_dict()))
    write_shards(folder / "a", dict(model.state_dict()))
    noise = {key: torch.randn(value.shape, generator=generator) for key, value in moved.items()}
    write_shards(folder / "b", {key: value + NOISE * value.std() * noise[key] for key, value in moved.items()})


def drive(words: list[str]) -> int:
    """Run the command in this process, with pauses."""
    from onebasin.cli.app import run

    run_tasks = Engine._run

    def run_slowly(*arguments: Any) -> Iterator[Any]:
        for answer in run_tasks(*arguments):
            time.sleep(PAUSE)
            yield answer

    Engine._run = run_slowly
    return run(words)


def start(folder: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.faults", "--drive", *words]
    environment = {**os.environ, **VARIABLES}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=(folder / "said").open("wb")
    )


def digest(folder: Path, outputs: tuple[str, ...] = OUTPUTS) -> str:
    """Of all tensors that were written: weights, permutations."""
    total = hashlib.sha256()
    for file in sorted(file for name in outputs for file in folder.glob(f"{name}/*.safetensors")):
        total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()


def find_workers(root: int) -> list[int]:
    """Processes under another one that work on tasks."""
    found = {pid: read_usage(pid) for pid in list_descendants(root)}
    marks = ("ray::_run", "ray::_combine", "onebasin.engines.worker")
    return [pid for pid, usage in found.items() if usage is not None and any(mark in usage.command for mark in marks)]


def kill(pid: int) -> bool:
    """Without a warning; False if it had ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def count_left(workers: list[int]) -> int:
    """Workers that do not end, though those that are still importing PyTorch are given the time to see that they should."""
    left = len(workers)
    for _ in range(60):
        left = sum(read_usage(pid) is not None for pid in workers)
        if not left:
            break
        time.sleep(0.5)
    return left


def remove_outputs(folder: Path) -> None:
    """Of a run that is over."""
    for name in OUTPUTS:
        shutil.rmtree(folder / name, ignore_errors=True)


def disturb(folder: Path, words: list[str], chance: random.Random, cluster: int | None, expected: str) -> dict[str, int]:
    """Run a command until it is done, killing it or a worker now and then."""
    count = {"workers": 0, "drivers": 0, "resumed": 0, "left_workers": 0}
    journal = folder / ".out.resume" / "run.json"
    while True:
        resume = journal.is_file()
        count["resumed"] += resume
        driver = start(folder, [*words, *(["--resume"] if resume else [])])
        while driver.poll() is None:
            time.sleep(chance.uniform(0.1, 3.0) if journal.is_file() else 0.2)
            if not journal.is_file() and chance.random() > EARLY:
                continue
            workers = find_workers(driver.pid if cluster is None else cluster)
            if driver.poll() is not None:
                break
            if count["drivers"] < MOST_DRIVERS and chance.random() < 0.35:
                driver.kill()
                count["drivers"] += 1
                driver.wait()
                count["left_workers"] += 0 if cluster else count_left(workers)
                assert not (folder / "out").exists() or digest(folder, ("out",)) == expected, "a half output"
            elif count["workers"] < MOST_WORKERS and workers:
                count["workers"] += kill(chance.choice(workers))
        if driver.returncode == 0 or (driver.returncode < 0 and (folder / "out").exists() and not journal.exists()):
            return count
        assert driver.returncode == -signal.SIGKILL, f"it failed: {(folder / 'said').read_text()}"


@contextlib.contextmanager
def run_cluster(is_needed: bool) -> Iterator[tuple[str, int] | None]:
    """A Ray cluster on this machine: its address, and the process that all of it is under."""
    if not is_needed:
        yield None
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray")
    words = ["start", "--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--block",
             "--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--disable-usage-stats"]  # fmt: skip
    head = subprocess.Popen(
        [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *words],
        env={**os.environ, **VARIABLES}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(120):
            time.sleep(0.5)
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
        yield f"127.0.0.1:{port}", head.pid
    finally:
        head.terminate()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def run_engine(name: str, kills: int, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each run, until enough has been killed."""
    inputs = {file: file.read_bytes() for each in "ab" for file in (folder / each).iterdir()}
    options = ["--model", "benchmarks.faults:make_network", "--method", "weight-matching", "--no-check", "-o", "out"]
    expected: dict[str, str] = {}
    alone: dict[str, str] = {}
    with run_cluster(name == "ray") as cluster:
        address, root = cluster or (None, None)
        engine = ["--engine", name, "--workers", "2", *(["--address", address] if address else [])]
        for words in COMMANDS:
            assert start(folder, [*words, *options, "--engine", "local"]).wait() == 0, (folder / "said").read_text()
            expected[words[0]], alone[words[0]] = digest(folder), digest(folder, ("out",))
            remove_outputs(folder)
        number = killed = 0
        while killed < kills:
            words = COMMANDS[number % len(COMMANDS)]
            begin = time.monotonic()
            count = disturb(folder, [*words, *options, *engine], random.Random(seed + number), root, alone[words[0]])
            killed += count["workers"] + count["drivers"]
            left = {file.name for file in folder.iterdir()} - {"a", "b", "said", *OUTPUTS}
            yield {
                "engine": name, "command": words[0], "run": number, **count, "seconds": round(time.monotonic() - begin),
                "same_bits": digest(folder) == expected[words[0]], "left_over": sorted(left),
                "inputs_untouched": all(file.read_bytes() == content for file, content in inputs.items()),
            }  # fmt: skip
            remove_outputs(folder)
            number += 1


def main() -> None:
    """Print a line for each run, and write the record with --out."""
    if sys.argv[1:2] == ["--drive"]:
        sys.exit(drive(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["processes"], choices=["processes", "ray"])
    parser.add_argument("--kills", type=int, default=30, help="at least, for each engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    record: dict[str, Any] = {"commit": find_commit(), "torch": torch.__version__, "runs": []}
    try:
        write_pair(folder)
        for name in options.engines:
            for row in run_engine(name, options.kills, options.seed, folder):
                record["runs"].append(row)
                print(row, flush=True)
                if options.out:
                    options.out.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        shutil.rmtree(folder)
    rows = record["runs"]
    whole = all(row["same_bits"] and row["inputs_untouched"] and not row["left_over"] for row in rows)
    print(f"{sum(row['workers'] + row['drivers'] for row in rows)} kills, {'nothing' if whole else 'SOMETHING'} lost")
    sys.exit(not whole)


if __name__ == "__main__":
    main()
