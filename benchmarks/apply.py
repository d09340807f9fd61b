"""`Permutation.apply` against a plain copy of the same tensors: ``python -m benchmarks.apply``.

The floor is one read and one write of every byte that moves: a copy into fresh memory. Both sides write into fresh
destinations: earlier results are kept alive, and the allocator is told to ask the system for every large block, or it would
hand out pages that are mapped already to one side and not to the other. The minimum of ten runs counts.
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.cli.torchvision_operators import declare_missing_operators


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


def fastest(functions: Sequence[Callable[[], Any]], repeats: int = 10) -> list[float]:
    """Seconds of the fastest run of each, in turn, every run into fresh memory."""
    kept, best = [], [float("inf")] * len(functions)
    for _ in range(repeats):
        for number, function in enumerate(functions):
            start = time.perf_counter()
            kept.append(function())
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[number] = min(best[number], time.perf_counter() - start)
    return best


def measure(name: str, device: str) -> dict[str, Any]:
    model, inputs = CASES[name]()
    symmetry = ob.symmetry(model.to(device), inputs.to(device), verify=False)
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    state = {key: value for key, value in model.state_dict().items() if value.dim()}
    result = permutation.apply(model)
    moved = [value for key, value in state.items() if result[key].data_ptr() != value.data_ptr()]
    copy, apply = fastest([lambda: [value.clone() for value in moved], lambda: permutation.apply(model)])
    bytes_moved = sum(value.nbytes for value in moved)
    return {
        "network": name, "device": device, "megabytes": bytes_moved / 1e6, "copy_ms": copy * 1e3, "apply_ms": apply * 1e3,
        "ratio": apply / copy, "copy_gb_per_s": 2 * bytes_moved / copy / 1e9,
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
    print(f"{'network':24}{'MB moved':>10}{'copy ms':>10}{'apply ms':>10}{'ratio':>8}")
    for name in CASES:
        row = measure(name, options.device)
        rows.append(row)
        print(
            f"{name:24}{row['megabytes']:10.1f}{row['copy_ms']:10.2f}{row['apply_ms']:10.2f}{row['ratio']:8.2f}", flush=True
        )
    if options.out:
        record = {"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
