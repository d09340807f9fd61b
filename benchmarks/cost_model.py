"""What alignment by weight matching costs: bytes, flops, assignments and network: ``python -m benchmarks.cost_model``.

For a Llama of L layers, width d, feed-forward width f, vocabulary V and kv units k, one sweep

- scores the stream: 2 d flops for each parameter (one product of n x n from each tensor that has the stream on it),
- scores the feed-forward units of each layer: 2 f flops for each of its 3 d f entries, and heads: little,
- weighs each step it takes, which reads the tensors of a group again, and assigns one problem of size d and L of size f,

and a run reads both models for the check of finite numbers, for the cost before and after, and for each sweep about four
times (scores and weights of the stream; scores and weights of the blocks), then once more to write. Workers of a machine
share its network and its disk. ``--check RECORD`` compares with a record of ``python -m benchmarks.engines``.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

GB, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    layers: int
    width: int
    inner: int
    key_value: int
    vocabulary: int
    tied: bool = False

    @property
    def parameters(self) -> float:
        """Entries of all matrices."""
        per_layer = 2 * self.width**2 + 2 * self.width * self.key_value + 3 * self.width * self.inner
        return self.layers * per_layer + (1 if self.tied else 2) * self.vocabulary * self.width


SHAPES = {
    "8B": Shape(32, 4096, 14336, 1024, 128256),
    "70B": Shape(80, 8192, 28672, 1024, 128256),
    "405B": Shape(126, 16384, 53248, 1024, 128256),
}


@dataclass(frozen=True)
class Machine:
    """What one machine does in a second."""

    flops: float
    disk: float
    network: float
    dollars_per_hour: float


CPU = Machine(flops=1.0 * TERA, disk=2 * GB, network=2.5 * GB, dollars_per_hour=1.5)
"""Sixteen cores that multiply at 60 GFLOP/s each, files on a shared disk, 20 Gbit/s."""


@dataclass(frozen=True)
class Cost:
    """Of one run, in totals over all machines but for the assignments, which wait for each other."""

    read: float
    flops: float
    assign_alone: float
    assign_apart: float
    network: float


def count(shape: Shape, sweeps: int = 2, assign_at_2048: float = 0.2) -> Cost:
    """Bytes and flops of `sweeps` sweeps.

    Args:
        shape: of the network.
        sweeps: until nothing moves; groups whose tensors did not change are left out, so that the last costs little.
        assign_at_2048: seconds of one assignment of 2,048 units on one core; it grows with the cube.
    """
    pair = 2 * 2 * shape.parameters  # two models of two bytes an entry
    passes = 1 + 2 + 4 * (sweeps - 1) + 1
    stream = 2.0 * shape.width * shape.parameters
    blocks = 2.0 * shape.inner * shape.layers * 3 * shape.width * shape.inner
    leaves = shape.layers * 9 / 8  # sums of eight tensors each
    return Cost(
        read=pair * passes,
        flops=(stream + blocks) * (sweeps - 1),
        assign_alone=assign_at_2048 * (shape.width / 2048) ** 3 * (sweeps - 1),
        assign_apart=assign_at_2048 * (shape.inner / 2048) ** 3 * shape.layers * (sweeps - 1),
        network=leaves * 4 * shape.width**2 * (sweeps - 1),
    )


def predict(cost: Cost, machine: Machine, machines: int, cores: int = 16) -> dict[str, float]:
    """Seconds by the clock of each part, if the work is shared out evenly."""
    return {
        "read": cost.read / (machine.disk * machines),
        "score": cost.flops / (machine.flops * machines),
        "assign": cost.assign_apart / (cores * machines) + cost.assign_alone,
        "network": cost.network / (machine.network * max(machines, 1)) if machines > 1 else 0.0,
    }


def print_table() -> None:
    """All shapes on 1, 8 and 64 machines."""
    columns = ["model", "machines", "read", "score", "assign", "network", "hours", "dollars", "bottleneck"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, shape in SHAPES.items():
        cost = count(shape)
        for machines in (1, 8, 64):
            parts = predict(cost, CPU, machines)
            total = sum(parts.values()) / 3600
            cells = " | ".join(f"{seconds / 60:.1f} min" for seconds in parts.values())
            worst = max(parts, key=lambda part: parts[part])
            dollars = total * machines * CPU.dollars_per_hour
            print(f"| {name} | {machines} | {cells} | {total:.2f} | {dollars:.1f} | {worst} |")


def check(path: Path) -> None:
    """Compare counted flops and bytes with what a record measured: the rates must be those of one core."""
    record = json.loads(path.read_text())
    config = record["config"]
    head = config["hidden_size"] // config["num_attention_heads"]
    shape = Shape(
        config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"],
        head * config["num_key_value_heads"], config["vocab_size"], tied=True,
    )  # fmt: skip
    for row in record["rows"]:
        cost, spent = count(shape, max(row["sweeps"], 2)), row["work_seconds"]
        core = {"flops": cost.flops / spent["score"] / 1e9, "read": cost.read / spent["read"] / 1e9}
        assigned = (cost.assign_alone + cost.assign_apart) / spent["assign"]
        print(
            f"{row['engine']:14} {core['flops']:7.1f} GFLOP/s and {core['read']:5.2f} GB/s a worker; "
            f"assignments take {1 / assigned:.2f} of what is counted"
        )


def main() -> None:
    """Print the table, or a comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=Path, help="a record of benchmarks.engines")
    options = parser.parse_args()
    if options.check:
        check(options.check)
    else:
        print_table()


if __name__ == "__main__":
    main()
