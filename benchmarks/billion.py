"""Two checkpoints of a billion parameters, aligned and merged from disk: ``python -m benchmarks.billion [--device cuda]``.

A random network with the shape of Llama 3.2 1B (2048 wide, 16 layers, 1.24 billion parameters in bfloat16, tied
embeddings) is written in shards, and a randomly permuted copy of it beside it. Weight matching must find the permutation
from the two folders, and their merge must be the first network. No tensor is held longer than it is needed.
"""

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onebasin as ob
from benchmarks.measuring import find_commit
from onebasin.checkpoints import Checkpoint, fit_names, open_checkpoint, write_checkpoint
from onebasin.checkpoints.checkpoint import FileLayout
from onebasin.cli.torchvision_operators import declare_missing_operators

SHAPE = {
    "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
_SHARD_BYTES = 5 * 10**8


def make_symmetry(config: dict[str, Any]) -> tuple[ob.Symmetry, dict[str, Tensor]]:
    """The symmetry, traced on the meta device, and the state as meta tensors."""
    declare_missing_operators()
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    inputs = {"input_ids": torch.zeros(1, 8, dtype=torch.long, device="meta")}
    return ob.symmetry(model, inputs), {key: value.detach() for key, value in model.state_dict().items()}


def random_checkpoint(folder: Path, shapes: dict[str, Tensor], symmetry: ob.Symmetry, seed: int) -> Checkpoint:
    """Random weights in shards, drawn as they are written; gains that a change of basis needs to be one are one."""
    kept = {key: value for key, value in shapes.items() if not any(key in keys[1:] for keys in symmetry.ties)}
    numbers = {key: number for number, key in enumerate(kept)}

    def draw(key: str) -> Tensor:
        if key in symmetry.fixed:
            return torch.full(kept[key].shape, symmetry.fixed[key], dtype=kept[key].dtype)
        generator = torch.Generator().manual_seed(seed * 10**6 + numbers[key])
        value = torch.randn(kept[key].shape, generator=generator)
        return (value * 0.02 if value.dim() > 1 else 1 + 0.1 * value).to(kept[key].dtype)

    files: dict[Path, list[str]] = {}
    room = 0
    for key, value in kept.items():
        if value.nbytes > room:
            files[Path(f"model-{len(files) + 1:05}.safetensors")] = []
            room = _SHARD_BYTES
        files[list(files)[-1]].append(key)
        room -= value.nbytes
    index = folder.parent / "model.safetensors.index.json"
    weight_map = {key: file.name for file, keys in files.items() for key in keys}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    layout = FileLayout(index, {file: tuple(keys) for file, keys in files.items()}, index)
    drawn = Checkpoint(kept, draw, layout)
    write_checkpoint(folder, drawn, drawn)
    index.unlink()
    return open_checkpoint(folder)


def write_config(config: dict[str, Any], folders: list[Path]) -> None:
    """So that the folders load with `from_pretrained`, and the command line knows what they are."""
    from transformers import LlamaConfig

    for folder in folders:
        LlamaConfig(**config, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)


def peak_gigabytes() -> float:
    """The most memory this process has held, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def run(folder: Path, device: str, noise: float, seed: int, layers: int) -> dict[str, Any]:
    """Write, align, apply, merge, compare; a record of what each took."""
    record: dict[str, Any] = {
        "commit": find_commit(),
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "noise": noise,
    }
    config = {**SHAPE, "num_hidden_layers": layers}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        record[f"{name}_seconds"] = round(time.perf_counter() - begin, 2)
        print(f"{name:10}{record[f'{name}_seconds']:9.1f} s   peak {peak_gigabytes():.2f} GB", flush=True)
        return result

    symmetry, shapes = timed("trace", lambda: make_symmetry(config))
    record["parameters"] = sum(v.numel() for k, v in shapes.items() if not any(k in t[1:] for t in symmetry.ties))
    first = timed("write", lambda: random_checkpoint(folder / "a", shapes, symmetry, seed))
    first = fit_names(first, shapes, symmetry.ties)
    planted = symmetry.random(torch.Generator().manual_seed(seed))
    noisy = first.map(_noise(noise, first.names)) if noise else first
    timed("permute", lambda: write_checkpoint(folder / "b", planted.apply(noisy), first))
    second = fit_names(open_checkpoint(folder / "b"), shapes, symmetry.ties)
    sweeps: list[float] = []
    busy: list[float] = []
    begin, begin_busy = time.perf_counter(), time.process_time()

    def note(entry: dict[str, Any]) -> None:
        sweeps.append(round(time.perf_counter() - begin, 2))
        busy.append(round(time.process_time() - begin_busy, 2))  # on all cores; unlike the clock, whoever else is at work
        print(f"  {entry}, {sweeps[-1]:.0f} s, {busy[-1]:.0f} s of cores", flush=True)

    result = timed(
        "align",
        lambda: ob.align(
            second, to=first.to(device), symmetry=symmetry, method="weight-matching", order="anchored", callback=note
        ),
    )
    record |= {"sweeps_at_seconds": sweeps, "sweeps_at_core_seconds": busy, "load": os.getloadavg()}
    record |= {"cost": result.cost, "start_cost": result.start_cost}
    record["exact"] = result.permutation == planted.inverse()
    timed("apply", lambda: write_checkpoint(folder / "aligned", result.model, second))
    merged = ob.interpolate([first, result.model], [0.5, 0.5])
    timed("merge", lambda: write_checkpoint(folder / "merged", merged, first))
    again = fit_names(open_checkpoint(folder / "merged"), shapes, symmetry.ties)
    record["merged_is_first"] = all(torch.equal(again[key], first[key]) for key in first)
    record["peak_gigabytes"] = round(peak_gigabytes(), 2)
    write_config(config, [folder / name for name in ("a", "b", "aligned", "merged")])
    if device != "cpu":
        record["device_name"] = torch.cuda.get_device_name()
        record["peak_device_gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return record


def _noise(size: float, names: dict[str, str]) -> Callable[[str, Tensor], Tensor]:
    """Noise that depends on the tensor alone: however often it is read, and under whichever of its names."""

    def add(key: str, value: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(names[key].encode()))
        wide = value.float()
        return (wide + size * wide.std() * torch.randn(value.shape, generator=generator)).to(value.dtype)

    return add


def main() -> None:
    """Print what each step took; the record with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.0, help="noise in the copy, relative to each tensor's spread")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="where to write the checkpoints (10 GB); a temporary folder if not given"
    )
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        record = run(folder, options.device, options.noise, options.seed, options.layers)
    finally:
        if options.keep:
            print(f"the checkpoints are in {folder}")
        else:
            shutil.rmtree(folder)
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
