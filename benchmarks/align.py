"""From two networks to the aligned one, everything counted, ours against peers: ``python -m benchmarks.align``.

Two tasks. A copy: a randomly permuted copy of each network is aligned with the original; exact or not. A pair: two networks
trained from different starts; the distance and the barrier that are reached. Every solver runs in a process of its own
(`benchmarks.solvers`), one after the other, peers in an interpreter of their own. Counted are tracing, optimisation and
assignment; the models exist before. Memory is the most that was held beyond them.

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

from benchmarks.align_tables import print_tables
from benchmarks.pairs import PAIRS, train_pair
from benchmarks.solvers import COPY_SOLVERS, NETWORKS, PAIR_SOLVERS
from onebasin.files import write_atomically

ROOT = Path(__file__).parent.parent
QUICK = (("mlp", "vgg11", "resnet18"), ("MLP 2 x 512, digits",))
Record = dict[str, Any]


def list_rows(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Task, network and solver of every row."""
    for network in options.networks:
        for solver in COPY_SOLVERS:
            yield "copy", network, solver
    for network in options.pairs:
        for solver in PAIR_SOLVERS:
            yield "pair", network, solver


def measure(row: tuple[str, str, str], pair: Path | None, options: argparse.Namespace) -> Record | None:
    """A worker in a process of its own: what it says, or why it says nothing; None where the peer is not here."""
    task, network, solver = row
    peer = {"authors": options.authors, "rebasin": options.rebasin}.get(solver.partition(",")[0], sys.executable)
    if peer is None:
        return None
    paths = [str(ROOT), str(ROOT / "src"), *([peer] if Path(peer).is_dir() else []), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    python = sys.executable if Path(peer).is_dir() else peer
    command = [python, "-m", "benchmarks.solvers", network, solver, "--device", options.device]
    if options.threads:
        command += ["--threads", str(options.threads)]
        environment["OMP_NUM_THREADS"] = str(options.threads)
    if pair is not None:
        command += ["--pair", str(pair)]
    record: Record = {"task": task, "network": network, "solver": solver, "device": options.device}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.limit, check=False, cwd=ROOT, env=environment
        )
    except subprocess.TimeoutExpired:
        return {**record, "failed": f"not done in {options.limit} s"}
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if "Error" in line] or done.stderr.strip().splitlines()
        return {**record, "failed": (lines or [f"ended with {done.returncode}"])[-1][:200]}
    return {**record, **json.loads(done.stdout.splitlines()[-1])}


def prepare_pair(network: str, folder: Path, device: str) -> Path | str:
    """A file with a trained pair, or why there is none."""
    path = folder / f"{list(PAIRS).index(network)}.pt"
    try:
        if not path.exists():
            train_pair(network, path, device)
    except (ValueError, OSError) as error:
        return str(error)
    return path


def describe_commit() -> str:
    """The commit that is measured: from the environment where there is no repository."""
    if "ONEBASIN_COMMIT" in os.environ:
        return os.environ["ONEBASIN_COMMIT"]
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip() or "unknown"


def read_records(path: Path | None) -> list[Record]:
    """What an earlier run has left."""
    return json.loads(path.read_text())["records"] if path is not None and path.exists() else []


def write_records(path: Path, records: list[Record]) -> None:
    text = json.dumps({"commit": describe_commit(), "records": records}, indent=1) + "\n"
    write_atomically(path, lambda file: Path(file).write_text(text))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS), help="permuted copies of these")
    parser.add_argument("--pairs", nargs="*", choices=PAIRS, default=list(PAIRS), help="trained pairs of these")
    parser.add_argument("--solvers", nargs="*", help="only solvers whose names begin with one of these")
    parser.add_argument("--quick", action="store_true", help="three networks and one pair, three minutes")
    parser.add_argument("--authors", help="an interpreter that has sinkhorn-rebasin, or a folder with it")
    parser.add_argument("--rebasin", help="an interpreter that has rebasin 0.0.47, or a folder with it")
    parser.add_argument("--data", help="folder with MNIST and CIFAR-10; else ONEBASIN_DATA")
    parser.add_argument("--threads", type=int, help="threads of each solver; by default PyTorch's choice")
    parser.add_argument("--limit", type=int, default=600, help="seconds for one solver on one network")
    parser.add_argument("--out", type=Path, help="write the records to this JSON file, and go on from those in it")
    options = parser.parse_args()
    if options.quick:
        options.networks, options.pairs = QUICK
        options.limit = min(options.limit, 60)
    if options.data:
        os.environ["ONEBASIN_DATA"] = options.data
    return options


def main() -> None:
    """Run every solver on every network, and print the tables."""
    options = read_options()
    records = read_records(options.out)
    known = {(r["task"], r["network"], r["solver"]) for r in records}
    with tempfile.TemporaryDirectory() as folder:
        for row in list_rows(options):
            if row in known or (options.solvers and not row[2].startswith(tuple(options.solvers))):
                continue
            pair = prepare_pair(row[1], Path(folder), options.device) if row[0] == "pair" else None
            if isinstance(pair, str):
                print(f"{row[1]}: {pair}", file=sys.stderr)
                continue
            record = measure(row, pair, options)
            if record is None:
                continue
            records.append({**record, "commit": describe_commit()})
            print(*row, record.get("failed") or f"{record['seconds']:.2f} s", sep=" | ", file=sys.stderr, flush=True)
            if options.out:
                write_records(options.out, records)
    print_tables(records)


if __name__ == "__main__":
    main()
