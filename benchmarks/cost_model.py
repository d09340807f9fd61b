"""What alignment by weight matching costs on many machines: ``python -m benchmarks.cost_model``.

For a Llama of L layers, width d, feed-forward width f and N parameters, a run of two full sweeps (the second finds that
nothing moves) computes

- the scores of the stream, 2 d flops for each parameter, in each sweep: tasks of eight tensors, summed in a tree; then one
  assignment of d units, in the driver,
- the scores of the feed-forward units of each layer, 2 f flops for each of 3 d f entries, once: a task for each layer, with
  its assignment of f units. No task is divided further,
- and reads both models 11 times: for checks, costs, scores, and what steps gain; a last time to write.

A worker needs memory for the scores of a layer and their assignment, so that a machine may have room for fewer workers than
it has cores: each then multiplies with several threads, and assigns with one. The longest chain is what no number of
machines shortens. ``--check RECORD`` compares with records of ``python -m benchmarks.engines``.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GB = 1e9
FAN_IN, BASE, MARGIN = 8, 0.4, 1.1
"""As in `onebasin.engines` and `onebasin.matching.problem`: tensors in a task; what a process holds anyway, in GB."""
PASSES = 11


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

    @property
    def worker_memory(self) -> float:
        """GB, as `estimate_need` computes it: large embeddings are cut, so that the largest tensor is one of d x f."""
        tensor, stream, block = (4 * entries / GB for entries in (self.width * self.inner, self.width**2, self.inner**2))
        return BASE + MARGIN * max(5 * tensor, 4 * tensor + 2 * block, tensor + 5 * block, 6 * stream)

    @property
    def driver_memory(self) -> float:
        """GB: an assignment of the stream."""
        return BASE + 5 * 4 * self.width**2 / GB


SHAPES = {
    "8B": Shape(32, 4096, 14336, 1024, 128256),
    "70B": Shape(80, 8192, 28672, 1024, 128256),
    "405B": Shape(126, 16384, 53248, 1024, 128256),
}


@dataclass(frozen=True)
class Machine:
    """What one machine has, and does in a second."""

    cores: int = 16
    memory: float = 128
    core_flops: float = 45e9
    worker_read: float = 1 * GB
    disk: float = 2 * GB
    network: float = 2.5 * GB
    assign_at_2048: float = 0.2
    dollars_per_hour: float = 1.5

    def assign(self, size: int) -> float:
        """Seconds of one assignment on one core, which grow with the cube."""
        return self.assign_at_2048 * (size / 2048) ** 3


@dataclass(frozen=True)
class Prediction:
    """Seconds by the clock of each part, and what they are made of.

    Attributes:
        parts: of the whole run.
        chain: seconds that no number of machines shortens.
        workers: on each machine.
        network: bytes that each machine sends, beside files.
    """

    parts: dict[str, float]
    chain: float
    workers: int
    network: float


def count_core_seconds(shape: Shape, machine: Machine) -> dict[str, float]:
    """Of all workers together, by what they do."""
    stream, blocks = _count_flops(shape)
    return {
        "read": 2 * 2 * shape.parameters * PASSES / machine.worker_read,
        "score": (2 * stream + blocks) / machine.core_flops,
        "assign": 2 * machine.assign(shape.width) + shape.layers * machine.assign(shape.inner),
    }


def _count_flops(shape: Shape) -> tuple[float, float]:
    """Of one scoring of the stream, and of the feed-forward units of all layers."""
    return 2.0 * shape.width * shape.parameters, 2.0 * shape.inner * shape.layers * 3 * shape.width * shape.inner


def predict(shape: Shape, machine: Machine, machines: int) -> Prediction:
    """How long a run takes, if tasks are given out as they come and none waits for memory.

    Raises:
        ValueError: if no worker fits.
    """
    workers = min(machine.cores, int((machine.memory - shape.driver_memory) / shape.worker_memory))
    if not workers:
        raise ValueError(f"a worker needs {shape.worker_memory:.0f} GB, and a machine has {machine.memory} GB")
    threads, everywhere = machine.cores // workers, workers * machines
    rate = machine.core_flops * threads
    stream, blocks = _count_flops(shape)
    # Eight tensors of d x f; the tree then adds matrices of the stream, eight at a time.
    portion = 2.0 * shape.width * FAN_IN * shape.width * shape.inner / rate
    matrix = 4 * shape.width**2
    levels = math.ceil(math.log(max(shape.layers * 9 / FAN_IN, 2), FAN_IN))
    adding = levels * FAN_IN * matrix * (1 / machine.network if machines > 1 else 1 / (10 * GB))
    block = blocks / shape.layers / rate
    rounds = math.ceil(shape.layers / everywhere)
    parts = {
        "read": 2 * 2 * shape.parameters * PASSES / (machines * min(machine.disk, workers * machine.worker_read)),
        "score": 2 * (max(stream / (rate * everywhere), portion) + adding) + rounds * block,
        "assign": 2 * machine.assign(shape.width) + rounds * machine.assign(shape.inner),
    }
    chain = 2 * (portion + adding + machine.assign(shape.width)) + block + machine.assign(shape.inner)
    sums = shape.layers * 9 / FAN_IN * matrix * 2
    return Prediction(parts, chain, workers, sums / machines if machines > 1 else 0.0)


def print_table(machine: Machine) -> None:
    """All shapes on 1, 8 and 64 machines."""
    columns = ["model", "machines", "workers each", "GB per worker", "read", "score", "assign", "whole", "longest chain",
               "network, GB per machine", "dollars"]  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, shape in SHAPES.items():
        for machines in (1, 8, 64):
            found = predict(shape, machine, machines)
            total = sum(found.parts.values())
            minutes = " | ".join(f"{seconds / 60:.1f} min" for seconds in (*found.parts.values(), total, found.chain))
            dollars = total / 3600 * machines * machine.dollars_per_hour
            print(
                f"| {name} | {machines} | {found.workers} | {shape.worker_memory:.1f} | {minutes} | "
                f"{found.network / GB:.1f} | {dollars:.1f} |"
            )


def read_shape(config: dict[str, Any]) -> Shape:
    """Of a record."""
    head = config["hidden_size"] // config["num_attention_heads"]
    return Shape(
        config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"],
        head * config["num_key_value_heads"], config["vocab_size"], tied=config["tie_word_embeddings"],
    )  # fmt: skip


def check(path: Path, machine: Machine) -> None:
    """Print what a record measured beside what is predicted: core seconds of the whole, and the largest worker.

    The seconds that tasks measure by the clock grow with the load, so they are scaled to the core seconds of the run.
    """
    record = json.loads(path.read_text())
    shape = read_shape(record["config"])
    predicted = count_core_seconds(shape, machine)
    for row in record["rows"]:
        if "failed" in row:
            continue
        used = row["driver_core_seconds"] + row["worker_core_seconds"]
        clock = row["work_seconds"]
        share = used / sum(clock[what] for what in clock if what != "wait")
        parts = ", ".join(f"{what} {clock[what] * share:.1f} ({predicted[what]:.1f})" for what in predicted)
        peak = max([row["driver_peak_gigabytes"], *row["worker_peak_gigabytes"]])
        print(
            f"{row['engine']:12} core seconds {used:.0f} (predicted {sum(predicted.values()):.0f}): {parts}; "
            f"peak {peak} GB ({shape.worker_memory:.2f})"
        )


def main() -> None:
    """Print the table, or a comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, nargs="+", help="records of benchmarks.engines")
    for name, kind in (("cores", int), ("memory", float), ("core-flops", float), ("disk", float), ("network", float)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Machine(), name.replace("-", "_")))
    options = parser.parse_args()
    machine = Machine(
        cores=options.cores, memory=options.memory, core_flops=options.core_flops, disk=options.disk, network=options.network
    )
    for path in options.check or ():
        check(path, machine)
    if not options.check:
        print_table(machine)


if __name__ == "__main__":
    main()
