"""Engines side by side on a Llama in shards: ``python -m benchmarks.engines --engines local processes:1 processes:2``.

A random network with the shape of a Llama is written in shards, and a permuted copy with noise beside it. Each engine aligns
them by weight matching and writes the aligned copy. Printed are seconds by the clock and their ratio to the first engine,
core seconds of all processes (which do not depend on who else is at work), the share of them that the driver used, which no
further worker makes shorter, the peak memory, whether the permutation, the cost and the files are the same bits, and where
the time of all workers went. ``--shape 3b`` is Llama 3.2 3B.
"""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import onebasin as ob
from benchmarks.billion import make_symmetry, peak_gigabytes, random_checkpoint
from benchmarks.measuring import find_commit
from onebasin.checkpoints import fit_names, open_checkpoint, write_checkpoint
from onebasin.engines import make_engine
from onebasin.engines.processes import ProcessEngine

SHAPES = {
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048, "num_attention_heads": 8,
              "num_key_value_heads": 4, "vocab_size": 8192},
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


def read_peaks(engine: Any) -> list[float]:
    """The most memory that each worker process has held, in GB."""
    peaks = []
    for pid in engine.process_ids if isinstance(engine, ProcessEngine) else ():
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        peaks.append(round(int(lines["VmHWM"].split()[0]) * 1024 / 1e9, 2))
    return peaks


def read_core_seconds(engine: Any) -> float:
    """What the workers have used of the cores, whoever else is at work."""
    total = 0.0
    for pid in engine.process_ids if isinstance(engine, ProcessEngine) else ():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def run_engine(name: str, folder: Path, symmetry: ob.Symmetry, pair: tuple[Any, Any], device: str, sweeps: int) -> Any:
    """One row."""
    kind, _, workers = name.partition(":")
    first, second = pair
    count, threads = int(workers) if workers else None, torch.get_num_threads()
    with ProcessEngine(count, threads=threads) if kind == "processes" else make_engine(kind, count, device=device) as engine:
        list(engine.map(abs, range(2 * engine.workers)))  # workers are started: importing PyTorch takes seconds
        engine.seconds.clear()
        begin, cores, theirs = time.perf_counter(), sum(os.times()[:2]), read_core_seconds(engine)
        result = ob.align(
            second, to=first.to(device), symmetry=symmetry, method="weight-matching", max_sweeps=sweeps, engine=engine
        )
        aligned = time.perf_counter()
        out = folder / f"out-{name.replace(':', '-')}"
        write_checkpoint(out, result.model, second, engine=engine)
        end = time.perf_counter()
        row = {
            "engine": name,
            "align_seconds": round(aligned - begin, 2),
            "write_seconds": round(end - aligned, 2),
            "work_seconds": {what: round(each, 2) for what, each in engine.seconds.items()},
            "driver_core_seconds": round(sum(os.times()[:2]) - cores, 2),
            "worker_core_seconds": round(read_core_seconds(engine) - theirs, 2),
            "worker_peak_gigabytes": read_peaks(engine),
            "driver_peak_gigabytes": round(peak_gigabytes(), 2),
            "notes": engine.notes,
            "cost": result.cost,
            "start_cost": result.start_cost,
            "sweeps": len(result.history),
        }
    indices = b"".join(result.permutation[group].numpy().tobytes() for group in sorted(result.permutation.indices))
    row["bits"] = hashlib.sha256(indices + hash_weights(out).encode() + result.cost.hex().encode()).hexdigest()[:16]
    shutil.rmtree(out)
    return row


def main() -> None:
    """Print a line for each engine, and the record with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["local", "processes:1", "processes:2"])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, help="other than the shape has")
    parser.add_argument("--sweeps", type=int, default=100, help="the most sweeps")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch in this process, and in each worker")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--symmetry", type=Path, help="a permutation of the network, where transformers is not installed")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints; a temporary folder if not given")
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = {**SHAPES[options.shape], "tie_word_embeddings": True, "use_cache": False}
    config |= {"num_hidden_layers": options.layers} if options.layers else {}
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    record: dict[str, Any] = {"commit": find_commit(), "config": config, "threads": options.threads, "rows": []}
    record |= {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "device": options.device}
    try:
        symmetry, shapes = read_symmetry(options.symmetry) if options.symmetry else make_symmetry(config)
        first = fit_names(random_checkpoint(folder / "a", shapes, symmetry, 0), shapes, symmetry.ties)
        planted = symmetry.random(torch.Generator().manual_seed(0))
        noisy = first.map(lambda key, value: add_noise(1, first.names[key], value))
        write_checkpoint(folder / "b", planted.apply(noisy), first)
        second = fit_names(open_checkpoint(folder / "b"), shapes, symmetry.ties)
        record["parameters"] = first.original.num_entries
        print(f"{record['parameters'] / 1e9:.2f} billion parameters, load {os.getloadavg()[0]:.1f}", flush=True)
        for name in options.engines:
            row = run_engine(name, folder, symmetry, (first, second), options.device, options.sweeps)
            row["load"] = round(os.getloadavg()[0], 1)
            record["rows"].append(row)
            base = record["rows"][0]
            ratio = base["align_seconds"] / row["align_seconds"]
            used, least = (each["driver_core_seconds"] + each["worker_core_seconds"] for each in (row, base))
            same = "same bits" if row["bits"] == base["bits"] else "OTHER BITS"
            peaks = max([row["driver_peak_gigabytes"], *row["worker_peak_gigabytes"]])
            print(
                f"{name:14}{row['align_seconds']:9.1f} s align{row['write_seconds']:8.1f} s write   x {ratio:5.2f}   "
                f"core seconds x {used / least:.2f}, {row['driver_core_seconds'] / used:.0%} in the driver   "
                f"peak {peaks:.2f} GB   {same}   {row['work_seconds']}",
                flush=True,
            )
            if options.out:
                options.out.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
