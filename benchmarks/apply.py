"""`Permutation.apply` against a plain copy of the same tensors: ``python -m benchmarks.apply``.

The floor is one read and one write of every byte that moves: a copy into fresh memory. Both sides write into fresh
destinations: the results of the round before are kept alive, and the allocator is told to ask the system for every large
block, or it would hand out pages that are mapped already to one side and not to the other. `apply` asks for huge pages,
which `clone` does not; so a copy that asks for them too, and an `apply` that gets none, are measured beside. Each `apply`
follows a copy. The minimum of ten runs counts.
"""

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from benchmarks.measuring import find_commit
from onebasin.cli.torchvision_operators import declare_missing_operators
from onebasin.tensors.huge_pages import ask_for_huge_pages


def mlp(width: int) -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10)), torch.rand(1, 64)


def vision(name: str) -> tuple[nn.Module, Tensor]:
    declare_missing_operators()
    from torchvision import models

    return getattr(models, name)(weights=None), torch.rand(1, 3, 64, 64)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "MLP 3 x 2048": lambda: mlp(2048),
    "MLP 3 x 4096": lambda: mlp(4096),
    "ResNet-50": lambda: vision("resnet50"),
    "VGG11 with batch norm": lambda: vision("vgg11_bn"),
    "ConvNeXt-T": lambda: vision("convnext_tiny"),
}

COLUMNS = {
    "MB moved": "megabytes", "copy ms": "copy_ms", "apply ms": "apply_ms", "ratio": "ratio",
    "of medians": "ratio_of_medians", "huge copy ms": "huge_copy_ms", "small pages": "small_page_apply_ms", "load": "load",
}  # fmt: skip


def time_in_turn(functions: Sequence[Callable[[], Any]], repeats: int = 10) -> list[list[float]]:
    """Seconds of every run of each, in turn, every run into fresh memory."""
    kept: list[Any] = [None] * len(functions)
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for number, function in enumerate(functions):
            start = time.perf_counter()
            result = function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[number].append(time.perf_counter() - start)
            kept[number] = result
    return seconds


def copy_into_huge_pages(tensor: Tensor) -> Tensor:
    """A copy into memory as `apply` asks for it."""
    result = torch.empty_like(tensor)
    if tensor.is_cpu:
        ask_for_huge_pages(result)
    return result.copy_(tensor)


def without_huge_pages(function: Callable[[], Any]) -> Any:
    """Call a function while Linux gives this process no huge pages; elsewhere just call it."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "prctl"):
        return function()
    set_thp_disable = 41
    libc.prctl(set_thp_disable, 1, 0, 0, 0)
    try:
        return function()
    finally:
        libc.prctl(set_thp_disable, 0, 0, 0, 0)


def measure(name: str, device: str) -> dict[str, Any]:
    model, inputs = CASES[name]()
    symmetry = ob.symmetry(model.to(device), inputs.to(device), verify=False)
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    state = {key: value for key, value in model.state_dict().items() if value.dim()}
    result = permutation.apply(model)
    moved = [value for key, value in state.items() if result[key].data_ptr() != value.data_ptr()]
    seconds = time_in_turn([
        lambda: [copy_into_huge_pages(value) for value in moved],
        lambda: without_huge_pages(lambda: permutation.apply(model)),
        lambda: [value.clone() for value in moved],
        lambda: permutation.apply(model),
    ])  # fmt: skip
    huge_copy, small_page_apply, copy, apply = map(min, seconds)
    *_, median_copy, median_apply = map(statistics.median, seconds)
    bytes_moved = sum(value.nbytes for value in moved)
    return {
        "network": name, "device": device, "megabytes": bytes_moved / 1e6, "copy_ms": copy * 1e3, "apply_ms": apply * 1e3,
        "ratio": apply / copy, "ratio_of_medians": median_apply / median_copy, "huge_copy_ms": huge_copy * 1e3,
        "small_page_apply_ms": small_page_apply * 1e3,
        "copy_gb_per_s": 2 * bytes_moved / copy / 1e9, "load": os.getloadavg()[0],
    }  # fmt: skip


def ask_for_fresh_memory() -> None:
    """Have glibc map every block of 64 kB or more anew; elsewhere do nothing."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD


def main() -> None:
    """Print a row per network; optionally write the record."""
    ask_for_fresh_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    options = parser.parse_args()
    rows = []
    print(f"{'network':24}" + "".join(f"{title:>13}" for title in COLUMNS))
    for name in CASES:
        row = measure(name, options.device)
        rows.append(row)
        print(f"{name:24}" + "".join(f"{row[key]:13.2f}" for key in COLUMNS.values()), flush=True)
    if options.out:
        record = {
            "commit": find_commit(), "cores": os.cpu_count(), "command": "python -m benchmarks.apply",
            "torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
