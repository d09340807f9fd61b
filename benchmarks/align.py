"""From two networks to the aligned one, everything counted, ours against peers: ``python -m benchmarks.align``.

Two tasks. A copy: a randomly permuted copy of each network is aligned with the original; exact or not. A pair: two networks
trained from different starts; the distance and the barrier that are reached. Every solver runs in a process of its own
(`benchmarks.solvers`; with ``--shared`` all of ours on a network share one), one after the other, peers in an interpreter of
their own. Counted are tracing, optimisation and assignment; the models exist before. Memory is the most that was held beyond
them.

Peers: ``--authors`` has `sinkhorn-rebasin` 0.0.2, ``--rebasin`` has `rebasin` 0.0.47 (both import as `rebasin`). Each is an
interpreter, or a folder to import it from; without them their rows stay empty. Records are written after every row, to
``--out``, and what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.align_tables import load_records, print_tables
from benchmarks.measuring import check_device, check_files, find_commit
from benchmarks.pairs import PAIRS, train_pair
from benchmarks.solvers import COPY_SOLVERS, NETWORKS, PAIR_SOLVERS
from onebasin.tensors.files import write_atomically

ROOT = Path(__file__).parent.parent
QUICK = (("mlp", "resnet18"), ("MLP 2 x 512, digits",))
Record = dict[str, Any]


def list_jobs(options: argparse.Namespace, known: set[tuple[str, str, str]]) -> Iterator[tuple[str, str, list[str], str]]:
    """Task, network, solvers and peer of every process to start."""
    for task, networks, solvers in (("copy", options.networks, COPY_SOLVERS), ("pair", options.pairs, PAIR_SOLVERS)):
        for network in networks:
            together: dict[str, list[str]] = {}
            for solver in solvers:
                peer = {"authors": options.authors, "rebasin": options.rebasin}.get(solver.partition(",")[0], sys.executable)
                wanted = not options.solvers or solver.startswith(tuple(options.solvers))
                if peer is not None and wanted and (task, network, solver) not in known:
                    together.setdefault(peer, []).append(solver)
            for peer, chosen in together.items():
                yield from ((task, network, part, peer) for part in ([chosen] if options.shared else [[s] for s in chosen]))


def measure(network: str, solvers: list[str], peer: str, pair: Path | None, options: argparse.Namespace) -> list[Record]:
    """Solvers in a process of their own: what it says of each, or why it says nothing."""
    is_folder = Path(peer).is_dir()
    paths = [str(ROOT), str(ROOT / "src"), *([peer] if is_folder else []), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable if is_folder else peer, "-m", "benchmarks.solvers", network, *solvers]
    command += ["--device", options.device, "--limit", str(options.limit), "--again", str(1 if options.quick else 20)]
    if options.threads:
        command += ["--threads", str(options.threads)]
        environment["OMP_NUM_THREADS"] = str(options.threads)
    if pair is not None:
        command += ["--pair", str(pair)]
    limit = 60 + (options.limit + 30) * len(solvers)  # they stop by themselves, unless they hang where nothing can stop them
    output, why = "", f"not done in {options.limit} s"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, cwd=ROOT, env=environment)
        output, why = done.stdout, (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:200]
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
    said = [json.loads(line) for line in output.splitlines() if line.startswith('{"solver"')]
    heard = {record["solver"] for record in said}
    return said + [{"solver": solver, "failed": why} for solver in solvers if solver not in heard]


def prepare_pair(network: str, folder: Path, device: str) -> Path | str:
    """A file with a trained pair, or why there is none."""
    path = folder / f"{list(PAIRS).index(network)}.pt"
    try:
        if not path.exists():
            train_pair(network, path, device)
    except (ValueError, OSError) as error:
        return str(error)
    return path


def read_records(path: Path | None, retry: bool) -> list[Record]:
    """What an earlier run has left; with `retry` only what did not fail."""
    records = load_records(path) if path is not None and path.exists() else []
    return [record for record in records if not (retry and "failed" in record)]


def write_records(path: Path, records: list[Record]) -> None:
    text = json.dumps({"records": records}, indent=1) + "\n"
    write_atomically(path, lambda file: Path(file).write_text(text))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS), help="permuted copies of these")
    parser.add_argument("--pairs", nargs="*", choices=PAIRS, default=list(PAIRS), help="trained pairs of these")
    parser.add_argument("--solvers", nargs="*", help="only solvers whose names begin with one of these")
    parser.add_argument("--quick", action="store_true", help="two networks and one pair, two minutes")
    parser.add_argument("--authors", help="an interpreter that has sinkhorn-rebasin, or a folder with it")
    parser.add_argument("--rebasin", help="an interpreter that has rebasin 0.0.47, or a folder with it")
    parser.add_argument("--data", help="folder with MNIST and CIFAR-10; else ONEBASIN_DATA")
    parser.add_argument(
        "--shared", action="store_true", help="one process a network: on CUDA memory is counted all the same"
    )
    parser.add_argument("--threads", type=int, help="threads of each solver; by default PyTorch's choice")
    parser.add_argument("--limit", type=int, default=600, help="seconds for one solver on one network")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--out", type=Path, help="write the records to this JSON file, and go on from those in it")
    options = parser.parse_args()
    check_device(options.device)
    check_files(options.out, options.authors, options.rebasin)
    if options.quick:
        options.networks, options.pairs = QUICK
        options.limit = min(options.limit, 60)
    if options.data:
        os.environ["ONEBASIN_DATA"] = options.data
    return options


def main() -> None:
    """Run every solver on every network, and print the tables."""
    options = read_options()
    records = read_records(options.out, options.retry)
    commit = find_commit()
    known = {(r["task"], r["network"], r["solver"]) for r in records}
    with tempfile.TemporaryDirectory() as folder:
        for task, network, solvers, peer in list_jobs(options, known):
            pair = prepare_pair(network, Path(folder), options.device) if task == "pair" else None
            if isinstance(pair, str):
                print(f"{network}: {pair}", file=sys.stderr)
                continue
            for record in measure(network, solvers, peer, pair, options):
                records.append({"task": task, "network": network, **record, "device": options.device, "commit": commit})
                told = record.get("failed") or f"{record['seconds']:.2f} s"
                print(task, network, record["solver"], told, sep=" | ", file=sys.stderr, flush=True)
            if options.out:
                write_records(options.out, records)
    print_tables(records)


if __name__ == "__main__":
    main()
