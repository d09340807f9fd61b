"""The table of ``make demo`` over ten seeds: which method is best on average, and whether that is the default.

    python -m benchmarks.demo_seeds

trains ten pairs of networks on the embedded digits, two minutes on one core. Beside the rows of the demo stands the default
on the midpoint with a descent less. Each pair is a record in results/demo-seeds.jsonl, drawn in results/demo-seeds.md; pairs
that have a record are not measured again.
"""

import argparse
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

import onebasin as ob
from benchmarks.pipelines import SHORTER, align_in_turn
from benchmarks.records import Record, complete, tabulate, write_page
from onebasin.cli.digits_demo import compare_methods, measure_row, train_pair
from onebasin.datasets import digits

_DEFAULT = "auto, midpoint"


def measure(config: Record) -> Record:
    """Every method on one pair."""
    a, b = train_pair(config["seed"])
    rows = list(compare_methods(a, b))
    images, labels = digits("train")
    batches = list(zip(images.split(200), labels.split(200), strict=True))
    goal = {"data": batches, "objective": ob.Midpoint(torch.nn.functional.cross_entropy), "example_inputs": images[:2]}
    for name, methods in SHORTER.items():
        align = functools.partial(align_in_turn, b, a, methods, **goal)
        rows.append(measure_row(f"{_DEFAULT}, {name}", a, b, align))
    return {
        row.name: {"distance": row.distance, "barrier": row.path.barrier, "middle": row.middle, "seconds": row.seconds}
        for row in rows
    }


def draw(records: Sequence[Record]) -> list[str]:
    """The lines of the page: means over the pairs in order of the barrier, and the barrier of each pair."""
    results = [record["result"] for record in records]
    names = [name for name in results[0] if not name.startswith(f"{_DEFAULT}, ")]
    wins = [min(names, key=lambda name: result[name]["barrier"]) for result in results]

    def average(name: str, key: str) -> float:
        return statistics.mean(result[name][key] for result in results)

    def describe(name: str) -> list[str]:
        cells = [
            f"{average(name, key):{form}}" for key, form in (("distance", ".1f"), ("barrier", ".4f"), ("middle", ".2%"))
        ]
        return [name, *cells, f"{average(name, 'seconds'):.2f}"]

    ordered = sorted(results[0], key=lambda name: average(name, "barrier"))
    best = min(names, key=lambda name: average(name, "barrier"))
    shown = [[*describe(name), str(wins.count(name))] for name in ordered if name in names]
    head = ["method", "L2 distance", "test barrier", "midpoint accuracy", "seconds"]
    each = [[name, ", ".join(f"{result[name]['barrier']:.3f}" for result in results)] for name in ordered]
    return [
        "# The table of `make demo` over ten seeds", "",
        f"**The lowest mean barrier is that of \"{best}\".** `python -m benchmarks.demo_seeds`; seconds of one core.", "",
        *tabulate([*head, "lowest barrier in"], shown),
        "", "The default on the midpoint, and with a descent less:", "",
        *tabulate(head, [describe(name) for name in ordered if name.startswith(_DEFAULT)]),
        "", "The test barrier of each pair:", "", *tabulate(["method", "pairs"], each),
    ]  # fmt: skip


def main() -> None:
    """Measure the pairs that have no record, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="pairs of networks (default 10)")
    parser.add_argument("--out", type=Path, default=Path("results/demo-seeds.jsonl"), help="the records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = complete(options.out, [{"seed": 2 * number} for number in range(options.seeds)], measure)
    write_page(options.out.with_suffix(".md"), draw(records), records)


if __name__ == "__main__":
    main()
