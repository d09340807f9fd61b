"""Engines side by side on a Llama in shards: ``python -m benchmarks.engines --engines local processes:1 processes:2``.

A random network with the shape of a Llama is written in shards, and a permuted copy with noise beside it (or, with
``--unrelated``, another random network, whose assignments are hard). Each engine aligns them by weight matching and writes
the aligned copy, in a fresh process each, with workers that have been started and have solved an assignment before.

Core seconds of all processes are the main number: they do not depend on who else is at work. Seconds by the clock mean
something where the load is small, which is recorded. The serial share is what Amdahl's law says about the speed-up, and
beside it what the time line says: how many workers were busy on average, and how long fewer than all. ``--shape 3b`` is
Llama 3.2 3B.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import onebasin as ob
from benchmarks.billion import make_symmetry, random_checkpoint
from benchmarks.measuring import find_commit
from benchmarks.process_usage import read_own_peak, read_services, read_workers, warm_up
from onebasin.checkpoints import Checkpoint, fit_names, open_checkpoint, write_checkpoint
from onebasin.engines import Engine, make_engine
from onebasin.engines.engine import DRIVER
from onebasin.engines.memory_limits import read_bytes
from onebasin.engines.processes import ProcessEngine

SHAPES = {
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048, "num_attention_heads": 8,
              "num_key_value_heads": 4, "vocab_size": 8192},
    "medium": {"hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 4096, "num_attention_heads": 16,
               "num_key_value_heads": 4, "vocab_size": 65536},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "3b": {"hidden_size": 3072, "num_hidden_layers": 28, "intermediate_size": 8192, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
NOISE = 0.1


def add_noise(seed: int, key: str, value: torch.Tensor) -> torch.Tensor:
    """Noise that depends on the tensor alone."""
    generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{seed} {key}".encode()).hexdigest()[:12], 16))
    wide = value.float()
    return (wide + NOISE * wide.std() * torch.randn(value.shape, generator=generator)).to(value.dtype)


def read_symmetry(file: Path) -> tuple[ob.Symmetry, dict[str, torch.Tensor]]:
    """The symmetry of a saved permutation, and the tensors that it is of, on the meta device."""
    symmetry = ob.Permutation.load(file).symmetry
    return symmetry, {
        key: torch.empty([term.size for term in layout], dtype=torch.bfloat16, device="meta")
        for key, layout in symmetry.layouts.items()
    }


def hash_weights(folder: Path) -> str:
    """Of all weight files in a folder."""
    total = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def start_engine(name: str, options: argparse.Namespace) -> Engine:
    """An engine by a name such as processes:2."""
    kind, _, workers = name.partition(":")
    count, memory = int(workers) if workers else None, read_bytes(options.memory) if options.memory else None
    if kind == "processes":
        return ProcessEngine(count, memory, threads=options.threads)
    return make_engine(kind, count, memory, device=options.device)


def describe_timeline(engine: Engine, begin: float, end: float) -> dict[str, float]:
    """How many workers were busy on average, and the share of the clock in which fewer than all were."""
    timeline, width = engine.timeline, engine.timeline.width
    own = [row for name, row in timeline.rows.items() if engine.name == "local" or name != DRIVER]
    busy = [sum(some[place] for row in own for some in row.values()) for place in range(int((end - begin) / width))
            if all(place < len(some) for row in own for some in row.values())]  # fmt: skip
    full = sum(min(each / width, engine.workers) >= engine.workers * 0.95 for each in busy)
    return {
        "mean_busy_workers": round(sum(busy) / (end - begin), 3),
        "share_not_all_busy": round(1 - full * width / (end - begin), 3),
    }


def run_engine(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One row, in this process."""
    torch.set_num_threads(options.threads)
    symmetry, shapes = read_symmetry(folder / "symmetry.safetensors")
    first, second = (fit_names(open_checkpoint(folder / each), shapes, symmetry.ties) for each in "ab")
    warm_up(256)
    load = os.getloadavg()[0]
    with start_engine(name, options) as engine:
        list(engine.map(warm_up, [256] * (2 * engine.workers)))  # workers are started: importing PyTorch takes seconds
        engine.timeline.__init__()
        before, services = read_workers(), read_services()
        begin, cores = time.perf_counter(), sum(os.times()[:2])
        result = ob.align(
            second, to=first.to(options.device), symmetry=symmetry, method="weight-matching", max_sweeps=options.sweeps,
            detect_copy=not options.unrelated, engine=engine,
        )  # fmt: skip
        aligned = time.perf_counter()
        spent, busy = dict(engine.seconds), describe_timeline(engine, begin, aligned)
        out = folder / f"out-{name.replace(':', '-')}"
        write_checkpoint(out, result.model, second, engine=engine)
        end = time.perf_counter()
        after = read_workers()
        used = {
            pid: usage.core_seconds - (before[pid].core_seconds if pid in before else 0.0) for pid, usage in after.items()
        }
        row = {
            "engine": name,
            "load_before": round(load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "align_seconds": round(aligned - begin, 2),
            "write_seconds": round(end - aligned, 2),
            "work_seconds": {what: round(each, 2) for what, each in spent.items()},
            **busy,
            "driver_core_seconds": round(sum(os.times()[:2]) - cores, 2),
            "worker_core_seconds": round(sum(used.values()), 2),
            "service_core_seconds": round(read_services() - services, 2),
            "worker_peak_gigabytes": sorted(round(usage.peak / 1e9, 2) for pid, usage in after.items() if used[pid] > 0.5),
            "driver_peak_gigabytes": round(read_own_peak() / 1e9, 2),
            "notes": engine.notes,
            "cost": result.cost,
            "start_cost": result.start_cost,
            "sweeps": len(result.history),
        }
        if options.device != "cpu":
            row["device_name"] = torch.cuda.get_device_name()
            row["device_used_gigabytes"] = round((torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 1e9, 2)
    indices = b"".join(result.permutation[group].numpy().tobytes() for group in sorted(result.permutation.indices))
    row["bits"] = hashlib.sha256(indices + hash_weights(out).encode() + result.cost.hex().encode()).hexdigest()[:16]
    shutil.rmtree(out)
    return row


def write_networks(folder: Path, config: dict[str, Any], options: argparse.Namespace) -> Checkpoint:
    """Two networks in shards, and their symmetry as a permutation."""
    symmetry, shapes = read_symmetry(options.symmetry) if options.symmetry else make_symmetry(config)
    symmetry.identity().save(folder / "symmetry.safetensors")
    first = fit_names(random_checkpoint(folder / "a", shapes, symmetry, 0), shapes, symmetry.ties)
    if options.unrelated:
        random_checkpoint(folder / "b", shapes, symmetry, 1)
        return first
    planted = symmetry.random(torch.Generator().manual_seed(0))
    noisy = first.map(lambda key, value: add_noise(1, first.names[key], value))
    write_checkpoint(folder / "b", planted.apply(noisy), first)
    return first


def describe_row(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A line about a row, compared with the first; with the serial share if there is a row of one worker of its kind."""
    base, kind = rows[0], row["engine"].partition(":")[0]
    used, least = (sum(each[f"{who}_core_seconds"] for who in ("driver", "worker")) for each in (row, base))
    row["core_seconds_ratio"] = round(used / least, 3)
    line = f"{row['engine']:12}{used:9.1f} core s (x {used / least:.3f}){row['align_seconds']:9.1f} s align"
    line += f"{row['write_seconds']:7.1f} s write   load {row['load_before']}"
    alone = next((each for each in rows if each["engine"] == f"{kind}:1"), None)
    workers = int(row["engine"].partition(":")[2] or 1)
    if alone is not None and workers > 1:
        speed_up = alone["align_seconds"] / row["align_seconds"]
        row["speed_up"] = round(speed_up, 3)
        row["serial_share"] = round((1 / speed_up - 1 / workers) / (1 - 1 / workers), 4)
        line += f"   x {speed_up:.2f} as fast, serial share {row['serial_share']:.1%}, {row['mean_busy_workers']} busy"
    peaks = [row["driver_peak_gigabytes"], *row["worker_peak_gigabytes"]]
    same = "same bits" if row["bits"] == base["bits"] else "OTHER BITS"
    return f"{line}   peaks {peaks} GB   {same}   {row['work_seconds']}"


def run_rows(folder: Path, record: dict[str, Any], options: argparse.Namespace) -> None:
    """Each engine in a process of its own; the record is kept after each."""
    for name in options.engines:
        words = [sys.executable, "-m", "benchmarks.engines", "--row", name, "--folder", str(folder),
                 "--threads", str(options.threads), "--sweeps", str(options.sweeps), "--device", options.device,
                 *(["--memory", options.memory] if options.memory else []),
                 *(["--unrelated"] if options.unrelated else [])]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment, check=False)
        if ran.returncode:
            record["rows"].append({"engine": name, "failed": ran.returncode})
            print(f"{name} failed with {ran.returncode}", flush=True)
            continue
        row = json.loads(ran.stdout.splitlines()[-1])
        record["rows"].append(row)
        print(describe_row(row, [each for each in record["rows"] if "failed" not in each]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(record, indent=1) + "\n")


def read_options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["local", "processes:1", "processes:2"])
    parser.add_argument("--shape", choices=SHAPES, default="medium")
    parser.add_argument("--layers", type=int, help="other than the shape has")
    parser.add_argument("--unrelated", action="store_true", help="two random networks, not a planted copy with noise")
    parser.add_argument("--sweeps", type=int, default=100, help="the most sweeps")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch in this process, and in each worker")
    parser.add_argument("--memory", help="what all processes may hold together, such as 8GB")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--symmetry", type=Path, help="a permutation of the network, where transformers is not installed")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints; a temporary folder if not given")
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Print a line for each engine, and write the record with --out."""
    options = read_options()
    if options.row:
        print(json.dumps(run_engine(options.row, options.folder, options)), flush=True)
        return
    torch.set_num_threads(options.threads)
    config = {**SHAPES[options.shape], "tie_word_embeddings": True, "use_cache": False}
    config |= {"num_hidden_layers": options.layers} if options.layers else {}
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    record: dict[str, Any] = {
        "commit": find_commit(), "config": config, "pair": "unrelated" if options.unrelated else f"noise {NOISE}",
        "threads": options.threads, "memory": options.memory, "sweeps": options.sweeps,
        "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "device": options.device, "rows": [],
    }  # fmt: skip
    try:
        first = write_networks(folder, config, options)
        record["parameters"] = first.original.num_entries
        print(f"{record['parameters'] / 1e9:.2f} billion parameters, load {os.getloadavg()[0]:.1f}", flush=True)
        run_rows(folder, record, options)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
