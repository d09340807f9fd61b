"""Permuted copies of real networks: found exactly with default arguments? ``python -m benchmarks.copies [--device cuda]``.

VGG11-19 with one linear layer on 512 x 7 x 7 features (as in the example of the paper's authors), ResNet-18 and ResNet-50,
each aligned with a random permutation of itself.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from benchmarks.apply import vision


def make_network(name: str) -> tuple[nn.Module, Tensor]:
    """The network and an example input."""
    model, _ = vision(name)
    if name.startswith("vgg"):
        model.classifier = nn.Linear(512 * 7 * 7, 10)
    return model.eval(), torch.rand(1, 3, 64, 64)


def run_trial(name: str, method: str, device: str, seed: int, **options: Any) -> dict[str, Any]:
    """Plant a permutation in a network and look for it."""
    torch.manual_seed(seed)
    model, inputs = make_network(name)
    begin = time.perf_counter()
    symmetry = ob.symmetry(model, inputs, verify=False)
    tracing = time.perf_counter() - begin
    planted = symmetry.random(torch.Generator().manual_seed(seed))
    target = {key: value.to(device) for key, value in model.state_dict().items()}
    source = {key: value.to(device) for key, value in planted.apply(model).items()}
    result = ob.align(source, to=target, symmetry=symmetry, method=method, **options)
    last = [entry.get("step", entry.get("sweep")) for entry in result.history if entry["by"] != "polish"][-1]
    return {
        "network": name, "method": method, **options, "device": device, "seed": seed,
        "exact": result.permutation == planted.inverse(),
        "agreement": result.permutation.agreement(planted.inverse()), "cost": result.cost, "start_cost": result.start_cost,
        "steps": last + 1, "seconds": result.seconds, "tracing_seconds": tracing,
    }  # fmt: skip


def main() -> None:
    """Print a row per network and method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="*", default=["vgg11", "vgg13", "vgg16", "vgg19", "resnet18", "resnet50"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    options = parser.parse_args()
    records = []
    print(f"{'network':10}{'method':18}{'exact':>7}{'agreement':>11}{'steps':>7}{'seconds':>9}")
    for name in options.networks:
        for method, extra in (("sinkhorn", {}), ("sinkhorn", {"detect_copy": False}), ("weight-matching", {})):
            record = run_trial(name, method, options.device, options.seed, **extra)
            records.append(record)
            label = method + (" (descent)" if extra else "")
            print(
                f"{name:10}{label:18}{record['exact']!s:>7}{record['agreement']:11.3f}{record['steps']:7}{record['seconds']:9.2f}",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
