"""The table of ``make demo`` over ten seeds: which method is best on average, and whether that is the default.

    python -m benchmarks.demo_seeds

trains ten pairs of networks on the embedded digits, two minutes on one core.
"""

import argparse
import statistics

import torch

from onebasin.cli.digits_demo import compare_methods, train_pair


def main() -> None:
    """Print the means over the seeds, in order of the barrier."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="pairs of networks (default 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    for number in range(options.seeds):
        for row in compare_methods(*train_pair(2 * number)):
            rows.setdefault(row.name, []).append((row.distance, row.path.barrier, row.middle, row.seconds))
    means = {name: [statistics.mean(column) for column in zip(*found, strict=True)] for name, found in rows.items()}
    print("| method | L2 distance | test barrier | midpoint accuracy | seconds | lowest barrier in |")
    print("|---" * 6 + "|")
    wins = [min(rows, key=lambda name: rows[name][number][1]) for number in range(options.seeds)]
    for name, (distance, barrier, middle, seconds) in sorted(means.items(), key=lambda item: item[1][1]):
        print(f"| {name} | {distance:.1f} | {barrier:.4f} | {middle:.2%} | {seconds:.2f} | {wins.count(name)} |")
    print(f"\n{options.seeds} pairs of networks, torch {torch.__version__}.")


if __name__ == "__main__":
    main()
