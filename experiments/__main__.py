"""``python -m experiments NAME``: run what has no record yet, then draw its tables and figures."""

import argparse
import importlib
import os
import sys
from pathlib import Path

import torch

from experiments.frame import read_records, run_experiment, select

EXPERIMENTS = {
    "continual": "continual learning on Rotated MNIST and Split CIFAR-100 (Table 3)",
    "table1": "planted permutations of ten-unit networks (Table 1)",
    "table2": "linear mode connectivity of trained pairs (Table 2) and the strip of widths",
    "sensitivity": "what the settings of Sinkhorn do, on validation data; implicit against unrolled gradients",
    "convergence": "how the cost falls on planted copies of deep networks",
    "figures": "the loss plane and the permutation matrices",
    "depth": "VGG11-19, ResNet-20 and a vision transformer on CIFAR-10",
    "many": "three and five deep networks merged at once",
    "transformers": "a ViT and two language models, aligned by every kind of symmetry",
    "widening": "narrow networks widened and aligned to wide ones that were trained apart",
    "porting": "fine-tunes carried over to a network that was trained apart",
    "soft": "the soft midpoint as a merge, against fine-tuning",
    "deep": "networks trained by the recipes of the published results on merging, on CIFAR-10",
}


def main() -> None:
    """Parse, run, draw."""
    listing = "\n".join(f"  {name:12} {about}" for name, about in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=f"Reproduce the paper.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=EXPERIMENTS, metavar="NAME", help="one of the above")
    parser.add_argument("--quick", action="store_true", help="a small version: minutes at most, on two cores")
    parser.add_argument("--data", type=Path, help="folder with MNIST/ and cifar-10-batches-py/ (or set ONEBASIN_DATA)")
    parser.add_argument("--out", type=Path, help="folder for records (results/, or experiments-output/ with --quick)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", choices=("processes", "ray"), default="processes", help="ray: on a Ray cluster")
    parser.add_argument("--processes", type=int, help="trials side by side (one a core; on a GPU, one)")
    parser.add_argument("--only", action="append", default=[], metavar="KEY=VALUE,...", help="only trials like this")
    parser.add_argument("--draw", action="store_true", help="run nothing: draw from the records there are")
    options = parser.parse_args()
    if options.data is not None:
        os.environ["ONEBASIN_DATA"] = str(options.data)
    if options.processes is None:
        options.processes = 1 if options.device.startswith("cuda") else os.cpu_count() or 1
    module = importlib.import_module(f"experiments.{options.name}")
    out = options.out or Path("experiments-output" if options.quick else "results")
    path = out / f"{options.name}.jsonl"
    try:
        if options.draw:
            records = read_records(path)
            if not records:
                raise ValueError(f"{path} has no records to draw from")
        else:
            configs = select(module.configs(options.quick), options.only)
            records = run_experiment(options.name, configs, path, options.device, options.engine, options.processes)
        module.draw(records, out)
    except (ValueError, FileNotFoundError, ImportError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on after the trials in {path}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
